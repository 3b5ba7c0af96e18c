//! Sources of a model: a folder, an adapter with its base, or the recipe's own architecture. Opening reads
//! only headers.

use super::memory::{ModelCommand, gigabytes};
use crate::bad_input;
use crate::chat::Chat;
use crate::checkpoint;
use crate::checkpoint::BaseModel;
use crate::checkpoint::gguf::{GgufModel, is_gguf};
use crate::checkpoint::load::{ModelFolder, has_weights};
use crate::checkpoint::peft::{AdapterFolder, is_adapter_folder, read_base};
use crate::checkpoint::save::{CompanionFiles, name_ends};
use crate::dist::Mesh;
use crate::error::shell_quote;
use crate::metrics::{Console, Phase};
use crate::model::config::{Config, Rope, WeightFormat};
use crate::model::init::init;
use crate::model::layers_on_demand::WeightChange;
use crate::model::names::{ParameterSpec, parameter_specs};
use crate::model::parameters::{Backend, Parameters};
use crate::model::rounding::WeightRounding;
use crate::model::settings::{Architecture, Dtype, ModelSettings, Tokenizer};
use crate::model::storage::{StoredFormat, TensorStorage};
use crate::ops::product::Precision;
use crate::ops::weight::Weight;
use crate::recipe::{Plan, Recipe, RecipeSource, override_key};
use crate::vocabulary::Vocabulary;
use anyhow::{Result, bail};
use candle_core::Device;
use half::bf16;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Minimum size of weights that are read with a progress bar, in megabytes.
const PROGRESS_MEGABYTES_MIN: u64 = 256;

/// The source of a model: a folder, or the recipe's own architecture.
pub(super) struct ModelSource {
    pub(super) config: Config,
    pub(super) chat: Chat,
    pub(super) companions: CompanionFiles,
    /// The weight files. `None` for random weights.
    pub(super) weights: Option<Arc<ModelFolder>>,
    /// The model's folder, if it has no weights. A warning names it.
    pub(super) folder_without_weights: Option<PathBuf>,
    /// The storage format of each tensor. f32 for random weights.
    pub(super) formats: Vec<StoredFormat>,
    /// The model's folder or GGUF file. `None` for the recipe's own architecture.
    pub(super) folder: Option<PathBuf>,
    /// The adapter for these weights, if any.
    pub(super) adapter: Option<AdapterFolder>,
    /// Whether blocks of a GGUF file are rounded to bf16, because an older version trained the adapter for
    /// such weights.
    rounds_blocks: bool,
}

/// Where frozen packed weights are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placement {
    /// In the memory of each process.
    Replicated,
    /// Sharded over the processes.
    Sharded,
    /// On disk, except the current layer.
    OnDisk,
}

impl ModelSource {
    pub(super) fn open(recipe: &Recipe) -> Result<Self> {
        Ok(Self::open_without_unpacking(recipe)?.unpack_for_precision(recipe))
    }

    /// Sets the formats in memory for the recipe's precision. Blocks multiply in f32 and in bf16; other
    /// packed weights multiply in f32, so they are unpacked for products in bf16. With weights in bf16,
    /// blocks are rounded to bf16.
    pub(super) fn unpack_for_precision(mut self, recipe: &Recipe) -> Self {
        for format in &mut self.formats {
            *format = match (recipe.model.dtype, *format) {
                (Dtype::Bf16, StoredFormat::Blocks(_)) => StoredFormat::Bf16,
                (Dtype::F32, StoredFormat::Blocks(_)) if self.rounds_blocks => StoredFormat::Bf16,
                (Dtype::F32 | Dtype::Bf16, format) => format,
                (Dtype::Bf16Dot, blocks @ StoredFormat::Blocks(_)) => blocks,
                (Dtype::Bf16Dot, _) => StoredFormat::F32,
            };
        }
        self
    }

