//! Reads weights of a Hugging Face folder: from one safetensors file, or from shards with an index.
//!
//! Opening a folder reads only the headers and checks them against the config. One error lists all mistakes.
//! Tensors are read later, one at a time ([`TensorFile`]).

use super::gguf::GgufWeights;
use super::tensor_file::TensorFile;
use crate::bad_input;
use crate::bounded_file::{self, TOKENIZER_BYTES_MAX};
use crate::dist::serialization::f32_values;
use crate::model::config::{Config, WeightFormat};
use crate::model::layers_on_demand::TensorSource;
use crate::model::names::{Layout, ParameterSpec, StoredTensor, parameter_specs};
use crate::model::storage::StoredFormat;
use crate::ops::mxfp4::{self, BLOCK};
use crate::ops::packed_weights::{PackedFormat, PackedMatrix, StoredRows, bf16_is_finite, block_is_finite};
use crate::ops::weight::Weight;
use anyhow::{Result, bail};
use candle_core::{Device, Tensor};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub const WEIGHTS_FILE: &str = "model.safetensors";
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// Maximum number of mistakes that one error lists. With a wrong config, every tensor is a mistake.
const MISTAKES_SHOWN_MAX: usize = 16;

/// Lists the first `shown_max` mistakes, and the number of the others.
pub(super) fn list_mistakes(mut mistakes: Vec<String>, shown_max: usize) -> String {
    let more = mistakes.len().saturating_sub(shown_max);
    mistakes.truncate(shown_max);
    mistakes.extend((more > 0).then(|| format!("and {more} more")));
    mistakes.join("; ")
}

/// Returns whether `folder` has weight files of any kind. If a folder has no weight files, the model is
/// initialised at random.
///
/// Weights in other formats and shards without an index count too. Otherwise the model would be initialised
/// at random without a message. [`ModelFolder::open`] reports such weights as a mistake.
pub fn has_weights(folder: &Path) -> bool {
    let is_weights = |name: &str| {
        let ends = [".safetensors", ".safetensors.index.json", ".gguf"].iter().any(|end| name.ends_with(end));
        ends || name.starts_with("pytorch_model")
    };
    std::fs::read_dir(folder)
        .is_ok_and(|entries| entries.flatten().any(|e| is_weights(&e.file_name().to_string_lossy())))
}

/// An open model folder or GGUF file whose headers agree with the config. Tensors are read on demand.
pub struct ModelFolder {
    folder: PathBuf,
    /// The weights, if they are in a GGUF file.
    gguf: Option<GgufWeights>,
    files: Vec<TensorFile>,
    /// For each tensor, by its stored name: the index of its file in `files`.
    file_index: BTreeMap<String, usize>,
}

impl ModelFolder {
    /// Opens the weight files and checks names, shapes and dtypes against `config`.
    ///
    /// # Errors
    /// `BadInput` lists every tensor that is missing or unexpected, or has a wrong shape or an unsupported
    /// dtype. If a file is missing or damaged, it names that file.
    pub fn open(folder: &Path, config: &Config) -> Result<Self> {
        config.check()?;
        let listed = listed_files(folder)?;
        let mut files = Vec::new();
        for name in listed.iter().map(|(file, _)| file) {
            files.push(TensorFile::open(&folder.join(name))?);
        }
        let mut opened = Self { folder: folder.into(), gguf: None, files, file_index: BTreeMap::new() };
        let mut mistakes = opened.index_tensors(&listed);
        if config.tie_word_embeddings {
            mistakes.extend(opened.drop_copied_head()?);
        }
        mistakes.extend(opened.find_mistakes(&parameter_specs(config)));
        if mistakes.is_empty() {
            return Ok(opened);
        }
        Err(bad_input!(
            "{}: the weights do not fit config.json: {}. Use the config.json that belongs to these weights, or \
             remove the weights to start at random",
            folder.display(),
            list_mistakes(mistakes, MISTAKES_SHOWN_MAX)
        ))
    }

