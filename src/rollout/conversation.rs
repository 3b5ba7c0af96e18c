//! The message loop of one trajectory: it takes sampled tokens, inserts tool replies and user messages, and
//! enforces budgets.
//!
//! Rules, in the order of their checks:
//! - Only a stop token ends an answer. In Harmony a `final` message closed by `<|end|>` is an ordinary
//!   message: sampling continues.
//! - A turn consists of the tokens sampled between two insertions. The last allowed turn must not end in a
//!   call: the call is not executed, and the trajectory ends as [`Outcome::TurnsExhausted`]. A malformed last
//!   turn ends it as [`Outcome::Malformed`].
//! - A trajectory that has used up its tokens or its context ends as [`Outcome::TruncatedLength`]; a call at
//!   its end is not executed. The trajectory ends in the same way if the next insertion would leave no space
//!   for a further token. Then nothing is inserted.
//! - A call to an unknown recipient gets an error reply, whose author is that recipient. A malformed call
//!   also gets an error reply. The author is the call's recipient if known, otherwise the Python tool. If
//!   there is neither, the trajectory ends as malformed.
//! - If a turn ends in several calls, they are answered in order, and their replies are inserted together.
//!   They share the characters of one reply: each is shortened to what the replies before it leave, and each
//!   but the first takes [`REPLY_FRAME_TOKENS`] of them. If none are left for a call, the trajectory ends as
//!   [`Outcome::TruncatedLength`].
//! - If programs in answers run ([`ToolForm`](crate::chat::ToolForm)), the end of a program ends the turn,
//!   and its output is inserted into the same message. The last allowed turn must not end in a program.
//! - Sampled tokens never change, including the stop token before a further user message. If the model's own
//!   chat template writes earlier turns in another way once messages follow, the conversation goes on in a
//!   new part: another trajectory, with the same reward. A conversation in parts does not pause.

mod calls;
mod programs;
mod record;
mod requests;

use super::partial::PausedConversation;
use super::prompt::{RenderedPrompt, first_messages};
use super::{Rollout, TurnPosition};
use crate::chat::{ChatTurnParser, NextTokens, ProgramScanner};
use crate::engine::{Completion, NewToken};
use crate::harmony::{Message, TurnEnd, TurnStep};
use crate::tasks::{OnFailure, Problem, Reward, RewardFailure, Transcript};
use crate::trajectory::{CallOutcome, Outcome, Trajectory, Turn, VersionRun};
pub use record::TokenRecord;
use requests::Coordinates;

/// Number of tokens that a chat format adds around a tool's reply, at most.
pub const REPLY_FRAME_TOKENS: usize = 32;

/// The next action of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextAction {
    /// Sample another token.
    Sample,
    /// Run the conversation's tool calls.
    Call,
    /// Ask the task for a further user message. This may take long.
    Turn,
    /// Nothing: the conversation is over.
    Finish,
}

/// A trajectory in progress.
pub(super) struct Conversation<'a> {
    rollout: &'a Rollout<'a>,
    problem: &'a Problem,
    coordinates: Coordinates,
    record: TokenRecord,
    pause: Pause,
    /// The turns that have ended.
    turns: Vec<Turn>,
    /// The parts that have ended: their tokens, their turns, and the number of messages before their end.
    parts: Vec<(TokenRecord, Vec<Turn>, usize)>,
    turn: TurnInProgress,
    /// Messages after the prompt, without those of the turn in progress.
    pub(super) messages: Vec<Message>,
    calls_answered: usize,
    tool_s: f64,
    outcome: Option<Outcome>,
}

/// When a conversation pauses, and what is read again afterwards.
struct Pause {
    /// Tokens after which the conversation pauses; `None` if it never pauses.
    after: Option<usize>,
    /// Number of tokens sampled since it began or went on.
    sampled_since: usize,
    /// Number of first tokens that are read again after a pause, and whose experts are known.
    read_again: usize,
}

/// The turn that is being sampled.
struct TurnInProgress {
    start: usize,
    parser: ChatTurnParser,
    /// Finds programs in the answer, if they run.
    programs: Option<ProgramScanner>,
    /// A program that has ended and not run yet.
    program: Option<String>,
    /// The inserted outputs, with their places in the answer.
    outputs: Vec<(usize, String)>,
    /// The action after the last token.
    next: NextAction,
    /// Inserted tokens before the turn that the engine has not read yet.
    inserted: Vec<u32>,
    /// Whether the turn begins a part, whose prompt the engine has not read yet.
    begins_part: bool,
}

/// Returns a parser of the next turn. If programs in answers run, the chat format's calls are text.
fn turn_parser(rollout: &Rollout) -> ChatTurnParser {
    let parser = rollout.chat.turn_parser();
    if rollout.form.runs_text() { parser.without_calls() } else { parser }
}

