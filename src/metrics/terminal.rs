//! Makes text from models, tools and files safe for a terminal and a page.

use std::borrow::Cow;
use unicode_width::UnicodeWidthStr;

/// Replaces every control character of `text` with a picture (`␛`, `␇`) or an escape (`\u{9b}`).
///
/// Line feed and tab are kept. Characters that reorder or hide text (bidirectional controls, line and
/// paragraph separators, zero-width marks) are escaped too.
pub fn sanitize_terminal(text: &str) -> Cow<'_, str> {
    sanitize(text, |c| c == '\n' || c == '\t')
}

/// Replaces control characters as [`sanitize_terminal`] does, for text on one line: line feed and tab become
/// pictures too.
pub fn sanitize_line(text: &str) -> Cow<'_, str> {
    sanitize(text, |_| false)
}

/// Breaks the lines of `text` between words, at `columns` characters. If a line has a label, as in `folder  
/// runs/quickstart`, its continuation lines are indented to the text after the label, else by two columns.
pub(super) fn wrap_lines(text: &str, columns: usize) -> String {
    const LABEL_MAX: usize = 16;
    let mut lines = vec![];
    for line in text.lines() {
        let label = line.find("  ").map(|gap| line.len() - line[gap..].trim_start().len());
        let indent = label.filter(|at| *at <= LABEL_MAX).unwrap_or(2);
        let (mut broken, mut width) = (String::new(), 0);
        for word in line.split_inclusive(' ') {
            // Spaces at the end of a line are invisible, so they do not count.
            if width + word.trim_end().width() > columns && width > indent {
                broken = format!("{}\n{}", broken.trim_end(), " ".repeat(indent));
                width = indent;
            }
            broken.push_str(word);
            width += word.width();
        }
        lines.push(broken);
    }
    lines.join("\n")
}

fn sanitize(text: &str, keep: impl Fn(char) -> bool) -> Cow<'_, str> {
    let unsafe_char = |c: char| (c.is_control() || hides(c)) && !keep(c);
    if !text.contains(unsafe_char) {
        return Cow::Borrowed(text);
    }
    let mut clean = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match c {
            c if !unsafe_char(c) => clean.push(c),
            '\u{7f}' => clean.push('␡'),
            // From U+2400 on: the pictures of the C0 controls, in order.
            c if c < ' ' => clean.extend(char::from_u32(0x2400 + c as u32)),
            c => clean.extend(c.escape_unicode()),
        }
    }
    Cow::Owned(clean)
}

fn hides(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_break_between_words_below_what_follows_their_label() {
        let text = "steps    1,000 of cold start, then 80\nwarning: a word-that-is-longer-than-the-line";
        let broken = "steps    1,000 of\n         cold start,\n         then 80\nwarning: a\n  word-that-is-longer-than-the-line";
        assert_eq!(wrap_lines(text, 20), broken);
        assert_eq!(wrap_lines(text, 200), text);
        assert_eq!(wrap_lines("folder   a/path/that/is/too/long", 20), "folder   a/path/that/is/too/long");
    }
}
