//! The byte-level alphabet of GPT-2 vocabularies, which maps each byte to one printable character.

/// Returns the character of each byte.
///
/// Printable Latin-1 bytes map to themselves. The other 68 bytes map to U+0100 and the characters after it,
/// in order.
pub(super) fn alphabet() -> [char; 256] {
    let mut chars = ['\0'; 256];
    let mut substitute = 0x100..;
    for byte in 0..=255u8 {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let point = if printable { u32::from(byte) } else { substitute.next().unwrap_or_default() };
        chars[usize::from(byte)] = char::from_u32(point).unwrap_or_default();
    }
    chars
}

/// The highest character of the alphabet: 68 bytes are not printable, and their characters begin at U+0100.
const LAST_CHARACTER: usize = 0x143;

/// Maps vocabulary entries back to bytes: the byte of each character of the alphabet.
pub(super) struct ByteDecoder([Option<u8>; LAST_CHARACTER + 1]);

impl ByteDecoder {
    pub(super) fn new() -> Self {
        let mut bytes = [None; LAST_CHARACTER + 1];
        for (c, byte) in alphabet().into_iter().zip(0..=255) {
            bytes[c as usize] = Some(byte);
        }
        Self(bytes)
    }

    /// Appends the bytes of `entry` to `out`. For a character outside the alphabet, appends its UTF-8 bytes.
    pub(super) fn decode_into(&self, entry: &str, out: &mut Vec<u8>) {
        for c in entry.chars() {
            match self.0.get(c as usize).copied().flatten() {
                Some(byte) => out.push(byte),
                None => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
    }
}

/// Returns `text` with each byte replaced by its character of the alphabet, as in the entries of a
/// vocabulary.
pub(super) fn to_byte_level(text: &str) -> String {
    let alphabet = alphabet();
    text.bytes().map(|byte| alphabet[usize::from(byte)]).collect()
}
