//! Writes a Hugging Face folder: config.json, tokenizer files and safetensors. Weights above a size are
//! sharded.
//!
//! The bytes of the files depend only on the arguments. Files are synced. Existing files are never
//! overwritten. For an atomic save, save into a new folder and rename the folder.

use super::load::{INDEX_FILE, WEIGHTS_FILE};
use super::tensor_file::{FRAMEWORK, write_bf16, write_f32, write_tensors};
use crate::bad_input;
use crate::bounded_file::{self, TOKENIZER_BYTES_MAX};
use crate::chat::Chat;
use crate::chat::chatml::TemplateSource;
use crate::integrity::Manifest;
use crate::model::config::{Config, WeightFormat};
use crate::model::names::{Layout, ParameterSpec, StoredTensor, parameter_specs};
use crate::ops::cpu::host_values;
use crate::ops::mxfp4;
use anyhow::{Context, Result, ensure};
use blake3::Hash;
use candle_core::{DType, Device, Tensor};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

/// Maximum size of a weight file, in bytes. Larger weights are sharded. The value is the usual one on the
/// Hugging Face Hub.
pub const SHARD_BYTES_MAX: u64 = 5_000_000_000;
const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// The template of conversations with tools, where transformers finds it.
const TOOL_USE_TEMPLATE: &str = "additional_chat_templates/tool_use.jinja";
/// Names of the companion files. They are copied from the folder of a model to every folder where the model
/// is saved.
const COMPANION_FILES: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    CHAT_TEMPLATE,
    TOOL_USE_TEMPLATE,
    "generation_config.json",
];

/// The companion files of the weights, by name: tokenizer, chat template and generation config. [`save`]
/// writes them. Only their end tokens may differ from the files that were read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CompanionFiles(BTreeMap<String, Vec<u8>>);

impl CompanionFiles {
    /// Reads the companion files of `folder`. If the folder has no chat template, adds the template of
    /// `chat`.
    pub fn read(folder: &Path, chat: &Chat) -> Result<Self> {
        let mut files = BTreeMap::new();
        for name in COMPANION_FILES {
            let path = folder.join(name);
            if path.is_file() {
                let bytes = bounded_file::read(&path, TOKENIZER_BYTES_MAX)
                    .map_err(|e| bad_input!("{}: cannot be read: {e}", path.display()))?;
                files.insert(name.into(), bytes);
            }
        }
        let mut found = Self(files);
        found.name_ends(chat);
        if !found.has_chat_template() {
            found.0.insert(CHAT_TEMPLATE.into(), chat.jinja().into());
        }
        Ok(found)
    }

    /// Adds a generation config with the tokens that end a turn, if the files have none.
    pub fn with_generation_config(mut self, config: &Config, chat: &Chat) -> Self {
        let derived = || pretty(&generation_config(config));
        self.0.entry("generation_config.json".into()).or_insert_with(derived);
        self.name_ends(chat);
        self
    }

    /// Makes the files name the tokens that end a turn of `chat`, and keeps their other keys. A base model
    /// names another token, and after training its answers end with these.
    fn name_ends(&mut self, chat: &Chat) {
        let stops = chat.stop_tokens();
        let end = chat.vocabulary().decode(&stops[..1]);
        for name in ["generation_config.json", "tokenizer_config.json", "special_tokens_map.json"] {
            let parsed = self.0.get(name).and_then(|bytes| serde_json::from_slice(bytes).ok());
            let Some(Value::Object(before)) = parsed else { continue };
            let mut settings = before.clone();
            if name.starts_with("generation") {
                let ids = settings.entry("eos_token_id").or_insert(Value::Null);
                let known = ids.as_array().map_or(std::slice::from_ref(ids), Vec::as_slice);
                let known: Vec<u32> =
                    known.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect();
                *ids = json!(with_ends(&known, &stops));
            } else if let Some(token) = settings.get_mut("eos_token")
                && token.get("content").unwrap_or(token) != end.as_str()
            {
                *token = json!(end);
            }
            if settings != before {
                self.0.insert(name.to_owned(), pretty(&settings.into()));
            }
        }
    }

