//! The work shared by an engine's workers: waiting requests, sequences to continue, and kept sequences.

use super::cache_admission::CacheAdmission;
use super::request::{Completion, Continuation, EngineRequest, FinishReason};
use super::work::{Prefill, Sequence, Work};
use super::{Client, Engine, PolicyVersion};
use crate::panics::lock;
use anyhow::{Context, Error, Result, ensure};
use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

/// Interval at which an idle worker asks its client whether to go on.
const IDLE_POLL: Duration = Duration::from_millis(50);

/// The result of a worker's request for work.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RefillResult {
    Work,
    /// Nothing now, but the client goes on.
    Nothing,
    /// [`Client::goes_on`] returned false.
    Finished,
    Failure,
}

/// A request that has not begun.
struct WaitingRequest {
    group: u64,
    version: PolicyVersion,
    request: EngineRequest,
}

/// Requests and sequences that no worker holds.
#[derive(Default)]
pub(super) struct Queue {
    waiting: VecDeque<WaitingRequest>,
    /// Sequences that wait for a worker: after their prefill, or with new tokens to read.
    ready: VecDeque<Box<Sequence>>,
    kept: HashMap<u64, Box<Sequence>>,
    admission: CacheAdmission,
    groups: u64,
    /// Ids of the samples that have not ended.
    unfinished: HashSet<u64>,
    /// Ids of the unfinished samples that must end before the next forward.
    cancelled: HashSet<u64>,
    pub(super) failure: Option<Error>,
}

impl Queue {
    pub(super) fn new(slots: usize) -> Self {
        Self { admission: CacheAdmission::new(slots), ..Self::default() }
    }

    pub(super) fn submit(&mut self, version: PolicyVersion, request: EngineRequest) {
        self.unfinished.extend(request.samples.iter().map(|sample| sample.id));
        self.waiting.push_back(WaitingRequest { group: self.groups, version, request });
        self.groups += 1;
    }

    pub(super) fn continue_sequence(&mut self, continuation: Continuation) -> Result<()> {
        let id = continuation.sample.id;
        let kept = self.kept.get(&id).with_context(|| format!("no sequence {id} is kept"))?;
        let context = kept.reading.version.model().context_tokens_max();
        let length = kept.len().saturating_add(continuation.tokens.len());
        ensure!(
            length.saturating_add(continuation.new_tokens_max) <= context,
            "sequence {id} might outgrow the context of {context}"
        );
        let mut sequence = self.kept.remove(&id).context("the sequence that was just found")?;
        sequence.extend(continuation);
        self.unfinished.insert(id);
        self.ready.push_back(sequence);
        Ok(())
    }

    pub(super) fn release(&mut self, id: u64) {
        if let Some(sequence) = self.kept.remove(&id) {
            self.admission.end_sample(sequence.reading.group, sequence.has_slot);
        }
    }

    pub(super) fn cancel(&mut self, id: u64) {
        if self.unfinished.contains(&id) {
            self.cancelled.insert(id);
        }
    }

    /// Records that a sample has ended: it is kept, or gives its slot back.
    pub(super) fn end(&mut self, sequence: Box<Sequence>) {
        self.unfinished.remove(&sequence.id);
        self.cancelled.remove(&sequence.id);
        if sequence.reading.options.keep_sequence {
            self.kept.insert(sequence.id, sequence);
        } else {
            self.admission.end_sample(sequence.reading.group, sequence.has_slot);
        }
    }

    /// Returns the index in `ready` of the first sequence that can be admitted to the KV cache.
    fn next_ready(&self) -> Option<usize> {
        self.ready
            .iter()
            .position(|sequence| sequence.has_slot || self.admission.can_begin_sample(sequence.reading.group))
    }

    /// Takes the sequence that [`Self::next_ready`] selects.
    fn take_ready(&mut self) -> Option<Box<Sequence>> {
        let mut sequence = self.ready.remove(self.next_ready()?)?;
        if !std::mem::replace(&mut sequence.has_slot, true) {
            self.admission.begin_sample(sequence.reading.group);
        }
        Some(sequence)
    }

