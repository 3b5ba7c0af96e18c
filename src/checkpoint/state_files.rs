//! Optimizer state, in one file or one file for each process: f32, and 8-bit codes.
//!
//! One process writes `trainer.safetensors`. With several, each writes its own shards, flat, into a file
//! such as `trainer-00002-of-00004.safetensors`. Rank 0 also writes the tensors that are not sharded. Any
//! number of processes can read what any other number wrote, and each reads its own shards only.

use super::resume::DAMAGE_REMEDY;
use super::tensor_file::{TensorFile, write_f32, write_tensors};
use crate::bad_input;
use crate::dist::serialization::f32_values;
use crate::integrity::Manifest;
use crate::model::names::{ParameterSpec, StoredTensor};
use crate::model::parameters::{MASTER, Parameters, ShardRequest};
use crate::ops::cpu::{host_codes, host_values, to_host};
use anyhow::{Result, bail};
use blake3::Hash;
use candle_core::DType;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The result of one process's file.
#[derive(Serialize, Deserialize)]
enum Written {
    Digest([u8; 32]),
    Failed(String),
}

/// Returns the file name of `rank` of `ranks`.
fn file_name(stem: &str, rank: usize, ranks: usize) -> String {
    match ranks {
        1 => format!("{stem}.safetensors"),
        _ => format!("{stem}-{:05}-of-{ranks:05}.safetensors", rank + 1),
    }
}

/// Returns the type of an optimizer state in a file.
fn stored_dtype(dtype: DType) -> Dtype {
    if dtype == DType::U8 { Dtype::U8 } else { Dtype::F32 }
}

/// Writes the optimizer state of each trained tensor into `folder`, its master included, and frozen tensors
/// that `keep` selects. Each process writes its own file. Rank 0 requests it, the others call [`serve`],
/// and rank 0 adds all files to `manifest`.
///
/// # Errors
/// When a process cannot write; the error names its rank.
pub fn write(
    (folder, stem): (&Path, &str),
    parameters: &Parameters,
    of_critic: bool,
    keep: &dyn Fn(&ParameterSpec, &[f32]) -> bool,
    manifest: &mut Manifest,
) -> Result<()> {
    let mesh = parameters.mesh();
    mesh.request(ShardRequest::File { folder: folder.to_owned(), stem: stem.to_owned(), of_critic })?;
    let written = write_own((folder, stem), parameters, of_critic, keep);
    if mesh.ranks() == 1 {
        manifest.record(&file_name(stem, 0, 1), written?);
        return Ok(());
    }
    for (rank, written) in gather_write_results(parameters, written)?.into_iter().enumerate() {
        match written {
            Written::Digest(digest) => {
                manifest.record(&file_name(stem, rank, mesh.ranks()), Hash::from_bytes(digest))
            }
            Written::Failed(why) => bail!("rank {rank}: {why}"),
        }
    }
    Ok(())
}

/// Writes this process's file at the request of rank 0.
///
/// # Errors
/// When a rank does not respond in time. Rank 0 reports a failed write.
pub fn serve(folder: &Path, stem: &str, parameters: &Parameters, of_critic: bool) -> Result<()> {
    gather_write_results(parameters, write_own((folder, stem), parameters, of_critic, &|_, _| false))
        .map(drop)
}

fn gather_write_results(parameters: &Parameters, written: Result<Hash>) -> Result<Vec<Written>> {
    let own = match written {
        Ok(digest) => Written::Digest(*digest.as_bytes()),
        Err(error) => Written::Failed(format!("{error:#}")),
    };
    parameters.mesh().all_gather_records("files of a checkpoint", &own)
}

fn write_own(
    (folder, stem): (&Path, &str),
    parameters: &Parameters,
    of_critic: bool,
    keep: &dyn Fn(&ParameterSpec, &[f32]) -> bool,
) -> Result<Hash> {
    let mesh = parameters.mesh();
    // By name in the file: the tensor's index and the kind of its values.
    let mut kept: BTreeMap<String, (usize, &str)> = BTreeMap::new();
    for (index, spec) in parameters.specs.iter().enumerate() {
        // The model's own files hold packed tensors.
        let Ok(values) = parameters.values(index) else { continue };
        let is_sharded = parameters.is_sharded(index);
        if !is_sharded && !mesh.is_rank_zero() {
            continue;
        }
        // SFT warm-up trained an adapter's base, which has a folder of its own since then.
        let frozen = || match is_sharded {
            true => Ok(of_critic || parameters.adapter().is_none()),
            false => anyhow::Ok(keep(spec, &host_values(&to_host(values)?)?)),
        };
        if parameters.is_trained(index) || frozen()? {
            kept.insert(format!("{MASTER}.{}", spec.name), (index, MASTER));
        }
        for name in parameters.state(index).keys() {
            kept.insert(format!("{name}.{}", spec.name), (index, name));
        }
    }
    let stored = kept.iter().map(|(name, &(index, kind))| {
        let (dtype, length) = parameters.state_shape(index, kind)?;
        let own = parameters.local_range(index, kind, length).len();
        Ok(StoredTensor { name: name.clone(), dtype: stored_dtype(dtype), shape: vec![own] })
    });
    let stored = stored.collect::<Result<_>>()?;
    let places: Vec<(usize, &str)> = kept.into_values().collect();
    write_tensors(&folder.join(file_name(stem, mesh.rank(), mesh.ranks())), stored, |index, out| {
        let (index, kind) = places[index];
        let tensor = to_host(parameters.local_state(index, kind)?)?;
        match tensor.dtype() {
            DType::U8 => Ok(out.write_all(&host_codes(&tensor)?)?),
            _ => write_f32(out, &host_values(&tensor)?),
        }
    })
}

