//! Adapters in PEFT format: `adapter_config.json` and `adapter_model.safetensors`. This program also writes
//! `base.json`, with the path and the digest of the base.
//!
//! | tensor, after `base_model.model.` | shape |
//! | --- | --- |
//! | `…q_proj.lora_A.weight`, `…lora_B.weight` | `[r, in]`, `[out, r]` |
//! | `…mlp.experts.base_layer.lora_A.weight`, `…lora_B.weight`: `gate_up_proj` | `[E·r, H]`, `[2I, r·E]` |
//! | `…mlp.experts.lora_A.weight`, `…lora_B.weight`: `down_proj` | `[E·r, I]`, `[H, r·E]` |
//! | `…mlp.experts.3.up_proj.lora_A.weight`, `…lora_B.weight`: Qwen3's expert 3 | `[r, in]`, `[out, r]` |
//!
//! In an `A` of experts, rank `j` of expert `e` is row `e·r + j`. In a `B` of experts, it is column `j·E +
//! e`. PEFT wraps the experts once for each of the two parameters. The inner wrapper has the name
//! `base_layer`; if only one parameter has an adapter, there is no such name.

use super::load::list_mistakes;
use super::tensor_file::{FRAMEWORK, TensorFile, write_f32, write_tensors};
use super::{BaseModel, hub};
use crate::bad_input;
use crate::bounded_file::{self, SMALL_FILE_BYTES_MAX};
use crate::dist::serialization::f32_values;
use crate::integrity::{Manifest, file_digest};
use crate::model::adapter::{Lora, is_adaptable, specs_with_head, target_spec};
use crate::model::names::{Layout, ParameterSpec, StoredTensor};
use anyhow::{Context, Result, ensure};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The name of the config file. A folder with this file is the folder of an adapter.
pub const CONFIG_FILE: &str = "adapter_config.json";
const TENSORS_FILE: &str = "adapter_model.safetensors";
const BASE_FILE: &str = "base.json";
/// Maximum of `alpha`, as in recipes. Larger values could make factors infinite.
const ALPHA_MAX: f64 = 1e6;
const PREFIX: &str = "base_model.model.";
const EXPERTS: &str = ".mlp.experts";

/// The folder of an adapter whose config and headers match a model. Values are read on demand.
pub struct AdapterFolder {
    pub path: PathBuf,
    pub lora: Lora,
    /// The model that the adapter was trained on, if this program wrote the folder.
    pub base: Option<BaseModel>,
    file: TensorFile,
    /// The names of the stored tensors of each factor, by the name of the factor. A factor has one stored
    /// tensor, or one per expert.
    stored: BTreeMap<String, Vec<String>>,
}

/// Returns whether `folder` is the folder of an adapter.
pub fn is_adapter_folder(folder: &Path) -> bool {
    folder.join(CONFIG_FILE).is_file()
}

/// Reads the base that the folder of an adapter names, without checking it. Returns `None` if another program
/// wrote the folder.
///
/// # Errors
/// [`crate::error::BadInput`] when the file is damaged.
pub fn read_base(folder: &Path) -> Result<Option<BaseModel>> {
    let path = folder.join(BASE_FILE);
    if !path.is_file() {
        return Ok(None);
    }
    let text = bounded_file::read_text(&path, SMALL_FILE_BYTES_MAX)
        .map_err(|e| bad_input!("{}: cannot be read: {e}", path.display()))?;
    let base: BaseModel = serde_json::from_str(&text).map_err(|e| {
        bad_input!(
            "{}: damaged: {e}; restore the file, or remove it to skip the check of the base",
            path.display()
        )
    })?;
    Ok(Some(base))
}