impl<'a> Conversation<'a> {
    /// Starts sample `sample` of a prompt, the trajectory `index` of the rollout.
    pub(super) fn new(
        rollout: &'a Rollout<'a>,
        prompt: &RenderedPrompt<'a>,
        sample: u64,
        index: usize,
        pause_after: Option<usize>,
    ) -> Self {
        let (plan, version) = (rollout.plan, rollout.engine.version());
        Self {
            rollout,
            problem: prompt.problem,
            coordinates: Coordinates { step: plan.step, prompt: prompt.index, sample, index },
            record: TokenRecord::new(&prompt.tokens, version, plan.keeps_token_sets()),
            pause: Pause { after: pause_after, sampled_since: 0, read_again: 0 },
            turns: vec![],
            parts: vec![],
            turn: TurnInProgress {
                start: prompt.tokens.len(),
                parser: turn_parser(rollout),
                programs: rollout.form.runs_text().then(|| ProgramScanner::new(rollout.form)),
                program: None,
                outputs: vec![],
                next: NextAction::Sample,
                inserted: vec![],
                begins_part: false,
            },
            messages: vec![],
            calls_answered: 0,
            tool_s: 0.0,
            outcome: None,
        }
    }

    /// Goes on after a pause. `step` is the step that began the conversation.
    pub(super) fn resume(mut self, paused: PausedConversation, step: u64) -> Self {
        let PausedConversation { tokens, mask, log_probs, kept_tokens, routed_experts, mut versions, .. } =
            paused;
        let version = self.rollout.engine.version();
        if versions.last().is_none_or(|run| run.version != version) {
            versions.push(VersionRun { start: tokens.len(), version });
        }
        for &token in &tokens[paused.turn_start..] {
            self.turn.parser.push(token);
        }
        self.turn.start = paused.turn_start;
        self.coordinates.step = step;
        self.pause.read_again = routed_experts.len();
        Self {
            record: TokenRecord {
                sampled: mask.iter().filter(|&&sampled| sampled).count(),
                tokens,
                mask,
                log_probs,
                kept_tokens,
                routed_experts,
                versions,
                ..self.record
            },
            turns: paused.turns,
            messages: paused.messages,
            calls_answered: paused.calls_answered,
            tool_s: paused.tool_s,
            ..self
        }
    }

    /// Returns whether no further token may be sampled before a pause.
    pub(super) fn must_pause(&self) -> bool {
        self.parts.is_empty()
            && self.pause.after.is_some_and(|tokens_max| self.pause.sampled_since >= tokens_max)
    }

    /// Pauses the conversation.
    pub(super) fn pause(self) -> PausedConversation {
        let TokenRecord { tokens, mask, log_probs, kept_tokens, routed_experts, versions, .. } = self.record;
        PausedConversation {
            tokens,
            mask,
            log_probs,
            kept_tokens,
            routed_experts,
            versions,
            turns: self.turns,
            turn_start: self.turn.start,
            messages: self.messages,
            calls_answered: self.calls_answered,
            tool_s: self.tool_s,
        }
    }

    /// Returns the number of tokens sampled since it began or went on.
    pub(super) fn sampled_since(&self) -> usize {
        self.pause.sampled_since
    }

    /// Returns its index among all trajectories of the rollout.
    pub(super) fn trajectory_index(&self) -> usize {
        self.coordinates.index
    }

    /// Returns the position of the turn that is being sampled.
    pub(super) fn position(&self) -> TurnPosition {
        self.coordinates.turn(self.turns_ended())
    }

    /// Returns the number of turns that have ended, in all parts.
    fn turns_ended(&self) -> usize {
        self.parts.iter().map(|(_, turns, _)| turns.len()).sum::<usize>() + self.turns.len()
    }

    /// Stores the engine's result for this turn and returns the next action. [`Self::push_token`] has already
    /// stored the tokens.
    pub(super) fn end_request(&mut self, completion: Completion) -> NextAction {
        let read_again = std::mem::take(&mut self.pause.read_again);
        let record = match self.parts.last_mut() {
            Some((record, ..)) if self.turn.begins_part => record,
            _ => &mut self.record,
        };
        record.routed_experts.extend(completion.routed_experts.into_iter().skip(read_again));
        self.turn.next
    }

    /// Appends the next sampled token. Returns whether the turn goes on.
    pub(super) fn push_token(&mut self, drawn: &NewToken) -> bool {
        self.turn.next = self.take_token(drawn);
        let goes_on = self.turn.inserted.is_empty() && !self.turn.begins_part;
        self.turn.next == NextAction::Sample && goes_on && !self.must_pause()
    }

