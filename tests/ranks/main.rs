//! Several processes on this machine, connected by MPI or by NCCL: what they make is what one process makes.

mod run;

use run::{Launch, assert_same_state, checkpoint_tensors, columns, metrics, rows_with};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A short run of everything: cold start, samples with the tool, an entropy bonus so that there is
/// something to learn.
const SHORT: [&str; 14] = [
    "cold_start.steps=6",
    "cold_start.eval_every_steps=3",
    "cold_start.batch_size=7",
    "cold_start.validation_rows_max=4",
    "train.steps=3",
    "train.micro_batch_tokens=300",
    "policy.entropy_coefficient=0.01",
    "rollout.prompts_per_step=5",
    "rollout.samples_per_prompt=3",
    "rollout.response_tokens_max=24",
    "eval.problems_max=8",
    "eval.every_steps=2",
    "checkpoint.every_steps=2",
    "checkpoint.keep=9",
];

/// Metrics that a clock makes.
fn is_timed(name: &str) -> bool {
    name.starts_with("perf/") || name.starts_with("timing")
}

/// Every figure of two runs is the same, but for the norm of the gradient, whose squares are added rank by
/// rank, in f64.
fn assert_same_figures(one: &run::Done, other: &run::Done, name: &str) {
    // The row after a checkpoint has its time, except in a run that resumes there.
    let untimed = |done: &run::Done| {
        let mut rows = metrics(done);
        rows.iter_mut().for_each(|row| row.retain(|key, _| !is_timed(key)));
        rows
    };
    let (one, other) = (untimed(one), untimed(other));
    assert_eq!(one.len(), other.len(), "{name}: rows");
    for (a, b) in one.iter().zip(&other) {
        assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>(), "{name}");
        for (key, a) in a {
            let b = b[key];
            let same =
                a.to_bits() == b.to_bits() || (key.contains("grad_norm") && (a - b).abs() <= 1e-12 * a.abs());
            assert!(same, "{name}: {key}: {a} and {b}");
        }
    }
}

#[test]
fn ranks_that_share_the_micro_batches_make_the_run_of_one_process_bit_for_bit() {
    for (recipe, more) in [
        ("quickstart", &["policy.kl.place=loss", "policy.kl.coefficient=0.1"][..]),
        (
            "quickstart",
            &[
                "train.optimizer.kind=adamw_8bit",
                "policy.old_logprob=recompute",
                "train.minibatches=2",
                "model.dtype=bf16",
            ],
        ),
        (
            "quickstart",
            &[
                "rollout.top_p=0.9",
                "rollout.min_p=0.001",
                "policy.old_logprob=rollout",
                "train.minibatches=2",
                "policy.kl.place=loss",
            ],
        ),
        ("quickstart_lora", &["cold_start.eval_every_steps=0"]),
        ("quickstart_ppo", &[]),
        ("quickstart_dense", &[]),
        ("quickstart_qwen3_moe", &[]),
    ] {
        let sets = [&SHORT[..], more].concat();
        let one = Launch::new(recipe, &sets).alone();
        for ranks in [2, 4] {
            let several = Launch::new(recipe, &sets).ranks(ranks).run();
            assert_same_figures(&one, &several, &format!("{recipe} {more:?} on {ranks}"));
            let mut compared = 0;
            for checkpoint in one.checkpoints() {
                // Values are the same to the bit, whichever number of processes wrote them.
                for file in ["model.safetensors", "adapter_model.safetensors"] {
                    let read = |done: &run::Done| std::fs::read(done.checkpoint(&checkpoint).join(file)).ok();
                    assert!(read(&one) == read(&several), "{recipe} on {ranks}: {checkpoint}/{file}");
                    compared += usize::from(read(&one).is_some());
                }
                for stem in ["trainer", "critic"] {
                    let there = one.checkpoint(&checkpoint).join(format!("{stem}.safetensors")).exists();
                    assert!(there || stem == "critic");
                    if there {
                        assert!(assert_same_state(&one, &several, &checkpoint, stem, ranks) > 0);
                        compared += 1;
                    }
                }
            }
            assert!(compared >= 4, "{recipe}: {compared} files");
        }
    }
}