impl AdapterFolder {
    /// Returns the digest of the adapter's weights, in hexadecimal.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn digest(&self) -> Result<String> {
        let file = self.path.join(TENSORS_FILE);
        let digest = file_digest(&file, None).with_context(|| format!("reading {}", file.display()))?;
        Ok(digest.to_hex().to_string())
    }

    /// Opens the adapter in `path` for a model with the tensors `specs`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that lists every mistake: settings that are not supported, and tensors that
    /// are missing, have another shape or belong to no matrix of the model.
    pub fn open(path: &Path, specs: &[ParameterSpec]) -> Result<Self> {
        let config = path.join(CONFIG_FILE);
        let text = bounded_file::read_text(&config, SMALL_FILE_BYTES_MAX).map_err(|e| {
            bad_input!("{}: cannot be read: {e}; name a folder in PEFT format", config.display())
        })?;
        let json: Value = serde_json::from_str(&text)
            .map_err(|e| bad_input!("{}: not valid JSON: {e}", config.display()))?;
        let mut mistakes = unsupported_settings(&json);
        let rank = json["r"].as_u64().filter(|r| (1..=u64::from(u16::MAX)).contains(r));
        if rank.is_none() {
            mistakes.push(format!("r is {}; it must be a rank of 1 or more", json["r"]));
        }
        let alpha = json["lora_alpha"].as_f64().filter(|alpha| *alpha > 0.0 && *alpha <= ALPHA_MAX);
        if alpha.is_none() {
            let alpha = &json["lora_alpha"];
            mistakes
                .push(format!("lora_alpha is {alpha}; it must be a number above 0 and at most {ALPHA_MAX}"));
        }
        let (Some(rank), Some(alpha), true) = (rank, alpha, mistakes.is_empty()) else {
            return Err(mismatch_error(&config, mistakes));
        };
        let file = TensorFile::open(&path.join(TENSORS_FILE))?;
        let lora = Lora {
            rank: rank as usize,
            alpha,
            rslora: json["use_rslora"].as_bool().unwrap_or(false),
            targets: vec![],
        };
        let mut opened =
            Self { path: path.to_owned(), lora, base: read_base(path)?, file, stored: BTreeMap::new() };
        let mistakes = opened.match_tensors(&specs_with_head(specs));
        if mistakes.is_empty() { Ok(opened) } else { Err(mismatch_error(&path.join(TENSORS_FILE), mistakes)) }
    }

    /// Finds the matrix and the factors of each module. Returns all mistakes.
    fn match_tensors(&mut self, specs: &[ParameterSpec]) -> Vec<String> {
        let (mut mistakes, mut modules) = (vec![], BTreeMap::<String, [Option<String>; 2]>::new());
        for name in self.file.metadata.offset_keys() {
            match parse_factor_name(&name) {
                Some((module, factor)) => {
                    modules.entry(module.to_owned()).or_default()[factor] = Some(name.clone());
                }
                None => mistakes.push(format!("{name:?} is not a factor of an adapter")),
            }
        }
        let mut found = BTreeSet::new();
        let mut experts = BTreeMap::<&str, BTreeMap<usize, &[Option<String>; 2]>>::new();
        for (module, names) in &modules {
            match self.matrix_of(module, names, specs) {
                Ok((spec, Some(expert))) => {
                    found.insert(&spec.name);
                    if experts.entry(&spec.name).or_default().insert(expert, names).is_some() {
                        mistakes
                            .push(format!("{module} is a second adapter of {}", spec.name_of_expert(expert)));
                    }
                }
                Ok((spec, None)) if !found.insert(&spec.name) => {
                    mistakes.push(format!("{module} is a second adapter of {}", spec.name));
                }
                Ok((spec, None)) => {
                    let names = names.iter().flatten().map(|name| vec![name.clone()]);
                    self.stored.extend(Lora::factor_names(&spec.name).into_iter().zip(names));
                }
                Err(mistake) => mistakes.push(mistake),
            }
        }
        for spec in specs {
            let Some(names) = experts.get(spec.name.as_str()) else { continue };
            let count = spec.stored_shape[0];
            if names.len() < count {
                let (name, found) = (&spec.name, names.len());
                mistakes.push(format!(
                    "{name}: {found} of {count} experts have an adapter; every expert must have one"
                ));
            }
            for (index, factor) in Lora::factor_names(&spec.name).into_iter().enumerate() {
                let names = names.values().filter_map(|names| names[index].clone()).collect();
                self.stored.insert(factor, names);
            }
        }
        if modules.is_empty() && mistakes.is_empty() {
            mistakes.push("it has no tensors".to_owned());
        }
        let in_order = specs.iter().filter(|spec| found.contains(&spec.name));
        self.lora.targets = in_order.map(|spec| spec.name.clone()).collect();
        mistakes
    }

    /// Returns the matrix that the tensors `names` of `module` adapt, and the expert if the module belongs to
    /// one expert. A module of all experts has two matrices. Then the matrix whose shape fits both tensors is
    /// returned.
    fn matrix_of<'s>(
        &self,
        module: &str,
        names: &[Option<String>; 2],
        specs: &'s [ParameterSpec],
    ) -> Result<(&'s ParameterSpec, Option<usize>), String> {
        let [Some(a), Some(b)] = names else {
            return Err(format!("{module} has only one of its two factors"));
        };
        let outer = module.strip_suffix(".base_layer").unwrap_or(module);
        let of_expert = module.split_once(".mlp.experts.").and_then(|(layer, rest)| {
            let (expert, name) = rest.split_once('.')?;
            Some((format!("{layer}.mlp.experts.{name}.weight"), expert.parse::<usize>().ok()?))
        });
        let expert = of_expert.as_ref().map(|(_, expert)| *expert);
        let named = |spec: &&ParameterSpec| match spec.is_expert_matrix() {
            true if spec.layout == Layout::PerExpert => of_expert
                .as_ref()
                .is_some_and(|(name, expert)| spec.name == *name && *expert < spec.stored_shape[0]),
            true => outer.ends_with(EXPERTS) && spec.name.starts_with(&format!("{outer}.")),
            false => spec.name.strip_suffix(".weight") == Some(module),
        };
        let candidates: Vec<&ParameterSpec> =
            specs.iter().filter(|spec| is_adaptable(spec)).filter(named).collect();
        let shape = |name: &str| self.file.metadata.info(name).map(|info| info.shape.clone());
        let wanted =
            |spec: &ParameterSpec, factor| Some(stored_factors(&self.lora, spec, factor)?.remove(0).1);
        let misfit = |spec: &ParameterSpec| {
            let of = |(factor, name): (usize, &String)| {
                (shape(name) != wanted(spec, factor)).then(|| (factor, name.clone()))
            };
            [a, b].into_iter().enumerate().find_map(of)
        };
        let first = candidates.first().ok_or_else(|| format!(
                "{module} has an adapter, but this model has no such matrix, or the matrix cannot have an adapter: only matrices of attention, experts, MLPs and the head can"
            ))?;
        candidates.iter().find(|spec| misfit(spec).is_none()).map(|spec| (*spec, expert)).ok_or_else(|| {
            let (factor, name) = misfit(first).unwrap_or_default();
            format!(
                "{name:?} has shape {:?}, but rank {} of {} requires {:?}",
                shape(&name).unwrap_or_default(),
                self.lora.rank,
                first.name,
                wanted(first, factor).unwrap_or_default()
            )
        })
    }

    /// Returns the values of the factors in working layout, in the order of [`Lora::factor_specs`].
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a value is NaN or infinite, or the file cannot be read.
    pub fn read_values(&self, base: &[ParameterSpec]) -> Result<Vec<Vec<f32>>> {
        self.lora.factor_specs(base)?.iter().map(|spec| self.factor(spec)).collect()
    }

    fn factor(&self, spec: &ParameterSpec) -> Result<Vec<f32>> {
        let names = self.stored.get(&spec.name).with_context(|| format!("no factor {}", spec.name))?;
        let layout = FactorLayout::from_spec(spec, names.len());
        let mut values = vec![0.0; spec.element_count()];
        let length = values.len() / names.len();
        for (name, values) in names.iter().zip(values.chunks_exact_mut(length)) {
            let stored = self.stored_values(name)?;
            stored.into_iter().enumerate().for_each(|(at, value)| values[layout.memory_index(at)] = value);
        }
        Ok(values)
    }

    /// Reads one stored tensor.
    fn stored_values(&self, name: &str) -> Result<Vec<f32>> {
        let info = self.file.metadata.info(name).with_context(|| format!("no tensor {name}"))?;
        let bytes = self.file.read(info)?;
        let refused =
            |reason: String| bad_input!("{}: {name:?} {reason}", self.path.join(TENSORS_FILE).display());
        let stored: Vec<f32> = match info.dtype {
            Dtype::F32 => f32_values(&bytes).collect(),
            Dtype::F16 => bytes.as_chunks().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::BF16 => {
                bytes.as_chunks().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()
            }
            other => return Err(refused(format!("is {other:?}; it must be F32, BF16 or F16"))),
        };
        if let Some(value) = stored.iter().find(|value| !value.is_finite()) {
            return Err(refused(format!("has the value {value}; use an earlier adapter")));
        }
        Ok(stored)
    }
}

