//! Checks before any work that the processes of a run agree.

use crate::actor::{OptimizerKind, OptimizerSettings};
use crate::dist::{ExpertPlacement, Mesh};
use crate::integrity::{MANIFEST_FILE, file_digest};
use crate::recipe::Plan;
use anyhow::{Context, Result};
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

/// Applies the sequence-parallel degree, the sharding and the timeout of `plan` to `mesh`.
///
/// # Errors
/// [`crate::error::BadInput`] when a number does not divide the number of processes.
pub fn configure_mesh(mesh: &Mesh, plan: &Plan) -> Result<()> {
    mesh.set_timeout(Duration::from_secs_f64(plan.recipe.parallel.exchange_timeout_s));
    let parallel = &plan.recipe.parallel;
    check_division(plan, mesh.ranks())?;
    mesh.set_sequence_ranks(parallel.sequence);
    mesh.set_shards_by_expert(parallel.experts == ExpertPlacement::ByExpert);
    match parallel.shard_size {
        0 => Ok(()),
        size => mesh.set_shard_group_size(size),
    }
}

/// Checks that `processes` processes can be divided as `plan` says. A single process has the only copy of the
/// weights, whatever `parallel.shard_size` is.
///
/// # Errors
/// [`crate::error::BadInput`] when they cannot.
pub fn check_division(plan: &Plan, processes: usize) -> Result<()> {
    let parallel = &plan.recipe.parallel;
    let shard_size = if processes == 1 { 0 } else { parallel.shard_size };
    for (key, size, other) in
        [("parallel.sequence", parallel.sequence, 1), ("parallel.shard_size", shard_size, 0)]
    {
        if size > 0 && !processes.is_multiple_of(size) {
            let run = match processes {
                1 => "one process".to_owned(),
                several => format!("{several} processes"),
            };
            let reason = format!(
                "{size} does not divide the {run} of this run; start a multiple of {size} processes (mpirun -np), or give --set {key}={other}"
            );
            return Err(plan.mistake(key, reason).into());
        }
    }
    if !shard_size.is_multiple_of(parallel.sequence) {
        let reason = format!(
            "{shard_size} is not a multiple of parallel.sequence = {}; give a multiple, or 0",
            parallel.sequence
        );
        return Err(plan.mistake("parallel.shard_size", reason).into());
    }
    Ok(())
}

/// Checks that distillation works with the processes of `mesh`.
///
/// # Errors
/// [`crate::error::BadInput`] for distillation with several processes.
pub fn check_distillation(mesh: &Mesh, plan: &Plan) -> Result<()> {
    if mesh.ranks() == 1 || plan.recipe.policy.distill.is_none() {
        return Ok(());
    }
    let reason =
        "several processes cannot share a teacher yet; start one process, or remove [policy.distill]";
    Err(plan.mistake("policy.distill.teacher", reason.to_owned()).into())
}

/// Checks that the optimizers of `plan` work in `processes` processes.
///
/// # Errors
/// [`crate::error::BadInput`] for Muon in several processes, which hold shards of matrices.
pub fn check_optimizers(plan: &Plan, processes: usize) -> Result<()> {
    let recipe = &plan.recipe;
    let optimizers = [
        ("cold_start", Some(&recipe.cold_start.optimizer).filter(|_| recipe.cold_start.steps > 0)),
        ("train", Some(&recipe.train.optimizer).filter(|_| recipe.train.steps > 0)),
        ("critic", recipe.critic.as_ref().map(|critic| &critic.optimizer)),
    ];
    let is_muon = |settings: Option<&OptimizerSettings>| {
        settings.is_some_and(|settings| settings.kind == OptimizerKind::Muon)
    };
    match optimizers.into_iter().find(|(_, settings)| is_muon(*settings)) {
        Some((table, _)) if processes > 1 => {
            let reason = format!(
                "\"muon\" needs whole matrices, and the {processes} processes of this run have shards of them; write \"adamw\", or start one process"
            );
            Err(plan.mistake(&format!("{table}.optimizer.kind"), reason).into())
        }
        _ => Ok(()),
    }
}

/// Checks that all processes of `mesh` have the same recipe, the same binary, GPUs of one kind, and the same
/// starting point. The starting point is the folder `weights`, if any, and `state`.
///
/// # Errors
/// [`crate::error::BadInput`] on every process, with the same message.
pub fn check_agreement(
    mesh: &Mesh,
    plan: &Plan,
    device_name: &str,
    weights: Option<&Path>,
    state: &str,
) -> Result<()> {
    if mesh.ranks() == 1 {
        return Ok(());
    }
    mesh.check_equal("recipes", &plan.to_toml(), "start all with the same file and the same --set")?;
    // The name begins with the GPU's index, which may differ.
    let gpu = device_name.split_once(", ").map_or(device_name, |(_, name)| name);
    let gpus = mesh.all_gather_records("the GPUs", &gpu.to_owned())?;
    mesh.require_success("the GPUs", check_same_gpus(&gpus))?;
    let binary = std::env::current_exe().context("looking for this program")?;
    let digest = file_digest(&binary, None).context("reading this program")?;
    mesh.check_equal("programs", digest.to_hex().as_str(), "install one build of rloss on every node")?;
    let manifest =
        mesh.require_success("the checkpoint", weights.map_or(Ok(String::new()), manifest_digest))?;
    mesh.check_equal("checkpoints", &format!("{manifest} {state}"), "use one run folder that all nodes share")
}