#[test]
fn runs_that_sample_ahead_are_those_of_one_process_and_go_on_with_another_number() {
    let ahead = |lag| [&SHORT[..], &["train.steps=4", lag, "policy.old_logprob=rollout"]].concat();
    // One process has two samplings in flight, several have none.
    for lag in ["rollout.lag_steps=1", "rollout.lag_steps=2"] {
        let one = Launch::new("quickstart", &ahead(lag)).alone();
        assert_same_figures(&one, &Launch::new("quickstart", &ahead(lag)).ranks(2).run(), lag);
    }
    let sets = ahead("rollout.lag_steps=2");
    // What was sampled ahead goes on with another number of processes.
    let constant = [&sets[..], &["train.optimizer.schedule=constant"]].concat();
    let half = [&constant[..], &["train.steps=3"]].concat();
    let on = |run: run::Done| Launch::resume(&run, &["train.steps=5"]);
    let one = on(Launch::new("quickstart", &half).alone()).alone();
    let several = on(Launch::new("quickstart", &half).ranks(2).run()).ranks(3).run();
    assert_same_figures(&one, &several, "lag 2, resumed");
}

#[test]
fn partial_trajectories_of_two_processes_are_those_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("lengths.py");
    let text = "import json, sys\n\
                for line in sys.stdin:\n    \
                ask = json.loads(line)\n    \
                text = ''.join(m['content'] or '' for m in ask.get('messages', []))\n    \
                answer = {'describe': {'name': 'lengths', 'version': 2, 'validation_problems': 3}, 'problem': {'prompt': str(ask.get('index')), 'answer': 1}}\n    \
                answer = answer.get(ask['request'], {'reward': len(text) * 7 % 5 / 4, 'success': True})\n    \
                print(json.dumps({'request_id': ask['request_id'], **answer}), flush=True)\n";
    std::fs::write(&program, text).unwrap();
    let command = format!("task.command=[\"python3\",\"{}\"]", program.display());
    let partial = ["task.name=command", &command, "cold_start.steps=0", "rollout.step_tokens_max=8"];
    let sets =
        [&SHORT[..], &["train.steps=5", "rollout.lag_steps=1", "policy.old_logprob=rollout"], &partial]
            .concat();
    let one = Launch::new("quickstart", &sets).alone();
    assert!(columns(&one, "partial/trajectories_paused").iter().any(|&paused| paused > 0.0));
    assert_same_figures(&one, &Launch::new("quickstart", &sets).ranks(2).run(), "partial trajectories");
}

#[test]
fn weights_held_by_expert_while_sampling_change_no_bit() {
    let bf16 = "arms.rollout_bf16=true";
    let one_expert = ["model.architecture.num_local_experts=2", "model.architecture.num_experts_per_tok=1"];
    for (recipe, more, ranks) in [
        ("quickstart", &[][..], &[2, 3][..]),
        ("quickstart", &[bf16], &[3]),
        ("quickstart", &["arms.rollout_mxfp4=true"], &[3]),
        // One process of three has no expert.
        ("quickstart", &one_expert, &[3]),
        ("quickstart_lora", &["cold_start.eval_every_steps=0"], &[2]),
        ("quickstart_qwen3_moe", &[], &[2, 3]),
        ("quickstart_qwen3_moe", &["adapter.rank=4"], &[3]),
    ] {
        let sets = [&SHORT[..], more].concat();
        let one = Launch::new(recipe, &sets).alone();
        for ranks in ranks {
            let held = [&sets[..], &["parallel.rollout_weights=by_expert"]].concat();
            let several = Launch::new(recipe, &held).ranks(*ranks).run();
            assert_same_figures(&one, &several, &format!("{recipe} {more:?} by expert on {ranks}"));
        }
    }
}