    fn open_without_unpacking(recipe: &Recipe) -> Result<Self> {
        match (&recipe.model.path, &recipe.model.architecture) {
            (Some(path), _) => match &recipe.model.adapter {
                Some(adapter) => {
                    Self::from_base(&model_folder(path)?)?.with_adapter(&adapter_folder(adapter)?)
                }
                None => Self::from_folder(&model_folder(path)?),
            },
            (None, Some(architecture)) => {
                let family = architecture.model_type;
                let chat = match recipe.model.tokenizer.as_ref().unwrap_or(&Tokenizer::Embedded) {
                    Tokenizer::Embedded => family.chat.from_embedded()?,
                    Tokenizer::Path(path) if path.is_dir() => {
                        family.chat.read(&path.join("tokenizer.json"))?
                    }
                    Tokenizer::Path(path) => family.chat.read(path)?,
                };
                let config = architecture_config(architecture, &chat);
                config.check()?;
                Ok(Self::new(config, CompanionFiles::from_chat(&chat), chat, None))
            }
            (None, None) => bail!("neither model.path nor model.architecture"),
        }
    }

    /// Returns a model without an adapter. Without `weights`, every tensor has f32 values.
    fn new(config: Config, companions: CompanionFiles, chat: Chat, weights: Option<ModelFolder>) -> Self {
        let format = |spec| weights.as_ref().map_or(StoredFormat::F32, |weights| weights.format_of(spec));
        Self {
            formats: parameter_specs(&config).iter().map(format).collect(),
            config,
            chat,
            companions,
            weights: weights.map(Arc::new),
            folder_without_weights: None,
            folder: None,
            adapter: None,
            rounds_blocks: false,
        }
    }

    /// Opens the model in `folder`: a base, or an adapter that names its base.
    pub(super) fn from_folder(folder: &Path) -> Result<Self> {
        if is_adapter_folder(folder) { Self::from_adapter(folder, None) } else { Self::from_base(folder) }
    }

    /// Opens the adapter in `folder` on its base. `base_path` is another path at which the base may be.
    pub(super) fn from_adapter(folder: &Path, base_path: Option<&Path>) -> Result<Self> {
        let Some(base) = read_base(folder)? else {
            return Err(bad_input!(
                "{}: this adapter does not name the base that it was trained on; name both: --set model.path=BASE --set model.adapter={}",
                folder.display(),
                shell_quote(&folder.display().to_string())
            ));
        };
        let base_path = base_path.and_then(|path| model_folder(path).ok());
        let mut source = Self::from_base(&base.find(folder, base_path.as_deref())?)?;
        checkpoint::verify_folder(folder)?;
        let adapter = AdapterFolder::open(folder, &source.specs())?;
        source.set_adapter(adapter);
        Ok(source)
    }

    /// Adds the adapter in `folder`. Its shapes must match the base. If the adapter's folder has the digest
    /// of a base, the base must have this digest.
    fn with_adapter(mut self, folder: &Path) -> Result<Self> {
        checkpoint::verify_folder(folder)?;
        let adapter = AdapterFolder::open(folder, &self.specs())?;
        if let (Some(expected), Some(base)) = (&adapter.base, &self.folder)
            && BaseModel::from_folder(base)?.digest != expected.digest
        {
            return Err(bad_input!(
                "model.adapter: {} was trained on another base than {}: the two differ in weights or config; set model.path to \
                 the base that it was trained on: {}",
                folder.display(),
                base.display(),
                expected.path.display()
            ));
        }
        self.set_adapter(adapter);
        Ok(self)
    }

    fn set_adapter(&mut self, adapter: AdapterFolder) {
        let has_blocks = self.formats.iter().any(|format| matches!(format, StoredFormat::Blocks(_)));
        self.rounds_blocks = has_blocks && adapter.base.as_ref().is_some_and(|base| !base.exact_blocks);
        self.adapter = Some(adapter);
    }

    /// Returns the base as a checkpoint refers to it. `None` if no folder has the base.
    pub(super) fn base(&self) -> Result<Option<BaseModel>> {
        match (&self.adapter, &self.folder, &self.weights) {
            (Some(AdapterFolder { base: Some(base), .. }), Some(folder), _) => {
                Ok(Some(BaseModel { path: folder.clone(), ..base.clone() }))
            }
            (_, Some(folder), Some(_)) => BaseModel::from_folder(folder).map(Some),
            _ => Ok(None),
        }
    }