    /// Writes the files into the existing folder `folder`, and adds them to `manifest`. Files that are absent
    /// are derived from `config`.
    ///
    /// # Errors
    /// When a file exists or cannot be written.
    pub fn write(&self, folder: &Path, config: &Config, manifest: &mut Manifest) -> Result<()> {
        let files = self.complete(config);
        files.iter().try_for_each(|(name, content)| manifest.write_file(folder, name, content))
    }

    /// Returns the tokenizer and the templates of `chat`. [`save`] derives the other companion files from the
    /// tokenizer and the config.
    pub fn from_chat(chat: &Chat) -> Self {
        let tool_use = chat.tool_use_jinja().map(|text| (TOOL_USE_TEMPLATE.into(), text.into()));
        let files = [
            ("tokenizer.json".into(), chat.vocabulary().json_bytes().to_vec()),
            (CHAT_TEMPLATE.into(), chat.jinja().into()),
        ];
        Self(files.into_iter().chain(tool_use).collect())
    }

    /// Returns the tokenizer and the chat template of `chat`. If `template` is given, it replaces the
    /// template of `chat`.
    pub fn from_gguf(chat: &Chat, template: Option<String>) -> Self {
        let mut found = Self::from_chat(chat);
        if let Some(template) = template {
            found.0.insert(CHAT_TEMPLATE.into(), template.into_bytes());
        }
        found
    }

    /// Reads the chat templates of `folder`, and the texts of its special tokens.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] for a file that cannot be read.
    pub fn read_template(folder: &Path) -> Result<TemplateSource> {
        let text = |name: &str| -> Result<Option<String>> {
            let path = folder.join(name);
            if !path.is_file() {
                return Ok(None);
            }
            let bytes = bounded_file::read(&path, TOKENIZER_BYTES_MAX);
            let text = bytes.map_err(anyhow::Error::from).and_then(|bytes| Ok(String::from_utf8(bytes)?));
            text.map(Some).map_err(|e| bad_input!("{}: cannot be read: {e}", path.display()))
        };
        let json = |name: &str| -> Result<Value> {
            let parsed = text(name)?.and_then(|text| serde_json::from_str(&text).ok());
            Ok(parsed.unwrap_or(Value::Null))
        };
        let settings = json("tokenizer_config.json")?;
        let given = &settings["chat_template"];
        let named = |wanted: &str| {
            let entry = given.as_array()?.iter().find(|entry| entry["name"] == wanted)?;
            entry["template"].as_str().map(str::to_owned)
        };
        let mut variables = Map::new();
        for source in [&json("special_tokens_map.json")?, &settings] {
            let tokens =
                source.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_token"));
            let text = |token: &Value| token["content"].as_str().or(token.as_str()).map(Value::from);
            variables.extend(tokens.filter_map(|(name, token)| Some((name.clone(), text(token)?))));
        }
        let own_file = text(CHAT_TEMPLATE)?;
        let other_file = json("chat_template.json")?["chat_template"].as_str().map(str::to_owned);
        let of_settings = given.as_str().map(str::to_owned).or_else(|| named("default"));
        Ok(TemplateSource {
            default: own_file.or(of_settings).or(other_file).unwrap_or_default(),
            tool_use: named("tool_use").or(text(TOOL_USE_TEMPLATE)?),
            variables,
        })
    }

    /// Returns the chat template; `None` if the files have none.
    pub fn template(&self) -> Option<String> {
        if let Some(bytes) = self.0.get(CHAT_TEMPLATE) {
            return String::from_utf8(bytes.clone()).ok();
        }
        let settings: Value = serde_json::from_slice(self.0.get("tokenizer_config.json")?).ok()?;
        settings["chat_template"].as_str().map(str::to_owned)
    }

