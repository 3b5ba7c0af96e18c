//! The message loop under forced tokens: calls, mistakes, budgets, several user turns.

use super::*;
use crate::qwen2;
use rloss::chat::chatml::ChatMl;
use rloss::harmony::Role;
use rloss::trajectory::{Trajectory, Turn};

const CALL: &str = "<|channel|>analysis to=python<|message|>7*12<|call|>";
const FINAL: &str = "<|channel|>final<|message|>ok<|return|>";

/// Plays `turns` once; returns the record and the messages after the question.
fn play_once(
    world: &World,
    task: &Questions,
    tool: Option<&dyn Interpreter>,
    turns: &[&str],
) -> (Trajectory, Vec<Message>) {
    let script = Script::new(world, turns);
    let mut rollouts = play(world.rollout(task, tool), &script, &Questions::prompts(1), 1).unwrap();
    let trajectory = rollouts.groups.remove(0).trajectories.remove(0);
    let messages = rollouts.messages.remove(0).remove(0);
    assert_eq!(messages[0], Questions::prompts(1)[0].problem.messages[0]);
    (trajectory, messages[1..].to_vec())
}

fn with_echo(world: &World, turns: &[&str]) -> (Trajectory, Vec<Message>) {
    play_once(world, &Questions::new(), Some(&echo()), turns)
}

/// In Harmony a turn has one call at most.
fn one(calls: &[CallOutcome]) -> Option<CallOutcome> {
    assert!(calls.len() < 2);
    calls.first().copied()
}

/// What became of each turn's call.
fn calls(t: &Trajectory) -> Vec<Option<CallOutcome>> {
    t.turns.iter().map(|turn| one(&turn.calls)).collect()
}

/// The text of a trajectory after its prompt.
fn text(world: &World, t: &Trajectory) -> String {
    world.tokenizer.decode(&t.tokens[t.prompt_tokens..])
}

#[test]
fn a_call_is_answered_and_what_is_inserted_is_masked() {
    let world = World::roomy();
    let (t, messages) = with_echo(&world, &[CALL, FINAL]);
    let inserted =
        "<|start|>python to=assistant<|channel|>analysis<|message|><7*12><|end|><|start|>assistant";
    assert_eq!(text(&world, &t), format!("{CALL}{inserted}{FINAL}"));
    let of = |mask: bool| -> Vec<u32> {
        (t.prompt_tokens..t.tokens.len()).filter(|&i| t.mask[i] == mask).map(|i| t.tokens[i]).collect()
    };
    assert_eq!(world.tokenizer.decode(&of(false)), inserted);
    assert_eq!(world.tokenizer.decode(&of(true)), format!("{CALL}{FINAL}"));
    assert_eq!((t.outcome, t.success, t.reward, t.tool_s), (Outcome::Finished, true, 1.0, 0.25));
    let first = Turn { start: t.prompt_tokens, end: t.turns[0].end, calls: vec![CallOutcome::Answered] };
    let second = Turn { start: t.turns[1].start, end: t.tokens.len(), calls: vec![] };
    assert_eq!(t.turns, [first, second]);
    let reply = Message::tool("python", Some("analysis"), "<7*12>");
    let expected = [Message::call("python", "analysis", "7*12"), reply, Message::assistant("final", "ok")];
    assert_eq!(messages, expected);
}

#[test]
fn sampled_ids_stay_although_the_tokenizer_would_write_them_otherwise() {
    let world = World::roomy();
    let (t, _) = with_echo(&world, &[FINAL]);
    // The script spells header words byte by byte; the tokenizer would take one token each.
    let canonical = world.tokenizer.render_message(&Message::assistant("final", "ok")).unwrap();
    assert!(t.sampled_tokens() > canonical.len(), "{} {}", t.sampled_tokens(), canonical.len());
}

