//! Conversations in a model's own chat template: the history's ids against a fresh rendering.

use super::*;
use crate::own_templates::own_chat;
use rloss::trajectory::Trajectory;

/// Plays one sample of a question with two follow-ups. Returns its trajectories with their messages.
fn play_three_turns(template: &str, turns: [&str; 3]) -> (World, Vec<(Trajectory, Vec<Message>)>) {
    let mut world = World::roomy();
    world.chat = own_chat(template);
    world.plan.settings.keep_routes = true;
    let task = Questions { follow_ups: vec!["And 2?".into(), "And 3?".into()] };
    let script =
        Script(turns.iter().map(|turn| encode_with_special(world.chat.vocabulary(), turn)).collect());
    let rollouts = play(world.rollout(&task, None), &script, &Questions::prompts(1), 2).unwrap();
    let (group, messages) = (&rollouts.groups[0], &rollouts.messages[0]);
    assert_eq!(group.trajectories.len(), messages.len());
    let of_first = group.trajectories.iter().zip(messages).filter(|(trajectory, _)| trajectory.sample == 0);
    for trajectory in &group.trajectories {
        // The model has not read the last token.
        let (_, read) = trajectory.routed_experts.split_last().unwrap();
        assert_eq!(trajectory.routed_experts.len(), trajectory.tokens.len());
        assert!(read.iter().all(|experts| !experts.is_empty()), "part {}", trajectory.part);
    }
    let first = of_first.map(|(trajectory, messages)| (trajectory.clone(), messages.clone())).collect();
    (world, first)
}

/// The messages of a trajectory before its last answer.
fn before_last_answer(messages: &[Message]) -> &[Message] {
    let last_user = messages.iter().rposition(|message| message.role == rloss::harmony::Role::User).unwrap();
    &messages[..=last_user]
}

#[test]
fn the_ids_of_a_history_are_those_of_a_fresh_rendering() {
    for template in ["plain", "default_system", "tools_json", "parts", "dated", "tools_xml"] {
        let (world, parts) =
            play_three_turns(template, ["one<|im_end|>", "two words<|im_end|>", "3<|im_end|>"]);
        assert_eq!(parts.len(), 1, "{template}");
        let (trajectory, messages) = &parts[0];
        let prompt = world.chat.render_prompt(before_last_answer(messages)).unwrap();
        assert_eq!(trajectory.tokens[..trajectory.turns[2].start], prompt, "{template}");
        assert_eq!((trajectory.turns.len(), trajectory.part), (3, 0), "{template}");
    }
}

/// Sampled ids stay, although the template would trim the text around them.
#[test]
fn a_sampled_turn_stays_as_it_was_sampled() {
    let (world, parts) = play_three_turns("default_system", ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]);
    assert_eq!(parts.len(), 1);
    let text = world.chat.vocabulary().decode(&parts[0].0.tokens);
    assert!(text.ends_with("assistant\nc<|im_end|>"), "{text}");
}

#[test]
fn earlier_turns_that_a_template_rewrites_begin_another_part() {
    let turn = "<think>\nhm\n</think>\n\nok<|im_end|>";
    let (world, parts) = play_three_turns("thoughts", [turn; 3]);
    assert_eq!(parts.iter().map(|(trajectory, _)| trajectory.part).collect::<Vec<_>>(), [0, 1, 2]);
    for (trajectory, messages) in &parts {
        let prompt = world.chat.render_prompt(before_last_answer(messages)).unwrap();
        assert_eq!(trajectory.tokens[..trajectory.prompt_tokens], prompt, "part {}", trajectory.part);
        assert_eq!(
            trajectory.tokens[trajectory.prompt_tokens..],
            encode_with_special(world.chat.vocabulary(), turn)
        );
        assert_eq!(
            (trajectory.turns.len(), trajectory.sampled_tokens()),
            (1, trajectory.log_probs.len() - prompt.len())
        );
        assert!(
            !world.chat.vocabulary().decode(&prompt).contains("hm"),
            "the template drops earlier thoughts"
        );
        assert_eq!(trajectory.reward, parts[0].0.reward);
    }
    // An answer without a thought is rewritten by nothing.
    let (_, parts) = play_three_turns("thoughts", ["ok<|im_end|>"; 3]);
    assert_eq!(parts.len(), 1);
}
