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
//! - Sampled tokens never change, including the stop token before a further user message.

use super::partial::PausedConversation;
use super::prompt::RenderedPrompt;
use super::{ForcedTokens, Rollout, TurnPosition};
use crate::chat::{Call, ChatTurnParser, PYTHON};
use crate::engine::{Completion, Continuation, EngineRequest, NewToken, SampleRequest};
use crate::harmony::{Message, TurnEnd, TurnStep};
use crate::ops::token_set::TokenSet;
use crate::random::stream;
use crate::tasks::{Problem, Reward, Transcript, clip_reply};
use crate::trajectory::{CallOutcome, Outcome, Trajectory, Turn, VersionRun};
use rand::Rng;
use std::time::Instant;

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
    prompt: u64,
    sample: u64,
    /// Its index among all trajectories of the rollout.
    index: usize,
    pub(super) tokens: Vec<u32>,
    prompt_tokens: usize,
    mask: Vec<bool>,
    log_probs: Vec<f32>,
    /// The tokens that each token was drawn from. Empty if they are not kept.
    kept_tokens: Vec<Option<TokenSet>>,
    /// Routed experts of the tokens that the model has read so far. Empty if they are not kept.
    routed_experts: Vec<Vec<u16>>,
    /// The step whose random streams the conversation uses.
    step: u64,
    /// Versions of the weights that sampled the tokens.
    versions: Vec<VersionRun>,
    /// Tokens after which the conversation pauses; `None` if it never pauses.
    pause_after: Option<usize>,
    /// Number of tokens sampled since it began or went on.
    sampled_since: usize,
    /// Number of first tokens that are read again after a pause, and whose experts are known.
    read_again: usize,
    turns: Vec<Turn>,
    turn_start: usize,
    sampled: usize,
    parser: ChatTurnParser,
    /// The action after the last token.
    next: NextAction,
    /// Inserted tokens that the engine has not read yet.
    inserted: Vec<u32>,
    /// Messages after the prompt.
    messages: Vec<Message>,
    calls_answered: usize,
    tool_s: f64,
    outcome: Option<Outcome>,
}

impl<'a> Conversation<'a> {
    /// Returns the request for the first turns of all `samples` samples of a prompt. Their ids in the engine
    /// are `first`, `first + 1`, and so on.
    pub(super) fn request(
        rollout: &Rollout,
        prompt: &RenderedPrompt,
        samples: usize,
        first: usize,
        forced: &ForcedTokens,
    ) -> EngineRequest {
        let sample = |sample: usize| {
            let position = TurnPosition { prompt: prompt.index, sample: sample as u64, turn: 0 };
            turn_sample(rollout, rollout.plan.step, (first + sample) as u64, position, forced)
        };
        engine_request(rollout, prompt.tokens.clone(), (0..samples).map(sample).collect(), 0)
    }

    /// Starts sample `sample` of a prompt, the trajectory `index` of the rollout.
    pub(super) fn new(
        rollout: &'a Rollout<'a>,
        prompt: &RenderedPrompt<'a>,
        sample: u64,
        index: usize,
        pause_after: Option<usize>,
    ) -> Self {
        let prompt_tokens = prompt.tokens.len();
        Self {
            rollout,
            problem: prompt.problem,
            prompt: prompt.index,
            sample,
            index,
            tokens: prompt.tokens.clone(),
            prompt_tokens,
            mask: vec![false; prompt_tokens],
            log_probs: vec![0.0; prompt_tokens],
            kept_tokens: if rollout.plan.keeps_token_sets() { vec![None; prompt_tokens] } else { vec![] },
            routed_experts: Vec::new(),
            step: rollout.plan.step,
            versions: vec![VersionRun { start: prompt_tokens, version: rollout.engine.version() }],
            pause_after,
            sampled_since: 0,
            read_again: 0,
            turns: Vec::new(),
            turn_start: prompt_tokens,
            sampled: 0,
            parser: rollout.chat.turn_parser(),
            next: NextAction::Sample,
            inserted: Vec::new(),
            messages: Vec::new(),
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
            self.parser.push(token);
        }
        Self {
            step,
            sampled: mask.iter().filter(|&&sampled| sampled).count(),
            tokens,
            mask,
            log_probs,
            kept_tokens,
            read_again: routed_experts.len(),
            routed_experts,
            versions,
            turns: paused.turns,
            turn_start: paused.turn_start,
            messages: paused.messages,
            calls_answered: paused.calls_answered,
            tool_s: paused.tool_s,
            ..self
        }
    }

