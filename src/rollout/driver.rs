//! The engine's client for a rollout. It holds the conversations in progress, the pending tool calls and the
//! results.

use super::conversation::{Conversation, NextAction};
use super::partial::{GroupInProgress, TrajectoryInProgress};
use super::prompt::RenderedPrompt;
use super::tokens_left::{LastEstimate, tokens_left};
use super::{ForcedTokens, Rollout, RolloutProgress, Rollouts, TurnPosition};
use crate::engine::{Client, Completion, NewToken};
use crate::harmony::Message;
use crate::interpreter::Interpreter;
use crate::random::Purpose;
use crate::trajectory::{Group, Trajectory};
use anyhow::{Error, Result, anyhow};
use serde_json::Value;
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;
use std::time::Instant;

/// Called with each trajectory as it ends, in any order and from any thread.
pub type Observer<'a> = dyn Fn(&Trajectory, &[Message]) + Sync + 'a;

/// Called with each token before it is appended: its turn, its id, and the messages of the turns before,
/// without the prompt. The tokens of a trajectory come in order.
pub type TokenObserver<'a> = dyn Fn(TurnPosition, u32, &[Message]) + Sync + 'a;

/// Callbacks of a rollout's caller: progress, tokens, results, an early stop, and tokens to force.
#[derive(Clone, Copy)]
pub struct Hooks<'a> {
    pub progress: &'a (dyn Fn(RolloutProgress) + Sync),
    pub sampled: &'a TokenObserver<'a>,
    pub finished: &'a Observer<'a>,
    pub stop: &'a (dyn Fn() -> bool + Sync),
    pub forced: &'a ForcedTokens<'a>,
    /// Whether all parts of a conversation are trained. Otherwise it has one result: its last part.
    pub keeps_parts: bool,
}

impl<'a> Hooks<'a> {
    /// Returns hooks that observe nothing but the end.
    pub fn until(stop: &'a (dyn Fn() -> bool + Sync)) -> Self {
        Self {
            progress: &|_| (),
            sampled: &|_, _, _| (),
            finished: &|_, _| (),
            stop,
            forced: &|_| vec![],
            keeps_parts: false,
        }
    }
}

/// The conversations of one rollout, shared by the engine's workers and the tool threads.
pub(super) struct Driver<'a> {
    rollout: &'a Rollout<'a>,
    prompts: Vec<RenderedPrompt<'a>>,
    samples: usize,
    tool_calls_max: usize,
    hooks: Hooks<'a>,
    /// Tokens after which a conversation pauses; `None` if conversations are sampled whole.
    pause_after: Option<usize>,
    /// The conversation of each trajectory, `[prompts × samples]`, from its first token to its end.
    conversations: Vec<Mutex<Option<Box<Conversation<'a>>>>>,
    state: Mutex<State<'a>>,
    /// Signals to the tool threads that a call is pending, or that the rollout is over.
    calls: Condvar,
}

struct State<'a> {
    /// Conversations that wait for a tool or their task, each with the action it waits for.
    pending_calls: VecDeque<(Box<Conversation<'a>>, NextAction)>,
    tool_threads: usize,
    tool_threads_idle: usize,
    /// `[prompts × samples]`.
    ended: Vec<Option<TrajectoryInProgress>>,
    unfinished: usize,
    /// Number of tokens that this driver sampled of each finished trajectory.
    lengths: Vec<usize>,
    progress: RolloutProgress,
    last_estimate: LastEstimate,
    failed: bool,
    stopped: bool,
}

impl State<'_> {
    fn is_over(&self) -> bool {
        self.unfinished == 0 || self.failed || self.stopped
    }
}

impl<'a> Driver<'a> {
    pub(super) fn new(
        rollout: &'a Rollout<'a>,
        prompts: Vec<RenderedPrompt<'a>>,
        samples: usize,
        hooks: Hooks<'a>,
    ) -> Self {
        let trajectories = prompts.len() * samples;
        let state = State {
            pending_calls: VecDeque::new(),
            tool_threads: 0,
            tool_threads_idle: 0,
            ended: (0..trajectories).map(|_| None).collect(),
            unfinished: trajectories,
            lengths: vec![],
            progress: RolloutProgress { trajectories, reads_prompts: true, ..RolloutProgress::default() },
            last_estimate: LastEstimate::default(),
            failed: false,
            stopped: false,
        };
        Self {
            rollout,
            prompts,
            samples,
            tool_calls_max: rollout.plan.settings.tool_calls_concurrent_max.max(1),
            hooks,
            pause_after: None,
            conversations: (0..trajectories).map(|_| Mutex::new(None)).collect(),
            state: Mutex::new(state),
            calls: Condvar::new(),
        }
    }