    /// Returns the open weights of the GGUF file in `path`.
    pub fn from_gguf(path: &Path, weights: GgufWeights) -> Self {
        Self { folder: path.into(), gguf: Some(weights), files: vec![], file_index: BTreeMap::new() }
    }

    /// Records the file of each tensor. Returns a mistake for each tensor that the index assigns to
    /// another file.
    fn index_tensors(&mut self, listed: &[(String, Option<BTreeSet<String>>)]) -> Vec<String> {
        let mut mistakes = Vec::new();
        for (index, (file, (file_name, indexed_names))) in self.files.iter().zip(listed).enumerate() {
            let present: BTreeSet<String> = file.metadata.offset_keys().into_iter().collect();
            if let Some(indexed_names) = indexed_names {
                let unlisted = present.difference(indexed_names);
                mistakes.extend(
                    unlisted.map(|name| {
                        format!("{name:?} is in {file_name}, but {INDEX_FILE} names another file")
                    }),
                );
            }
            self.file_index.extend(present.into_iter().map(|name| (name, index)));
        }
        mistakes
    }

    /// Forgets an LM head that is a copy of the embedding. Published folders of tied models, such as
    /// Qwen3-0.6B, may have both. Returns a mistake if the two differ.
    fn drop_copied_head(&mut self) -> Result<Option<String>> {
        const HEAD: &str = "lm_head.weight";
        const CHUNK_BYTES: usize = 1 << 20;
        let (Ok(head), Ok(embedding)) = (self.locate(HEAD), self.locate("model.embed_tokens.weight")) else {
            return Ok(None);
        };
        let length = head.info.data_offsets.1 - head.info.data_offsets.0;
        let mut is_copy = head.info.dtype == embedding.info.dtype && head.info.shape == embedding.info.shape;
        let (mut of_head, mut of_embedding) = (vec![0; CHUNK_BYTES], vec![0; CHUNK_BYTES]);
        let mut start = 0;
        while is_copy && start < length {
            let count = CHUNK_BYTES.min(length - start);
            head.read_at(start, &mut of_head[..count])?;
            embedding.read_at(start, &mut of_embedding[..count])?;
            is_copy = of_head[..count] == of_embedding[..count];
            start += count;
        }
        self.file_index.remove(HEAD);
        let mistake = format!(
            "tie_word_embeddings is true, but {HEAD:?} differs from the embedding; write false to use it"
        );
        Ok((!is_copy).then_some(mistake))
    }

    /// Returns a mistake for each difference between the headers and the specs.
    fn find_mistakes(&self, specs: &[ParameterSpec]) -> Vec<String> {
        let mut mistakes = Vec::new();
        let mut extra: BTreeSet<&str> = self.file_index.keys().map(String::as_str).collect();
        for spec in specs {
            let format = self.folder_format_of(spec);
            for wanted in spec.stored_tensors(format) {
                extra.remove(wanted.name.as_str());
                match self.info(&wanted.name) {
                    None => mistakes.push(format!("`{}` is missing", wanted.name)),
                    Some(info) => mistakes.extend(header_mistake(&wanted, info)),
                }
            }
            let fan_in = spec.fan_in();
            if format == WeightFormat::Mxfp4 && !fan_in.is_multiple_of(mxfp4::BLOCK) {
                mistakes.push(format!("`{}`: MXFP4 needs a multiple of 32 inputs, not {fan_in}", spec.name));
            }
        }
        mistakes.extend(extra.into_iter().map(|name| format!("{name:?} is not a tensor of this model")));
        mistakes
    }

    fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.files.get(*self.file_index.get(name)?)?.metadata.info(name)
    }

    /// Returns the stored format of a tensor.
    pub fn format_of(&self, spec: &ParameterSpec) -> StoredFormat {
        if let Some(gguf) = &self.gguf { gguf.format_of(spec) } else { self.folder_format_of(spec).into() }
    }

    /// Returns the format of a tensor in a folder: MXFP4 if the files have its blocks or scales, otherwise
    /// bf16 or f32. Returns f32 also for a tensor in f16, because f16 values are read as f32.
    fn folder_format_of(&self, spec: &ParameterSpec) -> WeightFormat {
        let is_packed = spec.is_expert_matrix()
            && spec.layout != Layout::PerExpert
            && spec.stored_tensors(WeightFormat::Mxfp4).iter().any(|t| self.file_index.contains_key(&t.name));
        let is_bf16 = |t: &StoredTensor| self.info(&t.name).is_some_and(|info| info.dtype == Dtype::BF16);
        match spec.stored_tensors(WeightFormat::Bf16).iter().all(is_bf16) {
            _ if is_packed => WeightFormat::Mxfp4,
            true => WeightFormat::Bf16,
            false => WeightFormat::F32,
        }
    }

    /// Reads one parameter in packed format. `format` is that of [`Self::format_of`], or bf16 for blocks.
    /// Returns `None` for formats that are read as f32 ([`Self::read_values`]).
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a value is NaN or infinite, or the file cannot be read.
    pub fn read_packed(&self, spec: &ParameterSpec, format: StoredFormat) -> Result<Option<Weight>> {
        if let Some(gguf) = &self.gguf {
            return gguf.read_packed(spec, format);
        }
        let (Some(format), Some(shape)) = (spec.packed_format(format), spec.matrix_shape()) else {
            return Ok(None);
        };
        let [_, input, output] = shape;
        let finite_bf16 = |first: usize, values: &[u8]| {
            let values = values.as_chunks().0;
            // Vector instructions compute this. `position` tests value by value.
            if values.iter().fold(true, |all, value| all & bf16_is_finite(*value)) {
                return Ok(());
            }
            let bad = values.iter().position(|value| !bf16_is_finite(*value));
            bad.map_or(Ok(()), |at| Err(self.not_finite(spec, first + at)))
        };
        let matrix = match (format, spec.layout) {
            (PackedFormat::Bf16Rows, _) => {
                let bytes = self.bytes(&spec.name)?.0;
                finite_bf16(0, &bytes)?;
                PackedMatrix::from_bytes(format, shape, bytes)
            }
            (PackedFormat::Bf16, Layout::Transposed | Layout::PerExpert) => {
                let stored = spec.stored_tensors(WeightFormat::Bf16);
                let stored: Vec<_> = stored.iter().map(|t| self.locate(&t.name)).collect::<Result<_>>()?;
                PackedMatrix::read(format, shape, |rows: StoredRows| {
                    let first = rows.columns.start * input;
                    stored[rows.expert].read_at(2 * first, rows.values)?;
                    finite_bf16(first, rows.values)
                })?
            }
            (PackedFormat::Bf16, Layout::AsStored) => {
                let stored = self.locate(&spec.name)?;
                PackedMatrix::read_columns(shape, |expert: usize, values: &mut [u8]| {
                    let first = expert * input * output;
                    stored.read_at(2 * first, values)?;
                    finite_bf16(first, values)
                })?
            }
            (PackedFormat::Mxfp4, _) => {
                let [blocks, scales] =
                    ["_blocks", "_scales"].map(|half| self.locate(&format!("{}{half}", spec.name)));
                let (blocks, scales) = (blocks?, scales?);
                PackedMatrix::read(format, shape, |rows: StoredRows| {
                    let first = (rows.expert * output + rows.columns.start) * (input / BLOCK);
                    blocks.read_at(first * (BLOCK / 2), rows.values)?;
                    scales.read_at(first, rows.scales)?;
                    let mut pairs = rows.values.as_chunks().0.iter().zip(&*rows.scales);
                    let bad = pairs.position(|(block, scale)| !block_is_finite(block, *scale));
                    bad.map_or(Ok(()), |at| Err(self.not_finite(spec, (first + at) * BLOCK)))
                })?
            }
            (PackedFormat::Blocks(_) | PackedFormat::BlockRows(_), _) => {
                bail!("{}: only GGUF files have blocks", spec.name)
            }
        };
        Ok(Some(Weight::Packed(Arc::new(matrix))))
    }

    fn not_finite(&self, spec: &ParameterSpec, element: usize) -> anyhow::Error {
        bad_input!(
            "{}: `{}` holds NaN or an infinite value at element {element}: the checkpoint is damaged or comes from a run \
             that diverged; use an earlier one",
            self.folder.display(),
            spec.name,
        )
    }

    fn locate(&self, name: &str) -> Result<TensorLocation<'_>> {
        let file = self.file_index.get(name).and_then(|&index| self.files.get(index));
        file.and_then(|file| Some(TensorLocation { file, info: file.metadata.info(name)? }))
            .ok_or_else(|| bad_input!("{}: `{name}` is missing", self.folder.display()))
    }

    /// Reads one parameter as f32 in its working layout. MXFP4 is decoded exactly. While reading, memory
    /// holds the values and the stored bytes of this tensor only.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a value is NaN or infinite.
    pub fn read_values(&self, spec: &ParameterSpec) -> Result<Vec<f32>> {
        if let Some(gguf) = &self.gguf {
            return gguf.read_values(spec);
        }
        let values = match (self.folder_format_of(spec), spec.stored_shape.as_slice()) {
            (WeightFormat::Mxfp4, &[experts, input, output]) => {
                let [blocks, scales] =
                    ["_blocks", "_scales"].map(|half| self.bytes(&format!("{}{half}", spec.name)));
                mxfp4::decode(&blocks?.0, &scales?.0, [experts, input, output])
            }
            _ => match spec.stored_tensors(WeightFormat::F32).as_slice() {
                [whole] => self.floats(spec.layout, whole)?,
                experts => {
                    let mut values = Vec::with_capacity(spec.element_count());
                    for expert in experts {
                        values.append(&mut self.floats(spec.layout, expert)?);
                    }
                    values
                }
            },
        };
        if let Some(at) = values.iter().position(|v| !v.is_finite()) {
            return Err(self.not_finite(spec, stored_index(spec, at)));
        }
        Ok(values)
    }

    /// Reads one stored tensor as f32 in working layout.
    fn floats(&self, layout: Layout, stored: &StoredTensor) -> Result<Vec<f32>> {
        let (bytes, dtype) = self.bytes(&stored.name)?;
        Ok(match dtype {
            Dtype::F32 => in_working_layout(layout, &stored.shape, f32_values(&bytes)),
            Dtype::F16 => {
                let values = bytes.as_chunks().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32());
                in_working_layout(layout, &stored.shape, values)
            }
            _ => {
                let values = bytes.as_chunks().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32());
                in_working_layout(layout, &stored.shape, values)
            }
        })
    }

    fn bytes(&self, name: &str) -> Result<(Vec<u8>, Dtype)> {
        let TensorLocation { file, info } = self.locate(name)?;
        Ok((file.read(info)?, info.dtype))
    }
}