/// Writes the adapter `lora` into the existing folder `folder`, and adds the files to `manifest`. `specs` are
/// the tensors of the model. `factor` returns the values of a factor by name, in working layout.
///
/// # Errors
/// When a file exists or cannot be written, or `factor` fails.
pub fn write(
    folder: &Path,
    manifest: &mut Manifest,
    (lora, specs): (&Lora, &[ParameterSpec]),
    base: &BaseModel,
    mut factor: impl FnMut(&str) -> Result<Vec<f32>>,
) -> Result<()> {
    let factors = lora.factor_specs(specs)?;
    let of_target = |index: usize| target_spec(specs, &lora.targets[index / 2]);
    let mut stored = vec![];
    for (index, spec) in factors.iter().enumerate() {
        let target = of_target(index).context("a target is missing")?;
        let tensors = stored_factors(lora, &target, index % 2).context("a target is not a matrix")?;
        stored.push((tensors, spec));
    }
    // The tensors of a factor are consecutive, so each factor is read once.
    stored.sort_by(|a, b| a.0[0].0.cmp(&b.0[0].0));
    let tensors = stored.iter().flat_map(|(tensors, _)| tensors).map(|(name, shape)| StoredTensor {
        name: name.clone(),
        dtype: Dtype::F32,
        shape: shape.clone(),
    });
    let parts: Vec<(&ParameterSpec, usize, usize)> = stored
        .iter()
        .flat_map(|(tensors, spec)| (0..tensors.len()).map(move |part| (*spec, part, tensors.len())))
        .collect();
    let mut working = vec![];
    let digest = write_tensors(&folder.join(TENSORS_FILE), tensors.collect(), FRAMEWORK, |index, out| {
        let (spec, part, count) = parts[index];
        if part == 0 {
            working = factor(&spec.name)?;
        }
        ensure!(working.len() == spec.element_count(), "{}: {} values", spec.name, working.len());
        ensure!(
            working.iter().all(|value| value.is_finite()),
            "{} has NaN or an infinite value: training diverged, so nothing is saved",
            spec.name
        );
        let layout = FactorLayout::from_spec(spec, count);
        let length = working.len() / count;
        let working = &working[part * length..(part + 1) * length];
        let values: Vec<f32> = (0..length).map(|at| working[layout.memory_index(at)]).collect();
        write_f32(out, &values)
    })?;
    manifest.record(TENSORS_FILE, digest);
    let pretty = |json: &Value| format!("{json:#}\n").into_bytes();
    manifest.write_file(folder, CONFIG_FILE, &pretty(&config_json(lora, &specs_with_head(specs), base)))?;
    manifest.write_file(folder, BASE_FILE, &pretty(&serde_json::to_value(base)?))
}