    /// Returns the request that goes on after a pause. All tokens are read again.
    pub(super) fn resumption(&self, forced: &ForcedTokens) -> EngineRequest {
        let mut sample = turn_sample(self.rollout, self.step, self.index as u64, self.position(), forced);
        // The engine draws one random number per token.
        for _ in self.turn_start..self.tokens.len() {
            let _: f64 = sample.random.random();
        }
        engine_request(self.rollout, self.tokens.clone(), vec![sample], self.sampled)
    }

    /// Returns whether no further token may be sampled before a pause.
    pub(super) fn must_pause(&self) -> bool {
        self.pause_after.is_some_and(|tokens_max| self.sampled_since >= tokens_max)
    }

    /// Pauses the conversation.
    pub(super) fn pause(self) -> PausedConversation {
        PausedConversation {
            tokens: self.tokens,
            mask: self.mask,
            log_probs: self.log_probs,
            kept_tokens: self.kept_tokens,
            routed_experts: self.routed_experts,
            versions: self.versions,
            turns: self.turns,
            turn_start: self.turn_start,
            messages: self.messages,
            calls_answered: self.calls_answered,
            tool_s: self.tool_s,
        }
    }

    /// Returns the number of tokens sampled since it began or went on.
    pub(super) fn sampled_since(&self) -> usize {
        self.sampled_since
    }

    /// Returns its index among all trajectories of the rollout.
    pub(super) fn trajectory_index(&self) -> usize {
        self.index
    }

    /// Returns the place of the turn that is being sampled.
    pub(super) fn position(&self) -> TurnPosition {
        TurnPosition { prompt: self.prompt, sample: self.sample, turn: self.turns.len() as u64 }
    }

    /// Returns the messages of the turns so far, without the prompt.
    pub(super) fn messages(&self) -> &[Message] {
        &self.messages
    }

    /// Returns the engine's input for the next turn.
    pub(super) fn continuation(&mut self, forced: &ForcedTokens) -> Continuation {
        let position = self.position();
        Continuation {
            tokens: std::mem::take(&mut self.inserted),
            sample: turn_sample(self.rollout, self.step, self.index as u64, position, forced),
            new_tokens_max: tokens_left(self.rollout, self.sampled, self.tokens.len()),
        }
    }

    /// Stores the engine's result for this turn and returns the next action. [`Self::push_token`] has already
    /// stored the tokens.
    pub(super) fn end_request(&mut self, completion: Completion) -> NextAction {
        let read_again = std::mem::take(&mut self.read_again);
        self.routed_experts.extend(completion.routed_experts.into_iter().skip(read_again));
        self.next
    }

    /// Appends the next sampled token. Returns whether the turn goes on.
    pub(super) fn push_token(&mut self, drawn: &NewToken) -> bool {
        self.next = self.take_token(drawn);
        self.next == NextAction::Sample && self.inserted.is_empty() && !self.must_pause()
    }

