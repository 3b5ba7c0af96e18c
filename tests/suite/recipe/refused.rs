//! Broken recipes, each with the whole message that the user sees.

use rand::Rng;
use rloss::error::BadInput;
use rloss::random::{Purpose, stream};
use rloss::recipe::{KeyScope, resolve};
use std::path::Path;

pub(super) fn mistakes(text: &str, sets: &[&str]) -> Vec<String> {
    let sets: Vec<String> = sets.iter().map(|set| set.to_string()).collect();
    let mistakes = resolve(Path::new("r.toml"), text, &sets).expect_err("the recipe is broken");
    mistakes.listed.iter().map(ToString::to_string).collect()
}

pub(super) fn mistake(text: &str, sets: &[&str]) -> String {
    let mistakes = mistakes(text, sets);
    assert_eq!(mistakes.len(), 1, "{text} {sets:?} gives {mistakes:#?}");
    mistakes.concat()
}

#[test]
fn broken_recipes_are_refused_with_place_key_and_remedy() {
    // (recipe, the whole message)
    let cases = [
        (
            "[train]\nsteps = \"80\"",
            "r.toml:2: train.steps: found the string \"80\"; give an integer, 0 to 1000000000",
        ),
        ("[train]\nsteps = 80.0", "r.toml:2: train.steps: found 80.0; give an integer, 0 to 1000000000"),
        (
            "[train]\n\nsteps = -1",
            "r.toml:3: train.steps: -1 is out of range; give an integer, 0 to 1000000000",
        ),
        (
            "train.seed = 9223372036854775808",
            "r.toml:1: train.seed: 9223372036854775808 does not fit in a signed 64-bit integer; give an integer, 0 or more",
        ),
        ("[train]\nstep = 80", "r.toml:2: train.step: unknown key; did you mean train.steps?"),
        (
            "[train]\n\"optimizer.lr\" = 1",
            "r.toml:2: train.\"optimizer.lr\": unknown key; did you mean train.optimizer.lr?",
        ),
        (
            "\"\\u001b[2J\" = 1",
            "r.toml:1: \"\\u{1b}[2J\": unknown key; a recipe has device, model, adapter, chat, task, tools, interpreter, rollout, cold_start, train, policy, critic, arms, eval, checkpoint, parallel, logging",
        ),
        ("[trian]\nsteps = 80", "r.toml:1: trian: unknown key; did you mean train?"),
        ("[train]\nlr = 1e-3", "r.toml:2: train.lr: unknown key; did you mean train.optimizer.lr?"),
        (
            "[checkpoint]\nnokey = 1",
            "r.toml:2: checkpoint.nokey: unknown key; [checkpoint] has every_steps, keep, dtype",
        ),
        ("clip_low = 0.1", "r.toml:1: clip_low: unknown key; did you mean policy.clip_low?"),
        (
            "[arms]\nx = 1",
            "r.toml:2: arms.x: unknown key; [arms] has no_train_sinks, no_sink_gradient, second_forward_old_logprobs, router_noise, router_noise_rollout, router_noise_train, rollout_bf16, rollout_mxfp4, rollout_mantissa_bits, freeze_attention",
        ),
        (
            "[whatever]\nx = 1",
            "r.toml:1: whatever: unknown key; a recipe has device, model, adapter, chat, task, tools, interpreter, rollout, cold_start, train, \
             policy, critic, arms, eval, checkpoint, parallel, logging",
        ),
        ("train = 3", "r.toml:1: train: found a value instead of a table; write [train] and its keys below"),
        ("[train.steps]\nx = 1", "r.toml:1: train.steps: found a table; give an integer, 0 to 1000000000"),
        (
            "[task]\nname = \"gsm8\"",
            "r.toml:2: task.name: no such value \"gsm8\", did you mean \"gsm8k\"? Give \"arithmetic\", \"arithmetic_single\", \
             \"calculator\", \"format_rules\", \"gsm8k\", \"retool\", \"verify_if\", \"command\", \"python\" or \"agent\"",
        ),
        (
            "[checkpoint]\ndtype = \"fp16\"",
            "r.toml:2: checkpoint.dtype: no such value \"fp16\"; give \"f32\", \"bf16\" or \"mxfp4\"",
        ),
        (
            "[checkpoint]\ndtype = 16",
            "r.toml:2: checkpoint.dtype: found 16; give \"f32\", \"bf16\" or \"mxfp4\"",
        ),
        (
            "[chat]\ncurrent_date = 2025-06-28",
            "r.toml:2: chat.current_date: found 2025-06-28 without quotes; write \"2025-06-28\"",
        ),
        (
            "[chat]\ncurrent_date = \"2025-02-30\"",
            "r.toml:2: chat.current_date: \"2025-02-30\" is not a date; write it as YYYY-MM-DD, such as \"2025-06-28\"",
        ),
        (
            "[chat]\nknowledge_cutoff = \"June\"",
            "r.toml:2: chat.knowledge_cutoff: \"June\" is not a month; write it as YYYY-MM, such as \"2024-06\"",
        ),
        ("[logging]\ntensorboard = 1", "r.toml:2: logging.tensorboard: found 1; give true or false"),
        (
            "[eval]\npass_at = 4",
            "r.toml:2: eval.pass_at: found 4; give an array, each element an integer, 1 or more",
        ),
        (
            "[eval]\nsamples = 4\npass_at = [1, 0]",
            "r.toml:3: eval.pass_at: element 2: 0 is out of range; give an integer, 1 or more",
        ),
        (
            "[eval]\npass_at = [\n 4]",
            "r.toml:2: eval.pass_at: pass@4 needs at least 4 samples, but eval.samples is 1; raise it",
        ),
        (
            "[eval]\nsamples = 8\ntemperature = 0",
            "r.toml:2: eval.samples: at temperature 0 all 8 samples of a problem are equal; write 1, or raise \
             eval.temperature",
        ),
        (
            "[policy]\nclip_low = 1.0",
            "r.toml:2: policy.clip_low: 1 is out of range for the ratio of ppo; give a number above 0 and below 1 (only cispo, \
             which clips a weight, accepts larger ones)",
        ),
        (
            "[policy]\nloss = \"gspo\"\nclip_high = 3",
            "r.toml:3: policy.clip_high: 3 is out of range for the ratio of gspo; give a number above 0 and below 1 (only \
             cispo, which clips a weight, accepts larger ones)",
        ),
        (
            "[policy]\nclip_low = 0",
            "r.toml:2: policy.clip_low: 0 is out of range; give a number, above 0 and at most 1",
        ),
        (
            "[policy]\nclip_high = nan",
            "r.toml:2: policy.clip_high: NaN is out of range; give a number, above 0 and at most 1000",
        ),
        (
            "[policy]\ndual_clip = 0.5",
            "r.toml:2: policy.dual_clip: 0.5 would clip the ratio of on-policy samples; give more than 1, or 0 for no clip",
        ),
        (
            "[train.optimizer]\nbeta2 = 1",
            "r.toml:2: train.optimizer.beta2: 1 is out of range; give a number, 0 or more and below 1",
        ),
        (
            "[train.optimizer]\nmomentum = 0.9",
            "r.toml:2: train.optimizer.momentum: only kind = \"sgd\" has a momentum, but train.optimizer.kind is \"adamw\", which uses beta1 instead; remove one of the two",
        ),
        (
            "[cold_start]\noptimizer = { kind = \"adamw_8bit\", momentum = 0.9 }",
            "r.toml:2: cold_start.optimizer.momentum: only kind = \"sgd\" has a momentum, but cold_start.optimizer.kind is \"adamw_8bit\", which uses beta1 instead; remove one of the two",
        ),
        (
            "[train.optimizer]\nkind = \"muon\"\nmomentum = 0.9",
            "r.toml:3: train.optimizer.momentum: only kind = \"sgd\" has a momentum, but train.optimizer.kind is \"muon\", which uses muon_momentum instead; remove one of the two",
        ),
        (
            "[train.optimizer]\nmuon_momentum = 0.9",
            "r.toml:2: train.optimizer.muon_momentum: only kind = \"muon\" uses this key, and train.optimizer.kind is \"adamw\"; write \"muon\", or remove the key",
        ),
        (
            "[train.optimizer]\nkind = \"sgd\"\nmomentum = 1",
            "r.toml:3: train.optimizer.momentum: 1 is out of range; give a number, 0 or more and below 1",
        ),
        (
            "[train.optimizer]\nkind = \"adam\"",
            "r.toml:2: train.optimizer.kind: no such value \"adam\", did you mean \"adamw\"? Give \"adamw\", \"adamw_8bit\", \
             \"sgd\" or \"muon\"",
        ),
        (
            "[train.optimizer]\nlr = 0",
            "r.toml:2: train.optimizer.lr: 0 is out of range; give a number, above 0 and at most 10",
        ),
        (
            "[rollout]\ntemperature = 0",
            "r.toml:2: rollout.temperature: 0 is out of range; give a number, above 0 and at most 100",
        ),
        (
            "[rollout]\ntop_k = 1",
            "r.toml:2: rollout.top_k: 1 keeps only the most likely token, so every log-probability is 0 and has no gradient; write 2 or more, or 0",
        ),
        (
            "[rollout]\nmin_p = 1.0",
            "r.toml:2: rollout.min_p: 1 keeps only the most likely token, so every log-probability is 0 and has no gradient; write less than 1",
        ),
        (
            "[rollout]\nresponse_tokens_max = 160",
            "r.toml:2: rollout.response_tokens_max: 160 leaves no space for a prompt: the recipe names no model, and its [model.architecture] has a context of 160 tokens; set model.path to your model, lower this key, or raise \
             model.architecture.max_position_embeddings",
        ),
        (
            "[model.architecture]\nnum_key_value_heads = 3",
            "r.toml:2: model.architecture.num_key_value_heads: 3 does not divide the 4 query heads; give a divisor",
        ),
        (
            "[model.architecture]\nhead_dim = 15",
            "r.toml:2: model.architecture.head_dim: 15 is odd, but the rotary embedding rotates pairs of dimensions; give an even number",
        ),
        (
            "[model.architecture]\nnum_experts_per_tok = 8",
            "r.toml:2: model.architecture.num_experts_per_tok: 8 is more than the 4 experts of a layer; give at most this number",
        ),
        (
            "[model.architecture.yarn]\nbeta_slow = 64",
            "r.toml:1: model.architecture.yarn.beta_fast: 32 must be above beta_slow, 64; GPT-OSS has 32 and 1",
        ),
        (
            "[model]\npath = \"src\"\narchitecture.hidden_size = 8",
            "r.toml:3: model.architecture: the model at model.path defines the architecture (config.json, or the header of a GGUF \
             file); remove one of the two",
        ),
        (
            "[model]\npath = \"src\"\ntokenizer = \"embedded\"",
            "r.toml:3: model.tokenizer: the folder of model.path has its own tokenizer; remove one of the two",
        ),
        (
            "[model]\npath = \"\"",
            "r.toml:2: model.path: the path is empty; name a file or folder, or remove the key",
        ),
        (
            "[task]\nvalidation_rows_max = 5",
            "r.toml:2: task.validation_rows_max: the task arithmetic reads no file; remove the key",
        ),
        (
            "[task]\ntrain_file = \"Cargo.toml\"",
            "r.toml:2: task.train_file: the task arithmetic generates its problems; remove the key",
        ),
        (
            "[task]\ngrading = \"all\"",
            "r.toml:2: task.grading: only the task verify_if uses this key, and task.name is arithmetic; remove one of the two",
        ),
        (
            "[task]\nname = \"verify_if\"\ntrain_file = \"Cargo.toml\"\nvalidation_file = \"Cargo.toml\"\nanswer = \"exact\"",
            "r.toml:5: task.answer: only the task retool uses this key, and task.name is verify_if; remove one of the two",
        ),
        (
            "[task]\nname = \"retool\"\ntrain_file = \"Cargo.toml\"\nextraction = \"strict\"\nvalidation_file = \"Cargo.toml\"",
            "r.toml:4: task.extraction: only the task gsm8k uses this key, and task.name is retool; remove one of the two",
        ),
        (
            "[task]\nname = \"retool\"\ntrain_file = \"Cargo.toml\"",
            "r.toml:1: task.validation_file: missing, and the task retool reads its problems from this file; set the key",
        ),
        (
            "[task]\ncommand = [\"python3\"]",
            "r.toml:2: task.command: only the task command or python or agent uses this key, and task.name is arithmetic; remove one of the two",
        ),
        (
            "[task]\nname = \"command\"",
            "r.toml:1: task.command: missing, and the task \"command\" runs this program; write a program and its arguments, such as \
             [\"python3\", \"my_task.py\"]",
        ),
        (
            "[task]\nname = \"gsm8k\"\nvalidation_file = \"Cargo.toml\"",
            "r.toml:1: task.train_file: missing, and the task gsm8k reads its problems from this file; set the key",
        ),
        (
            "[interpreter]\ntime_limit_s = 5",
            "r.toml:1: interpreter.wall_clock_s: 3 must be above interpreter.time_limit_s, 5: it is the second limit, which kills the worker if the first limit fails; raise interpreter.wall_clock_s",
        ),
        (
            "[train]\nfreeze = [\"\"]",
            "r.toml:2: train.freeze: an empty pattern matches no parameter; remove it, or write one such as \"*.self_attn.*\"",
        ),
    ];
    for (text, message) in cases {
        assert_eq!(mistake(text, &[]), message, "{text}");
    }
}