/// Returns the content of `adapter_config.json`.
fn config_json(lora: &Lora, specs: &[ParameterSpec], base: &BaseModel) -> Value {
    let adapted: BTreeSet<&str> = lora.targets.iter().map(String::as_str).collect();
    let (mut modules, mut parameters) = (BTreeSet::new(), BTreeSet::new());
    for spec in specs.iter().filter(|spec| adapted.contains(spec.name.as_str())) {
        let module = spec.name.strip_suffix(".weight").unwrap_or(&spec.name);
        // If the matrix is adapted in every layer, the name omits the layer, as in most PEFT configs.
        let of_layers = |name: &str| -> Option<String> {
            let rest = name.strip_prefix("model.layers.")?.split_once('.')?.1;
            let alike = |other: &&ParameterSpec| other.name.ends_with(&format!(".{rest}"));
            specs
                .iter()
                .filter(alike)
                .all(|other| adapted.contains(other.name.as_str()))
                .then(|| rest.to_owned())
        };
        let short = of_layers(&spec.name);
        if spec.layout == Layout::PerExpert && short.is_none() {
            let name = |expert| spec.name_of_expert(expert).trim_end_matches(".weight").to_owned();
            modules.extend((0..spec.stored_shape[0]).map(name));
        } else if spec.is_expert_matrix() && spec.layout != Layout::PerExpert {
            parameters.insert(short.unwrap_or_else(|| spec.name.clone()));
        } else {
            let last =
                short.and_then(|rest| Some(rest.strip_suffix(".weight")?.rsplit('.').next()?.to_owned()));
            modules.insert(last.unwrap_or_else(|| module.to_owned()));
        }
    }
    // PEFT wraps the parameters in the order of this list. The first one gets the inner wrapper, which must
    // be that of gate_up.
    let parameters: Vec<String> = parameters.into_iter().rev().collect();
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub::name_of_snapshot(&base.path).map_or(json!(base.path), Value::from),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": false,
        "use_dora": false,
        "inference_mode": true,
        "target_modules": modules,
        "target_parameters": parameters,
    })
}