    /// Returns whether transformers finds a chat template in the files. The template has its own file or, in
    /// older folders, is part of `tokenizer_config.json`.
    fn has_chat_template(&self) -> bool {
        let settings = self.0.get("tokenizer_config.json").map_or(&[][..], Vec::as_slice);
        let settings: Value = serde_json::from_slice(settings).unwrap_or(Value::Null);
        self.0.contains_key(CHAT_TEMPLATE) || !settings["chat_template"].is_null()
    }

    /// Returns the files to write: the companion files, and derived files for those that are absent.
    fn complete(&self, config: &Config) -> BTreeMap<String, Vec<u8>> {
        let mut files = self.0.clone();
        let derived = [
            ("generation_config.json", Some(generation_config(config))),
            ("tokenizer_config.json", files.get("tokenizer.json").map(|t| tokenizer_config(config, t))),
        ];
        for (name, content) in derived {
            if let (Some(content), false) = (content, files.contains_key(name)) {
                files.insert(name.into(), pretty(&content));
            }
        }
        files
    }
}

/// Makes `config` name the tokens with which training teaches the model to end a turn, first of all.
pub fn name_ends(config: &mut Config, chat: &Chat) {
    let stops = chat.stop_tokens();
    // The other stop token of ChatML ends documents.
    let taught = if matches!(chat, Chat::ChatMl(_)) { &stops[..1] } else { &stops };
    config.eos_token_ids = with_ends(&config.eos_token_ids, taught);
}

/// Returns `ids` if they begin with the first of `ends` and have all. Otherwise returns `ends` and the other
/// ids after them, because many readers use the first id alone.
fn with_ends(ids: &[u32], ends: &[u32]) -> Vec<u32> {
    if ids.first() == ends.first() && ends.iter().all(|end| ids.contains(end)) {
        return ids.to_vec();
    }
    ends.iter().chain(ids.iter().filter(|id| !ends.contains(id))).copied().collect()
}

/// Saves a model in `format` into the existing folder `folder`.
///
/// `tensor` is called once per parameter, in file order, and returns the working tensor in any float dtype
/// and on any device. A weight file has at most `shard_bytes_max` bytes, unless a single parameter is larger.
/// Several files get an index. Returns the digests of the written files.
///
/// # Errors
/// When a shape is wrong, a value is NaN or infinite, or a file exists. `BadInput` when a size is not a
/// multiple of the MXFP4 block size.
pub fn save(
    folder: &Path,
    config: &Config,
    format: WeightFormat,
    companions: &CompanionFiles,
    shard_bytes_max: u64,
    mut tensor: impl FnMut(&ParameterSpec) -> Result<Tensor>,
) -> Result<Manifest> {
    config.check()?;
    let mut specs = parameter_specs(config);
    if format == WeightFormat::Mxfp4 && !config.family.has_mxfp4 {
        return Err(bad_input!("MXFP4 is not a format of this family: save in bf16"));
    }
    if format == WeightFormat::Mxfp4 {
        check_blocks(&specs)?;
        // Tensors of bytes come after tensors of floats, so that every tensor starts at a multiple of its
        // element size.
        specs.sort_by_key(ParameterSpec::is_expert_matrix);
    }
    let shards = shards(&specs, format, shard_bytes_max);
    let mut manifest = Manifest::default();
    for (index, shard) in shards.iter().enumerate() {
        let name = shard_name(index, shards.len());
        manifest.record(&name, write_shard(&folder.join(&name), shard, format, &mut tensor)?);
    }
    if shards.len() > 1 {
        manifest.write_file(folder, INDEX_FILE, &pretty(&index_json(&shards, format)))?;
    }
    save_without_weights(folder, config, format, companions, &mut manifest)?;
    Ok(manifest)
}

/// Writes an index into a folder of [`save`] that has none, because it has one weight file. vLLM and SGLang
/// read every safetensors file of a folder without an index, and so a checkpoint's state too.
///
/// # Errors
/// When the file cannot be written.
pub fn save_index(
    folder: &Path,
    config: &Config,
    format: WeightFormat,
    manifest: &mut Manifest,
) -> Result<()> {
    if folder.join(INDEX_FILE).exists() {
        return Ok(());
    }
    manifest.write_file(folder, INDEX_FILE, &pretty(&index_json(&[&parameter_specs(config)], format)))
}

