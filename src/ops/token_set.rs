//! A set of token ids in compact form.
//!
//! A set has the shorter of two forms. Runs: the lengths of alternating runs of removed and kept ids, from id
//! 0, as LEB128 numbers. Bits: one bit per id, the lowest id in the lowest bit of the first byte. So a set of
//! few ids, or of nearly all ids, takes few bytes, and no set takes more than one bit per id.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::sync::Arc;

/// First byte of a set in runs.
const RUNS: u8 = 0;
/// First byte of a set in bits.
const BITS: u8 = 1;
/// Every id must be below this number. It bounds the memory that a damaged file can request.
const IDS_MAX: u64 = 1 << 24;

/// A nonempty set of token ids. Clones share their memory. Files store it as base64 text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenSet(Arc<[u8]>);

/// The sets of several rows; `None` for a row whose distribution has all tokens.
pub type KeptTokens = Arc<Vec<Option<TokenSet>>>;

impl TokenSet {
    /// Returns the set of `ids`, which are ascending, distinct and below 2^24. `ids` must not be empty.
    pub fn from_ids(ids: &[u32]) -> Self {
        let bits_len = 1 + ids.last().map_or(0, |&last| last as usize / 8 + 1);
        let (mut bytes, mut end) = (vec![RUNS], 0);
        for run in ids.chunk_by(|a, b| a + 1 == *b) {
            push_number(&mut bytes, run[0] - end);
            push_number(&mut bytes, run.len() as u32);
            end = run[0] + run.len() as u32;
            if bytes.len() > bits_len {
                bytes = vec![0; bits_len];
                bytes[0] = BITS;
                ids.iter().for_each(|&id| bytes[1 + id as usize / 8] |= 1 << (id % 8));
                break;
            }
        }
        Self(bytes.into())
    }

    /// Returns the set that `bytes` encode; `None` if they are not a valid set in its shorter form.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let ids = decode(bytes).filter(|ids| !ids.is_empty())?;
        Some(Self::from_ids(&ids)).filter(|set| *set.0 == *bytes)
    }

    /// Returns the ids, ascending.
    pub fn ids(&self) -> Vec<u32> {
        decode(&self.0).unwrap_or_default()
    }

    /// Returns whether `id` is in the set.
    pub fn contains(&self, id: u32) -> bool {
        self.ids().binary_search(&id).is_ok()
    }

    /// Returns the maximum bytes of a set of `count` ids below `vocabulary`.
    pub fn bytes_max(vocabulary: usize, count: usize) -> usize {
        let number_bytes = (usize::BITS - vocabulary.leading_zeros()).div_ceil(7) as usize;
        1 + count.saturating_mul(number_bytes + 1).min(vocabulary.div_ceil(8))
    }
}

/// Appends `number` as LEB128: seven bits per byte, the lowest first.
fn push_number(bytes: &mut Vec<u8>, mut number: u32) {
    while number >= 128 {
        bytes.push(number as u8 | 128);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// Reads a number from the start of `bytes` and removes it there; `None` if it is incomplete or too large.
fn take_number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..35).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 127) << shift;
        if byte < 128 {
            return Some(number);
        }
    }
    None
}

/// Returns the ids of an encoded set; `None` if `bytes` are not one.
fn decode(bytes: &[u8]) -> Option<Vec<u32>> {
    let (&form, mut bytes) = bytes.split_first()?;
    let mut ids = vec![];
    match form {
        RUNS => {
            let mut end = 0;
            while !bytes.is_empty() {
                let start = end + take_number(&mut bytes)?;
                end = start + take_number(&mut bytes)?;
                if end > IDS_MAX {
                    return None;
                }
                ids.extend(start as u32..end as u32);
            }
        }
        BITS if bytes.len() as u64 <= IDS_MAX / 8 => {
            for (&byte, first) in bytes.iter().zip((0..).step_by(8)) {
                ids.extend((0..8).filter(|bit| byte >> bit & 1 == 1).map(|bit| first + bit));
            }
        }
        _ => return None,
    }
    Some(ids)
}

impl Serialize for TokenSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64_STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for TokenSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = BASE64_STANDARD.decode(&text).ok();
        bytes.and_then(|bytes| Self::from_bytes(&bytes)).ok_or_else(|| {
            let shown: String = text.chars().take(40).collect();
            D::Error::custom(format!("{shown:?} is not a set of tokens"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Purpose, stream};
    use rand::Rng;

    fn text(set: &TokenSet) -> String {
        serde_json::to_string(set).unwrap()
    }

    #[test]
    fn every_set_is_read_back_and_takes_no_more_than_its_bound() {
        let mut random = stream(1, Purpose::Sampling, &[]);
        for vocabulary in [1u32, 7, 8, 9, 272, 5000] {
            for share in [0.0, 0.001, 0.05, 0.5, 0.95, 0.999, 1.0] {
                let mut ids: Vec<u32> = (0..vocabulary).filter(|_| random.random::<f64>() < share).collect();
                if ids.is_empty() {
                    ids.push(random.random_range(0..vocabulary));
                }
                let set = TokenSet::from_ids(&ids);
                assert_eq!(set.ids(), ids);
                assert!(set.0.len() <= TokenSet::bytes_max(vocabulary as usize, ids.len()));
                assert!((0..vocabulary).all(|id| set.contains(id) == ids.binary_search(&id).is_ok()));
                assert_eq!(serde_json::from_str::<TokenSet>(&text(&set)).unwrap(), set);
                let packed = rmp_serde::to_vec(&Some(set.clone())).unwrap();
                assert_eq!(rmp_serde::from_slice::<Option<TokenSet>>(&packed).unwrap(), Some(set));
            }
        }
    }

    #[test]
    fn few_ids_and_nearly_all_ids_take_few_bytes() {
        let bytes = |ids: &[u32]| TokenSet::from_ids(ids).0.len();
        assert_eq!(bytes(&[3]), 2);
        assert_eq!(bytes(&[150_000]), 5);
        let all: Vec<u32> = (0..151_936).collect();
        assert_eq!(bytes(&all), 5);
        let all_but_one: Vec<u32> = all.iter().copied().filter(|&id| id != 70_000).collect();
        assert_eq!(bytes(&all_but_one), 9);
        let every_second: Vec<u32> = all.into_iter().step_by(2).collect();
        assert_eq!(bytes(&every_second), 1 + 151_936 / 8);
        assert_eq!(TokenSet::bytes_max(151_936, usize::MAX), 1 + 151_936 / 8);
    }

    #[test]
    fn text_that_is_no_set_is_refused() {
        let of = |bytes: &[u8]| serde_json::to_string(&BASE64_STANDARD.encode(bytes)).unwrap();
        let huge = of(&[RUNS, 0, 255, 255, 255, 255, 15]);
        for bad in [
            "\"?\"".to_owned(),
            of(&[]),
            of(&[RUNS]),
            of(&[2, 1, 1]),
            of(&[RUNS, 3]),
            of(&[RUNS, 3, 0]),
            of(&[RUNS, 3, 128]),
            of(&[BITS, 0]),
            // The form with more bytes.
            of(&[BITS, 255, 255, 255, 255]),
            huge,
        ] {
            let error = serde_json::from_str::<TokenSet>(&bad).unwrap_err().to_string();
            assert!(error.contains("is not a set of tokens"), "{bad}: {error}");
        }
    }
}