/// The open state files, one for each process that wrote.
struct StateFiles {
    /// The path of the first file.
    path: PathBuf,
    files: Vec<TensorFile>,
}

impl StateFiles {
    fn open(folder: &Path, stem: &str) -> Result<Self> {
        let ranks = match folder.join(file_name(stem, 0, 1)).exists() {
            true => 1,
            false => ranks_of(folder, stem).unwrap_or(1),
        };
        let paths: Vec<PathBuf> = (0..ranks).map(|rank| folder.join(file_name(stem, rank, ranks))).collect();
        let open = |path: &PathBuf| {
            TensorFile::open(path)
                .map_err(|e| bad_input!("{}: damaged: {e:#}; {DAMAGE_REMEDY}", path.display()))
        };
        let files = paths.iter().map(open).collect::<Result<_>>()?;
        Ok(Self { path: paths.into_iter().next().unwrap_or_default(), files })
    }

    /// Returns the names of all tensors that are not empty.
    fn names(&self) -> BTreeSet<String> {
        let names = |file: &TensorFile| {
            let names = file.metadata.offset_keys();
            names
                .into_iter()
                .filter(|name| file.metadata.info(name).is_some_and(|info| info.shape != [0]))
                .collect()
        };
        self.files.iter().flat_map(|file: &TensorFile| -> Vec<String> { names(file) }).collect()
    }

    /// Reads the values `own` of the tensor `name`. The tensor is sharded over the files, `piece(m, M)` in
    /// file m of M, or whole in the first. Returns `None` when no file has it, an error when its size or
    /// type differs.
    fn read(
        &self,
        name: &str,
        (dtype, length): (DType, usize),
        own: Range<usize>,
        piece: impl Fn(usize, usize) -> Range<usize>,
    ) -> Result<Option<Vec<u8>>, Misfit> {
        let infos: Vec<_> = self.files.iter().map(|file| (file, file.metadata.info(name))).collect();
        if infos.iter().all(|(_, info)| info.is_none()) {
            return Ok(None);
        }
        let is_sharded = infos.len() > 1 && infos.iter().all(|(_, info)| info.is_some());
        let width = dtype.size_in_bytes();
        let mut bytes = vec![0; own.len() * width];
        for (rank, (file, info)) in infos.iter().enumerate() {
            let Some(info) = info else { continue };
            let held = if is_sharded { piece(rank, infos.len()) } else { 0..length };
            if info.dtype != stored_dtype(dtype) || info.shape != [held.len()] {
                return Err(Misfit::Size);
            }
            let common = held.start.max(own.start)..held.end.min(own.end);
            if !common.is_empty() {
                let to = (common.start - own.start) * width..(common.end - own.start) * width;
                file.read_at(info, (common.start - held.start) * width, &mut bytes[to])
                    .map_err(Misfit::Unread)?;
            }
        }
        Ok(Some(bytes))
    }
}

/// The reason why a stored tensor cannot be used.
enum Misfit {
    Size,
    Unread(anyhow::Error),
}

/// Returns the number of processes that wrote the files of `stem` in `folder`.
fn ranks_of(folder: &Path, stem: &str) -> Option<usize> {
    std::fs::read_dir(folder).ok()?.flatten().find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let (_, ranks) = name.strip_prefix(stem)?.strip_suffix(".safetensors")?.split_once("-of-")?;
        ranks.parse().ok().filter(|ranks| (1..=65_536).contains(ranks))
    })
}

/// Reads the files of [`write`], a tensor at a time; each process reads its own shards. With
/// `requires_frozen`, every frozen tensor must be present too.
///
/// # Errors
/// [`crate::error::BadInput`] when the files do not fit the model.
pub fn restore(
    (folder, stem): (&Path, &str),
    parameters: &mut Parameters,
    requires_frozen: bool,
) -> Result<()> {
    let files = StateFiles::open(folder, stem)?;
    let damaged = |what: String| bad_input!("{}: {what}; {DAMAGE_REMEDY}", files.path.display());
    let mut unread = files.names();
    for (index, spec) in parameters.specs.clone().iter().enumerate() {
        if parameters.values(index).is_err() {
            continue;
        }
        let kinds = parameters.state(index).keys().copied().chain([MASTER]).collect::<BTreeSet<_>>();
        for kind in kinds {
            let name = format!("{kind}.{}", spec.name);
            let (dtype, length) = parameters.state_shape(index, kind)?;
            let own = parameters.local_range(index, kind, length);
            let piece = |rank: usize, ranks: usize| parameters.range_of_rank(index, kind, rank, ranks);
            let bytes = files.read(&name, (dtype, length), own, piece).map_err(|misfit| match misfit {
                Misfit::Size => damaged(format!("{} has another size or optimizer", spec.name)),
                Misfit::Unread(error) => error,
            })?;
            let Some(bytes) = bytes else {
                if parameters.is_trained(index) || requires_frozen {
                    return Err(damaged(format!("{} is missing", spec.name)));
                }
                continue;
            };
            unread.remove(&name);
            if dtype != DType::U8
                && let Some(value) = f32_values(&bytes).find(|value| !value.is_finite())
            {
                return Err(damaged(format!("{name} holds {value}")));
            }
            parameters.overwrite(index, kind, &bytes)?;
        }
    }
    // Otherwise another optimizer's state would be dropped without a message.
    if let Some(name) = unread.first() {
        return Err(damaged(format!("{name} belongs to another model or optimizer")));
    }
    Ok(())
}