#[test]
fn a_group_of_one_is_refused_where_the_advantage_compares_within_groups() {
    let text =
        |advantage: &str| format!("rollout.samples_per_prompt = 1\npolicy.advantage = \"{advantage}\"");
    assert_eq!(
        mistake(&text("grpo"), &[]),
        "r.toml:1: rollout.samples_per_prompt: a group of one has its raw reward as advantage under grpo; give 2 or more, or \
         an advantage without groups such as \"reinforce_plus_plus\""
    );
    for advantage in ["dr_grpo", "grpo_batch_std", "rloo"] {
        assert_eq!(mistakes(&text(advantage), &[]).len(), 1, "{advantage}");
    }
    for advantage in ["reinforce_plus_plus", "remax", "gae"] {
        assert!(resolve(Path::new("r.toml"), &text(advantage), &[]).is_ok(), "{advantage}");
    }
    // A run that was written before the rule goes on.
    let stored =
        rloss::recipe::resolve_run_recipe(KeyScope::TrainStoredRun, Path::new("r.toml"), &text("grpo"), &[]);
    assert!(stored.is_ok());
}

#[test]
fn a_command_is_not_refused_for_keys_that_it_does_not_read() {
    let accepts = |scope: KeyScope, set: &str| {
        let data =
            "[task]\nname = \"gsm8k\"\ntrain_file = \"Cargo.toml\"\nvalidation_file = \"Cargo.toml\"\n";
        rloss::recipe::resolve_for(scope, Path::new("r.toml"), data, &[set.to_owned()]).is_ok()
    };
    let all = [KeyScope::Train, KeyScope::Rollout, KeyScope::Eval, KeyScope::Chat, KeyScope::CheckMismatch];
    for (set, refusing) in [
        ("train.minibatches=1000", &[KeyScope::Train][..]),
        ("train.freeze=[\"\"]", &[KeyScope::Train]),
        ("eval={samples=4,temperature=0}", &[KeyScope::Train, KeyScope::Eval]),
        ("rollout.top_k=1", &[KeyScope::Train]),
        ("rollout={top_p=0.5,top_k=20,min_p=0.1}", &[]),
        ("task.train_file=none", &[KeyScope::Train, KeyScope::Rollout, KeyScope::CheckMismatch]),
        ("task.validation_file=none", &[KeyScope::Train, KeyScope::Eval]),
        ("interpreter.time_limit_s=9", &all),
        ("train.minibatches=no number", &all),
    ] {
        for scope in all {
            assert_eq!(accepts(scope, set), !refusing.contains(&scope), "{scope:?} {set}");
        }
    }
}

