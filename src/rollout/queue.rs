//! The work shared by a rollout's engines: new prompts, conversations to continue, tool calls, results.

use super::cache_admission::CacheAdmission;
use super::conversation::NextAction;
use super::engine::{PromptWork, SampleWork, Work};
use super::prompt::RenderedPrompt;
use super::{Rollout, RolloutProgress, Rollouts};
use crate::harmony::Message;
use crate::interpreter::{Interpreter, SessionId};
use crate::model::cache::CacheFactory;
use crate::trajectory::{Group, Trajectory};
use anyhow::{Error, Result, anyhow};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;
use std::time::Duration;

/// How often an idle engine checks for a stop.
const STOP_POLL: Duration = Duration::from_millis(50);

/// Called with each trajectory as it ends, in any order and from any thread.
pub type Observer<'a> = dyn Fn(&Trajectory, &[Message]) + Sync + 'a;

/// Callbacks of a rollout's caller, for progress, results and an early stop.
#[derive(Clone, Copy)]
pub(super) struct Hooks<'a> {
    pub progress: &'a (dyn Fn(RolloutProgress) + Sync),
    pub finished: &'a Observer<'a>,
    pub stop: &'a (dyn Fn() -> bool + Sync),
}

/// Work of one rollout, shared by its engines and tool threads.
pub(super) struct Queue<'a> {
    pub(super) rollout: &'a Rollout<'a>,
    pub(super) prompts: Vec<RenderedPrompt<'a>>,
    pub(super) samples: usize,
    caches: CacheFactory,
    engines: usize,
    sequences_max: usize,
    tool_calls_max: usize,
    hooks: Hooks<'a>,
    state: Mutex<State<'a>>,
    /// Signals something to sample, or the end.
    work: Condvar,
    /// Signals a tool call, or the end.
    calls: Condvar,
}

/// The result of an engine's request for work.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RefillResult {
    Work,
    /// All remaining work waits for tools.
    Nothing,
    /// All is sampled, or the rollout was stopped.
    Finished,
    Failure,
}

struct State<'a> {
    next_prompt: usize,
    ready: VecDeque<Box<SampleWork<'a>>>,
    admission: CacheAdmission,
    /// Conversations that wait for a tool or their task, each with the action it waits for.
    pending_calls: VecDeque<(Box<SampleWork<'a>>, NextAction)>,
    tool_threads: usize,
    tool_threads_idle: usize,
    /// `[prompts × samples]`.
    finished: Vec<Option<(Trajectory, Vec<Message>)>>,
    unfinished: usize,
    progress: RolloutProgress,
    failure: Option<Error>,
    stopped: bool,
}

impl<'a> State<'a> {
    fn is_over(&self) -> bool {
        self.unfinished == 0 || self.failure.is_some() || self.stopped
    }

    /// Returns the index in `ready` of the first conversation that can be admitted to the KV cache.
    fn next_ready(&self) -> Option<usize> {
        self.ready
            .iter()
            .position(|sample| sample.has_slot || self.admission.can_begin_sample(sample.group()))
    }

    /// Takes the conversation that [`Self::next_ready`] selects.
    fn take_ready(&mut self) -> Option<Box<SampleWork<'a>>> {
        let mut sample = self.ready.remove(self.next_ready()?)?;
        if !std::mem::replace(&mut sample.has_slot, true) {
            self.admission.begin_sample(sample.group());
        }
        Some(sample)
    }
}

impl<'a> Queue<'a> {
    pub(super) fn new(
        rollout: &'a Rollout<'a>,
        prompts: Vec<RenderedPrompt<'a>>,
        samples: usize,
        engines: usize,
        (caches, cache_slots): (CacheFactory, usize),
        hooks: Hooks<'a>,
    ) -> Self {
        let trajectories = prompts.len() * samples;
        let state = State {
            next_prompt: 0,
            ready: VecDeque::new(),
            admission: CacheAdmission::new(cache_slots, prompts.len(), samples),
            pending_calls: VecDeque::new(),
            tool_threads: 0,
            tool_threads_idle: 0,
            finished: (0..trajectories).map(|_| None).collect(),
            unfinished: trajectories,
            progress: RolloutProgress { trajectories, ..RolloutProgress::default() },
            failure: None,
            stopped: false,
        };
        Self {
            rollout,
            prompts,
            samples,
            caches,
            engines,
            sequences_max: rollout.plan.settings.sequences_max.max(1),
            tool_calls_max: rollout.plan.settings.tool_calls_concurrent_max.max(1),
            hooks,
            state: Mutex::new(state),
            work: Condvar::new(),
            calls: Condvar::new(),
        }
    }

    /// Fills `batch` and returns whether to continue; waits while there is nothing to do. `sampled` is the
    /// number of tokens drawn since the last call.
    pub(super) fn refill(&self, batch: &mut Vec<Work<'a>>, sampled: u64) -> bool {
        let mut found = self.try_refill(batch, sampled);
        while let RefillResult::Nothing = found {
            self.wait_for_work();
            found = self.try_refill(batch, 0);
        }
        matches!(found, RefillResult::Work)
    }