impl TensorSource for ModelFolder {
    fn tensor(&self, spec: &ParameterSpec) -> Result<Weight> {
        if let Some(packed) = self.read_packed(spec, self.format_of(spec))? {
            return Ok(packed);
        }
        Ok(Weight::dense(&Tensor::from_vec(self.read_values(spec)?, spec.working_shape(), &Device::Cpu)?))
    }

    fn resident_bytes(&self, spec: &ParameterSpec) -> u64 {
        spec.resident_bytes(self.format_of(spec))
    }
}

/// The location of a tensor in a file.
struct TensorLocation<'a> {
    file: &'a TensorFile,
    info: &'a TensorInfo,
}

impl TensorLocation<'_> {
    /// Fills `to` with the bytes of the tensor from `start` on.
    fn read_at(&self, start: usize, to: &mut [u8]) -> Result<()> {
        self.file.read_at(self.info, start, to)
    }
}

/// Returns the mistake in the header of a tensor, if there is one. Tensors that are not packed may be f32,
/// bf16 or f16.
fn header_mistake(wanted: &StoredTensor, info: &TensorInfo) -> Option<String> {
    let (dtypes, known): (&[Dtype], _) = match wanted.dtype {
        Dtype::U8 => (&[Dtype::U8], "U8"),
        _ => (&[Dtype::F32, Dtype::BF16, Dtype::F16], "F32, BF16 or F16"),
    };
    let name = &wanted.name;
    if info.shape != wanted.shape {
        Some(format!("`{name}` has shape {:?}, but config.json implies {:?}", info.shape, wanted.shape))
    } else if !dtypes.contains(&info.dtype) {
        Some(format!("`{name}` is {:?}; it must be {known}", info.dtype))
    } else {
        None
    }
}

