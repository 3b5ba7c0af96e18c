//! Programs that a model writes in its answer: Python in a Markdown block, or in ReTool's tags. A closed
//! program runs, and its output is inserted into the same message.
//!
//! The forms are those of ToRL, SimpleTIR and Qwen2.5-Math (a block `python`, then a block `output`) and of
//! ReTool's release (`<code>`, `<interpreter>`).

use crate::settings::choice;

choice! {
    /// How a model uses the Python tool.
    pub enum ToolForm default Call {
        /// By a call of the chat format, whose reply is a message.
        Call = "call",
        /// By a Markdown block `python` in its answer. A block `output` is inserted after the block's end.
        Fence = "fence",
        /// By a block between `<code>` and `</code>`. Its output is inserted between `<interpreter>` and
        /// `</interpreter>`.
        CodeTags = "code_tags",
        /// Not at all: the task has no tool.
        None = "none",
    }
}

/// Languages of blocks that run.
const LANGUAGES: [&str; 3] = ["python", "py", "python3"];
const CODE_TAGS: [&str; 2] = ["<code>", "</code>"];

impl ToolForm {
    /// Returns whether programs in the text of an answer run.
    pub fn runs_text(self) -> bool {
        matches!(self, ToolForm::Fence | ToolForm::CodeTags)
    }

    /// Returns the text of the system prompt that offers the tool. The chat format declares calls itself.
    pub fn instructions(self) -> Option<&'static str> {
        match self {
            ToolForm::Call | ToolForm::None => None,
            ToolForm::Fence => Some(
                "You may write Python in a block ```python; its output is then given to you in a block ```output.",
            ),
            ToolForm::CodeTags => Some(
                "You may write Python between <code> and </code>; its output is then given to you between \
                 <interpreter> and </interpreter>.",
            ),
        }
    }

    /// Returns an answer with a program; `None` if programs in answers do not run.
    pub fn example(self, code: &str) -> Option<String> {
        match self {
            ToolForm::Call | ToolForm::None => None,
            ToolForm::Fence => Some(format!("```python\n{code}\n```")),
            ToolForm::CodeTags => Some(format!("<code>\n{code}\n</code>")),
        }
    }

    /// Returns the text that shows `output` after `answer`.
    pub fn output_text(self, answer: &[u8], output: &str) -> String {
        let line = if answer.ends_with(b"\n") { "" } else { "\n" };
        let output = output.trim_end_matches('\n');
        match self {
            ToolForm::CodeTags => format!("{line}<interpreter>\n{output}\n</interpreter>\n"),
            ToolForm::Call | ToolForm::Fence | ToolForm::None => format!("{line}```output\n{output}\n```\n"),
        }
    }
}

/// A block of Markdown that is open.
#[derive(Debug, Clone)]
struct Block {
    /// Its mark, `` ` `` or `~`, and the number of marks that it began with.
    mark: u8,
    marks: usize,
    /// White space before the marks, which is removed from its lines.
    indent: usize,
    is_python: bool,
    /// The lines so far.
    code: Vec<u8>,
}

/// Finds the closed programs of an answer that grows token by token.
///
/// A block begins with a line of at least three backticks or tildes and a language, and ends with a line that
/// begins with as many marks, as in CommonMark. The end of a program counts at its last mark, whatever
/// follows, so the decision does not depend on how the text is cut into tokens.
#[derive(Debug, Clone)]
pub struct ProgramScanner {
    form: ToolForm,
    /// Number of bytes of the answer that were read.
    read: usize,
    /// The line in progress; with tags, the text since the last tag.
    line: Vec<u8>,
    block: Option<Block>,
    /// Whether the rest of the line in progress follows the end of a program.
    skips_line: bool,
}

impl ProgramScanner {
    pub fn new(form: ToolForm) -> Self {
        Self { form, read: 0, line: vec![], block: None, skips_line: false }
    }

    /// Reads the answer so far, which is `None` before it begins. Returns the last program that has ended
    /// since the last call.
    pub fn read(&mut self, answer: Option<&[u8]>) -> Option<String> {
        let answer = answer.unwrap_or_default();
        if answer.len() < self.read {
            *self = Self::new(self.form);
        }
        let mut program = None;
        for &byte in &answer[self.read..] {
            let ended =
                if self.form == ToolForm::CodeTags { self.read_tags(byte) } else { self.read_fence(byte) };
            program = ended.or(program);
        }
        self.read = answer.len();
        program
    }

    /// Skips text that was inserted: the answer now has `length` bytes, and a new line begins.
    pub fn skip(&mut self, length: usize) {
        *self = Self { read: length, ..Self::new(self.form) };
    }

    fn read_tags(&mut self, byte: u8) -> Option<String> {
        self.line.push(byte);
        let [open, close] = CODE_TAGS;
        match &mut self.block {
            None if self.line.ends_with(open.as_bytes()) => {
                self.line.clear();
                self.block = Some(Block { mark: 0, marks: 0, indent: 0, is_python: true, code: vec![] });
                None
            }
            Some(_) if self.line.ends_with(close.as_bytes()) => {
                self.block = None;
                let line = std::mem::take(&mut self.line);
                Some(without_fence(&line[..line.len() - close.len()]))
            }
            _ => None,
        }
    }