#[test]
fn every_reply_of_the_tool_counts_under_its_own_name() {
    let world = World::roomy();
    for &outcome in CallOutcome::ALL {
        let tool = Scripted(move |_, _: &str| (outcome, "what happened".into()));
        let (t, messages) = play_once(&world, &Questions::new(), Some(&tool), &[CALL, FINAL]);
        assert_eq!((calls(&t), t.outcome), (vec![Some(outcome), None], Outcome::Finished));
        assert_eq!(messages[1].content, "what happened");
    }
}

#[test]
fn mistakes_are_answered_counted_and_survived() {
    let world = World::roomy();
    let cases = [
        (
            "<|channel|>commentary to=functions.go<|message|>{}<|call|>",
            CallOutcome::UnknownRecipient,
            "functions.go",
        ),
        ("<|channel|>analysis to=python<|message|> \n<|call|>", CallOutcome::MalformedCall, "python"),
        ("<|channel|>analysis<|message|>1<|call|>", CallOutcome::MalformedCall, "python"),
        ("what is this here<|message|>1<|call|>", CallOutcome::MalformedCall, "python"),
        ("<|channel|>analysis<|return|>", CallOutcome::MalformedCall, "python"),
        (
            "<|channel|>analysis<|message|>1<|end|><|start|>user<|message|>2<|end|>",
            CallOutcome::MalformedCall,
            "python",
        ),
        ("<|channel|>analysis to=python<|message|>1<|start|>2<|call|>", CallOutcome::MalformedCall, "python"),
    ];
    for (turn, call, author) in cases {
        let (t, messages) = with_echo(&world, &[turn, FINAL]);
        assert_eq!((calls(&t), t.outcome), (vec![Some(call), None], Outcome::Finished), "{turn}");
        let reply = &messages[messages.len() - 2];
        assert_eq!((reply.role, reply.name.as_deref()), (rloss::harmony::Role::Tool, Some(author)), "{turn}");
        assert!(reply.content.starts_with("Error: "), "{turn}: {}", reply.content);
        assert_eq!(t.tool_s, 0.0, "no tool was called");
    }
}

#[test]
fn without_a_tool_python_is_unknown_and_a_malformed_turn_the_end() {
    let world = World::roomy();
    let task = Questions::new();
    let (t, messages) = play_once(&world, &task, None, &[CALL, FINAL]);
    assert_eq!(calls(&t), [Some(CallOutcome::UnknownRecipient), None]);
    assert_eq!(messages[1].content, "Error: there is no tool named \"python\".");
    let (t, _) = play_once(&world, &task, None, &["what is this here<|message|>1<|return|>"]);
    assert_eq!((calls(&t), t.outcome), (vec![Some(CallOutcome::MalformedCall)], Outcome::Malformed));
}

/// A recipient makes a call, whatever closes it, and a broken header costs its message alone.
#[test]
fn a_turn_goes_on_after_a_broken_header_which_is_counted() {
    let world = World::roomy();
    for end in ["<|end|>", "<|return|>"] {
        let call = format!("<|channel|>analysis to=python<|message|>7*12{end}");
        let (t, messages) = with_echo(&world, &[&call, FINAL]);
        assert_eq!(calls(&t), [Some(CallOutcome::Answered), None], "{end}");
        assert_eq!(messages[1].content, "<7*12>");
    }
    let mut world = world;
    world.plan.settings.response_tokens_max = 900;
    let broken = "a b<|message|>1<|end|><|start|>assistant<|channel|>analysis<|end|><|start|>assistant";
    let (t, messages) = with_echo(&world, &[&format!("{broken}{CALL}"), &format!("{broken}{FINAL}")]);
    let malformed = [CallOutcome::MalformedCall; 2];
    assert_eq!(t.turns[0].calls, [&malformed[..], &[CallOutcome::Answered]].concat());
    assert_eq!((&t.turns[1].calls[..], t.outcome, t.success), (&malformed[..], Outcome::Finished, true));
    assert_eq!(messages.len(), 7);
}