    /// Appends the next sampled token. Returns the next action.
    fn take_token(&mut self, drawn: &NewToken) -> NextAction {
        self.record.push(drawn);
        self.pause.sampled_since += 1;
        let step = self.turn.parser.push(drawn.id);
        if let Some(program) =
            self.turn.programs.as_mut().and_then(|scanner| scanner.read(self.turn.parser.answer()))
        {
            return self.handle_program(program);
        }
        match step {
            TurnStep::Continues | TurnStep::MessageEnded if self.is_exhausted() => {
                self.close_turn(vec![]);
                self.end(Outcome::TruncatedLength)
            }
            TurnStep::Continues | TurnStep::MessageEnded => NextAction::Sample,
            TurnStep::Ended(end) => self.end_turn(end),
        }
    }

    /// Returns true when no further token may be sampled.
    fn is_exhausted(&self) -> bool {
        self.tokens_left() == 0
    }

    /// Returns true when the current turn is the last one allowed.
    fn is_last_turn(&self) -> bool {
        self.turns_ended() + 1 >= self.rollout.plan.settings.turns_max
    }

    fn end_turn(&mut self, end: TurnEnd) -> NextAction {
        if let TurnEnd::Returned = end { self.handle_return() } else { self.handle_call(end) }
    }

    fn handle_return(&mut self) -> NextAction {
        self.close_turn(vec![]);
        if self.rollout.task.may_take_long() { NextAction::Turn } else { self.request_user_turn() }
    }

    /// Asks the task for the next user message and blocks until the task answers. If the task may take long,
    /// this function is called on a tool thread.
    pub(super) fn request_user_turn(&mut self) -> NextAction {
        let next = self.rollout.task.next_user_message(self.problem, &self.transcript(Outcome::Finished));
        match next {
            Err(_) => self.end(Outcome::TaskFailed),
            Ok(None) => self.end(Outcome::Finished),
            Ok(Some(_)) if self.turns_ended() >= self.rollout.plan.settings.turns_max => {
                self.end(Outcome::TurnsExhausted)
            }
            Ok(Some(_)) if self.is_exhausted() => self.end(Outcome::TruncatedLength),
            Ok(Some(message)) => self.insert(vec![message], Outcome::TaskFailed),
        }
    }

    /// Records the turn and takes its messages from the parser. Messages that could not be read count as
    /// malformed calls.
    fn close_turn(&mut self, mut calls: Vec<CallOutcome>) {
        let broken = std::iter::repeat_n(CallOutcome::MalformedCall, self.turn.parser.broken_messages());
        calls.splice(..0, broken);
        self.turns.push(Turn { start: self.turn.start, end: self.record.len(), calls });
        let parser = std::mem::replace(&mut self.turn.parser, turn_parser(self.rollout));
        let mut messages = parser.finish();
        for (start, text) in std::mem::take(&mut self.turn.outputs) {
            let range = start..start + text.len();
            let is_there = |message: &&mut Message| message.content.get(range.clone()) == Some(&*text);
            if let Some(message) = messages.iter_mut().find(is_there) {
                message.inserted.push((range.start, range.end));
            }
        }
        self.messages.extend(messages);
    }

    /// Appends `messages` and the start of the assistant's next turn. The mask is false for all these tokens.
    /// `encoding_failure` is the outcome if a message cannot be encoded.
    fn insert(&mut self, messages: Vec<Message>, encoding_failure: Outcome) -> NextAction {
        let tokens_left = self.rollout.context_tokens_max().saturating_sub(self.record.len());
        let bytes = messages.iter().map(|message| message.content.len()).sum();
        if !self.rollout.chat.vocabulary().may_fit(bytes, tokens_left) {
            return self.end(Outcome::TruncatedLength);
        }
        let before =
            if self.rollout.chat.has_own_template() { self.with_prompt(&self.messages) } else { vec![] };
        let rendered = match self.rollout.chat.render_next(&before, &messages) {
            Err(_) => return self.end(encoding_failure),
            Ok(NextTokens::Rewritten { tokens, .. }) => return self.begin_part(&tokens, messages),
            Ok(NextTokens::Appended(rendered)) => rendered,
        };
        if self.record.len() + rendered.len() >= self.rollout.context_tokens_max() {
            return self.end(Outcome::TruncatedLength);
        }
        self.record.insert(&rendered);
        self.messages.extend(messages);
        self.turn.inserted = rendered;
        self.turn.start = self.record.len();
        NextAction::Sample
    }