    fn from_base(folder: &Path) -> Result<Self> {
        if is_adapter_folder(folder) {
            return Err(bad_input!(
                "{}: is an adapter, so it cannot be the base of another one; name its base, or remove model.adapter",
                folder.display()
            ));
        }
        if is_gguf(folder) {
            return Self::from_gguf(folder);
        }
        checkpoint::verify_folder(folder)?;
        let mut config = Config::read(folder)?;
        let file = folder.join("tokenizer.json");
        let template = CompanionFiles::read_template(folder)?;
        let vocabulary = Vocabulary::from_file(&file)?;
        let chat = config.family.chat.with_template(vocabulary, &file.display().to_string(), &template)?;
        let tokens = chat.vocabulary().vocab_size();
        if tokens > config.vocab_size {
            return Err(bad_input!(
                "{}: the tokenizer has {tokens} tokens, but vocab_size is {} in config.json; use the tokenizer that belongs to this model",
                file.display(),
                config.vocab_size
            ));
        }
        name_ends(&mut config, &chat);
        let companions = CompanionFiles::read(folder, &chat)?.with_generation_config(&config, &chat);
        let weights = has_weights(folder).then(|| ModelFolder::open(folder, &config)).transpose()?;
        Ok(Self {
            folder_without_weights: weights.is_none().then(|| folder.to_owned()),
            folder: Some(std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned())),
            ..Self::new(config, companions, chat, weights)
        })
    }

    /// Opens a GGUF file. Its chat template is stored for checkpoints.
    fn from_gguf(path: &Path) -> Result<Self> {
        let GgufModel { weights, mut config, vocabulary, template } = GgufModel::open(path)?;
        let chat = config.family.chat.with_template(vocabulary, &path.display().to_string(), &template)?;
        let tokens = chat.vocabulary().vocab_size();
        if tokens > config.vocab_size {
            return Err(bad_input!(
                "{}: the tokenizer has {tokens} tokens, but the embedding has {} rows; fetch or convert the file again",
                path.display(),
                config.vocab_size
            ));
        }
        name_ends(&mut config, &chat);
        let weights = ModelFolder::from_gguf(path, weights);
        let template = Some(template.default).filter(|text| !text.is_empty());
        let companions = CompanionFiles::from_gguf(&chat, template).with_generation_config(&config, &chat);
        Ok(Self {
            folder: Some(std::path::absolute(path).unwrap_or_else(|_| path.to_owned())),
            ..Self::new(config, companions, chat, Some(weights))
        })
    }

    pub(super) fn specs(&self) -> Vec<ParameterSpec> {
        parameter_specs(&self.config)
    }

    /// Returns the digest of the base, and of the adapter if there is one; empty without a folder.
    pub(super) fn digest(&self) -> Result<String> {
        let base = self.base()?.map(|base| base.digest).unwrap_or_default();
        Ok(if let Some(adapter) = &self.adapter { format!("{base}+{}", adapter.digest()?) } else { base })
    }

    /// Returns the bytes of the adapter, in f32.
    pub(super) fn adapter_bytes(&self) -> u64 {
        let specs = self.adapter.as_ref().and_then(|adapter| adapter.lora.factor_specs(&self.specs()).ok());
        specs.iter().flatten().map(|spec| spec.resident_bytes(WeightFormat::F32)).sum()
    }

    /// Returns the bytes of all weights in memory, if none is trainable.
    pub(super) fn resident_bytes(&self) -> u64 {
        self.specs().iter().zip(&self.formats).map(|(spec, format)| spec.resident_bytes(*format)).sum()
    }

    /// Reads the weights, or initializes them at random. Also reads the adapter.
    pub(super) fn parameters(
        &self,
        recipe: &Recipe,
        trainable: &[bool],
        command: ModelCommand,
        (mesh, device): (&Arc<Mesh>, &Device),
        placement: Placement,
        console: &Console,
    ) -> Result<Parameters> {
        let backend = Backend { device: device.clone(), mesh: mesh.clone(), precision: precision(recipe) };
        let mut parameters =
            self.base_parameters(recipe, trainable, command, &backend, placement, console)?;
        if let Some(adapter) = &self.adapter {
            parameters.attach_adapter(adapter.lora.clone(), adapter.read_values(&self.specs())?)?;
        }
        Ok(parameters)
    }

    /// Reads or initializes the base weights. Frozen tensors that are packed on disk stay packed.
    fn base_parameters(
        &self,
        recipe: &Recipe,
        trainable: &[bool],
        command: ModelCommand,
        backend: &Backend,
        placement: Placement,
        console: &Console,
    ) -> Result<Parameters> {
        // Rounds a tensor to `model.dtype`. Packed tensors need no rounding.
        let round = |mut values: Vec<f32>| {
            if recipe.model.dtype.is_bf16() || self.rounds_blocks {
                values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
            }
            values
        };
        let Some(folder) = &self.weights else {
            let tensors = init(&self.config, &recipe.model.init, recipe.train.seed)?;
            let tensors = tensors.into_iter().map(|(spec, values)| {
                let stored = TensorStorage::variable(&spec, round(values))?;
                Ok((spec, stored))
            });
            return Parameters::load(&self.config, backend, tensors);
        };
        if placement == Placement::OnDisk {
            let to_bf16 = WeightRounding { mxfp4: false, bits: Some(7) };
            let pack_bf16: WeightChange = Arc::new(|_, weight| Ok(weight.blocks_to_bf16()?));
            let unpack: WeightChange = Arc::new(move |spec, weight| match weight.block_type() {
                Some(_) => Ok(weight),
                None => to_bf16.apply(spec, Weight::dense(&weight.decode(&spec.working_shape())?)),
            });
            let changes = match recipe.model.dtype {
                Dtype::F32 if !self.rounds_blocks => vec![],
                Dtype::F32 | Dtype::Bf16 => vec![pack_bf16, to_bf16.weight_change()],
                Dtype::Bf16Dot => vec![unpack],
            };
            return Parameters::keep_on_disk(&self.config, backend, folder.clone(), changes);
        }
        if self.rounds_blocks {
            console.print(
                "the adapter was trained by an older version, which rounded the weights of quantised GGUF files to bf16; so does this",
            );
        }
        let megabytes = |bytes: u64| bytes / 1_000_000;
        let specs = self.specs();
        let bytes: Vec<u64> =
            specs.iter().zip(&self.formats).map(|(spec, format)| spec.resident_bytes(*format)).collect();
        let all = megabytes(bytes.iter().sum());
        let stage = if all >= PROGRESS_MEGABYTES_MIN {
            console.start_item_stage("MB of weights in memory", all, 0)
        } else {
            console.start_inner_stage("MB of weights in memory", all)
        };
        let mut read = 0;
        let tensors = specs.into_iter().enumerate().map(|(index, spec)| {
            let is_dense = (command.trains() && trainable[index]) || self.formats[index] == StoredFormat::F32;
            let packed = if is_dense { None } else { folder.read_packed(&spec, self.formats[index])? };
            let is_sharded =
                if packed.is_some() { placement == Placement::Sharded } else { trainable[index] };
            let stored = match packed {
                Some(packed) => TensorStorage::from_weight(packed),
                None => TensorStorage::variable(&spec, round(folder.read_values(&spec)?))?,
            };
            let before = megabytes(read);
            read += bytes[index];
            stage.advance(megabytes(read) - before, 0, &[]);
            let stored = if is_sharded {
                stored.into_shard(&spec, index, backend.mesh.shard_group())?
            } else {
                stored
            };
            Ok((spec, stored))
        });
        let parameters = Parameters::load(&self.config, backend, tensors)?;
        stage.finish();
        Ok(parameters)
    }
}

