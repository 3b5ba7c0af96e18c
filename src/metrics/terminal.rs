//! Text from models, tools and files, made harmless for a terminal and a page.

use std::borrow::Cow;

/// `text` with every control character shown as a picture (`␛`, `␇`) or an escape (`\u{9b}`).
///
/// Line feed and tab stay. Characters that reorder or hide text (bidirectional controls, line and
/// paragraph separators, zero-width marks) are escaped too.
pub fn sanitize_terminal(text: &str) -> Cow<'_, str> {
    sanitize(text, |c| c == '\n' || c == '\t')
}

/// As [`sanitize_terminal`], for text that must stay on one line: line feed and tab become pictures too.
pub fn sanitize_line(text: &str) -> Cow<'_, str> {
    sanitize(text, |_| false)
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
            // U+2400…: the pictures of the C0 controls, in their order.
            c if c < ' ' => clean.extend(char::from_u32(0x2400 + c as u32)),
            c => clean.extend(c.escape_unicode()),
        }
    }
    Cow::Owned(clean)
}

fn hides(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}