    fn read_fence(&mut self, byte: u8) -> Option<String> {
        if byte == b'\n' {
            let line = std::mem::take(&mut self.line);
            if !std::mem::take(&mut self.skips_line) {
                self.end_line(&line);
            }
            return None;
        }
        self.line.push(byte);
        let block = self.block.as_ref().filter(|block| block.is_python && !self.skips_line)?;
        let (_, mark, marks) = fence(&self.line)?;
        if mark != block.mark || marks < block.marks {
            return None;
        }
        self.skips_line = true;
        let code = self.block.take()?.code;
        Some(String::from_utf8_lossy(&code).into_owned())
    }

    /// Reads a whole line: the begin or the end of a block, or a line of it.
    fn end_line(&mut self, line: &[u8]) {
        match (&mut self.block, fence(line)) {
            (None, Some((indent, mark, marks))) => {
                let info = String::from_utf8_lossy(&line[indent + marks..]).into_owned();
                let language = info.split_whitespace().next().unwrap_or_default().to_lowercase();
                // Backticks after the marks are code within a line.
                if mark == b'`' && info.contains('`') {
                    return;
                }
                let is_python = LANGUAGES.contains(&language.as_str());
                self.block = Some(Block { mark, marks, indent, is_python, code: vec![] });
            }
            (Some(block), Some((indent, mark, marks)))
                if mark == block.mark
                    && marks >= block.marks
                    && line[indent + marks..].trim_ascii().is_empty() =>
            {
                self.block = None;
            }
            (Some(block), _) => {
                let blank =
                    line.iter().take(block.indent).take_while(|byte| byte.is_ascii_whitespace()).count();
                block.code.extend(&line[blank..]);
                block.code.push(b'\n');
            }
            (None, None) => {}
        }
    }
}

/// Returns the white space before a line's marks, the mark and the number of marks, if there are at least
/// three.
fn fence(line: &[u8]) -> Option<(usize, u8, usize)> {
    let indent = line.iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
    let mark = *line.get(indent).filter(|mark| matches!(mark, b'`' | b'~'))?;
    let marks = line[indent..].iter().take_while(|&&byte| byte == mark).count();
    (marks >= 3).then_some((indent, mark, marks))
}

/// Returns the code between tags, without the Markdown block that ReTool's models write around it.
fn without_fence(code: &[u8]) -> String {
    let text = String::from_utf8_lossy(code);
    let text = text.trim_matches('\n');
    let inner = text.strip_prefix("```").and_then(|rest| rest.split_once('\n'));
    let inner = inner.and_then(|(_, code)| code.trim_end().strip_suffix("```"));
    format!("{}\n", inner.unwrap_or(text).trim_end_matches('\n'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn programs(form: ToolForm, text: &str) -> Vec<String> {
        let mut scanner = ProgramScanner::new(form);
        (1..=text.len()).filter_map(|end| scanner.read(Some(&text.as_bytes()[..end]))).collect()
    }

    #[test]
    fn closed_python_blocks_are_programs() {
        for (text, expected) in [
            ("```python\nprint(1)\n```", &["print(1)\n"][..]),
            (
                "Then\n```py\nx = 1\n\nprint(x)\n```\nand\n```python3\n2\n``` so",
                &["x = 1\n\nprint(x)\n", "2\n"],
            ),
            ("  ```python\n  if x:\n      y\n  ```", &["if x:\n    y\n"]),
            ("````python\n```\n1\n````", &["```\n1\n"]),
            ("~~~python\n1\n~~~", &["1\n"]),
            ("```python title=x\n1\n```", &["1\n"]),
            ("```Python\n1\n```python", &["1\n"]),
            ("```python\n```", &[""]),
            ("```output\n```python\n1\n```", &[]),
            ("````markdown\n```python\n1\n```\n````", &[]),
            ("```bash\nls\n```\n```python\nprint('```')\n```", &["print('```')\n"]),
            ("```python\nopen", &[]),
            ("a ```python\n1\n```\n", &[]),
            ("``python\n1\n``", &[]),
            ("```python`\n1\n```\n", &[]),
            ("```\n1\n```", &[]),
        ] {
            assert_eq!(programs(ToolForm::Fence, text), expected, "{text:?}");
        }
    }

    #[test]
    fn code_in_tags_is_a_program() {
        for (text, expected) in [
            ("so <code>\nprint(1)\n</code> and", &["print(1)\n"][..]),
            ("<code>\n```python\nprint(1)\n```\n</code>", &["print(1)\n"]),
            ("<code>1</code><code>2</code>", &["1\n", "2\n"]),
            ("<code>1<code>2</code>", &["1<code>2\n"]),
            ("<code>1", &[]),
            ("</code>1</code>", &[]),
        ] {
            assert_eq!(programs(ToolForm::CodeTags, text), expected, "{text:?}");
        }
    }

    #[test]
    fn an_output_begins_on_a_line_of_its_own() {
        assert_eq!(ToolForm::Fence.output_text(b"```", "7\n"), "\n```output\n7\n```\n");
        assert_eq!(ToolForm::Fence.output_text(b"```\n", ""), "```output\n\n```\n");
        assert_eq!(ToolForm::CodeTags.output_text(b"</code>", "7"), "\n<interpreter>\n7\n</interpreter>\n");
    }
}