#[test]
fn packed_weights_in_pieces_change_no_bit() {
    let base = |recipe: &str, dtype: &str| {
        let dtype = format!("checkpoint.dtype={dtype}");
        let start = [&SHORT[..], &["train.steps=0", &dtype]].concat();
        Launch::new(recipe, &start).alone()
    };
    let (gpt_oss, qwen3) = (base("quickstart", "mxfp4"), base("quickstart_qwen3_moe", "bf16"));
    for (recipe, more, several) in [
        ("quickstart_lora", &[][..], &[("whole", 2), ("by_expert", 3)][..]),
        // Layers are gathered again in the backward.
        ("quickstart_lora", &["train.recompute_layers=true"], &[("whole", 3)]),
        // The attention's matrices learn beside packed experts.
        ("quickstart", &["train.freeze=[\"*.experts.*\"]"], &[("by_expert", 2)]),
        // A second adapter, of a critic, on the same pieces.
        ("quickstart_ppo", &["adapter.rank=4"], &[("whole", 2)]),
        // Experts that lie in a file each.
        ("quickstart_qwen3_moe", &["adapter.rank=4"], &[("whole", 2), ("by_expert", 3)]),
    ] {
        let base = if recipe == "quickstart_qwen3_moe" { &qwen3 } else { &gpt_oss };
        let path = format!("model.path={}", base.checkpoint("cold-start-000006").display());
        let start = [&path, "cold_start.steps=0", "policy.kl.place=loss", "policy.kl.coefficient=0.1"];
        let sets = [&SHORT[..], &start, more].concat();
        let one = Launch::new(recipe, &sets).alone();
        for &(how, ranks) in several {
            let how = format!("parallel.rollout_weights={how}");
            let parallel = ["parallel.packed_weights=cut", &how];
            let several = Launch::new(recipe, &[&sets[..], &parallel].concat()).ranks(ranks).run();
            assert_same_figures(&one, &several, &format!("{recipe} {more:?} {how} on {ranks}"));
            let last = one.checkpoints().pop().expect("a checkpoint");
            assert!(assert_same_state(&one, &several, &last, "trainer", ranks) > 0);
        }
    }
}

#[test]
fn split_sequences_and_copies_give_the_log_probs_of_one_process_and_its_gradients_within_rounding() {
    // One step whose update is the gradient itself.
    let step = [
        "cold_start.steps=1",
        "cold_start.optimizer.kind=sgd",
        "cold_start.optimizer.lr=1",
        "cold_start.optimizer.warmup_steps=0",
        "cold_start.optimizer.grad_norm_max=0",
        "cold_start.optimizer.weight_decay=0",
        "train.steps=2",
        "policy.old_logprob=recompute",
        "checkpoint.dtype=f32",
    ];
    let start =
        ["cold_start.steps=1", "cold_start.optimizer.lr=1e-30", "train.steps=0", "checkpoint.dtype=f32"];
    for recipe in ["quickstart", "quickstart_dense", "quickstart_qwen3_moe"] {
        let start = Launch::new(recipe, &[&SHORT[..], &start].concat()).alone();
        let start = checkpoint_tensors(&start, "cold-start-000001");
        let sets = [&SHORT[..], &step].concat();
        let one = Launch::new(recipe, &sets).alone();
        let after = checkpoint_tensors(&one, "cold-start-000001");
        for (ranks, sequence, shard_size) in
            [(2, 2, 0), (4, 4, 0), (4, 2, 0), (2, 1, 1), (4, 1, 2), (4, 2, 2)]
        {
            let name = format!("{recipe}: {sequence} of {ranks}, shards on {shard_size}");
            let split = format!("parallel.sequence={sequence}");
            let shards = format!("parallel.shard_size={shard_size}");
            let several = Launch::new(recipe, &[&sets[..], &[&split, &shards]].concat()).ranks(ranks).run();
            let found = checkpoint_tensors(&several, "cold-start-000001");
            for (tensor, start) in &start {
                let moved = |of: &BTreeMap<String, Vec<f32>>| -> Vec<f64> {
                    of[tensor].iter().zip(start).map(|(a, b)| f64::from(*a) - f64::from(*b)).collect()
                };
                let (one, several) = (moved(&after), moved(&found));
                let largest = one.iter().fold(0.0f64, |m, x| m.max(x.abs()));
                let apart = one.iter().zip(&several).fold(0.0f64, |m, (a, b)| m.max((a - b).abs()));
                // The weights that both are added to have 24 bits.
                let rounding = start.iter().fold(0.0f32, |m, x| m.max(x.abs())) as f64 * 1.2e-7;
                assert!(apart <= 1e-5 * largest + rounding, "{name}: {tensor}: {apart} of {largest}");
            }
            for key in ["cold_start/loss", "cold_start/load_balance"] {
                for (a, b) in columns(&one, key).iter().zip(columns(&several, key)) {
                    assert!((a - b).abs() <= 1e-6 * a.abs(), "{name}: {key}: {a} and {b}");
                }
            }
            let gaps = columns(&several, "mismatch/log_ppl_abs_diff_max");
            assert_eq!(gaps, [0.0, 0.0], "{name}: what was sampled whole and trained split");
            let drawn = columns(&several, "training/rollout_probs_diff_max");
            assert!(drawn.iter().all(|gap| *gap == 0.0), "{name}: {drawn:?}");
        }
    }
}

