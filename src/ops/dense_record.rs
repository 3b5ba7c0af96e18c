//! Which of cuBLASLt's algorithms multiplies rows by which matrix: the file that `gpu-check` writes, read in every build.
//!
//! An algorithm stands here where it was shown that a row's bits do not depend on the number of rows, up to [`ROWS_MAX`], nor on
//! the row's place among them. That is a fact about one kind of GPU and one version of the library, which the file names.

use super::cuda::LtProduct;
use crate::bad_input;
use crate::bounded_file::{self, TOML_BYTES_MAX};
use anyhow::Result;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

/// Rows of one product up to which it was shown; more are multiplied in several.
pub const ROWS_MAX: usize = 4096;
/// How a recipe and a record name the program's own kernels.
pub const OWN: &str = "own";
const REMEDY: &str = "write it anew with rloss gpu-check --write-cublaslt";

/// A dense product in bf16, of rows `[M, k]` by a matrix `[k, n]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DenseShape {
    pub k: usize,
    pub n: usize,
    /// Whether a bias `[n]` is added.
    pub bias: bool,
}

impl std::fmt::Display for DenseShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[M, {}] · [{}, {}]{}", self.k, self.k, self.n, if self.bias { " + bias" } else { "" })
    }
}

/// `cublasLtMatmulAlgo_t`, which the library alone can read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LtAlgorithm(pub [u64; 8]);

impl LtAlgorithm {
    /// 128 hexadecimal digits, its bytes as they lie in memory.
    fn hex(&self) -> String {
        self.0.iter().flat_map(|word| word.to_le_bytes()).fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }

    fn of_hex(text: &str) -> Option<Self> {
        let digits: Option<Vec<u8>> = text.chars().map(|c| c.to_digit(16).map(|d| d as u8)).collect();
        let digits = digits.filter(|digits| digits.len() == 128)?;
        let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
        let mut words = [0; 8];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
        }
        Some(Self(words))
    }
}

/// What multiplies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DenseChoice {
    Lt(LtAlgorithm),
    /// The program's own kernel, and why none of the library's can.
    Own(String),
}

/// What was shown on one kind of GPU with one version of the library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DenseRecord {
    /// The GPU's name.
    pub device: String,
    /// As `cublasLtGetVersion` says it.
    pub cublaslt: u64,
    pub choices: BTreeMap<DenseShape, DenseChoice>,
}