#[test]
fn missing_files_are_named_with_their_absolute_path() {
    let here = std::env::current_dir().expect("a working directory");
    for (text, key, remedy) in [
        ("model.path = \"no/folder\"", "model.path", "set model.path to a folder"),
        ("model.tokenizer = \"no/folder\"", "model.tokenizer", "name a tokenizer.json or its folder"),
        ("cold_start.train_file = \"no/folder\"", "cold_start.train_file", "name an existing file"),
        ("cold_start.validation_file = \"no/folder\"", "cold_start.validation_file", "name an existing file"),
        (
            "task = { name = \"gsm8k\", train_file = \"no/folder\", validation_file = \"Cargo.toml\" }",
            "task.train_file",
            "rloss fetch gsm8k",
        ),
    ] {
        let message = mistake(text, &[]);
        assert!(message.starts_with(&format!("r.toml:1: {key}: no")), "{message}");
        assert!(message.contains(&here.join("no/folder").display().to_string()), "{message}");
        assert!(message.contains(remedy), "{message}");
    }
}

#[test]
fn mistakes_in_sets_name_the_set() {
    for (set, message) in [
        ("train.steps=ten", "--set: train.steps: found the string \"ten\"; give an integer, 0 to 1000000000"),
        ("train.step=10", "--set: train.step: unknown key; did you mean train.steps?"),
        (
            "policy.clip_low=2",
            "--set: policy.clip_low: 2 is out of range; give a number, above 0 and at most 1",
        ),
        (
            "train.freeze=[a",
            "--set: train.freeze: found the string \"[a\"; give an array, each element a string",
        ),
        ("train.steps", "--set: \"train.steps\" is not key=value; write it like --set train.steps=80"),
        ("[train] # x=1", "--set: \"[train] # x=1\" is not key=value; write it like --set train.steps=80"),
        ("two words=1", "--set: \"two words=1\" is not key=value; write it like --set train.steps=80"),
        ("=1", "--set: \"=1\" is not key=value; write it like --set train.steps=80"),
        (
            "train.seed=1\ntrain.steps=2",
            "--set: train.seed: found the string \"1\\ntrain.steps=2\"; give an integer, 0 or more",
        ),
        (
            "model.dtype=fp32",
            "--set: model.dtype: no such value \"fp32\", did you mean \"f32\"? Give \"f32\", \"bf16\" or \"bf16_dot\"",
        ),
    ] {
        assert_eq!(mistake("[train]\nsteps = 3", &[set]), message);
    }
}