    /// Fills `batch` as [`Self::refill`] does, without waiting.
    ///
    /// An engine takes at most its share of the remaining work, so that the work is spread evenly.
    pub(super) fn try_refill(&self, batch: &mut Vec<Work<'a>>, sampled: u64) -> RefillResult {
        let mut state = self.lock();
        // When the last trajectory ended, all tokens were counted already.
        if sampled > 0 && state.unfinished > 0 {
            state.progress.sampled_tokens += sampled;
            (self.hooks.progress)(state.progress);
        }
        if !state.stopped && (self.hooks.stop)() {
            state.stopped = true;
            self.wake_all();
        }
        if state.is_over() {
            return if state.failure.is_some() { RefillResult::Failure } else { RefillResult::Finished };
        }
        let share = self.sequences_max.min(state.unfinished.div_ceil(self.engines));
        let weight = |work: &Work| if matches!(work, Work::Prompt(_)) { self.samples } else { 1 };
        let mut load: usize = batch.iter().map(weight).sum();
        while load < share
            && let Some(sample) = state.take_ready()
        {
            batch.push(Work::Sample(sample));
            load += 1;
        }
        while load < share && state.next_prompt < self.prompts.len() && state.admission.has_free_slot() {
            let index = state.next_prompt;
            state.admission.begin_group(index);
            batch.push(Work::Prompt(Box::new(PromptWork::new(index, self.caches.sequence()))));
            state.next_prompt += 1;
            state.progress.started += self.samples;
            load += self.samples;
        }
        if batch.is_empty() { RefillResult::Nothing } else { RefillResult::Work }
    }

    /// Waits until there may be work, but not longer than the interval of stop checks.
    pub(super) fn wait_for_work(&self) {
        let state = self.lock();
        if state.next_ready().is_none() && !state.is_over() {
            drop(self.work.wait_timeout(state, STOP_POLL));
        }
    }

    /// Passes a conversation on to its next action.
    pub(super) fn dispatch<'s>(
        &'s self,
        scope: &'s Scope<'s, '_>,
        sample: Box<SampleWork<'a>>,
        next: NextAction,
    ) where
        'a: 's,
    {
        match next {
            NextAction::Sample => {
                self.lock().ready.push_back(sample);
                self.work.notify_one();
            }
            NextAction::Call | NextAction::Turn => self.call(scope, sample, next),
            NextAction::Finish if self.rollout.task.may_take_long() => self.call(scope, sample, next),
            NextAction::Finish => self.finish(*sample),
        }
    }

    /// Queues a tool call or a question to the task. Starts a thread for it, unless one is idle or the
    /// maximum is reached.
    fn call<'s>(&'s self, scope: &'s Scope<'s, '_>, sample: Box<SampleWork<'a>>, next: NextAction)
    where
        'a: 's,
    {
        let mut state = self.lock();
        state.pending_calls.push_back((sample, next));
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
            let (sample, action) = loop {
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
                let mut sample = sample;
                let next = match action {
                    NextAction::Call => sample.conversation.run_calls(),
                    NextAction::Turn => sample.conversation.request_user_turn(),
                    NextAction::Sample | NextAction::Finish => action,
                };
                match next {
                    NextAction::Finish => self.finish(*sample),
                    next => self.dispatch(scope, sample, next),
                }
            };
            if catch_unwind(AssertUnwindSafe(answer)).is_err() {
                return self.fail(anyhow!("a tool or task panicked; this is a bug"));
            }
        }
    }

    fn finish(&self, sample: SampleWork<'a>) {
        let (trajectory_index, group, has_slot) = (sample.trajectory_index, sample.group(), sample.has_slot);
        let (trajectory, messages) = sample.conversation.finish();
        (self.hooks.finished)(&trajectory, &messages);
        let mut state = self.lock();
        state.unfinished -= 1;
        state.admission.end_sample(group, has_slot);
        state.progress.finished += 1;
        state.progress.finished_tokens += trajectory.sampled_tokens() as u64;
        state.progress.reward_sum += f64::from(trajectory.reward);
        if let Some(result) = state.finished.get_mut(trajectory_index) {
            *result = Some((trajectory, messages));
        }
        if state.unfinished == 0 {
            // Engines report the tokens of their last forward pass later.
            state.progress.sampled_tokens = state.progress.finished_tokens;
            (self.hooks.progress)(state.progress);
            self.wake_all();
        }
    }

    /// Ends the rollout. Only the first failure is reported.
    pub(super) fn fail(&self, error: Error) {
        self.lock().failure.get_or_insert(error);
        self.wake_all();
    }

    fn wake_all(&self) {
        self.work.notify_all();
        self.calls.notify_all();
    }

    /// Closes the tool's sessions of unfinished trajectories.
    pub(super) fn close_sessions(&self, interpreter: &dyn Interpreter) {
        let state = self.lock();
        let unfinished = state.finished.iter().enumerate().filter(|(_, result)| result.is_none());
        unfinished.for_each(|(trajectory_index, _)| interpreter.close(SessionId(trajectory_index as u64)));
    }

    /// Returns the results, `None` when stopped.
    ///
    /// # Errors
    /// The error that ended the rollout.
    pub(super) fn into_rollouts(self) -> Result<Option<Rollouts>> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        if let Some(failure) = state.failure {
            return Err(failure);
        }
        if state.unfinished > 0 {
            return Ok(None);
        }
        let mut finished = state.finished.into_iter().flatten();
        let mut rollouts = Rollouts { groups: Vec::new(), messages: Vec::new(), answers: Vec::new() };
        for prompt in &self.prompts {
            rollouts.answers.push(prompt.problem.answer.clone());
            let (trajectories, messages) = finished.by_ref().take(self.samples).unzip();
            rollouts.groups.push(Group { trajectories, greedy: None });
            rollouts.messages.push(messages);
        }
        Ok(Some(rollouts))
    }

    fn lock(&self) -> MutexGuard<'_, State<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
