//! Rules of `[tools.mcp]`.

use super::Rules;

impl Rules<'_> {
    /// Checks the program of an MCP server, and warns about its rights.
    pub(super) fn check_mcp(&mut self) {
        let Some(tools) = &self.recipe.tools else { return };
        if tools.mcp.command.first().is_none_or(String::is_empty) {
            let message = "missing: write the program of an MCP server and its arguments, such as \
                           [\"uvx\", \"mcp-server-time\"]";
            self.refuse(&["tools.mcp.command"], message);
        }
        if self.recipe.task.is_agent() {
            let message =
                "the task \"agent\" calls no tools; let its program call the server, and remove [tools.mcp]";
            self.refuse(&["tools.mcp.command", "task.name"], message);
        }
        let message = "the server runs with your own rights, outside any sandbox, and the model decides what it is asked. \
                       This run is a function of its recipe only as far as each reply is a function of its call";
        self.warn(&["tools.mcp.command"], message);
    }
}
