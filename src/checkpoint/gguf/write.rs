//! Writes a model as a GGUF file for llama.cpp.

use super::names::{GgufTensorSpec, geometry, parts};
use super::tensor_type::TensorType;
use super::tokenizer::{CONTROL, NORMAL, PRE_TOKENIZERS, PreTokenizer, UNUSED, USER_DEFINED};
use crate::atomic_file::replace_file;
use crate::bad_input;
use crate::model::adapter::HEAD;
use crate::model::adapter::Lora;
use crate::model::config::{Config, LayerType};
use crate::model::names::{Layout, ParameterSpec, TensorRole, parameter_specs};
use crate::ops::cpu::host_values;
use crate::settings::choice;
use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use serde_json::Value as Json;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// Alignment of tensors, in bytes. This is the default of GGUF.
const ALIGNMENT: usize = 32;
/// Number of rows that are encoded together.
const ROWS: usize = 64;
/// The clamp of SwiGLU, which is a constant in llama.cpp.
const SWIGLU_LIMIT: f64 = 7.0;

choice! {
    /// The type of the matrices in a written GGUF file. Vectors and the router stay F32.
    pub enum GgufFormat {
        /// 32-bit floating point.
        F32 = "f32",
        /// bfloat16.
        Bf16 = "bf16",
        /// 16-bit floating point.
        F16 = "f16",
        /// Blocks of 32 8-bit values with one scale.
        Q8 = "q8_0",
        /// Expert matrices in MXFP4, other matrices in bfloat16. GPT-OSS only.
        Mxfp4 = "mxfp4",
    }
}

impl GgufFormat {
    /// Returns the type of the tensor of `spec`.
    fn tensor_type(self, spec: &ParameterSpec) -> &'static TensorType {
        match self {
            _ if !spec.is_matrix() || spec.role == TensorRole::Router => &TensorType::F32,
            GgufFormat::F32 => &TensorType::F32,
            GgufFormat::F16 => &TensorType::F16,
            GgufFormat::Q8 if geometry(spec)[2].is_multiple_of(TensorType::Q8_0.block) => &TensorType::Q8_0,
            GgufFormat::Mxfp4 if spec.is_expert_matrix() => &TensorType::MXFP4,
            GgufFormat::Bf16 | GgufFormat::Q8 | GgufFormat::Mxfp4 => &TensorType::BF16,
        }
    }

    /// Returns `general.file_type`, the number of the format in llama.cpp.
    fn file_type(self) -> u32 {
        match self {
            GgufFormat::F32 => 0,
            GgufFormat::F16 => 1,
            GgufFormat::Q8 => 7,
            GgufFormat::Bf16 => 32,
            GgufFormat::Mxfp4 => 38,
        }
    }
}

/// The tokenizer and the chat template of a model, for the metadata.
pub struct GgufTokenizer<'a> {
    /// The content of `tokenizer.json`.
    pub json: &'a [u8],
    /// The chat template.
    pub template: &'a str,
    /// The template of conversations with tools, if it is another one.
    pub tool_use: Option<&'a str>,
}

/// Writes the model to the file `path`. `tensor` is called once per parameter, and returns its f32 tensor in
/// working layout.
///
/// # Errors
/// [`crate::error::BadInput`] when llama.cpp would compute the model differently, or when the type cannot
/// represent a value. Other errors when writing fails.
pub fn write(
    path: &Path,
    config: &Config,
    format: GgufFormat,
    tokenizer: GgufTokenizer,
    mut tensor: impl FnMut(&ParameterSpec) -> Result<Tensor>,
) -> Result<()> {
    check(config, format)?;
    let specs = parameter_specs(config);
    let entries = entries(config, format, tokenizer, path)?;
    let all: Vec<(GgufTensorSpec, &TensorType)> = specs
        .iter()
        .flat_map(|spec| parts(spec, config.family).into_iter().map(|part| (part, format.tensor_type(spec))))
        .collect();
    write_file(path, &header(&entries, &all), |out| {
        for spec in &specs {
            let found = tensor(spec)?;
            let wanted = spec.working_shape();
            ensure!(
                found.dims() == wanted,
                "`{}` has shape {:?} in memory, not {wanted:?}",
                spec.name,
                found.dims()
            );
            let values = host_values(&found)?;
            let part_count = parts(spec, config.family).len();
            for part in 0..part_count {
                write_part(out, spec, format.tensor_type(spec), &values, (part, part_count))?;
            }
        }
        Ok(())
    })
}