/// Returns the settings of a config that are not supported, each with its remedy.
fn unsupported_settings(json: &Value) -> Vec<String> {
    let mut found = vec![];
    if json["peft_type"].as_str() != Some("LORA") {
        found.push(format!("peft_type is {}; only \"LORA\" is read", json["peft_type"]));
    }
    if json["lora_dropout"].as_f64().unwrap_or(0.0) != 0.0 {
        found.push(format!(
            "lora_dropout is {}: dropout would make the forward pass of training differ from that of rollout; set it to 0, \
             which does not change the trained values",
            json["lora_dropout"]
        ));
    }
    if json["bias"].as_str().unwrap_or("none") != "none" {
        found.push(format!(
            "bias is {}: biases must stay those of the base; train the adapter with bias \"none\"",
            json["bias"]
        ));
    }
    let merge = "merge the adapter into its base with PEFT (merge_and_unload), and name the merged folder";
    let unknown = [
        "lora_bias",
        "fan_in_fan_out",
        "modules_to_save",
        "trainable_token_indices",
        "alora_invocation_tokens",
        "rank_pattern",
        "alpha_pattern",
        "layer_replication",
    ];
    // These keys switch on DoRA and other variants, including future variants.
    let is_unknown = |key: &str| {
        let variant = key.starts_with("use_") && key != "use_rslora";
        unknown.contains(&key) || variant || key.ends_with("_config")
    };
    let is_set = |value: &Value| match value {
        Value::Null => false,
        Value::Bool(on) => *on,
        Value::Array(items) => !items.is_empty(),
        Value::Object(items) => !items.is_empty(),
        _ => true,
    };
    let set = json.as_object().into_iter().flatten().filter(|(key, value)| is_unknown(key) && is_set(value));
    found.extend(set.map(|(key, value)| format!("{key} is {value}, which is not supported; {merge}")));
    // Other initialisations also change the weights of the base.
    if let Some(start) = json["init_lora_weights"]
        .as_str()
        .filter(|start| !["gaussian", "true", "orthogonal", "eva"].contains(start))
    {
        found.push(format!("init_lora_weights is {start:?}, which also changes the base; {merge}"));
    }
    found
}

fn mismatch_error(file: &Path, mistakes: Vec<String>) -> anyhow::Error {
    const MISTAKES_LISTED_MAX: usize = 8;
    let listed = list_mistakes(mistakes, MISTAKES_LISTED_MAX);
    bad_input!("{}: the adapter does not match the model: {listed}", file.display())
}