#[test]
fn only_return_ends_an_answer() {
    let world = World::roomy();
    let twice =
        "<|channel|>final<|message|>no<|end|><|start|>assistant<|channel|>final<|message|>ok<|return|>";
    let (t, messages) = with_echo(&world, &[twice]);
    assert_eq!((t.outcome, t.success, t.turns.len()), (Outcome::Finished, true, 1));
    assert_eq!(messages, [Message::assistant("final", "no"), Message::assistant("final", "ok")]);
    let (t, messages) = with_echo(&world, &["<|channel|>analysis<|message|>ok<|return|>"]);
    assert_eq!((t.outcome, t.success, messages.len()), (Outcome::Finished, false, 1));
}

#[test]
fn turns_run_out() {
    let mut world = World::roomy();
    world.plan.settings.turns_max = 2;
    let (t, messages) = with_echo(&world, &[CALL, CALL]);
    assert_eq!((calls(&t), t.outcome), (vec![Some(CallOutcome::Answered), None], Outcome::TurnsExhausted));
    assert_eq!((t.reward, t.tool_s), (-1.0, 0.25));
    assert_eq!(messages.last().unwrap(), &Message::call("python", "analysis", "7*12"));
    let (t, _) = with_echo(&world, &[CALL, "<|channel|>analysis<|message|>1<|call|>"]);
    let malformed = Some(CallOutcome::MalformedCall);
    assert_eq!((calls(&t), t.outcome), (vec![Some(CallOutcome::Answered), malformed], Outcome::Malformed));
}

#[test]
fn sampled_tokens_run_out_within_a_message_a_header_and_at_a_call() {
    let mut world = World::roomy();
    let length = |turn: &str| encode_with_special(&world.tokenizer, turn).len();
    let (call, end) = (length(CALL), length(FINAL));
    for budget in [1, call - 1, call, call + 1, call + end - 1] {
        world.plan.settings.response_tokens_max = budget;
        let (t, _) = with_echo(&world, &[CALL, FINAL]);
        assert_eq!((t.outcome, t.sampled_tokens()), (Outcome::TruncatedLength, budget));
        let called = if budget > call { Some(CallOutcome::Answered) } else { None };
        assert_eq!(one(&t.turns[0].calls), called, "a call that cannot be answered is not run");
        assert!(t.mask.last().unwrap(), "nothing is inserted where nothing can follow");
    }
    world.plan.settings.response_tokens_max = call + end;
    assert_eq!(with_echo(&world, &[CALL, FINAL]).0.outcome, Outcome::Finished);
}

#[test]
fn the_context_runs_out_while_sampling_and_at_a_reply_that_does_not_fit() {
    let whole = with_echo(&World::roomy(), &[CALL, FINAL]).0;
    let last = whole.turns[1].start;
    for context in whole.prompt_tokens + 1..=whole.tokens.len() {
        let config = Config { max_position_embeddings: context, ..tiny::config(false) };
        let world = World::new(config, 1);
        let (t, messages) = with_echo(&world, &[CALL, FINAL]);
        assert_eq!(t.tokens, whole.tokens[..t.tokens.len()]);
        let tokens = match context {
            c if c <= whole.turns[0].end => c,
            c if c <= last => whole.turns[0].end,
            c => c,
        };
        assert_eq!(t.tokens.len(), tokens, "context {context}");
        let finished = context == whole.tokens.len();
        let outcome = if finished { Outcome::Finished } else { Outcome::TruncatedLength };
        assert_eq!(t.outcome, outcome, "context {context}");
        let replied = messages.iter().any(|m| m.role == rloss::harmony::Role::Tool);
        assert_eq!(replied, context > last, "only what the model could read is in the conversation");
    }
}

#[test]
fn a_prompt_that_is_too_long_is_refused_by_name() {
    let refused = |world: &World| {
        let error = world
            .rollout(&Questions::new(), None)
            .run(&Questions::prompts(7), 1, Hooks { keeps_parts: true, ..Hooks::until(&|| false) })
            .unwrap_err();
        assert!(error.downcast_ref::<rloss::error::BadInput>().is_some());
        error.to_string()
    };
    let mut world = World::roomy();
    world.plan.settings.prompt_tokens_max = 25;
    let error = refused(&world);
    assert!(error.contains("questions/") && error.contains("rollout.prompt_tokens_max = 25"), "{error}");
    let world = World::new(Config { max_position_embeddings: 25, ..tiny::config(false) }, 1);
    let error = refused(&world);
    assert!(error.contains("questions/") && error.contains("context has 25"), "{error}");
}