/// Writes a file that begins with `header`, atomically.
fn write_file(
    path: &Path,
    header: &[u8],
    write_data: impl FnOnce(&mut BufWriter<File>) -> Result<()>,
) -> Result<()> {
    replace_file(path, |aside| {
        let mut out = BufWriter::new(File::create_new(aside)?);
        out.write_all(header)?;
        write_data(&mut out)?;
        Ok(out.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all()?)
    })
}

/// Writes zeros after the `written` bytes of a tensor, up to the next alignment.
fn pad(out: &mut impl Write, written: usize) -> Result<()> {
    Ok(out.write_all(&vec![0; written.next_multiple_of(ALIGNMENT) - written])?)
}

/// Writes the low-rank adapter `lora` of a model as llama.cpp reads it (`--lora`): for each adapted matrix,
/// the tensors `NAME.lora_a` `[rank, in]` and `NAME.lora_b` `[out, rank]` in F32. `factor` returns the values
/// of a factor in working layout, by its name.
///
/// # Errors
/// [`crate::error::BadInput`] when the adapter has a matrix of experts.
pub fn write_adapter(
    path: &Path,
    config: &Config,
    lora: &Lora,
    mut factor: impl FnMut(&str) -> Result<Vec<f32>>,
) -> Result<()> {
    let specs = parameter_specs(config);
    let mut entries = Entries::default();
    entries.text("general.architecture", config.family.gguf);
    entries.text("general.type", "adapter");
    entries.text("general.name", &path.file_stem().unwrap_or_default().to_string_lossy());
    entries.text("adapter.type", "lora");
    // llama.cpp divides by the rank.
    entries.float("adapter.lora.alpha", f64::from(lora.scale()) * lora.rank as f64);
    let (mut tensors, mut data) = (vec![], vec![]);
    for target in &lora.targets {
        if target == HEAD && config.tie_word_embeddings {
            return Err(bad_input!(
                "the adapter has factors of a tied head, which this form of llama.cpp does not hold; add --merged, or \
                 train without the head (train_unembed=False)"
            ));
        }
        let spec = specs.iter().find(|spec| spec.name == *target);
        let spec = spec.with_context(|| format!("no tensor {target}"))?;
        let mut names = parts(spec, config.family);
        let (Some(GgufTensorSpec { name, .. }), 0, false) =
            (names.pop(), names.len(), spec.has_expert_axis())
        else {
            return Err(bad_input!(
                "the adapter has factors of experts ({target}), which this form of llama.cpp does not hold; add --merged"
            ));
        };
        let [_, output, input] = geometry(spec);
        for (factor_name, (end, shape)) in Lora::factor_names(target)
            .iter()
            .zip([("lora_a", [lora.rank, input]), ("lora_b", [output, lora.rank])])
        {
            let values = factor(factor_name)?;
            let [rows, columns] = shape;
            ensure!(values.len() == rows * columns, "{factor_name}: {} values", values.len());
            data.push((0..values.len()).map(|at| values[at % columns * rows + at / columns]).collect());
            let shape = shape.to_vec();
            tensors.push((GgufTensorSpec { name: format!("{name}.{end}"), shape }, &TensorType::F32));
        }
    }
    write_file(path, &header(&entries, &tensors), |out| {
        for values in data {
            let bytes = TensorType::F32.encode(values)?;
            out.write_all(&bytes)?;
            pad(out, bytes.len())?;
        }
        Ok(())
    })
}

