//! What becomes of a sound example.

use crate::targets::Target;
use rand::Rng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand_chacha::ChaCha8Rng;

/// Pieces that mean something to one parser or another.
const WORDS: [&str; 36] = [
    "{",
    "}",
    "[",
    "]",
    "[[",
    "\"",
    "\\",
    ",",
    ":",
    "=",
    "\n",
    "null",
    "NaN",
    "-1",
    "1e999",
    "18446744073709551616",
    "0.1",
    "\u{0}",
    "\u{feff}",
    "é",
    "<|start|>",
    "<|call|>",
    "<|im_end|>",
    "<tool_call>",
    "\\frac{",
    "\\boxed{",
    "\\ud800",
    "(",
    "^",
    "../",
    "{% for m in messages %}",
    "{%- if ",
    "%}",
    "{{ ",
    " | tojson ",
    "range(",
];

/// An example, damaged: bits, bytes, pieces of itself and of another, words that mean something, depth and
/// length.
pub fn damaged(target: &Target, random: &mut ChaCha8Rng) -> Vec<u8> {
    let mut bytes = target.examples.choose(random).expect("an example").clone();
    for _ in 0..random.random_range(0..6) {
        let at = random.random_range(0..=bytes.len());
        let to = random.random_range(at..=bytes.len().min(at + 64));
        match random.random_range(0..10) {
            0 | 1 if at < bytes.len() => bytes[at] ^= 1 << random.random_range(0..8),
            2 if at < bytes.len() => bytes[at] = random.random(),
            3 => drop(bytes.drain(at..to)),
            4 => bytes.truncate(at),
            5 => {
                let piece = bytes[at..to].to_vec();
                let place = random.random_range(0..=bytes.len());
                bytes.splice(place..place, piece);
            }
            6 => {
                let other = target.examples.choose(random).expect("an example");
                let from = random.random_range(0..=other.len());
                bytes.truncate(at);
                bytes.extend_from_slice(&other[from..]);
            }
            7 if random.random_bool(0.1) => {
                // Deep, or long.
                let word = WORDS.choose(random).expect("a word").repeat(random.random_range(1..20_000));
                bytes.splice(at..at, word.into_bytes());
            }
            8 if to > at => bytes[at..to].shuffle(random),
            _ => drop(bytes.splice(at..at, WORDS.choose(random).expect("a word").bytes())),
        }
    }
    bytes
}