    /// Removes the cancelled samples from `ready` and from `batch`, and returns them. A prefill continues
    /// while one of its samples is not cancelled; its cancelled samples end after it.
    fn take_cancelled(&mut self, batch: &mut Vec<Work>) -> VecDeque<Box<Sequence>> {
        if self.cancelled.is_empty() {
            return VecDeque::new();
        }
        let mut ended = VecDeque::new();
        let cancelled = &self.cancelled;
        let mut retain = |sequence: Box<Sequence>| match cancelled.contains(&sequence.id) {
            true => {
                ended.push_back(sequence);
                None
            }
            false => Some(sequence),
        };
        self.ready = std::mem::take(&mut self.ready).into_iter().filter_map(&mut retain).collect();
        for work in std::mem::take(batch) {
            match work {
                Work::Sequence(sequence) => batch.extend(retain(sequence).map(Work::Sequence)),
                Work::Prefill(prefill) if prefill.ids().all(|id| cancelled.contains(&id)) => {
                    // `retain` moves each of these samples to `ended`.
                    prefill.into_sequences().for_each(|sequence| drop(retain(sequence)));
                }
                prefill => batch.push(prefill),
            }
        }
        ended
    }

    /// Removes the waiting requests whose samples are all cancelled. Returns the ids of these samples, each
    /// with the number of its version.
    fn take_cancelled_requests(&mut self) -> Vec<(u64, u64)> {
        if self.cancelled.is_empty() {
            return vec![];
        }
        let mut samples = vec![];
        let cancelled = &mut self.cancelled;
        self.waiting.retain(|WaitingRequest { version, request, .. }| {
            let all = request.samples.iter().all(|sample| cancelled.contains(&sample.id));
            if all {
                samples.extend(request.samples.iter().map(|sample| (sample.id, version.number())));
            }
            !all
        });
        for (id, _) in &samples {
            self.cancelled.remove(id);
            self.unfinished.remove(id);
        }
        samples
    }
}

impl Engine<'_> {
    /// Fills `batch` and returns whether to continue; waits while there is nothing to do. `sampled` is the
    /// number of tokens drawn since the last call.
    pub(super) fn refill(&self, client: &dyn Client, batch: &mut Vec<Work>, sampled: u64) -> bool {
        let mut found = self.try_refill(client, batch, sampled);
        while let RefillResult::Nothing = found {
            self.wait_for_work();
            found = self.try_refill(client, batch, 0);
        }
        matches!(found, RefillResult::Work)
    }

    /// Performs [`Self::refill`] without waiting.
    ///
    /// A worker takes at most its share of the remaining work, so that the work is spread evenly.
    pub(super) fn try_refill(
        &self,
        client: &dyn Client,
        batch: &mut Vec<Work>,
        sampled: u64,
    ) -> RefillResult {
        let goes_on = client.goes_on(sampled);
        let mut queue = lock(&self.queue);
        if queue.failure.is_some() {
            return RefillResult::Failure;
        }
        if !goes_on {
            drop(queue);
            self.wake();
            return RefillResult::Finished;
        }
        let cancelled = queue.take_cancelled(batch);
        let never_begun = queue.take_cancelled_requests();
        if !cancelled.is_empty() || !never_begun.is_empty() {
            drop(queue);
            cancelled.into_iter().for_each(|sequence| self.end(client, sequence, FinishReason::Cancelled));
            never_begun
                .into_iter()
                .for_each(|(id, version)| client.finished(id, Completion::cancelled(version)));
            queue = lock(&self.queue);
        }
        let share = self.limits.sequences_max.max(1).min(queue.unfinished.len().div_ceil(self.workers));
        let mut load: usize = batch.iter().map(Work::samples).sum();
        while load < share
            && let Some(sequence) = queue.take_ready()
        {
            batch.push(Work::Sequence(sequence));
            load += 1;
        }
        while load < share
            && queue.admission.has_free_slot()
            && let Some(waiting) = queue.waiting.pop_front()
        {
            let samples = waiting.request.samples.len();
            queue.admission.begin_group(waiting.group, samples);
            batch.push(Work::Prefill(Box::new(self.prefill(waiting))));
            load += samples;
        }
        if batch.is_empty() { RefillResult::Nothing } else { RefillResult::Work }
    }

    /// Queues a sequence whose prompt was read, for any worker.
    pub(super) fn make_ready(&self, sequence: Box<Sequence>) {
        lock(&self.queue).ready.push_back(sequence);
        self.work.notify_one();
    }

    fn prefill(&self, WaitingRequest { group, version, request }: WaitingRequest) -> Prefill {
        let mut cache = self.caches.sequence();
        if self.prefixes.is_some() {
            cache.record_filled();
        }
        Prefill::new(group, version, request, cache, self.prefixes.is_some())
    }

    /// Waits until there may be work, but not longer than [`IDLE_POLL`].
    pub(super) fn wait_for_work(&self) {
        let queue = lock(&self.queue);
        let has_work =
            queue.next_ready().is_some() || (!queue.waiting.is_empty() && queue.admission.has_free_slot());
        if !has_work && queue.failure.is_none() {
            drop(self.work.wait_timeout(queue, IDLE_POLL));
        }
    }
}