/// A later copy of the weights adds one micro-batch at most here, so sums have the order of one process.
#[test]
fn copies_of_the_weights_make_the_run_of_one_process_and_go_on_as_one_copy() {
    let few = ["cold_start.batch_size=2", "rollout.prompts_per_step=1", "rollout.samples_per_prompt=2"];
    let sets =
        [&SHORT[..], &few, &["train.micro_batch_tokens=64", "train.optimizer.schedule=constant"]].concat();
    let by_expert = ["parallel.rollout_weights=by_expert"];
    for (recipe, more, ranks, size) in [
        ("quickstart", &[][..], 3, 1),
        ("quickstart", &by_expert, 4, 2),
        ("quickstart_ppo", &["train.optimizer.kind=adamw_8bit", "critic.minibatches=1"], 4, 2),
        ("quickstart_lora", &["cold_start.eval_every_steps=0"], 4, 2),
    ] {
        let sets = [&sets[..], more].concat();
        let one = Launch::new(recipe, &sets).alone();
        let shards = format!("parallel.shard_size={size}");
        let several = Launch::new(recipe, &[&sets[..], &[&shards]].concat()).ranks(ranks).run();
        assert_same_figures(&one, &several, &format!("{recipe} {more:?}: shards on {size} of {ranks}"));
        for checkpoint in one.checkpoints() {
            let read = |done: &run::Done, file| std::fs::read(done.checkpoint(&checkpoint).join(file)).ok();
            for file in ["model.safetensors", "adapter_model.safetensors"] {
                assert!(read(&one, file) == read(&several, file), "{recipe}: {checkpoint}/{file}");
            }
            match size {
                1 => assert!(read(&one, "trainer.safetensors") == read(&several, "trainer.safetensors")),
                _ => assert!(assert_same_state(&one, &several, &checkpoint, "trainer", size) > 0),
            }
        }
        // Two processes go on with one copy.
        let on = Launch::resume(&several, &["train.steps=4", "parallel.shard_size=0"]).ranks(2).run();
        let alone = Launch::resume(&one, &["train.steps=4"]).alone();
        assert_same_figures(&alone, &on, &format!("{recipe} {more:?}, resumed"));
    }
}

#[test]
fn check_mismatch_finds_no_gap_between_processes() {
    let cases =
        [(2, 1, "by_expert", "1"), (2, 2, "whole", "1"), (4, 2, "by_expert", "1"), (2, 2, "whole", "0.9")];
    for (ranks, sequence, held, top_p) in cases {
        let split = format!("parallel.sequence={sequence}");
        let held = format!("parallel.rollout_weights={held}");
        let top_p = format!("rollout.top_p={top_p}");
        let sets = ["rollout.prompts_per_step=3", "rollout.samples_per_prompt=2", &split, &held, &top_p];
        let found = Launch::command("check-mismatch", "quickstart", &sets).ranks(ranks).run();
        assert!(found.stdout.contains("rollout and training are bitwise equal"), "{}", found.stdout);
        assert_eq!(
            found.stdout.matches("batch_invariance").count(),
            1,
            "the leader alone prints\n{}",
            found.stdout
        );
    }
}

#[test]
fn a_run_goes_on_with_another_number_of_processes() {
    let sets = [&SHORT[..], &["train.steps=4", "train.optimizer.schedule=constant"]].concat();
    let whole = Launch::new("quickstart", &sets).alone();
    let half = [&sets[..], &["train.steps=2"]].concat();
    let run = Launch::new("quickstart", &half).ranks(2).run();
    let on = Launch::resume(&run, &["train.steps=4"]).ranks(3).run();
    // The first evaluation of the shorter run is its last.
    let rl = |done: &run::Done| rows_with(done, "critic/rewards/mean");
    assert_eq!(rl(&whole).len(), 4);
    for (a, b) in rl(&whole).iter().zip(rl(&on)) {
        for key in ["actor/entropy", "critic/rewards/mean", "response_length/mean"] {
            assert_eq!(a[key].to_bits(), b[key].to_bits(), "{key}");
        }
    }
    // A process's own file that is gone is damage, whoever reads the checkpoint.
    let own = on.checkpoint(on.checkpoints().last().unwrap()).join("trainer-00002-of-00003.safetensors");
    let aside = own.with_extension("aside");
    std::fs::rename(&own, &aside).unwrap();
    let refused = Launch::resume(&on, &["train.steps=5"]).ranks(2).start().wait(Duration::from_secs(60));
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
    assert!(refused.stderr.contains("trainer-00002-of-00003.safetensors"), "{}", refused.stderr);
    std::fs::rename(&aside, &own).unwrap();
    let back = Launch::resume(&on, &["train.steps=5"]).alone();
    assert_eq!(rl(&back).len(), 5);
}