/// Returns a line with the model to read and its size. `None` if the model is small. If it cannot be opened,
/// a later step reports the error.
pub(super) fn reading_note(recipe: &Recipe) -> Option<String> {
    let folder = model_folder(recipe.model.path.as_deref()?).ok()?;
    let base = match is_adapter_folder(&folder) {
        true => read_base(&folder).ok()??.find(&folder, None).ok()?,
        false => folder.clone(),
    };
    let files: Vec<PathBuf> = match std::fs::read_dir(&base) {
        Ok(entries) => entries.filter_map(|entry| Some(entry.ok()?.path())).collect(),
        Err(_) => checkpoint::gguf::files(&base).ok()?,
    };
    let is_weights =
        |file: &&PathBuf| is_gguf(file) || file.extension().is_some_and(|kind| kind == "safetensors");
    let bytes = files.iter().filter(is_weights).filter_map(|file| Some(std::fs::metadata(file).ok()?.len()));
    let bytes: u64 = bytes.sum();
    let adapter =
        if base == folder { String::new() } else { format!(", for the adapter {}", folder.display()) };
    (bytes >= PROGRESS_MEGABYTES_MIN * 1_000_000)
        .then(|| format!("reading the model {} ({}){adapter}", base.display(), gigabytes(bytes)))
}