/// Checks that all ranks compute on the same kind of device. `names` has the name of each rank's device.
fn check_same_gpus(names: &[String]) -> Result<()> {
    match names.iter().position(|name| *name != names[0]) {
        None => Ok(()),
        Some(other) => Err(crate::bad_input!(
            "rank 0 computes on {}, rank {other} on {}; choose GPUs of one kind, with CUDA_VISIBLE_DEVICES or other machines",
            names[0],
            names[other]
        )),
    }
}

/// Returns the digest of a folder's manifest. The manifest has the digests of the folder's files.
fn manifest_digest(folder: &Path) -> Result<String> {
    match file_digest(&folder.join(MANIFEST_FILE), None) {
        Ok(digest) => Ok(digest.to_hex().to_string()),
        // A GGUF file has no manifest, and neither does a folder from another program or from an old version.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(String::new())
        }
        Err(error) => Err(error).with_context(|| format!("reading {}", folder.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::resolve;

    #[test]
    fn ranks_with_different_gpus_are_refused_by_name() {
        let names = |names: [&str; 3]| names.map(str::to_owned);
        check_same_gpus(&names(["H200"; 3])).unwrap();
        let error = check_same_gpus(&names(["H200", "H200", "H100"])).unwrap_err();
        assert!(error.is::<crate::error::BadInput>());
        assert!(error.to_string().starts_with("rank 0 computes on H200, rank 2 on H100; "), "{error}");
    }

    #[test]
    fn processes_are_divided_into_groups_of_equal_size() {
        let mistake = |text: &str, processes| {
            let plan = resolve(Path::new("r.toml"), &format!("[parallel]\n{text}"), &[]).unwrap();
            check_division(&plan, processes).map_err(|error| error.to_string()).err()
        };
        assert_eq!(mistake("sequence = 2\nshard_size = 4", 8), None);
        assert_eq!(mistake("shard_size = 1", 3), None);
        assert_eq!(mistake("shard_size = 8", 1), None);
        let cases = [
            ("sequence = 3", 4, "parallel.sequence: 3 does not divide the 4 processes"),
            ("shard_size = 8", 4, "parallel.shard_size: 8 does not divide the 4 processes"),
            (
                "sequence = 4\nshard_size = 2",
                8,
                "parallel.shard_size: 2 is not a multiple of parallel.sequence = 4",
            ),
        ];
        for (text, processes, message) in cases {
            let found = mistake(text, processes).unwrap_or_default();
            assert!(found.contains(message), "{found}");
        }
    }

    #[test]
    fn muon_works_with_one_process_only() {
        let mistake = |text: &str, processes| {
            let plan = resolve(Path::new("r.toml"), text, &[]).unwrap();
            check_optimizers(&plan, processes).map_err(|error| error.to_string()).err()
        };
        let kind = "optimizer.kind = \"muon\"";
        for (table, start) in [
            ("train", "[train]\n"),
            ("cold_start", "[cold_start]\nsteps = 1\n"),
            ("critic", "[policy]\nadvantage = \"gae\"\n[critic]\n"),
        ] {
            let text = format!("{start}{kind}");
            assert_eq!(mistake(&text, 1), None);
            let found = mistake(&text, 2).unwrap_or_default();
            let line = text.lines().count();
            let place = format!("r.toml:{line}: {table}.optimizer.kind: \"muon\" needs whole matrices");
            assert!(found.contains(&place) && found.contains("write \"adamw\", or start one"), "{found}");
            assert_eq!(found.lines().count(), 1, "{found}");
        }
        // An optimizer of no steps is not used.
        for table in ["train", "cold_start"] {
            assert_eq!(mistake(&format!("[{table}]\nsteps = 0\n{kind}"), 2), None);
        }
        assert_eq!(mistake("[train]\noptimizer.kind = \"adamw_8bit\"", 2), None);
    }

    #[test]
    fn distillation_works_with_one_process_only() {
        let text = "[policy.distill]\nteacher = \"src\"";
        let plan = resolve(Path::new("r.toml"), text, &[]).unwrap();
        check_distillation(&Mesh::without_connection(0, 1), &plan).unwrap();
        let error = check_distillation(&Mesh::without_connection(0, 2), &plan).unwrap_err().to_string();
        assert!(error.contains("r.toml:2: policy.distill.teacher: several processes"), "{error}");
    }
}
