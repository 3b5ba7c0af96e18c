//! `\boxed{…}` in a model's answer.

/// Maximum length of the content in bytes. Longer content is not accepted as an answer.
const CONTENT_BYTES_MAX: usize = 4_000;

/// Returns the content of the last complete `\boxed{…}` in `text`, with nested braces, and the byte index of
/// the command's start.
///
/// `\fbox{…}` and `\boxed 7` (one token without braces) are accepted too. Escaped braces do not nest.
pub fn find_last_boxed(text: &str) -> Option<(usize, &str)> {
    let mut before = text;
    loop {
        let start = before.rfind("\\boxed").max(before.rfind("\\fbox"))?;
        let command = if before[start..].starts_with("\\boxed") { "\\boxed" } else { "\\fbox" };
        if let Some(content) = content(&text[start + command.len()..]) {
            return Some((start, content));
        }
        before = &before[..start];
    }
}

/// Returns the argument of a command. `rest` is the text after the command.
fn content(rest: &str) -> Option<&str> {
    let inner = match rest.strip_prefix('{') {
        Some(inner) => inner,
        None => {
            // `\boxed 7`: the content ends where the formula or the line ends.
            let bare = rest.strip_prefix(' ')?;
            let end = bare.find(['$', '\n', ' ']).unwrap_or(bare.len());
            return (end > 0).then_some(&bare[..end]);
        }
    };
    let (mut depth, mut escaped) = (1usize, false);
    for (i, byte) in inner.bytes().enumerate().take(CONTENT_BYTES_MAX) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'{' => depth += 1,
            b'}' => {
                depth -= 1;
                if depth == 0 {
                    return Some(&inner[..i]);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_complete_box_wins() {
        let last_boxed = |text| find_last_boxed(text).map(|(_, content)| content);
        assert_eq!(last_boxed(r"\boxed{1} and \boxed{\frac{1}{2}}."), Some(r"\frac{1}{2}"));
        assert_eq!(last_boxed(r"\boxed{12} then \boxed{13"), Some("12"));
        assert_eq!(last_boxed(r"\boxed{\{1, 2\}}"), Some(r"\{1, 2\}"));
        assert_eq!(last_boxed(r"$\boxed 7$"), Some("7"));
        assert_eq!(last_boxed(r"\fbox{3}"), Some("3"));
        assert_eq!(last_boxed(r"\boxed{}"), Some(""));
        assert_eq!(last_boxed(r"\boxed"), None);
        assert_eq!(last_boxed("no box {7}"), None);
        assert_eq!(last_boxed("é\\boxed{é}é"), Some("é"));
    }
}