    /// Begins another part with the prompt `tokens`, which ends with `messages`.
    fn begin_part(&mut self, tokens: &[u32], messages: Vec<Message>) -> NextAction {
        if tokens.len() >= self.rollout.context_tokens_max() {
            return self.end(Outcome::TruncatedLength);
        }
        let (plan, version) = (self.rollout.plan, self.rollout.engine.version());
        let mut record = TokenRecord::new(tokens, version, plan.keeps_token_sets());
        record.sampled = self.record.sampled;
        let record = std::mem::replace(&mut self.record, record);
        self.parts.push((record, std::mem::take(&mut self.turns), self.messages.len()));
        self.messages.extend(messages);
        (self.turn.begins_part, self.turn.start) = (true, self.record.len());
        NextAction::Sample
    }

    /// Returns `messages` after those of the prompt.
    fn with_prompt(&self, messages: &[Message]) -> Vec<Message> {
        let Rollout { chat, system_prompt, .. } = *self.rollout;
        let first = first_messages(chat, system_prompt, self.rollout.has_tools(), self.problem);
        [&first, messages].concat()
    }

    fn end(&mut self, outcome: Outcome) -> NextAction {
        self.outcome = Some(outcome);
        NextAction::Finish
    }

    fn transcript(&self, outcome: Outcome) -> Transcript<'_> {
        Transcript {
            messages: &self.messages,
            outcome,
            calls_answered: self.calls_answered,
            completion_ids: self.record.tokens.get(self.record.prompt_tokens..).unwrap_or_default(),
            step: self.rollout.plan.step,
        }
    }

    /// Grades the conversation. Returns its parts with the messages up to their ends: one, unless the chat
    /// template has rewritten earlier turns. If the task fails, the reward is the task's least, as for a
    /// wrong answer.
    pub(super) fn finish(mut self) -> Vec<(Trajectory, Vec<Message>)> {
        let Rollout { task, interpreter, reward_min, .. } = *self.rollout;
        let failed = Reward::new(reward_min, false);
        if let Some(interpreter) = interpreter {
            interpreter.close(self.rollout.session(self.coordinates.index));
        }
        let mut outcome = self.outcome.unwrap_or(Outcome::TaskFailed);
        let mut failed_rewards = vec![];
        let reward = if outcome == Outcome::TaskFailed {
            failed
        } else {
            task.reward(self.problem, &self.transcript(outcome)).unwrap_or_else(|error| {
                failed_rewards =
                    error.downcast::<RewardFailure>().map(|failure| failure.names).unwrap_or_default();
                outcome = Outcome::TaskFailed;
                failed
            })
        };
        let mut parts = std::mem::take(&mut self.parts);
        let record = std::mem::replace(&mut self.record, TokenRecord::new(&[], 0, false));
        parts.push((record, std::mem::take(&mut self.turns), self.messages.len()));
        let part = |(part, (record, turns, messages)): (usize, (TokenRecord, Vec<Turn>, usize))| {
            let trajectory = self.part(part as u64, record, turns, outcome, &reward);
            (trajectory, self.with_prompt(&self.messages[..messages]))
        };
        let mut parts: Vec<_> = parts.into_iter().enumerate().map(part).collect();
        let drops = self.rollout.on_failure == OnFailure::Drop;
        let dropped = drops && parts.iter().any(|(trajectory, _)| trajectory.has_failure());
        parts.iter_mut().for_each(|(trajectory, _)| trajectory.dropped = dropped);
        if let Some((first, _)) = parts.first_mut() {
            first.failed_rewards = failed_rewards;
        }
        parts
    }

    /// Returns a part of the conversation as a trajectory.
    fn part(
        &self,
        part: u64,
        mut record: TokenRecord,
        turns: Vec<Turn>,
        outcome: Outcome,
        reward: &Reward,
    ) -> Trajectory {
        if self.rollout.plan.settings.keep_routes {
            // The model has not read the last token, so this token has no routed experts.
            record.routed_experts.resize(record.tokens.len(), Vec::new());
        }
        Trajectory {
            step: self.rollout.plan.step,
            policy_version: record.versions.last().map(|run| run.version),
            policy_versions: if record.versions.len() > 1 { record.versions } else { vec![] },
            prompt: self.coordinates.prompt,
            sample: self.coordinates.sample,
            part,
            problem_id: self.problem.id.clone(),
            tokens: record.tokens,
            prompt_tokens: record.prompt_tokens,
            mask: record.mask,
            log_probs: record.log_probs,
            kept_tokens: record.kept_tokens,
            routed_experts: record.routed_experts,
            turns,
            outcome,
            reward: reward.value,
            success: reward.success,
            rewards: reward.named.clone(),
            failed_rewards: vec![],
            dropped: false,
            tool_s: if part == 0 { self.tool_s } else { 0.0 },
        }
    }
}
