//! GGUF files: read as the `gguf` package reads them, written so that they read back, and refused by name.
//! `scripts/gguf_files.py` wrote the fixtures.

use crate::cli::{in_repository, scratch};
use rloss::checkpoint::gguf::{GgufFile, GgufModel, TensorType};
use rloss::checkpoint::load::ModelFolder;
use rloss::checkpoint::tensor_file::TensorFile;
use rloss::error::BadInput;
use rloss::model::names::{Layout, ParameterSpec, parameter_specs};
use rloss::ops::cpu::host_values;
use std::fs;
use std::path::PathBuf;

fn fixtures() -> PathBuf {
    let own = in_repository("tests/fixtures/gguf");
    std::env::var_os("RLOSS_GGUF").map_or(own, PathBuf::from)
}

fn read(file: &GgufFile, name: &str) -> Vec<f32> {
    let tensor = &file.tensors[name];
    let mut bytes = vec![0; tensor.dtype.bytes_of(tensor.shape.iter().product())];
    file.read_at(tensor, 0, &mut bytes).unwrap();
    let mut values = vec![0.0; tensor.shape.iter().product()];
    tensor.dtype.decode(&bytes, &mut values);
    values
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_type_is_decoded_to_the_bit_of_the_gguf_package() {
    let file = GgufFile::open(&fixtures().join("types.gguf")).unwrap();
    let kinds: Vec<&String> = file.tensors.keys().filter(|name| !name.ends_with(".expected")).collect();
    assert!(kinds.len() == TensorType::ALL.len() || std::env::var_os("RLOSS_GGUF").is_some());
    for kind in kinds {
        assert_eq!(file.tensors[kind].dtype.name, kind);
        let (found, expected) = (read(&file, kind), read(&file, &format!("{kind}.expected")));
        assert!(found.len() >= 4, "{kind}");
        // The package decodes MXFP4's negative zero as 0.
        let unsigned = |values: Vec<f32>| bits(&values.iter().map(|value| value + 0.0).collect::<Vec<_>>());
        let equal = match kind.as_str() {
            "MXFP4" => unsigned(found) == unsigned(expected),
            _ => bits(&found) == bits(&expected),
        };
        assert!(equal, "{kind}");
    }
}

/// The values of `spec` in the layout of a Hugging Face folder.
fn stored(spec: &ParameterSpec, working: &[f32]) -> Vec<f32> {
    match (spec.layout, spec.stored_shape.as_slice()) {
        (Layout::Transposed, &[out, input]) => {
            (0..out * input).map(|at| working[at % input * out + at / input]).collect()
        }
        _ => working.to_vec(),
    }
}

#[test]
fn a_gpt_oss_of_the_gguf_package_has_its_config_tokenizer_and_tensors() {
    let folder = in_repository("tests/fixtures/gguf");
    let path = folder.join("gpt_oss.gguf");
    let GgufModel { weights, config, vocabulary, template } = GgufModel::open(&path).unwrap();
    assert_eq!((config.family.name, config.vocab_size, config.num_local_experts), ("gpt_oss", 265, 4));
    let yarn = config.rope.yarn.as_ref().unwrap();
    assert_eq!((yarn.factor, yarn.original_max_position_embeddings, yarn.truncate), (8.0, 64, false));
    assert_eq!((config.rms_norm_eps, config.eos_token_ids.as_slice()), (1e-5, &[264][..]));
    let chat = config.family.chat.from_vocabulary(vocabulary, "gpt_oss.gguf").unwrap();
    assert!(!template.default.is_empty() && chat.difference_from(&template.default).is_some());
    assert_eq!(chat.stop_tokens(), [264, 263]);
    // The bytes h, e, l, o are at their place among the printable ones; two merges apply.
    assert_eq!(chat.vocabulary().encode_text("hello").unwrap(), [256, 257, u32::from(b'o' - 33)]);
    assert!(chat.vocabulary().token_bytes(261).is_none(), "an unused token");
    let expected = TensorFile::open(&folder.join("gpt_oss.safetensors")).unwrap();
    let files = ModelFolder::from_gguf(&path, weights);
    let mut packed = 0;
    for spec in parameter_specs(&config) {
        let info = expected.metadata.info(&spec.name).unwrap();
        assert_eq!(info.shape, spec.stored_shape, "{}", spec.name);
        let wanted: Vec<f32> = expected
            .read(info)
            .unwrap()
            .as_chunks()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect();
        let values = files.read_values(&spec).unwrap();
        assert_eq!(bits(&stored(&spec, &values)), bits(&wanted), "{}", spec.name);
        if let Some(weight) = files.read_packed(&spec, files.format_of(&spec)).unwrap() {
            let decoded = weight.decode(&spec.working_shape()).unwrap();
            assert!(host_values(&decoded).unwrap()[..] == values[..], "{}", spec.name);
            packed += 1;
        }
    }
    // Embedding and head; two matrices of attention, and the experts, of two layers. The others are F16 and F32.
    assert_eq!(packed, 2 + 2 * (2 + 2));
}

/// A header of `tensors` and `entries` in number, followed by `rest`.
fn header(tensors: u64, entries: u64, rest: &[u8]) -> Vec<u8> {
    [&b"GGUF\x03\0\0\0"[..], &tensors.to_le_bytes(), &entries.to_le_bytes(), rest].concat()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// The entry of a tensor of `shape`.
fn tensor(name: &str, shape: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let sizes: Vec<u8> = shape.iter().flat_map(|n| n.to_le_bytes()).collect();
    let dimensions = (shape.len() as u32).to_le_bytes();
    [&text(name)[..], &dimensions, &sizes, &kind.to_le_bytes(), &offset.to_le_bytes()].concat()
}

/// A file with the tensors `t` and `u` of 16 bytes at two offsets.
fn two_tensors(offsets: &[u64; 2]) -> Vec<u8> {
    let entries = [tensor("t", &[4], 0, offsets[0]), tensor("u", &[4], 0, offsets[1]), vec![0; 128]].concat();
    header(2, 0, &entries)
}

/// Other weights were read, with exit code 0.
#[test]
fn bug_tensors_at_one_offset_or_unaligned_are_refused() {
    let (_folder, [path]) = scratch(["a.gguf"]);
    let open = |offsets: &[u64; 2]| {
        fs::write(&path, two_tensors(offsets)).unwrap();
        GgufFile::open(&path)
    };
    assert_eq!(open(&[0, 32]).unwrap().tensors.len(), 2);
    assert_eq!(open(&[32, 0]).unwrap().tensors.len(), 2, "in any order");
    for offsets in
        [[0, 0], [0, 4], [0, 31], [0, 33], [0, 64], [4, 32], [32, 64], [u64::MAX, 0], [1 << 63, 1 << 63]]
    {
        let error = open(&offsets).err().expect("refused");
        assert!(error.is::<BadInput>(), "{offsets:?}: {error}");
    }
}

#[test]
fn bad_files_are_refused_in_one_line() {
    let (_folder, [path]) = scratch(["a.gguf"]);
    let entry = |kind: u32, value: &[u8]| [&text("k")[..], &kind.to_le_bytes(), value].concat();
    let list = |kind: u32, count: u64| [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat();
    let whole = fs::read(in_repository("tests/fixtures/gguf/gpt_oss.gguf")).unwrap();
    let changed = |from: &str, to: &str| {
        let at = whole.windows(from.len()).position(|bytes| bytes == from.as_bytes()).unwrap();
        let mut bytes = whole.clone();
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        bytes
    };
    for (bytes, words) in [
        (b"GG".to_vec(), "truncated"),
        (b"PK\x03\x04 and more of it".to_vec(), "not a GGUF file"),
        (b"GGUF\x01\0\0\0".to_vec(), "version 1"),
        (b"GGUF\0\0\0\x03".to_vec(), "big-endian"),
        (
            header(0, 1_000_000_000, &[0; 64]),
            "announces 1000000000 entries of metadata, but the file has space for 4",
        ),
        (header(u64::MAX, 0, &[0; 64]), "tensors, but the file has space for 2"),
        (header(0, 1, &[&u64::MAX.to_le_bytes()[..], &[0; 64]].concat()), "truncated within its header"),
        (header(0, 1, &entry(9, &[list(9, 1), list(9, 1)].concat())), "\"k\" is a list of lists"),
        (header(0, 1, &entry(9, &list(8, 1 << 61))), "\"k\" has 2305843009213693952 values"),
        (header(0, 1, &entry(9, &list(4, 1 << 40))), "the header ends before"),
        (header(0, 1, &entry(77, &[0; 9])), "unknown type 77"),
        (header(0, 2, &[entry(7, &[1]), entry(7, &[1])].concat()), "\"k\" occurs twice"),
        (header(1, 0, &tensor("t", &[1; 9], 0, 0)), "9 dimensions"),
        (header(1, 0, &tensor("t", &[256], 10, 0)), "the unsupported type 10"),
        (header(1, 0, &tensor("t", &[33, 2], 8, 0)), "must be multiples of 32"),
        (header(1, 0, &tensor("t", &[1 << 40, 1 << 40], 0, 0)), "shape"),
        (header(1, 0, &tensor("t", &[4], 0, u64::MAX)), "`t` has 16 bytes at offset"),
        (header(1, 0, &tensor("t", &[4], 0, 1 << 40)), "the file ends before"),
        (two_tensors(&[0, 0]), "`u` begins at offset 0, but t leads to offset 32 (general.alignment is 32)"),
        (two_tensors(&[0, 16]), "`u` begins at offset 16, but t leads to offset 32"),
        (two_tensors(&[0, 36]), "`u` begins at offset 36, but t leads to offset 32"),
        (two_tensors(&[32, 64]), "`t` begins at offset 32, but the start of the data leads to offset 0"),
        (two_tensors(&[0, 160]), "`u` has 16 bytes at offset 160, but the file ends before the last"),
        (header(0, 1, &[&text("general.alignment")[..], &4u32.to_le_bytes(), &[0; 4]].concat()), "alignment"),
        (header(0, 0, &[]), "general.architecture = \"\" is not supported; known: gpt-oss, qwen2"),
        (whole[..whole.len() - 1].to_vec(), "truncated"),
        (changed("gpt-oss", "llama-4"), "\"llama-4\" is not supported"),
        (changed("gpt-oss.block_count", "gpt-oss.block_wound"), "`num_hidden_layers` is missing"),
        (changed("gpt-4o", "llama3"), "llama3"),
        (changed("blk.1.attn_q.weight", "blk.7.attn_q.weight"), "`blk.1.attn_q.weight` is missing; "),
        (changed("tokenizer.ggml.merges", "tokenizer.ggml.verges"), "merges is absent"),
    ] {
        fs::write(&path, &bytes).unwrap();
        let error = GgufModel::open(&path).map(drop).expect_err(words);
        assert!(error.is::<BadInput>(), "{error:?}");
        let said = error.to_string();
        assert!(
            said.contains(words) && said.contains("a.gguf") && said.lines().count() == 1,
            "{words}: {said}"
        );
    }
}