    /// Creates a driver that samples up to `tokens_max` tokens of each unfinished trajectory of `groups`, the
    /// groups of `prompts`.
    pub(super) fn for_groups(
        rollout: &'a Rollout<'a>,
        prompts: Vec<RenderedPrompt<'a>>,
        samples: usize,
        hooks: Hooks<'a>,
        groups: Vec<GroupInProgress>,
        tokens_max: usize,
    ) -> Self {
        let mut driver = Self::new(rollout, prompts, samples, hooks);
        driver.pause_after = Some(tokens_max);
        for (prompt, group) in groups.into_iter().enumerate() {
            for (sample, trajectory) in group.trajectories.into_iter().enumerate() {
                let index = prompt * samples + sample;
                match trajectory {
                    TrajectoryInProgress::Paused(paused) => {
                        let conversation = driver.begin(index).resume(*paused, group.step);
                        *driver.conversation(index) = Some(Box::new(conversation));
                    }
                    finished => {
                        let state = driver.state.get_mut().unwrap_or_else(PoisonError::into_inner);
                        state.ended[index] = Some(finished);
                        state.unfinished -= 1;
                    }
                }
            }
        }
        driver
    }

    /// Samples all conversations. Afterwards no sequence of this rollout is left in the engine.
    pub(super) fn run(&self) -> Result<()> {
        let engine = self.rollout.engine;
        let result = std::thread::scope(|scope| {
            let result = self.submit().and_then(|()| engine.run(&ScopedDriver { driver: self, scope }));
            // Makes the tool threads end, also after an error.
            self.lock().failed |= result.is_err();
            self.calls.notify_all();
            result
        });
        engine.clear();
        result
    }

    /// Submits one request for each prompt.
    fn submit(&self) -> Result<()> {
        if self.samples == 0 {
            return Ok(());
        }
        for (index, prompt) in self.prompts.iter().enumerate() {
            let first = index * self.samples;
            if self.submit_paused(first..first + self.samples)? {
                continue;
            }
            let request = Conversation::request(self.rollout, prompt, self.samples, first, self.hooks.forced);
            self.rollout.engine.submit(request)?;
        }
        Ok(())
    }

    /// Submits one request for each paused trajectory in `trajectories`, the trajectories of a group. Returns
    /// whether the group had begun before.
    fn submit_paused(&self, trajectories: Range<usize>) -> Result<bool> {
        let mut has_begun = false;
        for trajectory in trajectories {
            let request = self.conversation(trajectory).as_ref().map(|c| c.resumption(self.hooks.forced));
            has_begun |= request.is_some() || self.lock().ended[trajectory].is_some();
            request.map_or(Ok(()), |request| self.rollout.engine.submit(request))?;
        }
        Ok(has_begun)
    }