    /// Appends the next sampled token. Returns the next action.
    fn take_token(&mut self, drawn: &NewToken) -> NextAction {
        self.tokens.push(drawn.id);
        self.mask.push(true);
        self.log_probs.push(drawn.log_prob);
        if self.rollout.plan.keeps_token_sets() {
            self.kept_tokens.push(drawn.kept.clone());
        }
        self.sampled += 1;
        self.sampled_since += 1;
        match self.parser.push(drawn.id) {
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
        tokens_left(self.rollout, self.sampled, self.tokens.len()) == 0
    }

    /// Returns true when the current turn is the last one allowed.
    fn is_last_turn(&self) -> bool {
        self.turns.len() + 1 >= self.rollout.plan.settings.turns_max
    }

    fn end_turn(&mut self, end: TurnEnd) -> NextAction {
        match end {
            TurnEnd::Returned => self.handle_return(),
            TurnEnd::Called | TurnEnd::Malformed | TurnEnd::Truncated => self.handle_call(end),
        }
    }

    fn handle_call(&mut self, end: TurnEnd) -> NextAction {
        if self.is_last_turn() || self.is_exhausted() {
            let (calls, outcome) = match end {
                TurnEnd::Called => (vec![], Outcome::TurnsExhausted),
                _ => (vec![CallOutcome::MalformedCall], Outcome::Malformed),
            };
            let outcome = if self.is_last_turn() { outcome } else { Outcome::TruncatedLength };
            self.close_turn(calls);
            return self.end(outcome);
        }
        let needs_thread = |call: &Call| match call {
            Call::Ready(message) => self.calls_python(message) || self.rollout.task.answers_calls(),
            Call::Malformed { .. } => false,
        };
        if self.parser.calls().iter().any(needs_thread) { NextAction::Call } else { self.run_calls() }
    }

    /// Returns true when a call goes to the Python tool.
    fn calls_python(&self, call: &Message) -> bool {
        self.rollout.interpreter.is_some() && call.recipient.as_deref() == Some(PYTHON)
    }

    /// Answers the calls of this turn and blocks until the last reply. If the Python tool or the task may
    /// have to run something, this function is called on a tool thread.
    pub(super) fn run_calls(&mut self) -> NextAction {
        let (mut outcomes, mut replies) = (vec![], vec![]);
        // A task that answers a call reads the conversation up to that call, so `messages` gets calls and
        // replies one by one. `close_turn` adds the turn's messages again, and `insert` the replies, so both
        // are removed before.
        let before = self.messages.len();
        let mut ended = None;
        let mut chars_left = self.rollout.reply_chars_max;
        for (index, call) in self.parser.calls().into_iter().enumerate() {
            if index > 0 {
                chars_left = chars_left.map(|chars| chars.saturating_sub(REPLY_FRAME_TOKENS));
            }
            if chars_left == Some(0) {
                ended = Some(Outcome::TruncatedLength);
                break;
            }
            let answer = match call {
                Call::Ready(call) => {
                    let name = call.recipient.clone().unwrap_or_default();
                    self.messages.push(call);
                    self.reply(&name).map(|(outcome, text)| (outcome, name, text))
                }
                Call::Malformed { recipient, reply } => {
                    let author = recipient.or_else(|| self.rollout.interpreter.map(|_| PYTHON.to_string()));
                    let author = author.ok_or(Outcome::Malformed);
                    author.map(|author| (CallOutcome::MalformedCall, author, reply))
                }
            };
            match answer {
                Ok((outcome, author, text)) => {
                    // The first reply is as long as its tool allows.
                    let text = match chars_left {
                        Some(chars) if index > 0 => clip_reply(&text, chars),
                        _ => text,
                    };
                    chars_left = chars_left.map(|chars| chars.saturating_sub(text.chars().count()));
                    outcomes.push(outcome);
                    let reply = Message::tool(&author, None, text);
                    self.messages.push(reply.clone());
                    replies.push(reply);
                }
                Err(outcome) => {
                    if outcome == Outcome::Malformed {
                        outcomes.push(CallOutcome::MalformedCall);
                    }
                    ended = Some(outcome);
                    break;
                }
            }
        }
        self.messages.truncate(before);
        self.close_turn(outcomes);
        if let Some(outcome) = ended {
            return self.end(outcome);
        }
        let channel = self.messages.last().and_then(|message| message.channel.clone());
        replies.iter_mut().for_each(|reply| reply.channel.clone_from(&channel));
        self.insert(replies, Outcome::Malformed)
    }

    /// Answers the last message, a call to `name`. `Err` holds the outcome that ends the trajectory.
    fn reply(&mut self, name: &str) -> Result<(CallOutcome, String), Outcome> {
        let unknown = || (CallOutcome::UnknownRecipient, format!("Error: there is no tool named {name:?}."));
        let Some(call) = self.messages.last() else { return Ok(unknown()) };
        if let Some(interpreter) = self.rollout.interpreter.filter(|_| name == PYTHON) {
            let reply = interpreter.call(self.rollout.session(self.index), &call.content);
            self.tool_s += reply.seconds;
            self.calls_answered += 1;
            return Ok((reply.outcome, reply.text));
        }
        if !self.rollout.task.answers_calls() {
            return Ok(unknown());
        }
        let started = Instant::now();
        let reply = self.rollout.task.tool_reply(self.problem, &self.transcript(Outcome::Finished));
        self.tool_s += started.elapsed().as_secs_f64();
        match reply {
            Ok(Some(text)) => {
                self.calls_answered += 1;
                Ok((CallOutcome::Answered, text))
            }
            Ok(None) => Ok(unknown()),
            Err(_) => Err(Outcome::TaskFailed),
        }
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
            Ok(Some(_)) if self.turns.len() >= self.rollout.plan.settings.turns_max => {
                self.end(Outcome::TurnsExhausted)
            }
            Ok(Some(_)) if self.is_exhausted() => self.end(Outcome::TruncatedLength),
            Ok(Some(message)) => self.insert(vec![message], Outcome::TaskFailed),
        }
    }

    /// Records the turn and takes its messages from the parser.
    fn close_turn(&mut self, calls: Vec<CallOutcome>) {
        self.turns.push(Turn { start: self.turn_start, end: self.tokens.len(), calls });
        let parser = std::mem::replace(&mut self.parser, self.rollout.chat.turn_parser());
        self.messages.extend(parser.finish());
    }