/// Converts stored values to the working layout.
fn in_working_layout(layout: Layout, shape: &[usize], stored: impl Iterator<Item = f32>) -> Vec<f32> {
    match (layout, shape) {
        (Layout::Transposed | Layout::PerExpert, &[out, input]) => {
            let mut values = vec![0.0; out * input];
            for (index, value) in stored.enumerate() {
                values[index % input * out + index / input] = value;
            }
            values
        }
        _ => stored.collect(),
    }
}

/// Converts the index of a value in working layout to its index in the stored tensor.
fn stored_index(spec: &ParameterSpec, at: usize) -> usize {
    match (spec.layout, spec.stored_shape.as_slice()) {
        (Layout::Transposed, &[out, input]) => at % out * input + at / out,
        _ => at,
    }
}

/// Returns the names of the weight files of `folder`, in order. If there is an index, its name is last.
///
/// # Errors
/// [`crate::error::BadInput`] when there are no weight files, or some are missing.
pub fn weight_files(folder: &Path) -> Result<Vec<String>> {
    let files = listed_files(folder)?;
    let index = files.iter().any(|(_, indexed_names)| indexed_names.is_some()).then(|| INDEX_FILE.to_owned());
    Ok(files.into_iter().map(|(name, _)| name).chain(index).collect())
}

/// Returns the names of the weight files. If there is an index, each name comes with the tensors that the
/// index assigns to the file.
fn listed_files(folder: &Path) -> Result<Vec<(String, Option<BTreeSet<String>>)>> {
    if folder.join(WEIGHTS_FILE).exists() {
        return Ok(vec![(WEIGHTS_FILE.into(), None)]);
    }
    let path = folder.join(INDEX_FILE);
    let text = bounded_file::read_text(&path, TOKENIZER_BYTES_MAX).map_err(|e| {
        bad_input!(
            "{}: no {WEIGHTS_FILE} and no readable {INDEX_FILE} ({e}); weights are read from safetensors files, or from a GGUF file that model.path names",
            folder.display()
        )
    })?;
    let index: serde_json::Value =
        serde_json::from_str(&text).map_err(|e| bad_input!("{}: not valid JSON: {e}", path.display()))?;
    let map = index
        .get("weight_map")
        .and_then(|m| m.as_object())
        .ok_or_else(|| bad_input!("{}: key `weight_map` is missing or not an object", path.display()))?;
    let mut files: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (tensor, file) in map {
        let is_plain = |f: &&str| Path::new(f).file_name().is_some_and(|name| name == *f);
        let file = file.as_str().filter(is_plain).ok_or_else(|| {
            bad_input!("{}: weight_map.{tensor:?} = {file} is not a file name", path.display())
        })?;
        files.entry(file.into()).or_default().insert(tensor.clone());
    }
    let absent: Vec<&str> = files.keys().filter(|f| !folder.join(f).is_file()).map(String::as_str).collect();
    if !absent.is_empty() {
        let listed = absent.get(..MISTAKES_SHOWN_MAX).unwrap_or(&absent);
        let more = absent.len() - listed.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        return Err(bad_input!(
            "{}: names files that are missing: {}{more}; fetch these files",
            path.display(),
            listed.join(", ")
        ));
    }
    Ok(files.into_iter().map(|(file, tensors)| (file, Some(tensors))).collect())
}