    /// Starts the conversation of a trajectory.
    fn begin(&self, trajectory: usize) -> Conversation<'a> {
        let (prompt, sample) = (trajectory / self.samples, trajectory % self.samples);
        self.lock().progress.started += 1;
        let prompt = &self.prompts[prompt];
        Conversation::new(self.rollout, prompt, sample as u64, trajectory, self.pause_after)
    }

    /// Starts the next action of a conversation.
    fn dispatch<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        mut conversation: Box<Conversation<'a>>,
        next: NextAction,
    ) where
        'a: 's,
    {
        match next {
            NextAction::Sample if conversation.must_pause() => {
                let (trajectory, sampled) = (conversation.trajectory_index(), conversation.sampled_since());
                self.end(trajectory, sampled, TrajectoryInProgress::Paused(Box::new(conversation.pause())));
            }
            NextAction::Sample => {
                let trajectory = conversation.trajectory_index();
                let part = conversation.next_part(self.hooks.forced);
                let continuation = part.is_none().then(|| conversation.continuation(self.hooks.forced));
                *self.conversation(trajectory) = Some(conversation);
                let engine = self.rollout.engine;
                let part = part.map_or(Ok(()), |request| {
                    engine.release(trajectory as u64);
                    engine.submit(request)
                });
                let going_on = continuation.map_or(Ok(()), |next| engine.continue_sequence(next));
                if let Err(error) = part.and(going_on) {
                    self.fail(error);
                }
            }
            NextAction::Call | NextAction::Turn => self.call(scope, conversation, next),
            NextAction::Finish if self.rollout.task.may_take_long() => self.call(scope, conversation, next),
            NextAction::Finish => self.finish(*conversation),
        }
    }

    /// Queues a tool call or a question to the task. Starts another tool thread if there are more queued
    /// actions than idle tool threads, and the maximum number of tool threads is not reached.
    fn call<'s>(&'s self, scope: &'s Scope<'s, '_>, conversation: Box<Conversation<'a>>, next: NextAction)
    where
        'a: 's,
    {
        let mut state = self.lock();
        state.pending_calls.push_back((conversation, next));
        let spawn =
            state.pending_calls.len() > state.tool_threads_idle && state.tool_threads < self.tool_calls_max;
        if spawn {
            state.tool_threads += 1;
        }
        drop(state);
        self.calls.notify_one();
        if spawn {
            let started = std::thread::Builder::new().spawn_scoped(scope, move || self.run_calls(scope));
            if let Err(error) = started {
                self.fail(
                    Error::new(error).context(
                        "starting a thread for a tool call; lower rollout.tool_calls_concurrent_max",
                    ),
                );
            }
        }
    }

    /// Runs a tool thread until its end.
    fn run_calls<'s>(&'s self, scope: &'s Scope<'s, '_>)
    where
        'a: 's,
    {
        loop {
            let mut state = self.lock();
            state.tool_threads_idle += 1;
            let (conversation, action) = loop {
                if state.is_over() {
                    return;
                }
                match state.pending_calls.pop_front() {
                    Some(pending) => break pending,
                    None => state = self.calls.wait(state).unwrap_or_else(PoisonError::into_inner),
                }
            };
            state.tool_threads_idle -= 1;
            drop(state);
            let answer = || {
                let mut conversation = conversation;
                let next = match action {
                    NextAction::Call => conversation.run_calls(),
                    NextAction::Turn => conversation.request_user_turn(),
                    NextAction::Sample | NextAction::Finish => action,
                };
                match next {
                    NextAction::Finish => self.finish(*conversation),
                    next => self.dispatch(scope, conversation, next),
                }
            };
            if catch_unwind(AssertUnwindSafe(answer)).is_err() {
                return self.fail(anyhow!("a tool or task panicked; this is a bug"));
            }
        }
    }

    fn finish(&self, conversation: Conversation<'a>) {
        let (index, sampled) = (conversation.trajectory_index(), conversation.sampled_since());
        let mut parts = conversation.finish();
        if !self.hooks.keeps_parts || self.rollout.plan.purpose != Purpose::Sampling {
            parts.drain(..parts.len().saturating_sub(1));
            parts.iter_mut().for_each(|(trajectory, _)| trajectory.part = 0);
        }
        parts.iter().for_each(|(trajectory, messages)| (self.hooks.finished)(trajectory, messages));
        self.end(index, sampled, TrajectoryInProgress::from_parts(parts));
    }

    /// Stores the result of a trajectory, of which `sampled` tokens were sampled by this driver.
    fn end(&self, index: usize, sampled: usize, result: TrajectoryInProgress) {
        self.rollout.engine.release(index as u64);
        let mut state = self.lock();
        state.unfinished -= 1;
        state.progress.finished += 1;
        state.lengths.push(sampled);
        let reward = match &result {
            TrajectoryInProgress::Finished(trajectory, _) => Some(trajectory.reward),
            TrajectoryInProgress::InParts(parts) => parts.first().map(|(part, _)| part.reward),
            TrajectoryInProgress::Paused(_) => None,
        };
        state.progress.reward_sum += reward.map_or(0.0, f64::from);
        state.ended[index] = Some(result);
        if state.unfinished == 0 {
            // `sampled_tokens` may lack the tokens of the last forward passes: workers report them later.
            state.progress.sampled_tokens = state.lengths.iter().sum::<usize>() as u64;
            (self.hooks.progress)(state.progress);
            self.wake_all();
        }
    }

    /// Estimates the tokens left, if the last estimate is old.
    fn estimate_tokens_left(&self) {
        if !self.lock().last_estimate.is_due(Instant::now()) {
            return;
        }
        // A conversation that waits for a tool is not in its place. It counts as one that waits to begin.
        let length =
            |slot: &Mutex<Option<Box<Conversation>>>| Some(slot.try_lock().ok()?.as_ref()?.sampled_since());
        let open: Vec<usize> = self.conversations.iter().filter_map(length).collect();
        let length_max = self.pause_after.unwrap_or(self.rollout.plan.settings.response_tokens_max);
        let mut state = self.lock();
        let waiting = state.unfinished.saturating_sub(open.len());
        state.progress.tokens_left = tokens_left(&state.lengths, &open, waiting, length_max);
    }

    /// Ends the rollout with an error.
    fn fail(&self, error: Error) {
        self.rollout.engine.fail(error);
        self.lock().failed = true;
        self.calls.notify_all();
    }

    fn wake_all(&self) {
        self.rollout.engine.wake();
        self.calls.notify_all();
    }

    /// Closes the tool's sessions of unfinished trajectories.
    pub(super) fn close_sessions(&self, interpreter: &dyn Interpreter) {
        let state = self.lock();
        let unfinished = state.ended.iter().enumerate().filter(|(_, result)| result.is_none());
        unfinished.for_each(|(trajectory, _)| interpreter.close(self.rollout.session(trajectory)));
    }

    /// Returns the state of each trajectory, `None` when stopped.
    pub(super) fn into_states(self) -> Option<Vec<TrajectoryInProgress>> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        (state.unfinished == 0).then(|| state.ended.into_iter().flatten().collect())
    }

    /// Returns the results of whole trajectories, `None` when stopped.
    pub(super) fn into_rollouts(self) -> Option<Rollouts> {
        let answers: Vec<Value> = self.prompts.iter().map(|prompt| prompt.problem.answer.clone()).collect();
        let samples = self.samples;
        let mut finished = self.into_states()?.into_iter();
        let mut rollouts = Rollouts::default();
        for answer in answers {
            rollouts.answers.push(answer);
            let group = finished.by_ref().take(samples).flat_map(TrajectoryInProgress::into_finished);
            let (trajectories, messages) = group.unzip();
            rollouts.groups.push(Group { trajectories, greedy: None });
            rollouts.messages.push(messages);
        }
        Some(rollouts)
    }

    fn lock(&self) -> MutexGuard<'_, State<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn conversation(&self, trajectory: usize) -> MutexGuard<'_, Option<Box<Conversation<'a>>>> {
        self.conversations[trajectory].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A driver with the scope of its tool threads.