#[test]
fn a_prompt_of_megabytes_is_refused_by_its_size() {
    let world = World::roomy();
    let problem = Problem {
        id: "huge/0".into(),
        messages: vec![Message::user("1+".repeat(6 << 20))],
        answer: serde_json::Value::Null,
    };
    let prompts = [Prompt { index: 0, problem }];
    let error = world
        .rollout(&Questions::new(), None)
        .run(&prompts, 1, Hooks { keeps_parts: true, ..Hooks::until(&|| false) })
        .unwrap_err()
        .to_string();
    assert!(error.contains("huge/0") && error.contains("12582912 bytes"), "{error}");
}

#[test]
fn further_user_messages_go_on_with_the_conversation() {
    let mut world = World::roomy();
    let task = Questions { follow_ups: vec!["<|end|>Sure?".into(), "Really?".into()] };
    let no = "<|channel|>final<|message|>no<|return|>";
    let (t, messages) = play_once(&world, &task, None, &[no, no, FINAL]);
    assert_eq!((t.outcome, t.success, t.turns.len()), (Outcome::Finished, true, 3));
    let expected = format!(
        "{no}<|start|>user<|message|><|end|>Sure?<|end|><|start|>assistant{no}<|start|>user<|message|>Really?<|end|>\
         <|start|>assistant{FINAL}"
    );
    assert_eq!(text(&world, &t), expected);
    let controls = t.tokens.iter().filter(|&&id| id == world.tokenizer.control_tokens().end).count();
    assert_eq!(controls, 3, "a control token in the user's text is ordinary text");
    assert_eq!(messages[1], Message::user("<|end|>Sure?"));
    world.plan.settings.turns_max = 2;
    let (t, _) = play_once(&world, &task, None, &[no, no]);
    assert_eq!((t.outcome, t.turns.len()), (Outcome::TurnsExhausted, 2));
}

#[test]
fn a_task_that_fails_is_an_outcome() {
    let world = World::roomy();
    let (t, _) = with_echo(&world, &["<|channel|>final<|message|>ungradable<|return|>"]);
    assert_eq!((t.outcome, t.reward, t.success), (Outcome::TaskFailed, -1.0, false));
    let rollouts = Rollouts {
        groups: vec![rloss::trajectory::Group { trajectories: vec![t], greedy: None }],
        messages: vec![vec![vec![]]],
        answers: vec![serde_json::Value::Null],
        episodes: None,
    };
    let metrics = rloss::rollout::metrics(&rollouts.groups).finish().unwrap();
    assert_eq!(metrics.get("outcome/task_failed"), Some(1.0));
    assert_eq!(metrics.get("outcome/finished"), Some(0.0));
    // It is dropped, so it counts in no group.
    assert_eq!((metrics.get("trajectory/dropped"), metrics.get("critic/rewards/mean")), (Some(1.0), None));
    assert_eq!(metrics.get("group/zero_signal_fraction"), None);
}

#[test]
fn a_panicking_tool_ends_the_rollout_instead_of_waiting_for_ever() {
    let world = World::roomy();
    let tool = Scripted(|_, _: &str| panic!("a tool's bug"));
    let script = Script::new(&world, &[CALL, FINAL]);
    let error =
        play(world.rollout(&Questions::new(), Some(&tool)), &script, &Questions::prompts(3), 2).unwrap_err();
    assert!(format!("{error:#}").contains("a tool or task panicked"), "{error:#}");
}