/// Writes the files of a model in `format` except its weights: config, tokenizer, template.
///
/// # Errors
/// When a file exists or cannot be written.
pub fn save_without_weights(
    folder: &Path,
    config: &Config,
    format: WeightFormat,
    companions: &CompanionFiles,
    manifest: &mut Manifest,
) -> Result<()> {
    companions.write(folder, config, manifest)?;
    manifest.write_file(folder, "config.json", &pretty(&config.to_json(format)))?;
    File::open(folder)
        .and_then(|f| f.sync_all())
        .with_context(|| format!("{}: cannot be synced", folder.display()))
}

fn check_blocks(specs: &[ParameterSpec]) -> Result<()> {
    let is_odd =
        |spec: &&ParameterSpec| spec.is_expert_matrix() && !spec.fan_in().is_multiple_of(mxfp4::BLOCK);
    match specs.iter().find(is_odd) {
        None => Ok(()),
        Some(spec) => Err(bad_input!(
            "`{}` has {} inputs; MXFP4 needs a multiple of {}: save in bf16",
            spec.name,
            spec.fan_in(),
            mxfp4::BLOCK
        )),
    }
}

/// Splits the parameters, in order, into shards of at most `shard_bytes_max` bytes.
fn shards(specs: &[ParameterSpec], format: WeightFormat, shard_bytes_max: u64) -> Vec<&[ParameterSpec]> {
    let (mut shards, mut start, mut filled) = (Vec::new(), 0, 0);
    for (i, spec) in specs.iter().enumerate() {
        let bytes = spec.stored_tensors(format).iter().map(StoredTensor::bytes).sum::<u64>();
        if i > start && filled + bytes > shard_bytes_max {
            shards.push(&specs[start..i]);
            (start, filled) = (i, 0);
        }
        filled += bytes;
    }
    shards.push(&specs[start..]);
    shards
}

fn shard_name(index: usize, count: usize) -> String {
    if count == 1 { WEIGHTS_FILE.into() } else { format!("model-{:05}-of-{count:05}.safetensors", index + 1) }
}

fn index_json(shards: &[&[ParameterSpec]], format: WeightFormat) -> Value {
    let mut map = BTreeMap::new();
    let mut total_size = 0;
    for (i, shard) in shards.iter().enumerate() {
        for stored in shard.iter().flat_map(|spec| spec.stored_tensors(format)) {
            total_size += stored.bytes();
            map.insert(stored.name, shard_name(i, shards.len()));
        }
    }
    json!({ "metadata": { "total_size": total_size }, "weight_map": map })
}

fn write_shard(
    path: &Path,
    specs: &[ParameterSpec],
    format: WeightFormat,
    tensor: &mut impl FnMut(&ParameterSpec) -> Result<Tensor>,
) -> Result<Hash> {
    // A packed matrix has two stored tensors: blocks and scales. With one tensor per expert, a matrix has as
    // many stored tensors as experts.
    let parts = |spec: &ParameterSpec| spec.stored_tensors(format).len();
    let owner: Vec<(&ParameterSpec, usize)> =
        specs.iter().flat_map(|spec| (0..parts(spec)).map(move |part| (spec, part))).collect();
    let mut pending_scales: Option<Vec<u8>> = None;
    let mut experts: Option<Tensor> = None;
    let stored = specs.iter().flat_map(|spec| spec.stored_tensors(format)).collect();
    write_tensors(path, stored, FRAMEWORK, |index, out| {
        let (spec, part) = owner[index];
        if let Some(scales) = pending_scales.take() {
            return Ok(out.write_all(&scales)?);
        }
        let working = match experts.take() {
            Some(working) if part > 0 => working,
            _ => check_and_convert(spec, &tensor(spec)?)?,
        };
        let values = host_values(&working)?;
        let mut values = &values[..];
        if spec.layout == Layout::PerExpert {
            experts = Some(working.clone());
            let matrix = values.len() / parts(spec);
            values = &values[part * matrix..(part + 1) * matrix];
        }
        match (format, spec.stored_shape.as_slice()) {
            (WeightFormat::Mxfp4, &[experts, input, output]) => {
                let (blocks, scales) = mxfp4::encode(values, [experts, input, output]);
                pending_scales = Some(scales);
                Ok(out.write_all(&blocks)?)
            }
            (WeightFormat::F32, _) => in_stored_order(spec, values, |piece| write_f32(out, piece)),
            _ => in_stored_order(spec, values, |piece| write_bf16(out, piece)),
        }
    })
}

