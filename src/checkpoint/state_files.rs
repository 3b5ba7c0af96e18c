//! Files with optimizer state, as f32 or 8-bit codes. There is one file, or one file per process.
//!
//! A single process writes `trainer.safetensors`. If there are several processes, each writes its own flat
//! shards into a file such as `trainer-00002-of-00004.safetensors`. Rank 0 also writes the tensors that are
//! not sharded. A run with another number of processes can read these files. Each process then reads only its
//! own shards.

use super::resume::DAMAGE_REMEDY;
use super::tensor_file::{TensorFile, write_f32, write_tensors};
use crate::bad_input;
use crate::dist::serialization::{f32_bytes, f32_values};
use crate::dist::{Sharding, rotated_shard_range};
use crate::integrity::Manifest;
use crate::model::names::{ParameterSpec, StoredTensor};
use crate::model::parameters::{BLOCK_STATES, CODES, MASTER, MOMENTS, Parameters, ShardRequest, state_range};
use crate::ops::adamw_8bit::{BLOCK, decode_moment};
use crate::ops::cpu::{host_codes, host_values, to_host};
use anyhow::{Result, bail};
use blake3::Hash;
use candle_core::DType;
use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Marks files whose shards are in rank order: equal ranges, or, with [`BY_EXPERT`], whole experts. Older
/// files have the shards of [`rotated_shard_range`].
const SHARD_ORDER: (&str, &str) = ("shards", "rank order");
/// Marks files whose shards of expert tensors are whole experts.
const BY_EXPERT: (&str, &str) = (SHARD_ORDER.0, "by expert");

/// A rule that shards tensors. Its arguments are a tensor with its index, the rank and the number of ranks.
type ShardRule = fn(&ParameterSpec, usize, usize, usize) -> Range<usize>;

fn in_rank_order(spec: &ParameterSpec, index: usize, rank: usize, ranks: usize) -> Range<usize> {
    spec.shard_range(index, rank, Sharding { ranks, by_expert: false })
}

fn by_expert(spec: &ParameterSpec, index: usize, rank: usize, ranks: usize) -> Range<usize> {
    spec.shard_range(index, rank, Sharding { ranks, by_expert: true })
}

fn rotated(spec: &ParameterSpec, index: usize, rank: usize, ranks: usize) -> Range<usize> {
    rotated_shard_range(spec.element_count(), index, rank, ranks)
}

/// The result of writing the file of one process.
#[derive(Serialize, Deserialize)]
enum WriteResult {
    Digest([u8; 32]),
    Failed(String),
}

/// Returns the name of the file that `rank` of `ranks` writes.
fn file_name(stem: &str, rank: usize, ranks: usize) -> String {
    match ranks {
        1 => format!("{stem}.safetensors"),
        _ => format!("{stem}-{:05}-of-{ranks:05}.safetensors", rank + 1),
    }
}

/// Converts the dtype of a tensor in memory to its dtype in the file.
fn stored_dtype(dtype: DType) -> Dtype {
    if dtype == DType::U8 { Dtype::U8 } else { Dtype::F32 }
}

/// Writes the optimizer state and the master values of each trained tensor into `folder`. Also writes the
/// frozen tensors that `keep` selects. Each process writes its own file. Rank 0 requests the files, and the
/// other ranks call [`serve`]. Rank 0 adds all files to `manifest`.
///
/// # Errors
/// When a process cannot write its file. The error names the rank.
pub fn write(
    (folder, stem): (&Path, &str),
    parameters: &Parameters,
    of_critic: bool,
    keep: &dyn Fn(&ParameterSpec, &[f32]) -> bool,
    manifest: &mut Manifest,
) -> Result<()> {
    let mesh = parameters.shard_mesh();
    let file = ShardRequest::File { folder: folder.to_owned(), stem: stem.to_owned(), of_critic };
    parameters.mesh().request(file)?;
    let written = write_own((folder, stem), parameters, of_critic, keep);
    if mesh.ranks() == 1 {
        manifest.record(&file_name(stem, 0, 1), written?);
        return Ok(());
    }
    for (rank, written) in gather_write_results(parameters, written)?.into_iter().enumerate() {
        match written {
            WriteResult::Digest(digest) => {
                manifest.record(&file_name(stem, rank, mesh.ranks()), Hash::from_bytes(digest))
            }
            WriteResult::Failed(why) => bail!("rank {rank}: {why}"),
        }
    }
    Ok(())
}

