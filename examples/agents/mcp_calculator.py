"""A calculator as an MCP server: pip install mcp

The recipe beside this file gives its tools to the model, in the loop of rloss. Each reply depends on its call alone.
"""

try:
    from mcp.server.mcpserver import MCPServer
except ModuleNotFoundError:  # mcp 1.x
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("calculator")


@server.tool()
def add(a: int, b: int) -> int:
    """Returns a + b."""
    return a + b


@server.tool()
def subtract(a: int, b: int) -> int:
    """Returns a - b."""
    return a - b


server.run()  # Over stdio. Logs go to standard error, which rloss shows if the server fails.