#[test]
fn a_killed_process_ends_the_others_at_once_and_the_run_goes_on() {
    let sets =
        [&SHORT[..], &["train.steps=100000", "checkpoint.every_steps=1", "checkpoint.keep=2"]].concat();
    for (seed, by_slurm, held) in [(1, false, "whole"), (2, true, "by_expert")] {
        let held = format!("parallel.rollout_weights={held}");
        let mut going =
            Launch::new("quickstart", &[&sets[..], &[&held]].concat()).ranks(3).survivors(by_slurm).start();
        going.wait_for_rows(9);
        std::thread::sleep(Duration::from_millis(37 * seed));
        let begun = Instant::now();
        going.signal_rank(seed as usize, "KILL");
        let ended = going.wait(Duration::from_secs(30));
        assert!(begun.elapsed() < Duration::from_secs(30), "took {:?}", begun.elapsed());
        // The stand-in for srun lets its processes fail.
        assert!(by_slurm || ended.code != Some(0), "{}", ended.stderr);
        let survivor = ended.stderr.contains(&format!("rank {seed} on "))
            && ended.stderr.contains("is lost, so this rank stops");
        assert!(survivor || (!by_slurm && ended.stderr.contains("signal 9")), "{}", ended.stderr);
        let steps = rows_with(&ended, "critic/rewards/mean").len();
        let on = Launch::resume(&ended, &[&format!("train.steps={}", steps + 2)]).ranks(2).run();
        assert_eq!(rows_with(&on, "critic/rewards/mean").len(), steps + 2);
    }
}

#[test]
fn a_restart_by_torchrun_and_a_requeue_by_slurm_go_on_by_resume_auto() {
    // With several turns an expert has one or two rows at step 12: docs/PROCESSES.md, "Known".
    let sets = [&SHORT[..], &["train.steps=30", "eval.every_steps=0", "rollout.turns_max=1"]].concat();
    let whole = Launch::new("quickstart", &sets).alone();
    for by_slurm in [false, true] {
        let launch = Launch::new("quickstart", &sets).ranks(2).survivors(by_slurm).auto();
        let mut going = launch.clone().start();
        going.wait_for_rows(12);
        going.signal_rank(1, "KILL");
        let mut ended = going.wait(Duration::from_secs(120));
        if by_slurm || !run::by_nccl() {
            // The scheduler starts the same command again; torchrun has done so by itself.
            assert!(rows_with(&ended, "critic/rewards/mean").len() < 30, "killed after its end");
            ended = launch.run();
        }
        assert!(ended.stderr.contains("resuming"), "{}", ended.stderr);
        assert_same_figures(&whole, &ended, &format!("by_slurm: {by_slurm}"));
    }
}

#[test]
fn a_process_that_hangs_is_named_when_the_time_limit_is_over() {
    // On a busy machine a process that does not hang can be late by seconds.
    let sets = [&SHORT[..], &["train.steps=100000", "parallel.exchange_timeout_s=15"]].concat();
    let mut going = Launch::new("quickstart", &sets).ranks(3).start();
    going.wait_for_rows(9);
    going.signal_rank(2, "STOP");
    let ended = going.wait(Duration::from_secs(120));
    assert_ne!(ended.code, Some(0), "{}", ended.stderr);
    // NCCL does not say which of them it is.
    let who = if run::by_nccl() { "2]: one of them hangs" } else { "for ranks [2]: they hang" };
    let waits = |line: &&str| line.contains("has waited 15 s in \"") && line.contains(who);
    assert!(ended.stderr.lines().any(|line| waits(&line)), "{}", ended.stderr);
}

#[test]
fn a_stop_is_agreed_on_and_saved() {
    let sets = [&SHORT[..], &["train.steps=100000", "checkpoint.every_steps=0"]].concat();
    let mut going = Launch::new("quickstart", &sets).ranks(2).start();
    going.wait_for_rows(9);
    going.signal_launcher("USR1");
    let ended = going.wait(Duration::from_secs(60));
    assert!(ended.stderr.contains("stopped:") && ended.stderr.contains("to resume:"), "{}", ended.stderr);
    let steps = rows_with(&ended, "critic/rewards/mean").len();
    assert_eq!(ended.checkpoints().last().unwrap(), &format!("step-{steps:06}"));
}

