//! `rloss sft`: what it learns from, and that it is the SFT warm-up of `rloss train`.

use super::*;
use rloss::chat::{ChatFormat, ConversationRenderer, SystemPromptSettings};
use rloss::harmony::{Message, Role};
use rloss::learner::examples::read_rows;

/// `rloss sft` of the quickstart's model on `data`, in bit-exact checkpoints.
fn sft(data: &Path, out: &Path, arguments: &[&str]) -> Command {
    let mut command = rloss();
    command.arg("sft").arg(quickstart()).arg("--data").arg(data).arg("--out").arg(out);
    command.args(["--set", "parallel.threads=2", "--set", "checkpoint.dtype=f32"]).args(arguments);
    command
}

fn weights(checkpoint: &Path) -> Vec<u8> {
    fs::read(checkpoint.join("model.safetensors")).unwrap()
}

#[test]
fn it_is_the_sft_warm_up_of_train() {
    let names = ["rows.jsonl", "sft", "train", "again", "model", "plain"];
    let (_folder, [data, out, same, again, model, plain]) = scratch(names);
    fs::write(&data, conversations()).unwrap();
    let data_text = data.to_str().unwrap();
    // 16 rows in batches of 3: 4 epochs take 22 steps, and an epoch 6.
    let options = ["--validation", data_text, "--epochs", "4", "--set", "cold_start.batch_size=3"];
    done(&mut sft(&data, &out, &[&options[..], &["--set", "cold_start.optimizer.lr=1e-3"]].concat()));
    let file = format!("cold_start.train_file={data_text}");
    let validation = format!("cold_start.validation_file={data_text}");
    done(train(&same, &[&file, &validation]).sets([
        "cold_start.steps=22",
        "cold_start.batch_size=3",
        "cold_start.eval_every_steps=6",
        "cold_start.optimizer.lr=1e-3",
        "train.steps=0",
        "parallel.threads=2",
        "checkpoint.dtype=f32",
    ]));
    assert_eq!(results(&out), results(&same));
    let last = |run: &Path| run.join("checkpoints/cold-start-000022");
    assert_eq!(weights(&last(&out)), weights(&last(&same)));
    let losses: Vec<f64> = phase(&rows(&out), "cold_start")
        .filter_map(|row| row.get("cold_start/held_out_loss").and_then(Value::as_f64))
        .collect();
    assert_eq!(losses.len(), 5, "{losses:?}");
    assert!(losses[4] < 0.7 * losses[0], "{losses:?}");

    // The result is a model from which the next run starts.
    let more = ["--validation", data_text, "--set", "cold_start.steps=1"];
    done(rloss().arg("sft").arg(&out).arg("--data").arg(&data).arg("--out").arg(&again).args(more));
    let first = rows(&again)[0]["cold_start/held_out_loss"].as_f64().unwrap();
    assert_eq!(Some(&first), losses.last());

    // Regression test: `rloss eval` sampled an unrelated task.
    copy_folder(&last(&out), &model);
    let mut sft = rloss();
    sft.arg("sft").arg(&model).arg("--data").arg(&data).arg("--out").arg(&plain);
    done(sft.sets(["cold_start.steps=1"]));
    refused(rloss().arg("eval").arg(&plain), &["no task to evaluate; name one"]);
    let sets = ["task.name=arithmetic_single", "chat.system_message=false", "eval.problems_max=1"];
    done(rloss().arg("eval").arg(&plain).sets(sets));
}

/// SFT made the reference of the recipe's KL loss, and wrote it.
#[test]
fn bug_sft_had_the_reference_and_the_critic_of_a_later_rl() {
    let (_folder, [data, out]) = scratch(["rows.jsonl", "sft"]);
    fs::write(&data, conversations()).unwrap();
    let kl = "policy.kl.place=loss";
    let planned = |steps: &str| {
        let text = done(rloss().args(["check", "quickstart_ppo", "--set", kl, "--set", steps])).stdout;
        (text.contains("resident  reference"), text.contains("resident  critic's weights"))
    };
    assert_eq!((planned("train.steps=1"), planned("train.steps=0")), ((true, true), (false, false)));
    done(&mut sft(&data, &out, &["--epochs", "1", "--set", kl]));
    assert!(out.join("checkpoints").is_dir() && !out.join("reference.safetensors").exists());
}