/// Returns the precision of matrix products on the CPU.
pub(super) fn precision(recipe: &Recipe) -> Precision {
    match recipe.model.dtype {
        Dtype::F32 | Dtype::Bf16 => Precision::F32,
        Dtype::Bf16Dot => Precision::Bf16Dot,
    }
}

/// Returns the config of the recipe's model.
///
/// # Errors
/// [`crate::error::BadInput`] when there is no such model.
#[cfg(feature = "cuda")]
pub fn model_config(recipe: &Recipe) -> Result<Config> {
    Ok(ModelSource::open(recipe)?.config)
}

/// Sets the plan's `model.path` to the folder with the weights: the last checkpoint of a run folder, or the
/// checkpoint itself. `--set model.path=…` overrides this. For a run with an adapter, `--set model.path=…`
/// names the adapter's base instead. If `model.adapter` names a run, sets it to the run's last checkpoint.
/// Returns the training step after which the model was saved, or 0 if the model is not a checkpoint of
/// reinforcement learning.
///
/// # Errors
/// [`crate::error::BadInput`] for a run without a checkpoint, and for a `model.adapter` without an adapter.
pub fn pin_model(plan: &mut Plan, source: &RecipeSource, sets: &[String]) -> Result<u64> {
    let is_set = |key: &str| sets.iter().any(|set| override_key(set) == Some(key));
    let is_path_set = is_set("model.path");
    let model = &mut plan.recipe.model;
    if let RecipeSource::Run(run) | RecipeSource::Checkpoint { run, .. } = source
        && std::path::absolute(run).is_ok_and(|full| full.to_str().is_none())
    {
        return Err(bad_input!(
            "{}: the path of the model must be UTF-8 in a recipe; rename the folder",
            run.display()
        ));
    }
    if is_path_set && let Some(adapter) = adapter_checkpoint(source, model)? {
        // The path that the user set is the base of the run's adapter.
        if let Some(path) = &mut model.path {
            let folder = model_folder(path)?;
            *path = std::path::absolute(&folder).unwrap_or(folder);
        }
        let step = checkpoint::read_state(&adapter)?;
        model.adapter = Some(adapter);
        return Ok(if step.phase == Phase::Rl { step.step } else { 0 });
    }
    let folder = match source {
        _ if is_path_set => None,
        RecipeSource::Run(run) => Some(checkpoint::newest_checkpoint(run)?.ok_or_else(|| {
            bad_input!(
                "{}: the run has no checkpoint yet; continue the run with --resume, or give its recipe.toml to use the model that it started from",
                run.display()
            )
        })?),
        RecipeSource::Checkpoint { folder, .. } => Some(folder.clone()),
        RecipeSource::File(_) | RecipeSource::BuiltIn { .. } => None,
    };
    if folder.is_some() {
        (model.path, model.architecture, model.tokenizer) = (folder, None, None);
        // The checkpoint already has the adapter that the run trained.
        if !is_set("model.adapter") {
            model.adapter = None;
        }
    }
    if let Some(adapter) = &mut model.adapter {
        let folder = adapter_folder(adapter)?;
        *adapter = std::path::absolute(&folder).unwrap_or(folder);
    }
    let Some(path) = &mut model.path else { return Ok(0) };
    if !holds_model(path)
        && let Some(folder) = checkpoint::newest_checkpoint(path)?
    {
        *path = folder;
    }
    *path = std::path::absolute(&*path).unwrap_or_else(|_| path.clone());
    if !checkpoint::is_checkpoint(path) {
        return Ok(0);
    }
    let state = checkpoint::read_state(path)?;
    Ok(if state.phase == Phase::Rl { state.step } else { 0 })
}