/// Checks the shape and the values of a working tensor. Returns the tensor as f32 on the CPU.
fn check_and_convert(spec: &ParameterSpec, working: &Tensor) -> Result<Tensor> {
    let name = &spec.name;
    let wanted = spec.working_shape();
    ensure!(working.dims() == wanted, "`{name}` has shape {:?} in memory, not {wanted:?}", working.dims());
    let working = working.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous()?;
    let values = host_values(&working)?;
    if let Some(at) = values.iter().position(|v| !v.is_finite()) {
        anyhow::bail!(
            "`{name}` has the value {} at element {at}: training diverged, so nothing is saved",
            values[at]
        );
    }
    drop(values);
    Ok(working)
}

/// Passes the values of a tensor, or of the matrix of one expert, to `write` in stored order, several rows
/// per call.
fn in_stored_order(
    spec: &ParameterSpec,
    values: &[f32],
    mut write: impl FnMut(&[f32]) -> Result<()>,
) -> Result<()> {
    let (out, input) = match (spec.layout, spec.stored_shape.as_slice()) {
        (Layout::Transposed, &[out, input]) | (Layout::PerExpert, &[_, input, out]) => (out, input),
        _ => return write(values),
    };
    // 16 columns per iteration read one cache line of each working row.
    for start in (0..out).step_by(16) {
        let rows = start..(start + 16).min(out);
        let mut piece = vec![0.0; rows.len() * input];
        for (i, working_row) in values.chunks_exact(out).enumerate() {
            for (row, &value) in working_row[rows.clone()].iter().enumerate() {
                piece[row * input + i] = value;
            }
        }
        write(&piece)?;
    }
    Ok(())
}

fn generation_config(config: &Config) -> Value {
    let mut json = Map::new();
    if let Some(bos) = config.bos_token_id {
        json.insert("bos_token_id".into(), json!(bos));
    }
    json.insert("do_sample".into(), json!(true));
    if !config.eos_token_ids.is_empty() {
        json.insert("eos_token_id".into(), json!(config.eos_token_ids));
    }
    if let Some(pad) = config.pad_token_id {
        json.insert("pad_token_id".into(), json!(pad));
    }
    Value::Object(json)
}

/// Returns the content of `tokenizer_config.json`. transformers needs this file to load `tokenizer.json`. The
/// content includes the texts of the config's special tokens.
fn tokenizer_config(config: &Config, tokenizer_json: &[u8]) -> Value {
    let tokenizer: Value = serde_json::from_slice(tokenizer_json).unwrap_or(Value::Null);
    let text_of = |id: u32| {
        let added = tokenizer.get("added_tokens")?.as_array()?;
        added.iter().find(|t| t["id"].as_u64() == Some(u64::from(id)))?.get("content").cloned()
    };
    let mut json = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": false,
    });
    let special = [
        ("bos_token", config.bos_token_id),
        ("eos_token", config.eos_token_ids.first().copied()),
        ("pad_token", config.pad_token_id),
    ];
    for (key, id) in special {
        if let Some(text) = id.and_then(text_of) {
            json[key] = text;
        }
    }
    json
}

fn pretty(json: &Value) -> Vec<u8> {
    format!("{json:#}\n").into_bytes()
}