#[test]
fn all_mistakes_come_at_once_in_order() {
    let text = "[train]\nsteps = \"x\"\nlr = 1\n[rollout]\nsamples_per_prompt = 1\n[tsak]\nname = 1\n[policy]\nclip_low = 7\n";
    let all = mistakes(text, &["eval.sample=2", "nonsense"]);
    let starts = [
        "r.toml:2: train.steps:",
        "r.toml:3: train.lr:",
        "r.toml:5: rollout.samples_per_prompt:",
        "r.toml:6: tsak:",
        "r.toml:9: policy.clip_low:",
        "--set: eval.sample:",
        "--set: \"nonsense\"",
    ];
    assert_eq!(all.len(), starts.len(), "{all:#?}");
    for (mistake, start) in all.iter().zip(starts) {
        assert!(mistake.starts_with(start), "{mistake} / {start}");
    }
}

#[test]
fn mistakes_of_syntax_are_shown_with_those_of_meaning() {
    let all = mistakes("[train]\nsteps = = 3\nseed = -1\n[policy]\nclip_low = 0.2 0.3\n[policy]\n", &[]);
    assert!(all.iter().any(|mistake| mistake.starts_with("r.toml:2: not TOML: ")), "{all:#?}");
    assert!(all.iter().any(|mistake| mistake.starts_with("r.toml:3: train.seed: ")), "{all:#?}");
    assert!(all.iter().any(|mistake| mistake.starts_with("r.toml:5: not TOML: ")), "{all:#?}");
    assert!(all.iter().any(|mistake| mistake.starts_with("r.toml:6: not TOML: duplicate")), "{all:#?}");
    assert!(mistakes("steps = \"", &[])[0].starts_with("r.toml:1: not TOML: "));
}