/// Returns the module of a stored tensor, and the index of the factor: 0 for A, 1 for B.
fn parse_factor_name(name: &str) -> Option<(&str, usize)> {
    let name = name.strip_prefix(PREFIX)?;
    let factor = |word: &str| name.strip_suffix(word);
    factor(".lora_A.weight").map(|stem| (stem, 0)).or_else(|| factor(".lora_B.weight").map(|stem| (stem, 1)))
}

/// Returns the name and the shape of each stored tensor of a factor of `spec`.
fn stored_factors(lora: &Lora, spec: &ParameterSpec, factor: usize) -> Option<Vec<(String, Vec<usize>)>> {
    if spec.layout != Layout::PerExpert {
        return Some(vec![(stored_name(lora, &spec.name, factor), factor_shape(spec, lora.rank, factor)?)]);
    }
    let shape = factor_shape(&spec.with_expert_count(1), lora.rank, factor)?;
    let name = |expert| stored_name(lora, &spec.name_of_expert(expert), factor);
    Some((0..spec.stored_shape[0]).map(|expert| (name(expert), shape.clone())).collect())
}

/// Returns the stored shape of a factor of `spec` if one stored tensor holds the factor of all experts.
fn factor_shape(spec: &ParameterSpec, rank: usize, factor: usize) -> Option<Vec<usize>> {
    Some(match (spec.working_shape().as_slice(), factor) {
        (&[input, _], 0) => vec![rank, input],
        (&[_, output], _) => vec![output, rank],
        (&[experts, input, _], 0) => vec![experts * rank, input],
        (&[experts, _, output], _) => vec![output, rank * experts],
        _ => return None,
    })
}

/// Returns the name of a factor in the file.
fn stored_name(lora: &Lora, target: &str, factor: usize) -> String {
    let letter = ["A", "B"][factor];
    let fused = target.split_once(".mlp.experts.").filter(|_| !target.ends_with(".weight"));
    let Some((layer, inner)) = fused else {
        let module = target.strip_suffix(".weight").unwrap_or(target);
        return format!("{PREFIX}{module}.lora_{letter}.weight");
    };
    let both = lora.targets.iter().any(|other| *other == format!("{layer}.mlp.experts.down_proj"));
    let inside = if both && inner == "gate_up_proj" { ".base_layer" } else { "" };
    format!("{PREFIX}{layer}{EXPERTS}{inside}.lora_{letter}.weight")
}

/// The layout of a factor in the file.
struct FactorLayout {
    /// Number of experts of the working shape; `None` for a matrix without experts.
    experts: Option<usize>,
    rows: usize,
    columns: usize,
    is_a: bool,
}

impl FactorLayout {
    /// Returns the layout of a stored tensor of the factor `spec`. The factor has `stored` stored tensors:
    /// one, or one per expert.
    fn from_spec(spec: &ParameterSpec, stored: usize) -> Self {
        let (experts, rows, columns) = match *spec.working_shape() {
            [_, rows, columns] if stored > 1 => (None, rows, columns),
            [experts, rows, columns] => (Some(experts), rows, columns),
            [rows, columns] => (None, rows, columns),
            _ => (None, 1, 1),
        };
        Self { experts, rows, columns, is_a: spec.name.ends_with("lora_A") }
    }

    /// Converts the index of a value in the file to its index in memory.
    fn memory_index(&self, at: usize) -> usize {
        let Self { experts, rows, columns, is_a } = *self;
        let experts = experts.unwrap_or(1);
        let (expert, row, column) = if is_a {
            // The layout is [E·r, in] in the file and [E, in, r] in memory.
            let (line, input) = (at / rows, at % rows);
            (line / columns, input, line % columns)
        } else {
            // The layout is [out, r·E] in the file, where the expert varies fastest, and [E, r, out] in
            // memory.
            let (output, column) = (at / (rows * experts), at % (rows * experts));
            (column % experts, column / experts, output)
        };
        (expert * rows + row) * columns + column
    }
}