/// Returns the checkpoint of `source` if it has an adapter and `model.path` is a model without one.
fn adapter_checkpoint(source: &RecipeSource, model: &ModelSettings) -> Result<Option<PathBuf>> {
    let folder = match source {
        _ if model.adapter.is_some() => None,
        RecipeSource::Run(run) => checkpoint::newest_checkpoint(run)?,
        RecipeSource::Checkpoint { folder, .. } => Some(folder.clone()),
        RecipeSource::File(_) | RecipeSource::BuiltIn { .. } => None,
    };
    let is_base = |path: &Path| model_folder(path).is_ok_and(|folder| !is_adapter_folder(&folder));
    let adapter_folder =
        folder.filter(|folder| is_adapter_folder(folder) && model.path.as_deref().is_some_and(is_base));
    Ok(adapter_folder.map(|folder| std::path::absolute(&folder).unwrap_or(folder)))
}

/// Returns whether `path` is a Hugging Face folder or a GGUF file.
fn holds_model(path: &Path) -> bool {
    path.join("config.json").is_file() || is_gguf(path)
}

/// Returns the folder or GGUF file of the model: `path` itself or, if `path` is a run folder, its last
/// checkpoint.
pub(super) fn model_folder(path: &Path) -> Result<PathBuf> {
    if holds_model(path) {
        return Ok(path.to_owned());
    }
    match checkpoint::newest_checkpoint(path)? {
        Some(folder) => Ok(folder),
        None => Err(bad_input!(
            "{}: has neither config.json nor a run's checkpoints; set model.path to a Hugging Face folder, a GGUF file, a checkpoint or a run folder",
            path.display()
        )),
    }
}

/// Returns the folder of the adapter: `path` itself or, if `path` is a run folder, its last checkpoint.
fn adapter_folder(path: &Path) -> Result<PathBuf> {
    let newest =
        if is_adapter_folder(path) { Some(path.to_owned()) } else { checkpoint::newest_checkpoint(path)? };
    newest.filter(|folder| is_adapter_folder(folder)).ok_or_else(|| {
        bad_input!(
            "{}: has neither adapter_config.json nor a run with an adapter; set model.adapter to a folder in PEFT's format, a \
             checkpoint or a run folder",
            path.display()
        )
    })
}

/// Returns the config of the recipe's architecture, without the keys of other families.
fn architecture_config(a: &Architecture, chat: &Chat) -> Config {
    let (family, experts) = (a.model_type, a.model_type.has_experts);
    Config {
        family,
        vocab_size: chat.vocabulary().vocab_size(),
        hidden_size: a.hidden_size,
        num_hidden_layers: a.num_hidden_layers,
        num_attention_heads: a.num_attention_heads,
        num_key_value_heads: a.num_key_value_heads,
        head_dim: a.head_dim,
        intermediate_size: a.intermediate_size,
        num_local_experts: if experts { a.num_local_experts } else { 0 },
        num_experts_per_tok: if experts { a.num_experts_per_tok } else { 0 },
        sliding_window: if family.has_windows { a.sliding_window } else { 0 },
        layer_types: (family.layer_types)(a.num_hidden_layers),
        rope: Rope { theta: a.rope_theta, yarn: a.yarn.clone() },
        rms_norm_eps: a.rms_norm_eps,
        swiglu_limit: if family.has_swiglu_limit { a.swiglu_limit } else { 0.0 },
        tie_word_embeddings: a.tie_word_embeddings,
        max_position_embeddings: a.max_position_embeddings,
        bos_token_id: None,
        eos_token_ids: chat.stop_tokens(),
        pad_token_id: chat.vocabulary().pad_id(),
    }
}