#[test]
fn one_slip_is_one_mistake() {
    // A slip of syntax is not also what the parser makes of the rest of its line, or of the keys below it.
    for text in [
        "[train\nsteps = 2",
        "[train]\nsteps = 2\n[train.optimizer\nlr = 1",
        "[train]\nlr == 2",
        "[train]\nsteps: 3",
    ] {
        assert!(mistake(text, &[]).contains("not TOML: "), "{text}");
    }
    // A misspelt train_file is not also a missing one, and a wrong task name brings no rule of another task.
    let gsm8k = "[task]\nname = \"gsm8k\"\nvalidation_file = \"Cargo.toml\"\n";
    assert_eq!(
        mistake(&format!("{gsm8k}train_fiel = \"Cargo.toml\""), &[]),
        "r.toml:4: task.train_fiel: unknown key; did you mean task.train_file?"
    );
    assert!(
        mistake("[task]\nname = \"gsm\"\ntrain_file = \"Cargo.toml\"", &[])
            .starts_with("r.toml:2: task.name")
    );
}

#[test]
fn mistakes_become_one_bad_input() {
    let mistakes = resolve(Path::new("r.toml"), "a = 1\nb = 2", &[]).expect_err("broken");
    let error = anyhow::Error::from(mistakes);
    let bad_input = error.downcast_ref::<BadInput>().expect("bad input");
    assert!(bad_input.0.starts_with("2 mistakes in the recipe:\n  r.toml:1: a: "), "{bad_input}");
    assert!(bad_input.0.contains("\n  r.toml:2: b: "), "{bad_input}");
}