    /// Appends `messages` and the start of the assistant's next turn. The mask is false for all these tokens.
    /// `encoding_failure` is the outcome if a message cannot be encoded.
    fn insert(&mut self, messages: Vec<Message>, encoding_failure: Outcome) -> NextAction {
        let tokens_left = self.rollout.context_tokens_max().saturating_sub(self.tokens.len());
        let bytes = messages.iter().map(|message| message.content.len()).sum();
        if !self.rollout.chat.vocabulary().may_fit(bytes, tokens_left) {
            return self.end(Outcome::TruncatedLength);
        }
        let Ok(rendered) = self.rollout.chat.render_continuation(&messages) else {
            return self.end(encoding_failure);
        };
        let tokens = self.tokens.len() + rendered.len();
        if tokens >= self.rollout.context_tokens_max() {
            return self.end(Outcome::TruncatedLength);
        }
        self.tokens.extend(&rendered);
        self.inserted = rendered;
        self.mask.resize(tokens, false);
        self.log_probs.resize(tokens, 0.0);
        if self.rollout.plan.keeps_token_sets() {
            self.kept_tokens.resize(tokens, None);
        }
        self.messages.extend(messages);
        self.turn_start = self.tokens.len();
        NextAction::Sample
    }

    fn end(&mut self, outcome: Outcome) -> NextAction {
        self.outcome = Some(outcome);
        NextAction::Finish
    }

    fn transcript(&self, outcome: Outcome) -> Transcript<'_> {
        Transcript { messages: &self.messages, outcome, calls_answered: self.calls_answered }
    }

    /// Grades the conversation. Returns the trajectory and all its messages. If the task fails, the reward is
    /// the task's least, as for a wrong answer.
    pub(super) fn finish(mut self) -> (Trajectory, Vec<Message>) {
        let Rollout { task, interpreter, reward_min, .. } = *self.rollout;
        let failed = Reward::new(reward_min, false);
        if let Some(interpreter) = interpreter {
            interpreter.close(self.rollout.session(self.index));
        }
        let mut outcome = self.outcome.unwrap_or(Outcome::TaskFailed);
        let reward = if outcome == Outcome::TaskFailed {
            failed
        } else {
            task.reward(self.problem, &self.transcript(outcome)).unwrap_or_else(|_| {
                outcome = Outcome::TaskFailed;
                failed
            })
        };
        if self.rollout.plan.settings.keep_routes {
            // The model has not read the last token, so this token has no routed experts.
            self.routed_experts.resize(self.tokens.len(), Vec::new());
        }
        let mut messages = self.rollout.system_prompt.to_vec();
        messages.extend_from_slice(&self.problem.messages);
        messages.append(&mut self.messages);
        let trajectory = Trajectory {
            step: self.rollout.plan.step,
            policy_version: self.versions.last().map(|run| run.version),
            policy_versions: if self.versions.len() > 1 { self.versions } else { vec![] },
            prompt: self.prompt,
            sample: self.sample,
            part: 0,
            problem_id: self.problem.id.clone(),
            tokens: self.tokens,
            prompt_tokens: self.prompt_tokens,
            mask: self.mask,
            log_probs: self.log_probs,
            kept_tokens: self.kept_tokens,
            routed_experts: self.routed_experts,
            turns: self.turns,
            outcome,
            reward: reward.value,
            success: reward.success,
            rewards: reward.named,
            tool_s: self.tool_s,
        };
        (trajectory, messages)
    }
}

/// Returns how many tokens may still be sampled. The conversation has `tokens` tokens so far; the policy
/// sampled `sampled` of them.
fn tokens_left(rollout: &Rollout, sampled: usize, tokens: usize) -> usize {
    let response = rollout.plan.settings.response_tokens_max.saturating_sub(sampled);
    response.min(rollout.context_tokens_max().saturating_sub(tokens))
}

/// Returns the request to sample after `tokens`, of which the policy sampled `sampled`.
fn engine_request(
    rollout: &Rollout,
    tokens: Vec<u32>,
    samples: Vec<SampleRequest>,
    sampled: usize,
) -> EngineRequest {
    EngineRequest {
        version: None,
        new_tokens_max: tokens_left(rollout, sampled, tokens.len()),
        tokens,
        samples,
        sampling: rollout.plan.settings.sampling(),
        // The parser detects the end of a turn, so the engine needs no stop tokens.
        stop_tokens: vec![],
        top_log_probs: None,
        prompt_log_probs: None,
        keep_routed_experts: rollout.plan.settings.keep_routes,
        keep_token_sets: rollout.plan.keeps_token_sets(),
        keep_sequence: true,
    }
}

/// Returns the request for a turn of one sample, which has the id `id` in the engine. Each turn has a random
/// stream of its own.
fn turn_sample(
    rollout: &Rollout,
    step: u64,
    id: u64,
    turn: TurnPosition,
    forced: &ForcedTokens,
) -> SampleRequest {
    let coordinates = [step, turn.prompt, turn.sample, turn.turn];
    let random = stream(rollout.plan.seed, rollout.plan.purpose, &coordinates);
    SampleRequest { id, random, forced: forced(turn) }
}