/// An epoch of 33 rows took three batches of 16.
#[test]
fn bug_a_last_batch_was_filled_with_most_of_another_epoch() {
    let (_folder, [data, out]) = scratch(["rows.jsonl", "sft"]);
    let rows: String = conversations().lines().cycle().take(33).map(|row| format!("{row}\n")).collect();
    fs::write(&data, rows).unwrap();
    done(&mut sft(&data, &out, &["--epochs", "1"]));
    assert_has(&text_of(out.join("recipe.toml")), &["\nbatch_size = 11\n", "\nsteps = 3\n"]);
}

#[test]
fn an_adapter_is_what_learns() {
    let (_folder, [data, out]) = scratch(["rows.jsonl", "sft"]);
    fs::write(&data, conversations()).unwrap();
    done(&mut sft(&data, &out, &["--epochs", "1", "--set", "adapter.rank=2"]));
    let checkpoint = out.join("checkpoints/cold-start-000001");
    assert!(checkpoint.join("adapter_model.safetensors").is_file());
    assert!(!checkpoint.join("model.safetensors").is_file());
}

#[test]
fn messages_of_weight_0_are_not_learned() {
    let row = |weights: [Value; 2]| {
        let [first, second] = weights;
        let mut row = json!({"messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "first answer", "weight": first},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": "second answer", "weight": second},
        ]});
        for message in row["messages"].as_array_mut().unwrap() {
            if message["weight"].is_null() {
                message.as_object_mut().unwrap().remove("weight");
            }
        }
        row
    };
    for format in [ChatFormat::Harmony, ChatFormat::ChatMl] {
        let chat = format.from_embedded().unwrap();
        let masked = |weights| -> (Vec<u32>, Vec<bool>) {
            let messages: Vec<Message> =
                chat.read_messages(&row(weights), &SystemPromptSettings::default(), false).unwrap();
            let rendered = chat.render_training(&messages).unwrap();
            (rendered.tokens, rendered.mask)
        };
        let (tokens, all) = masked([Value::Null, Value::Null]);
        assert_eq!(masked([json!(1), json!(1.0)]), (tokens.clone(), all.clone()));
        let (same, second) = masked([json!(0), Value::Null]);
        let (_, first) = masked([Value::Null, json!(0)]);
        assert_eq!(same, tokens);
        // Together they are all, apart they share nothing, and each has its own answer.
        assert!(all.iter().zip(&first).zip(&second).all(|((&all, &a), &b)| all == (a || b) && !(a && b)));
        assert!(first.iter().position(|&m| m) < second.iter().position(|&m| m));
        assert!(first.contains(&true) && second.contains(&true));
    }
}

/// Rows were rendered without the system message that chat, rollouts and published templates have.
#[test]
fn a_row_without_a_system_message_gets_that_of_the_recipe() {
    let user = json!({"role": "user", "content": "2*3?"});
    let answer = json!({"role": "assistant", "content": "6"});
    let own = json!({"role": "system", "content": "Own."});
    for (format, developer) in [(ChatFormat::Harmony, true), (ChatFormat::ChatMl, false)] {
        let chat = format.from_embedded().unwrap();
        let system_prompt =
            [Message::new(Role::System, "Recipe."), Message::new(Role::Developer, "Instructions.")];
        let system_prompt = &system_prompt[..if developer { 2 } else { 1 }];
        let settings = SystemPromptSettings {
            model_identity: Some("Identity.".to_owned()),
            developer_instructions: developer.then(|| "Instructions.".to_owned()),
            ..SystemPromptSettings::default()
        };
        let text = |row: Value| {
            let (_folder, [file]) = scratch(["rows.jsonl"]);
            fs::write(&file, row.to_string()).unwrap();
            let renderer = ConversationRenderer {
                chat: &chat,
                system_prompt,
                settings: &settings,
                uses_python: false,
                context_tokens_max: 4096,
                vocabulary: chat.vocabulary().vocab_size(),
            };
            chat.vocabulary().decode(&read_rows(&renderer, &file, None).unwrap().sequences[0].tokens)
        };
        let plain = text(json!({"messages": [user, answer]}));
        assert!(plain.contains("Recipe.") && plain.contains("Instructions.") == developer, "{plain}");
        let replaced = text(json!({"messages": [own, user, answer]}));
        assert!(replaced.contains("Own.") && !replaced.contains("Recipe."), "{replaced}");
        assert!(!replaced.contains("Instructions."), "{replaced}");
        if developer {
            let instructions = json!({"role": "developer", "content": "Mine."});
            let mine = text(json!({"messages": [instructions, user, answer]}));
            assert!(mine.contains("Identity.") && mine.contains("Mine."), "{mine}");
            assert!(!mine.contains("Instructions."), "{mine}");
            continue;
        }
        let tool = json!({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}});
        let with_tools = text(json!({"messages": [user, answer], "tools": [tool]}));
        assert!(with_tools.contains("Identity.") && with_tools.contains("add"), "{with_tools}");
        assert!(!with_tools.contains("Recipe."), "{with_tools}");
    }
}