#[test]
fn what_cannot_run_on_several_processes_is_refused_with_one_message() {
    let cases: [(&str, &[&str], usize, &str); 5] = [
        (
            "train",
            &["parallel.sequence=3"],
            2,
            "parallel.sequence: 3 does not divide the 2 processes of this run",
        ),
        ("train", &["parallel.sequence=3"], 3, "parallel.sequence: 3 does not divide the 4 attention heads"),
        ("train", &["parallel.shard_size=3"], 2, "parallel.shard_size: 3 does not divide the 2 processes"),
        ("train", &["train.optimizer.kind=muon"], 2, "train.optimizer.kind: \"muon\" needs whole matrices"),
        ("eval", &[], 2, "`eval` runs in one process, but this is one of 2"),
    ];
    for (command, sets, ranks, message) in cases {
        let refused =
            Launch::command(command, "quickstart", sets).ranks(ranks).start().wait(Duration::from_secs(60));
        assert_eq!(refused.stderr.matches(message).count(), 1, "{message}\n{}", refused.stderr);
        assert_eq!(refused.code, Some(2), "{}", refused.stderr);
        assert!(!refused.folder.join("metrics.jsonl").exists());
    }
    // Every process looks for the recipe; only one reports that there is none.
    let absent =
        Launch::command("train", "no_such_recipe", &[]).ranks(2).start().wait(Duration::from_secs(60));
    assert_eq!(absent.stderr.matches("no such file or folder").count(), 1, "{}", absent.stderr);
    assert_eq!(absent.code, Some(2), "{}", absent.stderr);
    let late = Launch::new("quickstart", &SHORT).ranks(2).last_differs("task.name=nothing").start();
    let late = late.wait(Duration::from_secs(60));
    assert_eq!(late.stderr.matches("error:").count(), 1, "{}", late.stderr);
    assert!(late.stderr.contains("rank 1:") && late.stderr.contains("nothing"), "{}", late.stderr);
}

#[test]
fn processes_of_other_recipes_programs_or_checkpoints_are_refused_with_one_message() {
    let refused = |launch: Launch, what: &str| {
        let ended = launch.start().wait(Duration::from_secs(120));
        let message = format!("ranks 0 and 1 have different {what}");
        assert_eq!(ended.stderr.matches(&message).count(), 1, "{}", ended.stderr);
        assert_eq!(ended.code, Some(2), "{}", ended.stderr);
        ended
    };
    let nothing_written = |ended: run::Done| assert!(!ended.folder.join("metrics.jsonl").exists());
    let checked =
        || Launch::command("check-mismatch", "quickstart", &["rollout.prompts_per_step=1"]).ranks(2);
    refused(checked().last_differs("train.seed=5"), "recipes");
    let train = Launch::new("quickstart", &SHORT).ranks(2);
    nothing_written(refused(train.last_differs("train.seed=5"), "recipes"));

    let place = tempfile::tempdir().unwrap();
    let other = place.path().join("rloss");
    std::fs::copy(run::program(), &other).unwrap();
    let mut bytes = std::fs::OpenOptions::new().append(true).open(&other).unwrap();
    std::io::Write::write_all(&mut bytes, b"another build").unwrap();
    drop(bytes);
    refused(checked().last(|arguments| arguments[0] = other.display().to_string()), "programs");
    let train = Launch::new("quickstart", &SHORT).ranks(2);
    nothing_written(refused(train.last(|arguments| arguments[0] = other.display().to_string()), "programs"));

    // Two runs of one recipe, one of them a checkpoint behind.
    let (run, behind) = (Launch::new("quickstart", &SHORT).alone(), place.path().join("behind"));
    let copied = std::process::Command::new("cp").arg("-r").args([&run.folder, &behind]).status().unwrap();
    assert!(copied.success());
    let newest = run.checkpoints().pop().unwrap();
    std::fs::remove_dir_all(behind.join("checkpoints").join(newest)).unwrap();
    let before = rows_with(&run, "critic/rewards/mean");
    let on = Launch::resume(&run, &["train.steps=4"]).ranks(2);
    let on = on.last(|arguments| arguments[2..5].clone_from_slice(&other_folder(&behind)));
    assert_eq!(rows_with(&refused(on, "checkpoints"), "critic/rewards/mean"), before);
}

/// `rloss train FOLDER --out FOLDER`, the last three words.
fn other_folder(folder: &std::path::Path) -> [String; 3] {
    let folder = folder.display().to_string();
    [folder.clone(), "--out".to_owned(), folder]
}