/// Returns what stands before the data of the tensors.
fn header(entries: &Entries, tensors: &[(GgufTensorSpec, &TensorType)]) -> Vec<u8> {
    let mut header = b"GGUF\x03\0\0\0".to_vec();
    header.extend_from_slice(&(tensors.len() as u64).to_le_bytes());
    header.extend_from_slice(&(entries.0.to_le_bytes()));
    header.extend_from_slice(&entries.1);
    let mut offset = 0;
    for (tensor, dtype) in tensors {
        put_text(&mut header, &tensor.name);
        header.extend_from_slice(&(tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().rev().for_each(|&n| header.extend_from_slice(&(n as u64).to_le_bytes()));
        header.extend_from_slice(&dtype.id.to_le_bytes());
        header.extend_from_slice(&(offset as u64).to_le_bytes());
        offset += dtype.bytes_of(tensor.shape.iter().product()).next_multiple_of(ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(ALIGNMENT), 0);
    header
}

/// Checks that llama.cpp can compute the model from a GGUF file in `format`.
fn check(config: &Config, format: GgufFormat) -> Result<()> {
    let family = config.family;
    if format == GgufFormat::Mxfp4 && !family.has_mxfp4 {
        return Err(bad_input!("MXFP4 is not a format of this family; write bf16 or q8_0"));
    }
    let odd = |spec: &&ParameterSpec| {
        spec.is_expert_matrix() && !geometry(spec)[2].is_multiple_of(TensorType::MXFP4.block)
    };
    if format == GgufFormat::Mxfp4
        && let Some(spec) = parameter_specs(config).iter().find(odd)
    {
        return Err(bad_input!(
            "`{}` has {} inputs; MXFP4 needs a multiple of 32; write bf16",
            spec.name,
            geometry(spec)[2]
        ));
    }
    if family.has_swiglu_limit && config.swiglu_limit != SWIGLU_LIMIT {
        return Err(bad_input!(
            "swiglu_limit = {}: GGUF has no key for it, and llama.cpp computes with {SWIGLU_LIMIT}",
            config.swiglu_limit
        ));
    }
    if family.has_windows && config.layer_types != LayerType::alternate(config.num_hidden_layers) {
        return Err(bad_input!(
            "layer_types do not alternate: GGUF has no key for them, and llama.cpp uses windows in even layers"
        ));
    }
    Ok(())
}

/// Writes one of the GGUF tensors of a parameter, row by row, and its padding. If a parameter has
/// several GGUF tensors, their rows alternate in the parameter.
fn write_part(
    out: &mut impl Write,
    spec: &ParameterSpec,
    dtype: &TensorType,
    values: &[f32],
    (part, parts): (usize, usize),
) -> Result<()> {
    let [_, output, input] = geometry(spec);
    let is_transposed = spec.layout == Layout::Transposed || spec.is_expert_matrix();
    let rows: Vec<usize> = (part..output).step_by(parts).collect();
    let mut written = 0;
    for matrix in values.chunks_exact(output * input) {
        for rows in rows.chunks(ROWS) {
            let mut stored = Vec::with_capacity(rows.len() * input);
            for &row in rows {
                match is_transposed {
                    true => stored.extend((0..input).map(|i| matrix[i * output + row])),
                    false => stored.extend_from_slice(&matrix[row * input..(row + 1) * input]),
                }
            }
            let bytes = dtype.encode(stored).with_context(|| format!("`{}`", spec.name))?;
            out.write_all(&bytes)?;
            written += bytes.len();
        }
    }
    pad(out, written)
}

fn put_text(to: &mut Vec<u8>, text: &str) {
    to.extend_from_slice(&(text.len() as u64).to_le_bytes());
    to.extend_from_slice(text.as_bytes());
}

/// The entries of the metadata: their number, and their bytes in file order.
#[derive(Default)]
struct Entries(u64, Vec<u8>);

impl Entries {
    fn key(&mut self, key: &str, kind: u32) {
        self.0 += 1;
        put_text(&mut self.1, key);
        self.1.extend_from_slice(&kind.to_le_bytes());
    }

    fn number(&mut self, key: &str, value: usize) {
        self.key(key, 4);
        self.1.extend_from_slice(&(value as u32).to_le_bytes());
    }

    fn float(&mut self, key: &str, value: f64) {
        self.key(key, 6);
        self.1.extend_from_slice(&(value as f32).to_le_bytes());
    }

    fn flag(&mut self, key: &str, value: bool) {
        self.key(key, 7);
        self.1.push(u8::from(value));
    }

    fn text(&mut self, key: &str, value: &str) {
        self.key(key, 8);
        put_text(&mut self.1, value);
    }

    fn texts<'a>(&mut self, key: &str, values: impl ExactSizeIterator<Item = &'a str>) {
        self.key(key, 9);
        self.1.extend_from_slice(&8u32.to_le_bytes());
        self.1.extend_from_slice(&(values.len() as u64).to_le_bytes());
        values.for_each(|value| put_text(&mut self.1, value));
    }

    fn integers(&mut self, key: &str, values: &[i32]) {
        self.key(key, 9);
        self.1.extend_from_slice(&5u32.to_le_bytes());
        self.1.extend_from_slice(&(values.len() as u64).to_le_bytes());
        values.iter().for_each(|value| self.1.extend_from_slice(&value.to_le_bytes()));
    }
}

/// Returns the metadata: the config, the tokenizer and the chat template.
fn entries(config: &Config, format: GgufFormat, tokenizer: GgufTokenizer, path: &Path) -> Result<Entries> {
    let mut to = Entries::default();
    let arch = config.family.gguf;
    let of = |key: &str| format!("{arch}.{key}");
    to.text("general.architecture", arch);
    to.text("general.name", &path.file_stem().unwrap_or_default().to_string_lossy());
    to.number("general.file_type", format.file_type() as usize);
    to.number("general.quantization_version", 2);
    for (key, value) in [
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("block_count", config.num_hidden_layers),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.num_attention_heads),
        ("attention.head_count_kv", config.num_key_value_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
        ("rope.dimension_count", config.head_dim),
        ("vocab_size", config.vocab_size),
    ] {
        to.number(&of(key), value);
    }
    to.float(&of("attention.layer_norm_rms_epsilon"), config.rms_norm_eps);
    to.float(&of("rope.freq_base"), config.rope.theta);
    if config.family.has_experts {
        to.number(&of("expert_feed_forward_length"), config.intermediate_size);
        to.number(&of("expert_count"), config.num_local_experts);
        to.number(&of("expert_used_count"), config.num_experts_per_tok);
    }
    if config.family.has_windows {
        to.number(&of("attention.sliding_window"), config.sliding_window);
    }
    if let Some(yarn) = &config.rope.yarn {
        to.text(&of("rope.scaling.type"), "yarn");
        to.float(&of("rope.scaling.factor"), yarn.factor);
        to.number(&of("rope.scaling.original_context_length"), yarn.original_max_position_embeddings);
        to.float(&of("rope.scaling.yarn_beta_fast"), yarn.beta_fast);
        to.float(&of("rope.scaling.yarn_beta_slow"), yarn.beta_slow);
        to.flag(&of("rope.scaling.truncate"), yarn.truncate);
    }
    add_tokenizer(&mut to, config, &tokenizer)?;
    to.text("tokenizer.chat_template", tokenizer.template);
    if let Some(template) = tokenizer.tool_use {
        to.text("tokenizer.chat_template.tool_use", template);
    }
    Ok(to)
}

fn add_tokenizer(to: &mut Entries, config: &Config, tokenizer: &GgufTokenizer) -> Result<()> {
    let json: Json = serde_json::from_slice(tokenizer.json).context("the tokenizer")?;
    let mut tokens: Vec<String> = (0..config.vocab_size).map(|id| format!("[PAD{id}]")).collect();
    let mut kinds = vec![UNUSED; tokens.len()];
    let mut put = |id: &Json, token: &str, kind: i32| {
        let id = id.as_u64().unwrap_or(u64::MAX) as usize;
        if let (Some(place), Some(own)) = (tokens.get_mut(id), kinds.get_mut(id)) {
            (*place, *own) = (token.to_owned(), kind);
        }
    };
    for (token, id) in json["model"]["vocab"].as_object().into_iter().flatten() {
        put(id, token, NORMAL);
    }
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let kind = if token["special"] == true { CONTROL } else { USER_DEFINED };
        put(&token["id"], token["content"].as_str().unwrap_or_default(), kind);
    }
    let pair = |merge: &Json| match merge.as_array().map(Vec::as_slice) {
        Some([left, right]) => {
            format!("{} {}", left.as_str().unwrap_or_default(), right.as_str().unwrap_or_default())
        }
        _ => merge.as_str().unwrap_or_default().to_owned(),
    };
    let merges: Vec<String> = json["model"]["merges"].as_array().into_iter().flatten().map(pair).collect();
    let steps = json["pre_tokenizer"].to_string();
    let own = config.family.gguf_pre_tokenizer;
    let pattern = |known: &&PreTokenizer| steps.contains(&Json::from(known.pattern).to_string());
    let pre_tokenizer = match PRE_TOKENIZERS.iter().find(pattern) {
        Some(known) => known.name,
        // Without merges each byte is a token, so the split of a text has no effect.
        None if merges.is_empty() => own,
        None => {
            return Err(bad_input!(
                "the pre-tokenizer of the tokenizer has no name in GGUF; export a Hugging Face folder instead"
            ));
        }
    };
    to.text("tokenizer.ggml.model", "gpt2");
    to.text("tokenizer.ggml.pre", pre_tokenizer);
    to.texts("tokenizer.ggml.tokens", tokens.iter().map(String::as_str));
    to.integers("tokenizer.ggml.token_type", &kinds);
    to.texts("tokenizer.ggml.merges", merges.iter().map(String::as_str));
    for (key, id) in [
        ("bos_token_id", config.bos_token_id),
        ("eos_token_id", config.eos_token_ids.first().copied()),
        ("padding_token_id", config.pad_token_id),
    ] {
        if let Some(id) = id {
            to.number(&format!("tokenizer.ggml.{key}"), id as usize);
        }
    }
    // Ollama's key for all of them. llama.cpp knows the others by their texts.
    let ends: Vec<i32> = config.eos_token_ids.iter().map(|id| *id as i32).collect();
    to.integers("tokenizer.ggml.eos_token_ids", &ends);
    to.flag("tokenizer.ggml.add_bos_token", false);
    Ok(())
}
