//! Programs in the text of an answer: they run, and their output is inserted into the same message.

use super::*;
use rloss::chat::{ChatFormat, ProgramScanner};
use rloss::trajectory::{Trajectory, Turn};

const PROGRAM: &str = "<|channel|>final<|message|>So\n```python\n7*12\n```";
const OUTPUT: &str = "\n```output\n<7*12\n>\n```\n";

fn with_programs(world: &World, form: ToolForm, turns: &[&str]) -> (Trajectory, Vec<Message>) {
    let (questions, tool) = (Questions::new(), echo());
    let rollout = Rollout { form, ..world.rollout(&questions, Some(&tool)) };
    let script = Script::new(world, turns);
    let mut rollouts = play(rollout, &script, &Questions::prompts(1), 1).unwrap();
    (rollouts.groups.remove(0).trajectories.remove(0), rollouts.messages.remove(0).remove(0)[1..].to_vec())
}

fn roomy() -> World {
    let mut world = World::roomy();
    world.plan.settings.response_tokens_max = 900;
    world
}

#[test]
fn a_programs_output_is_inserted_into_the_message_and_masked() {
    let world = roomy();
    let (t, messages) = with_programs(&world, ToolForm::Fence, &[PROGRAM, "ok<|return|>"]);
    let of = |mask: bool| -> Vec<u32> {
        (t.prompt_tokens..t.tokens.len()).filter(|&i| t.mask[i] == mask).map(|i| t.tokens[i]).collect()
    };
    assert_eq!(world.tokenizer.decode(&of(false)), OUTPUT);
    assert_eq!(world.tokenizer.decode(&of(true)), format!("{PROGRAM}ok<|return|>"));
    assert!((0..t.tokens.len()).all(|i| t.mask[i] || t.log_probs[i] == 0.0));
    let first = Turn { start: t.prompt_tokens, end: t.turns[0].end, calls: vec![CallOutcome::Answered] };
    let second = Turn { start: first.end + OUTPUT.len(), end: t.tokens.len(), calls: vec![] };
    assert_eq!(t.turns, [first, second]);
    let start = "So\n```python\n7*12\n```".len();
    let answer = Message::assistant("final", format!("So\n```python\n7*12\n```{OUTPUT}ok"));
    assert_eq!(messages, [Message { inserted: vec![(start, start + OUTPUT.len())], ..answer }]);
    assert_eq!((t.outcome, t.tool_s), (Outcome::Finished, 0.25));
}

#[test]
fn what_follows_the_fence_in_its_token_is_the_models() {
    let world = roomy();
    let tags = "<|channel|>final<|message|><code>\n7*12\n</code>";
    let (t, messages) = with_programs(&world, ToolForm::CodeTags, &[tags, "ok<|return|>"]);
    assert_eq!(t.turns[0].calls, [CallOutcome::Answered]);
    let inserted = "\n<interpreter>\n<7*12\n>\n</interpreter>\n";
    assert_eq!(messages[0].content, format!("<code>\n7*12\n</code>{inserted}ok"));
    let (start, end) = messages[0].inserted[0];
    assert_eq!(&messages[0].content[start..end], inserted);
}

#[test]
fn programs_in_thoughts_other_languages_and_open_blocks_never_run() {
    let world = roomy();
    let program = "```python\n7*12\n```\n";
    for turn in [
        format!(
            "<|channel|>analysis<|message|>{program}<|end|><|start|>assistant<|channel|>final<|message|>ok<|return|>"
        ),
        "<|channel|>final<|message|>```bash\n7*12\n```\nok<|return|>".to_owned(),
        "<|channel|>final<|message|>```output\n84\n```\nok<|return|>".to_owned(),
        "<|channel|>final<|message|>```python\n7*12 ok<|return|>".to_owned(),
        format!("<|channel|>final<|message|>````text\n{program}````\nok<|return|>"),
    ] {
        let (t, _) = with_programs(&world, ToolForm::Fence, &[&turn]);
        assert_eq!((t.turns.len(), t.outcome), (1, Outcome::Finished), "{turn}");
        assert!(t.turns[0].calls.is_empty(), "{turn}");
    }
    let called = "<|channel|>analysis to=python<|message|>7*12<|call|>";
    let (t, messages) =
        with_programs(&world, ToolForm::Fence, &[called, "<|channel|>final<|message|>ok<|return|>"]);
    assert_eq!(t.turns[0].calls, [CallOutcome::UnknownRecipient], "the tool takes no calls in this form");
    assert!(messages[1].content.starts_with("Error: "));
    let (t, _) = with_programs(&world, ToolForm::Call, &[&format!("{PROGRAM}\nok<|return|>")]);
    assert_eq!((t.turns.len(), t.outcome), (1, Outcome::Finished), "the default runs calls alone");
}

#[test]
fn runs_count_as_turns() {
    let mut world = roomy();
    world.plan.settings.turns_max = 2;
    let again = "and\n```python\n1\n```";
    let (t, messages) = with_programs(&world, ToolForm::Fence, &[PROGRAM, again]);
    assert_eq!((t.turns.len(), t.outcome), (2, Outcome::TurnsExhausted));
    assert_eq!((&t.turns[0].calls[..], t.turns[1].calls.len()), (&[CallOutcome::Answered][..], 0));
    assert!(messages[0].content.ends_with(again));
}

/// An output that spells a call is text, and the answer after it is graded.
#[test]
fn an_output_calls_nothing() {
    let chat = ChatFormat::ChatMl.from_embedded().unwrap();
    let mut parser = chat.turn_parser().without_calls();
    let call = "<tool_call>\n{\"name\": \"python\", \"arguments\": {\"code\": \"1\"}}\n</tool_call>";
    let text = format!("```python\n1\n```\n```output\n{call}\n```\n\\boxed{{1}}");
    for id in chat.vocabulary().encode_with_special(&format!("{text}<|im_end|>")).unwrap() {
        parser.push(id);
    }
    assert!(parser.calls().is_empty());
    assert_eq!(parser.finish(), [Message::assistant("final", text)]);
}

/// A character of several tokens began the search again, and programs that had run ran once more.
#[test]
fn bug_an_unfinished_character_is_no_new_answer() {
    let chat = ChatFormat::ThinkingChatMl.from_embedded().unwrap();
    let mut parser = chat.turn_parser().without_calls();
    let mut scanner = ProgramScanner::new(ToolForm::Fence);
    let program = "```python\nprint('é')\n```\n";
    let text = format!("<think>\n{program}</think>\n\n{program}größer\n{program}");
    let mut programs = vec![];
    for id in chat.vocabulary().encode_with_special(&text).unwrap() {
        parser.push(id);
        programs.extend(scanner.read(parser.answer()));
    }
    assert_eq!(programs, ["print('é')\n", "print('é')\n"]);
    let answer = parser.answer().unwrap().to_vec();
    assert_eq!(parser.finish()[1].content.as_bytes(), answer, "places in both are the same");
}
