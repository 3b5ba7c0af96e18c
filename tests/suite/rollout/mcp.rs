//! Tools of an MCP server in the message loop, in both families' chat formats.

use super::*;
use crate::{mcp, qwen2, skips};
use rloss::chat::chatml::ChatMl;
use rloss::chat::{SystemPromptSettings, system_prompt};
use rloss::harmony::Role;
use rloss::tasks::McpTask;

/// A model of each family, with its turns: two calls, then an answer.
fn worlds() -> [(World, Script); 2] {
    let roomy = |config: Config| Config { max_position_embeddings: 2048, ..config };
    let mut harmony = World::new(roomy(tiny::config(false)), 2);
    let mut chatml = World::new(roomy(qwen2::config(false)), 2);
    chatml.chat = Chat::ChatMl(ChatMl::from_embedded().unwrap());
    for world in [&mut harmony, &mut chatml] {
        (world.plan.settings.prompt_tokens_max, world.plan.settings.response_tokens_max) = (1600, 400);
    }
    let calls = [
        "<|channel|>commentary to=functions.add<|message|>{\"a\": 2, \"b\": 40}<|call|>",
        "<|channel|>commentary to=functions.add<|message|>{\"a\": \"x\", \"b\": 40}<|call|>",
        "<|channel|>final<|message|>42<|return|>",
    ];
    let script = Script::new(&harmony, &calls);
    let turns = [
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 2, \"b\": 40}}\n</tool_call>",
        "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": \"x\", \"b\": 40}}\n</tool_call>",
        "42",
    ];
    let end = chatml.chat.stop_tokens()[0];
    let turn = |text: &str| [chatml.chat.vocabulary().encode_text(text).unwrap(), vec![end]].concat();
    let chatml_script = Script(turns.iter().map(|text| turn(text)).collect());
    [(harmony, script), (chatml, chatml_script)]
}

/// Plays one sample of the task's first problem.
fn play_one(world: &World, script: &Script, task: &McpTask) -> Rollouts {
    let settings = SystemPromptSettings { system_message: Some(false), ..SystemPromptSettings::default() };
    let prompt = system_prompt(&world.chat, &settings, false, task.tools());
    let rollout = Rollout { system_prompt: &prompt, ..world.rollout(task, None) };
    play(rollout, script, &numbered([task.training_problem(0, 0)]), 1).unwrap()
}

#[test]
fn either_family_calls_the_tools_of_a_server() {
    let Some(()) = skips::python3() else { return };
    let task = mcp::task("");
    for (world, script) in worlds() {
        let (rollouts, format) = (play_one(&world, &script, &task), world.chat.name());
        let t = &rollouts.groups[0].trajectories[0];
        assert_eq!(t.outcome, Outcome::Finished, "{format}");
        let calls: Vec<_> = t.turns.iter().map(|turn| turn.calls.clone()).collect();
        let answered = vec![CallOutcome::Answered];
        assert_eq!(calls, [answered.clone(), answered, vec![]], "{format}");
        let replies = rollouts.messages[0][0].iter().filter(|message| message.role == Role::Tool);
        let replies: Vec<&str> = replies.map(|message| message.content.as_str()).collect();
        assert_eq!(replies, ["42", "a and b must be integers"], "{format}");
        let prompt = world.chat.vocabulary().decode(&t.tokens[..t.prompt_tokens]);
        assert!(["add", "picture"].iter().all(|name| prompt.contains(name)), "{format}: {prompt}");
        let masked = (t.prompt_tokens..t.tokens.len()).filter(|&i| !t.mask[i]).map(|i| t.tokens[i]);
        let inserted = world.chat.vocabulary().decode(&masked.collect::<Vec<_>>());
        assert!(inserted.contains("a and b must be integers"), "{format}: replies are masked: {inserted}");
    }
}

#[test]
fn a_server_that_dies_in_a_call_fails_that_trajectory() {
    let Some(()) = skips::python3() else { return };
    let task = mcp::task("dies");
    for (world, script) in worlds() {
        let rollouts = play_one(&world, &script, &task);
        let t = &rollouts.groups[0].trajectories[0];
        assert_eq!((t.outcome, t.reward, t.success), (Outcome::TaskFailed, -1.0, false));
        assert_eq!(t.turns.len(), 1);
        let metrics = rloss::rollout::metrics(&rollouts.groups).finish().unwrap();
        assert_eq!(metrics.get("outcome/task_failed"), Some(1.0));
    }
}