struct ScopedDriver<'s, 'e, 'a> {
    driver: &'s Driver<'a>,
    scope: &'s Scope<'s, 'e>,
}

impl Client for ScopedDriver<'_, '_, '_> {
    fn token(&self, sample: u64, token: &NewToken) -> bool {
        let trajectory = sample as usize;
        let mut slot = self.driver.conversation(trajectory);
        let conversation = slot.get_or_insert_with(|| Box::new(self.driver.begin(trajectory)));
        (self.driver.hooks.sampled)(conversation.position(), token.id, &conversation.messages);
        conversation.push_token(token)
    }

    fn finished(&self, sample: u64, completion: Completion) {
        let conversation = self.driver.conversation(sample as usize).take();
        if let Some(mut conversation) = conversation {
            let next = conversation.end_request(completion);
            self.driver.dispatch(self.scope, conversation, next);
        }
    }

    /// A conversation that goes on keeps its sequence.
    fn keeps_samples(&self) -> bool {
        false
    }

    fn goes_on(&self, sampled: u64) -> bool {
        let driver = self.driver;
        driver.estimate_tokens_left();
        let mut state = driver.lock();
        // After the end of the last trajectory nothing is added, because `finish` has counted all tokens.
        if sampled > 0 && state.unfinished > 0 {
            state.progress.sampled_tokens += sampled;
            (driver.hooks.progress)(state.progress);
        }
        if !state.stopped && (driver.hooks.stop)() {
            state.stopped = true;
            driver.wake_all();
        }
        !state.is_over()
    }
}