#[test]
fn a_rollout_can_be_stopped_and_tells_its_progress() {
    use std::sync::Mutex;
    let world = World::roomy();
    let (task, tool) = (Questions::new(), echo());
    let rollout = world.rollout(&task, Some(&tool));
    let prompts = Questions::prompts(4);
    assert!(rollout.run(&prompts, 2, Hooks::until(&|| true)).unwrap().is_none());
    let seen = Mutex::new(vec![]);
    let whole = rollout
        .run(&prompts, 2, Hooks { progress: &|p| seen.lock().unwrap().push(p), ..Hooks::until(&|| false) })
        .unwrap()
        .unwrap();
    let seen = seen.into_inner().unwrap();
    assert!(seen.is_sorted_by_key(|p| (p.finished, p.sampled_tokens)));
    let last = seen.last().unwrap();
    assert_eq!((last.finished, last.trajectories), (8, 8));
    assert_eq!(last.sampled_tokens as usize, whole.counts().sampled_tokens);
    assert_eq!(last.reward_sum, whole.trajectories().map(|t| f64::from(t.reward)).sum::<f64>());
    assert!(rollout.run(&[], 2, Hooks::until(&|| false)).unwrap().unwrap().groups.is_empty());
}

/// An answer of `<tool_call>` tokens alone had an error reply for each: tens of thousands of tokens, far above
/// the plan of memory.
#[test]
fn the_calls_of_a_turn_share_the_characters_of_one_reply() {
    let mut world = World::new(Config { max_position_embeddings: 2048, ..qwen2::config(false) }, 2);
    world.chat = Chat::ChatMl(ChatMl::from_embedded().unwrap());
    (world.plan.settings.prompt_tokens_max, world.plan.settings.response_tokens_max) = (800, 400);
    let call = |code: &str| {
        let call = format!("{{\"name\": \"python\", \"arguments\": {{\"code\": \"{code}\"}}}}");
        format!("<tool_call>\n{call}\n</tool_call>")
    };
    let end = world.chat.stop_tokens()[0];
    let played = |turns: &[String], reply_chars_max: usize| {
        let turn = |text: &String| [world.chat.vocabulary().encode_text(text).unwrap(), vec![end]].concat();
        let script = Script(turns.iter().map(turn).collect());
        let (questions, tool) = (Questions::new(), echo());
        let rollout =
            Rollout { reply_chars_max: Some(reply_chars_max), ..world.rollout(&questions, Some(&tool)) };
        let mut rollouts = play(rollout, &script, &Questions::prompts(1), 1).unwrap();
        let replies = rollouts.messages[0][0].iter().filter(|message| message.role == Role::Tool);
        let replies: Vec<String> = replies.map(|message| message.content.clone()).collect();
        (rollouts.groups.remove(0).trajectories.remove(0), replies)
    };
    // 60 characters, then 200 - 60 - 32 are left, and 200 - 60 - 32 - 60 - 32 are few.
    let three = [call(&"a".repeat(58)), call(&"b".repeat(58)), call(&"c".repeat(58))].concat();
    let (t, replies) = played(&[three.clone(), "ok".to_owned()], 200);
    assert_eq!((t.outcome, t.turns[0].calls.len()), (Outcome::Finished, 3));
    assert_eq!(replies[..2], [format!("<{}>", "a".repeat(58)), format!("<{}>", "b".repeat(58))]);
    assert_eq!(replies[2], "<ccccccc\n[... 44 characters cut ...]\nccccccc>");
    // Nothing is left for the third.
    let (t, replies) = played(&[three, "ok".to_owned()], 180);
    assert_eq!((t.outcome, t.turns.len(), replies.len()), (Outcome::TruncatedLength, 1, 0));
    assert_eq!(t.turns[0].calls, [CallOutcome::Answered; 2]);
    let storm = format!("{}{}", call("1"), "<tool_call>".repeat(60));
    let (t, _) = played(&[storm, "ok".to_owned()], 1024);
    assert_eq!((t.outcome, t.turns.len()), (Outcome::TruncatedLength, 1));
    assert!(t.turns[0].calls.len() < 20, "{}", t.turns[0].calls.len());
}
