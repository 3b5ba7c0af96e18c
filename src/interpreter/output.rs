//! Extracts code from a Markdown fence, and shortens long output by removing its middle.

/// Returns the code to run: the first fenced block that names Python or no language, else the whole text.
pub fn extract_code(text: &str) -> String {
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(language) = line.trim().strip_prefix("```") else { continue };
        let is_python = ["", "python", "python3", "py"].contains(&language.trim().to_lowercase().as_str());
        let block: Vec<&str> = lines.by_ref().take_while(|l| l.trim() != "```").collect();
        if is_python {
            return block.join("\n");
        }
    }
    text.to_string()
}

/// Collects text but keeps only its start and its end, so that memory is limited.
pub struct OutputClipper {
    head: String,
    head_room: usize,
    tail: String,
    tail_chars: usize,
    tail_max: usize,
    cut: usize,
}

impl OutputClipper {
    /// Keeps at most `chars_max` characters.
    pub fn new(chars_max: usize) -> Self {
        let head_room = chars_max / 2;
        Self {
            head: String::new(),
            head_room,
            tail: String::new(),
            tail_chars: 0,
            tail_max: chars_max - head_room,
            cut: 0,
        }
    }

    pub fn push(&mut self, text: &str) {
        let split = text.char_indices().nth(self.head_room).map_or(text.len(), |(i, _)| i);
        let (head, rest) = text.split_at(split);
        self.head.push_str(head);
        self.head_room -= head.chars().count();
        if rest.is_empty() {
            return;
        }
        let rest_chars = rest.chars().count();
        let skipped = rest_chars.saturating_sub(self.tail_max);
        let start = rest.char_indices().nth(skipped).map_or(rest.len(), |(i, _)| i);
        self.tail.push_str(&rest[start..]);
        self.tail_chars += rest_chars - skipped;
        self.cut += skipped;
        // The tail is trimmed only when it has reached twice its maximum, so that the cost of many small
        // texts is linear in their total length.
        if self.tail_chars > 2 * self.tail_max {
            self.trim();
        }
    }

    fn trim(&mut self) {
        let excess = self.tail_chars.saturating_sub(self.tail_max);
        let end = self.tail.char_indices().nth(excess).map_or(self.tail.len(), |(i, _)| i);
        self.tail.drain(..end);
        self.tail_chars -= excess;
        self.cut += excess;
    }

    /// Returns whether no text was added.
    pub fn is_empty(&self) -> bool {
        self.head.is_empty() && self.tail.is_empty()
    }

    /// Returns whether the last line has no line end yet.
    pub fn is_mid_line(&self) -> bool {
        let last = self.tail.chars().next_back().or(self.head.chars().next_back());
        last.is_some_and(|c| c != '\n')
    }

    /// Returns the text without its last line end. A mark shows where the middle was removed.
    pub fn finish(mut self) -> String {
        self.trim();
        let mut text = self.head;
        if self.cut > 0 {
            text.push_str(&format!("\n[... {} characters cut ...]\n", self.cut));
        }
        text.push_str(&self.tail);
        if text.ends_with('\n') {
            text.pop();
        }
        text
    }
}

/// Decodes UTF-8 bytes that arrive in several parts. Invalid bytes become U+FFFD.
#[derive(Default)]
pub struct Utf8Decoder {
    /// The first bytes of a character whose other bytes have not arrived.
    open: Vec<u8>,
}

impl Utf8Decoder {
    pub fn push(&mut self, piece: &[u8]) -> String {
        self.open.extend_from_slice(piece);
        let whole = self.open.len() - incomplete_bytes(&self.open);
        let rest = self.open.split_off(whole);
        let text = String::from_utf8_lossy(&self.open).into_owned();
        self.open = rest;
        text
    }

    /// Decodes the remaining bytes at the end.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.open).into_owned()
    }
}

/// Returns the number of bytes at the end of `bytes` that belong to an incomplete character.
fn incomplete_bytes(bytes: &[u8]) -> usize {
    let invalid = bytes.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
    let open = std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none());
    if open { invalid.len() } else { 0 }
}

/// Replaces the digits of the memory addresses that Python prints for some objects: `<f at 0x…>`.
pub fn remove_addresses(text: &str) -> String {
    const MARK: &str = " at 0x";
    let mut parts = text.split(MARK);
    let mut shown = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let digits = part.bytes().take_while(u8::is_ascii_hexdigit).count();
        shown.push_str(MARK);
        if digits >= 6 && part[digits..].starts_with('>') {
            shown.push('…');
            shown.push_str(&part[digits..]);
        } else {
            shown.push_str(part);
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_may_come_in_pieces() {
        let text = "aä€😀\n";
        for size in 1..6 {
            let mut pieces = Utf8Decoder::default();
            let parts: String = text.as_bytes().chunks(size).map(|c| pieces.push(c)).collect();
            assert_eq!(parts + &pieces.finish(), text, "pieces of {size}");
        }
        let mut pieces = Utf8Decoder::default();
        let parts: String = [&b"a\xe2"[..], b"b\xff", b"\xe2\x82"].map(|c| pieces.push(c)).concat();
        assert_eq!(parts + &pieces.finish(), "a\u{fffd}b\u{fffd}\u{fffd}");
    }

    #[test]
    fn addresses_of_objects_are_not_shown() {
        assert_eq!(remove_addresses("<f at 0x7f12ab3456> <g at 0x7ffff7a1b2c0>"), "<f at 0x…> <g at 0x…>");
        for text in ["look at 0x7fffffff00 there", "at 0x10>", "", "<f at 0x"] {
            assert_eq!(remove_addresses(text), text);
        }
    }

    #[test]
    fn the_first_python_fence_is_the_code() {
        assert_eq!(extract_code("x = 1\nx"), "x = 1\nx");
        assert_eq!(extract_code("Let me see.\n```python\nx = 1\nx\n```\nand\n```\ny\n```"), "x = 1\nx");
        assert_eq!(extract_code("```sh\nls\n```\n```py\n1\n```"), "1");
        assert_eq!(extract_code("```\n1 + 1"), "1 + 1");
        assert_eq!(extract_code("  ``` Python \n  if x:\n    y\n  ```"), "  if x:\n    y");
        assert_eq!(extract_code(""), "");
    }

    #[test]
    fn both_ends_of_a_long_text_stay_whatever_the_pieces() {
        let text: String = ('a'..='z').chain("äöü€".chars()).collect();
        for max in [0, 1, 2, 7, 29, 30, 31] {
            for piece in [1, 3, 30] {
                let mut clip = OutputClipper::new(max);
                let chars: Vec<char> = text.chars().collect();
                for part in chars.chunks(piece) {
                    clip.push(&part.iter().collect::<String>());
                }
                let head: String = chars.iter().take(max / 2).collect();
                let tail: String =
                    chars.iter().skip((max / 2).max(30usize.saturating_sub(max - max / 2))).collect();
                let expected = match 30usize.saturating_sub(max) {
                    0 => text.clone(),
                    cut => format!("{head}\n[... {cut} characters cut ...]\n{tail}"),
                };
                assert_eq!(clip.finish().trim_end(), expected.trim_end(), "max {max}, pieces of {piece}");
            }
        }
    }
}