/// Writes the file of this process at the request of rank 0. Ranks of other copies of the weights do nothing.
///
/// # Errors
/// When a rank does not respond in time. If writing fails, rank 0 reports the error.
pub fn serve(folder: &Path, stem: &str, parameters: &Parameters, of_critic: bool) -> Result<()> {
    if !parameters.mesh().shares_with_rank_zero() {
        return Ok(());
    }
    gather_write_results(parameters, write_own((folder, stem), parameters, of_critic, &|_, _| false))
        .map(drop)
}

fn gather_write_results(parameters: &Parameters, written: Result<Hash>) -> Result<Vec<WriteResult>> {
    let own = match written {
        Ok(digest) => WriteResult::Digest(*digest.as_bytes()),
        Err(error) => WriteResult::Failed(format!("{error:#}")),
    };
    parameters.shard_mesh().all_gather_records("files of a checkpoint", &own)
}

fn write_own(
    (folder, stem): (&Path, &str),
    parameters: &Parameters,
    of_critic: bool,
    keep: &dyn Fn(&ParameterSpec, &[f32]) -> bool,
) -> Result<Hash> {
    let mesh = parameters.shard_mesh();
    // By name in the file: the index of the tensor, and the kind of its values.
    let mut kept: BTreeMap<String, (usize, &str)> = BTreeMap::new();
    for (index, spec) in parameters.specs.iter().enumerate() {
        // Packed tensors are in the model's files only.
        let Ok(values) = parameters.values(index) else { continue };
        let is_sharded = parameters.is_sharded(index);
        if !is_sharded && !mesh.is_rank_zero() {
            continue;
        }
        // A frozen sharded tensor of a policy with an adapter is part of the base. The base has its own
        // folder.
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
    let indices: Vec<(usize, &str)> = kept.into_values().collect();
    let path = folder.join(file_name(stem, mesh.rank(), mesh.ranks()));
    let order = if mesh.sharding().by_expert { BY_EXPERT } else { SHARD_ORDER };
    write_tensors(&path, stored, order, |index, out| {
        let (index, kind) = indices[index];
        let tensor = to_host(parameters.local_state(index, kind)?)?;
        match tensor.dtype() {
            DType::U8 => Ok(out.write_all(&host_codes(&tensor)?)?),
            _ => write_f32(out, &host_values(&tensor)?),
        }
    })
}

/// The open state files, one per process that wrote them.
struct StateFiles {
    /// The path of the first file.
    path: PathBuf,
    files: Vec<TensorFile>,
}

impl StateFiles {
    fn open(folder: &Path, stem: &str) -> Result<Self> {
        let ranks =
            if folder.join(file_name(stem, 0, 1)).exists() { 1 } else { ranks_of(folder, stem).unwrap_or(1) };
        let paths: Vec<PathBuf> = (0..ranks).map(|rank| folder.join(file_name(stem, rank, ranks))).collect();
        let open = |path: &PathBuf| {
            TensorFile::open(path)
                .map_err(|e| bad_input!("{}: damaged: {e:#}; {DAMAGE_REMEDY}", path.display()))
        };
        let files = paths.iter().map(open).collect::<Result<_>>()?;
        Ok(Self { path: paths.into_iter().next().unwrap_or_default(), files })
    }

    /// Returns the rule by which the files are sharded.
    fn shard_rule(&self) -> ShardRule {
        let all_have = |(key, order): (&str, &str)| {
            self.files.iter().all(|file| {
                let metadata = file.metadata.metadata().as_ref();
                metadata.and_then(|entries| entries.get(key)).is_some_and(|found| found == order)
            })
        };
        match (all_have(SHARD_ORDER), all_have(BY_EXPERT)) {
            (true, _) => in_rank_order,
            (_, true) => by_expert,
            _ => rotated,
        }
    }

    /// Returns the names of all tensors that are not empty.
    fn names(&self) -> BTreeSet<String> {
        let names = self.files.iter().flat_map(|file| {
            let has_values = |name: &String| file.metadata.info(name).is_some_and(|info| info.shape != [0]);
            file.metadata.offset_keys().into_iter().filter(has_values)
        });
        names.collect()
    }

    fn damaged(&self, problem: String) -> anyhow::Error {
        bad_input!("{}: {problem}; {DAMAGE_REMEDY}", self.path.display())
    }

    /// Reads the range `own` of the values of the tensor `name` of `spec`. If it is sharded, file m of M has
    /// the values `range_of(m, M)`. Otherwise the first file has the whole tensor. Returns `None` if no file
    /// has the tensor, and an error if its size or type is wrong.
    fn read(
        &self,
        (spec, name): (&ParameterSpec, &str),
        (dtype, length): (DType, usize),
        own: Range<usize>,
        range_of: impl Fn(usize, usize) -> Range<usize>,
    ) -> Result<Option<Vec<u8>>> {
        let infos: Vec<_> = self.files.iter().map(|file| (file, file.metadata.info(name))).collect();
        if infos.iter().all(|(_, info)| info.is_none()) {
            return Ok(None);
        }
        let is_sharded = infos.len() > 1 && infos.iter().all(|(_, info)| info.is_some());
        let width = dtype.size_in_bytes();
        let mut bytes = vec![0; own.len() * width];
        for (rank, (file, info)) in infos.iter().enumerate() {
            let Some(info) = info else { continue };
            let stored_range = if is_sharded { range_of(rank, infos.len()) } else { 0..length };
            if info.dtype != stored_dtype(dtype) || info.shape != [stored_range.len()] {
                return Err(self.damaged(format!("{} has another size or optimizer", spec.name)));
            }
            let common = stored_range.start.max(own.start)..stored_range.end.min(own.end);
            if !common.is_empty() {
                let to = (common.start - own.start) * width..(common.end - own.start) * width;
                file.read_at(info, (common.start - stored_range.start) * width, &mut bytes[to])?;
            }
        }
        Ok(Some(bytes))
    }

    /// Reads a moment of `spec` from 8-bit codes. `names` are the names of its codes and scales in the files.
    /// Returns the values of the whole tensor; `None` if the files have no such codes.
    fn read_8bit_moment(
        &self,
        [codes, scales]: &[String; 2],
        is_first: bool,
        spec: &ParameterSpec,
        shard_of: impl Fn(usize, usize) -> Range<usize>,
    ) -> Result<Option<Vec<f32>>> {
        let values = spec.element_count();
        let codes = self.read((spec, codes), (DType::U8, values), 0..values, &shard_of)?;
        let blocks = values.div_ceil(BLOCK);
        let block_range = |rank, ranks| state_range(BLOCK_STATES[0], shard_of(rank, ranks));
        let scales = self.read((spec, scales), (DType::F32, blocks), 0..blocks, block_range)?;
        let (Some(codes), Some(scales)) = (codes, scales) else { return Ok(None) };
        let scales: Vec<f32> = f32_values(&scales).collect();
        Ok(Some(decode_moment(is_first, &codes, &scales)))
    }
}

/// Returns the names of the codes and scales of the moment `kind`; `None` if `kind` is no moment.
fn names_of_8bit_moment(kind: &str, spec: &ParameterSpec) -> Option<[String; 2]> {
    let moment = MOMENTS.iter().position(|name| *name == kind)?;
    Some([CODES[moment], BLOCK_STATES[moment]].map(|kind| format!("{kind}.{}", spec.name)))
}

/// Returns the number of processes that wrote the files of `stem` in `folder`.
fn ranks_of(folder: &Path, stem: &str) -> Option<usize> {
    std::fs::read_dir(folder).ok()?.flatten().find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let (_, ranks) = name.strip_prefix(stem)?.strip_suffix(".safetensors")?.split_once("-of-")?;
        ranks.parse().ok().filter(|ranks| (1..=65_536).contains(ranks))
    })
}