#[test]
fn no_damage_to_a_recipe_is_a_panic() {
    let text = include_str!("everything.toml");
    let read = |text: &str| match resolve(Path::new("r.toml"), text, &[text.to_owned()]) {
        Ok(plan) => assert!(plan.to_toml().contains("[train]")),
        Err(mistakes) => assert!(!mistakes.listed.is_empty()),
    };
    for (end, _) in text.char_indices() {
        read(&text[..end]);
    }
    let letters: Vec<char> = "[]{}\"'=.,#\n\\0-e x".chars().collect();
    let mut rng = stream(0, Purpose::Shuffle, &[]);
    for _ in 0..2000 {
        let mut damaged: Vec<char> = text.chars().collect();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..damaged.len());
            damaged[at] = letters[rng.random_range(0..letters.len())];
        }
        read(&damaged.into_iter().collect::<String>());
    }
}

#[test]
fn contradictions_of_the_policy_are_refused_with_the_reason() {
    // (recipe, key, part of the reason)
    let correction = |keys: &str| format!("[policy.correction]\n{keys}");
    let cases = [
        ("train.minibatches = 2".to_owned(), "train.minibatches", "would change the old log-probs"),
        ("train.epochs = 3".to_owned(), "train.epochs", "would change the old log-probs"),
        (
            "policy.old_logprob = \"rollout\"\ntrain.minibatches = 65".to_owned(),
            "train.minibatches",
            "65 updates are more than the 64 trajectories of a step",
        ),
        (
            "policy.old_logprob = \"rollout\"\npolicy.correction.is = \"token\"".to_owned(),
            "policy.correction.is",
            "count the mismatch twice",
        ),
        (correction("normalize = true"), "policy.correction.normalize", "no weights to normalise"),
        (correction("is = \"token\"\nthreshold = []"), "policy.correction.threshold", "give one number"),
        (
            correction("is = \"token\"\nthreshold = [2.0, 0.5]"),
            "policy.correction.threshold",
            "is above the upper bound",
        ),
        (correction("threshold = [2.0, 0.5]"), "policy.correction.threshold", "is above the upper bound"),
        (correction("is = \"token\"\nthreshold = [-1]"), "policy.correction.threshold", "positive"),
        (correction("reject = [\"token_k1\"]"), "policy.correction.reject_bounds", "0 bounds for 1 options"),
        (correction("reject = [\"seq_max_k1\"]"), "policy.correction.reject", "seq_max_k"),
        (
            correction("reject = [\"token_k1\"]\nreject_bounds = [[2.0, 0.5]]"),
            "policy.correction.reject_bounds",
            "is above the upper bound",
        ),
        (
            correction("reject = [\"token_k1\"]\nreject_bounds = [[0.5]]"),
            "policy.correction.reject_bounds",
            "empty for 0.5",
        ),
        (
            correction("reject = [\"seq_sum_k3\"]\nreject_bounds = [[0.5, 2.0]]"),
            "policy.correction.reject_bounds",
            "one upper bound",
        ),
        (
            correction("reject = [\"token_k2\", \"token_k2\"]\nreject_bounds = [[1.0], [1.0]]"),
            "policy.correction.reject",
            "token_k2 is listed twice",
        ),
        (
            "policy.router_replay = \"rollout\"".to_owned(),
            "policy.router_replay",
            "rollout.keep_routes = true",
        ),
        ("policy.router_replay = \"recompute\"".to_owned(), "policy.router_replay", "the same forward pass"),
        (
            "[policy.kl]\nplace = \"reward\"\nestimator = \"k3+\"".to_owned(),
            "policy.kl.estimator",
            "no gradient flows through a reward",
        ),
        ("policy.kl.coefficient = 0".to_owned(), "policy.kl.coefficient", "above 0"),
        ("policy.kl.target = 0.1".to_owned(), "policy.kl.target", "place is \"none\""),
        (
            "[policy.kl]\nplace = \"loss\"\ntarget = 0.1".to_owned(),
            "policy.kl.target",
            "controls the divergence in the reward",
        ),
        ("[policy.kl]\nplace = \"reward\"\ntarget = 0".to_owned(), "policy.kl.target", "above 0"),
        ("policy.kl.horizon = 0".to_owned(), "policy.kl.horizon", "above 0"),
        (
            "[policy.kl]\nplace = \"reward\"\ntarget = 0.1\nhorizon = 12".to_owned(),
            "policy.kl.horizon",
            "could become 0 or negative",
        ),
        (
            "policy.loss = \"gspo\"\npolicy.correction.is = \"token\"".to_owned(),
            "policy.correction.is",
            "one ratio per sequence",
        ),
        (
            "policy.loss = \"geo_mean\"\npolicy.correction = { is = \"token\", threshold = [0.5, 2.0] }"
                .to_owned(),
            "policy.correction.threshold",
            "which is 0 if one weight is 0",
        ),
        (
            "policy.advantage = \"remax\"\ntrain.trajectories = \"Cargo.toml\"".to_owned(),
            "policy.advantage",
            "needs a greedy sample for each prompt",
        ),
        (
            "policy.advantage = \"remax\"\nrollout.resample_rounds_max = 1".to_owned(),
            "rollout.resample_rounds_max",
            "its baseline is not the group's mean",
        ),
        (
            "policy.advantage = \"gae\"\nrollout.resample_rounds_max = 1".to_owned(),
            "rollout.resample_rounds_max",
            "its baseline is not the group's mean",
        ),
        (
            "policy.advantage = \"reinforce_plus_plus\"\nrollout.resample_rounds_max = 1".to_owned(),
            "rollout.resample_rounds_max",
            "its baseline is not the group's mean",
        ),
        (
            "rollout.resample_rounds_max = 1\ntrain.trajectories = \"Cargo.toml\"".to_owned(),
            "rollout.resample_rounds_max",
            "nothing is sampled",
        ),
        (
            "policy.overlong.buffer_tokens = 100".to_owned(),
            "policy.overlong.buffer_tokens",
            "more than the 72",
        ),
        ("[critic]".to_owned(), "critic", "write \"gae\", or remove [critic]"),
        ("critic.optimizer.lr = 1e-4".to_owned(), "critic", "policy.advantage is \"grpo\""),
        (
            "policy.advantage = \"gae\"\ncritic.minibatches = 65".to_owned(),
            "critic.minibatches",
            "65 updates are more than the 64",
        ),
        ("policy.advantage = \"gae\"\ncritic.lambda = 1.5".to_owned(), "critic.lambda", "0 to 1"),
        ("policy.advantage = \"gae\"\ncritic.freeze = [\"\"]".to_owned(), "critic.freeze", "empty pattern"),
        (
            "rollout.samples_per_prompt = 1\nrollout.resample_rounds_max = 1".to_owned(),
            "rollout.samples_per_prompt",
            "group of one",
        ),
    ];
    for (text, key, reason) in cases {
        let found = mistake(&text, &[]);
        assert!(found.contains(&format!(" {key}: ")) && found.contains(reason), "{text}: {found}");
    }
}

#[test]
fn what_only_looks_like_a_contradiction_is_allowed() {
    for text in [
        // Bounds of a weight, the lower one open.
        "[policy]\nloss = \"cispo\"\nclip_low = 1.0\nclip_high = 4.0",
        // No ratio in the loss: the weights are the only one.
        "policy.loss = \"reinforce\"\npolicy.old_logprob = \"rollout\"\npolicy.correction.is = \"sequence\"",
        "policy.loss = \"gspo\"\npolicy.correction.is = \"sequence\"",
        "policy.loss = \"geo_mean\"\npolicy.correction.is = \"token\"",
        "policy.loss = \"sapo\"\n[policy.sapo]\ntemperature_positive = 2",
        "policy.loss = \"dppo_kl\"\npolicy.advantage = \"opo\"",
        "[policy.kl]\nplace = \"reward\"\ntarget = 0.1",
        "policy.advantage = \"remax\"\nrollout.samples_per_prompt = 1",
    ] {
        let found = resolve(Path::new("r.toml"), text, &[]);
        let plan = found.unwrap_or_else(|mistakes| panic!("{text}: {:?}", mistakes.listed));
        assert!(plan.warnings.is_empty(), "{text}: {:?}", plan.warnings);
    }
}