/// The products of a model that cuBLASLt makes; own kernels make the others.
pub type DenseProducts = BTreeMap<DenseShape, LtProduct>;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileForm {
    device: String,
    cublaslt: u64,
    product: Vec<ProductForm>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ProductForm {
    k: usize,
    n: usize,
    bias: bool,
    algorithm: String,
    why: Option<String>,
}

impl DenseRecord {
    /// Reads a record; its text comes with it.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] with the line, where it cannot be read or is none.
    pub fn read(path: &Path) -> Result<(Self, String)> {
        let text = bounded_file::read_text(path, TOML_BYTES_MAX)
            .map_err(|e| bad_input!("{}: cannot be read: {e}; {REMEDY}", path.display()))?;
        let record = Self::parse(&text).map_err(|why| bad_input!("{}: {why}; {REMEDY}", path.display()))?;
        Ok((record, text))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let form: FileForm = toml::from_str(text).map_err(|e| {
            let before = e.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            format!("line {}: {}", before.matches('\n').count() + 1, e.message())
        })?;
        let mut choices = BTreeMap::new();
        for ProductForm { k, n, bias, algorithm, why } in form.product {
            let shape = DenseShape { k, n, bias };
            let choice = match (algorithm.as_str(), why) {
                (OWN, why) => DenseChoice::Own(why.unwrap_or_default()),
                (hex, None) => DenseChoice::Lt(LtAlgorithm::of_hex(hex).ok_or_else(|| {
                    format!("{shape}: the algorithm is neither \"{OWN}\" nor 128 hexadecimal digits")
                })?),
                (_, Some(_)) => return Err(format!("{shape}: an algorithm, and why there is none")),
            };
            if k == 0 || n == 0 {
                return Err(format!("{shape} is no product"));
            }
            if choices.insert(shape, choice).is_some() {
                return Err(format!("{shape} is there twice"));
            }
        }
        Ok(Self { device: form.device, cublaslt: form.cublaslt, choices })
    }

    /// What is wrong with it for a model with `shapes` on `device` and `version` of the library, and the remedy.
    pub fn unsuited(&self, device: &str, version: u64, shapes: &BTreeSet<DenseShape>) -> Option<String> {
        if self.device != device {
            return Some(format!("is of {:?}, and the GPU is {device:?}; {REMEDY} there", self.device));
        }
        if self.cublaslt != version {
            return Some(format!("is of cuBLASLt {}, and {version} is loaded; {REMEDY}", self.cublaslt));
        }
        let missing = shapes.iter().find(|shape| !self.choices.contains_key(shape))?;
        Some(format!("is of another model: it lacks {missing}; {REMEDY} for this one"))
    }

    /// The record as a file; reading it gives the same record.
    pub fn to_toml(&self) -> String {
        let string = |text: &str| toml::Value::String(text.to_owned()).to_string();
        let mut text = format!(
            "# Written by rloss gpu-check: algorithms of cuBLASLt with which a row's bits are the same at every number of rows.\n\
             device = {}\ncublaslt = {}\n",
            string(&self.device),
            self.cublaslt
        );
        if self.choices.is_empty() {
            text.push_str("product = []\n");
        }
        for (DenseShape { k, n, bias }, choice) in &self.choices {
            let choice = match choice {
                DenseChoice::Lt(algorithm) => string(&algorithm.hex()),
                DenseChoice::Own(why) => format!("\"{OWN}\"\nwhy = {}", string(why)),
            };
            let _ = write!(text, "\n[[product]]\nk = {k}\nn = {n}\nbias = {bias}\nalgorithm = {choice}\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: DenseShape = DenseShape { k: 64, n: 128, bias: true };

    fn record() -> DenseRecord {
        let own = DenseChoice::Own("no \"algorithm\"".to_owned());
        let algorithm = LtAlgorithm(std::array::from_fn(|i| 0x0123_4567_89ab_cdef << i));
        let bare = DenseShape { bias: false, ..SHAPE };
        DenseRecord {
            device: "A GPU".to_owned(),
            cublaslt: 130_000,
            choices: BTreeMap::from([(SHAPE, DenseChoice::Lt(algorithm)), (bare, own)]),
        }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let empty = DenseRecord { choices: BTreeMap::new(), ..record() };
        for record in [record(), empty] {
            assert_eq!(DenseRecord::parse(&record.to_toml()), Ok(record));
        }
        assert!(record().to_toml().contains("\"efcdab8967452301"), "bytes as they lie in memory");
    }

    #[test]
    fn what_is_no_record_is_refused_with_its_place() {
        let good = record().to_toml();
        let hex = good.split("algorithm = \"").find(|part| part.starts_with("ef")).unwrap()[..128].to_owned();
        for (from, to, said) in [
            ("device = \"A GPU\"", "", "missing field `device`"),
            ("cublaslt = 130000", "cublaslt = -1", "line 3: "),
            ("cublaslt = 130000", "cublaslt = 130000\nmore = 1", "line 4: unknown field `more`"),
            ("bias = true", "bias = true\nm = 1", "unknown field `m`"),
            ("bias = true\n", "", "missing field `bias`"),
            ("bias = true", "bias = false", "[M, 64] · [64, 128] is there twice"),
            ("k = 64", "k = 0", "[M, 0] · [0, 128] is no product"),
            (&hex, &hex[1..], "neither \"own\" nor 128 hexadecimal digits"),
            (&hex, &hex.replacen('e', "g", 1), "neither \"own\" nor 128 hexadecimal digits"),
            (&hex, &hex.replacen('e', "é", 1), "neither \"own\" nor 128 hexadecimal digits"),
            ("bias = true", "bias = true\nwhy = \"none\"", "+ bias: an algorithm, and why there is none"),
            ("device", "device device", "line 2: "),
        ] {
            let why = DenseRecord::parse(&good.replace(from, to)).unwrap_err();
            assert!(why.contains(said), "{why}, not {said}");
        }
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("record.toml");
        let refused = || DenseRecord::read(&file).unwrap_err().to_string();
        assert!(
            refused().contains("record.toml: cannot be read: No such file") && refused().ends_with(REMEDY)
        );
        std::fs::write(&file, "device = 1\n").unwrap();
        assert!(refused().contains("record.toml: line 1: ") && refused().ends_with(REMEDY), "{}", refused());
        std::fs::write(&file, b"\xff").unwrap();
        assert!(refused().contains("is not UTF-8"), "{}", refused());
    }

    #[test]
    fn what_was_shown_elsewhere_is_not_taken() {
        let other = DenseShape { k: 65, ..SHAPE };
        assert_eq!(record().unsuited("A GPU", 130_000, &BTreeSet::from([SHAPE])), None);
        for (device, version, shape, said) in [
            ("Another", 130_000, SHAPE, "is of \"A GPU\", and the GPU is \"Another\""),
            ("A GPU", 130_001, SHAPE, "is of cuBLASLt 130000, and 130001 is loaded"),
            ("A GPU", 130_000, other, "it lacks [M, 65] · [65, 128] + bias"),
        ] {
            let why = record().unsuited(device, version, &BTreeSet::from([shape])).unwrap();
            assert!(why.contains(said) && why.contains(REMEDY), "{why}");
        }
    }
}