/// Reads the files that [`write`] wrote, one tensor at a time. Each process reads its own shards. If
/// `requires_frozen` is true, every frozen tensor must be present too.
///
/// # Errors
/// [`crate::error::BadInput`] when the files do not match the model.
pub fn restore(
    (folder, stem): (&Path, &str),
    parameters: &mut Parameters,
    requires_frozen: bool,
) -> Result<()> {
    let files = StateFiles::open(folder, stem)?;
    let mut unread = files.names();
    let shard_of = files.shard_rule();
    for (index, spec) in parameters.specs.clone().iter().enumerate() {
        if parameters.values(index).is_err() {
            continue;
        }
        let kinds = parameters.state(index).keys().copied().chain([MASTER]).collect::<BTreeSet<_>>();
        for kind in kinds {
            let name = format!("{kind}.{}", spec.name);
            let (dtype, length) = parameters.state_shape(index, kind)?;
            let own = parameters.local_range(index, kind, length);
            let range_of = |rank: usize, ranks: usize| state_range(kind, shard_of(spec, index, rank, ranks));
            let mut bytes = files.read((spec, &name), (dtype, length), own.clone(), range_of)?;
            // In older runs, the biases of experts had 8-bit moments.
            if let (None, true, Some(names)) =
                (&bytes, spec.is_expert_parameter(), names_of_8bit_moment(kind, spec))
            {
                let shard_of = |rank: usize, ranks: usize| shard_of(spec, index, rank, ranks);
                let values = files.read_8bit_moment(&names, kind == MOMENTS[0], spec, shard_of);
                bytes = values?.map(|values| f32_bytes(&values[own]).to_vec());
                unread.retain(|name| !names.contains(name));
            }
            let Some(bytes) = bytes else {
                if parameters.is_trained(index) || requires_frozen {
                    return Err(files.damaged(format!("{} is missing", spec.name)));
                }
                continue;
            };
            unread.remove(&name);
            if dtype != DType::U8
                && let Some(value) = f32_values(&bytes).find(|value| !value.is_finite())
            {
                return Err(files.damaged(format!("{name} has the value {value}")));
            }
            parameters.overwrite(index, kind, &bytes)?;
        }
    }
    // Without this check, the state of another optimizer would be dropped without a message.
    if let Some(name) = unread.first() {
        return Err(files.damaged(format!("{name} belongs to another model or optimizer")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tensor_file::FRAMEWORK;
    use super::*;
    use crate::model::names::{Layout, TensorRole};

    /// Returns the bias of five experts with `values` values.
    fn spec_of_experts(values: usize) -> ParameterSpec {
        ParameterSpec {
            name: "model.layers.0.mlp.experts.down_proj_bias".to_owned(),
            layer: Some(0),
            role: TensorRole::Bias,
            stored_shape: vec![5, values / 5],
            layout: Layout::AsStored,
        }
    }

    /// Before shards were in rank order, the shards of a tensor were rotated by its index.
    #[test]
    fn shards_of_all_orders_are_read() {
        const VALUES: usize = 700;
        let values: Vec<f32> = (0..VALUES).map(|i| i as f32).collect();
        let spec = spec_of_experts(VALUES);
        for (written, metadata) in
            [(rotated as ShardRule, FRAMEWORK), (in_rank_order, SHARD_ORDER), (by_expert, BY_EXPERT)]
        {
            let folder = tempfile::tempdir().unwrap();
            for rank in 0..3 {
                let own = written(&spec, 1, rank, 3);
                let path = folder.path().join(file_name("trainer", rank, 3));
                let shape = vec![own.len()];
                let stored = StoredTensor { name: "master.x".to_owned(), dtype: Dtype::F32, shape };
                write_tensors(&path, vec![stored], metadata, |_, out| write_f32(out, &values[own.clone()]))
                    .unwrap();
            }
            let files = StateFiles::open(folder.path(), "trainer").unwrap();
            let rule = files.shard_rule();
            let range_of = |rank: usize, ranks: usize| rule(&spec, 1, rank, ranks);
            for own in [0..VALUES, 200..600, 512..VALUES] {
                let name = (&spec, "master.x");
                let read = files.read(name, (DType::F32, VALUES), own.clone(), range_of).unwrap();
                let read: Vec<f32> = f32_values(&read.unwrap()).collect();
                assert_eq!(read, values[own]);
            }
        }
    }

    /// Biases of experts had 8-bit moments before they had f32 moments.
    #[test]
    fn eight_bit_moments_of_experts_are_read_as_f32() {
        const VALUES: usize = 700;
        let spec = spec_of_experts(VALUES);
        let codes: Vec<u8> = (0..VALUES).map(|i| (i * 7 % 256) as u8).collect();
        let scales = [0.5f32, 2.0, 3.0];
        let folder = tempfile::tempdir().unwrap();
        for rank in 0..2 {
            let own = in_rank_order(&spec, 1, rank, 2);
            let blocks = state_range(BLOCK_STATES[1], own.clone());
            let tensor = |kind: &str, dtype, length| {
                let name = format!("{kind}.{}", spec.name);
                StoredTensor { name, dtype, shape: vec![length] }
            };
            let stored = vec![
                tensor(CODES[1], Dtype::U8, own.len()),
                tensor(BLOCK_STATES[1], Dtype::F32, blocks.len()),
            ];
            let path = folder.path().join(file_name("trainer", rank, 2));
            write_tensors(&path, stored, SHARD_ORDER, |index, out| match index {
                0 => Ok(out.write_all(&codes[own.clone()])?),
                _ => write_f32(out, &scales[blocks.clone()]),
            })
            .unwrap();
        }
        let files = StateFiles::open(folder.path(), "trainer").unwrap();
        let shard_of = |rank: usize, ranks: usize| in_rank_order(&spec, 1, rank, ranks);
        let names = names_of_8bit_moment(MOMENTS[1], &spec).unwrap();
        let read = files.read_8bit_moment(&names, false, &spec, shard_of).ok().flatten();
        assert_eq!(read.unwrap(), decode_moment(false, &codes, &scales));
        let others = names_of_8bit_moment(MOMENTS[0], &spec).unwrap();
        assert!(files.read_8bit_moment(&others, true, &spec, shard_of).is_ok_and(|read| read.is_none()));
        assert!(names_of_8bit_moment(MASTER, &spec).is_none());
    }
}
