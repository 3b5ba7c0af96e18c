//! GGUF, the format of llama.cpp: one file with the config, the tokenizer and the tensors of a model.
//! Specification: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

mod file;
mod metadata;
mod names;
mod tensor_type;
mod tokenizer;
mod weights;
mod write;

pub use file::GgufFile;
pub use metadata::GgufModel;
pub use tensor_type::TensorType;
pub use weights::{GgufWeights, files};
pub use write::{GgufFormat, GgufTokenizer, write, write_adapter};

use std::path::Path;

/// Returns whether `path` names a GGUF file.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf")) && !path.is_dir()
}