/// The default of `chat.system_message` became false for a vocabulary of bytes, and a resume refused it.
#[test]
fn a_run_on_a_model_of_bytes_resumes_with_its_recipe() {
    let (folder, [model, recipe]) = scratch(["model", "a.toml"]);
    copy_folder(&first_checkpoint(warm_model()), &model);
    let text = format!(
        "[model]\npath = {model:?}\n[task]\nname = \"arithmetic_single\"\n[rollout]\nturns_max = 1\nprompts_per_step = 2\n\
         samples_per_prompt = 2\nresponse_tokens_max = 8\n[train]\nsteps = 1\n[eval]\nevery_steps = 0\nbefore_training = false\n"
    );
    fs::write(&recipe, text).unwrap();
    let run = |more: &[&str]| {
        let mut command = rloss();
        command.current_dir(&folder).args(["train", "a.toml", "--out", "run"]).args(more);
        done(&mut command);
    };
    run(&[]);
    assert_has(&text_of(folder.path().join("run/recipe.toml")), &["system_message = false"]);
    run(&["--resume", "--set", "train.steps=2"]);
}

#[test]
fn all_validation_rows_are_measured() {
    let (folder, [data, held_out]) = scratch(["rows.jsonl", "held_out.jsonl"]);
    fs::write(&data, conversations()).unwrap();
    let rows = conversations();
    let first = rows.lines().next().unwrap();
    let last =
        json!({"messages": [{"role": "user", "content": "7"}, {"role": "assistant", "content": "8 9 8 9"}]});
    let losses = [256, 300].map(|count| {
        let all: Vec<String> =
            (0..count).map(|i| if i < 256 { first.to_owned() } else { last.to_string() }).collect();
        fs::write(&held_out, all.join("\n")).unwrap();
        let out = folder.path().join(count.to_string());
        let file = held_out.to_str().unwrap();
        done(&mut sft(&data, &out, &["--epochs", "1", "--validation", file]));
        phase(&super::rows(&out), "cold_start")
            .find_map(|row| row.get("cold_start/held_out_loss").and_then(Value::as_f64))
            .unwrap()
    });
    assert_ne!(losses[0], losses[1]);
}

#[test]
fn mistakes_are_named_before_any_work() {
    let (folder, [data, out]) = scratch(["rows.jsonl", "sft"]);
    let user = json!({"role": "user", "content": "1+1"});
    let answer = |weight: Value| json!({"role": "assistant", "content": "2", "weight": weight});
    let cases = [
        (json!({"messages": [user]}), "no token to train on; add an assistant message"),
        (json!({"messages": [user, answer(json!(0))]}), "no token to train on"),
        (
            json!({"messages": [user, answer(json!(0.5))]}),
            "message 2: \"weight\" is 0.5; it must be 0 (no loss) or 1",
        ),
        (
            json!({"messages": [{"role": "user", "content": "1", "weight": 1}, answer(json!(1))]}),
            "message 1: \"weight\" in a message of role user",
        ),
        (json!({"prompt": "1+1"}), "needs \"messages\""),
        (
            json!({"messages": [user, {"role": "assistant", "channel": "final", "content": "2"}],
                "tools": [{"type": "function", "function": {"name": "add"}}]}),
            "\"tools\" beside messages in Harmony's form",
        ),
    ];
    let good = json!({"messages": [user, answer(json!(1))]});
    for (row, reason) in cases {
        fs::write(&data, format!("{good}\n{row}\n")).unwrap();
        refused(&mut sft(&data, &out, &[]), &["rows.jsonl: row 2: ", reason]);
        assert!(!out.exists());
    }
    fs::write(&data, format!("{good}\n")).unwrap();
    let both = ["--epochs", "2", "--set", "cold_start.steps=3"];
    refused(&mut sft(&data, &out, &both), &["--epochs and cold_start.steps"]);
    refused(&mut sft(&folder.path().join("none.jsonl"), &out, &[]), &["none.jsonl"]);
}
