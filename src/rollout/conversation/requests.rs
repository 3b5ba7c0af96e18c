//! Requests of conversations to the engine.

use super::Conversation;
use crate::engine::{Continuation, EngineRequest, SampleRequest};
use crate::random::stream;
use crate::rollout::prompt::RenderedPrompt;
use crate::rollout::{ForcedTokens, Rollout, TurnPosition};
use rand::Rng;

/// The coordinates of a trajectory. They select its random streams.
#[derive(Clone, Copy)]
pub(super) struct Coordinates {
    /// The step that began the conversation.
    pub step: u64,
    pub prompt: u64,
    pub sample: u64,
    /// Its index among all trajectories of the rollout, and its id in the engine.
    pub index: usize,
}

impl Coordinates {
    /// Returns the position of turn `turn`.
    pub fn turn(&self, turn: usize) -> TurnPosition {
        TurnPosition { prompt: self.prompt, sample: self.sample, turn: turn as u64 }
    }

    /// Returns the request for a turn. Each turn has a random stream of its own.
    fn sample_request(&self, rollout: &Rollout, turn: usize, forced: &ForcedTokens) -> SampleRequest {
        let turn = self.turn(turn);
        let coordinates = [self.step, turn.prompt, turn.sample, turn.turn];
        let random = stream(rollout.plan.seed, rollout.plan.purpose, &coordinates);
        SampleRequest { id: self.index as u64, random, forced: forced(turn) }
    }
}

impl Conversation<'_> {
    /// Returns the request for the first turns of all `samples` samples of a prompt. Their ids in the engine
    /// are `first`, `first + 1`, and so on.
    pub fn request(
        rollout: &Rollout,
        prompt: &RenderedPrompt,
        samples: usize,
        first: usize,
        forced: &ForcedTokens,
    ) -> EngineRequest {
        let (step, prompt_index) = (rollout.plan.step, prompt.index);
        let sample = |sample: usize| {
            let coordinates =
                Coordinates { step, prompt: prompt_index, sample: sample as u64, index: first + sample };
            coordinates.sample_request(rollout, 0, forced)
        };
        engine_request(rollout, prompt.tokens.clone(), (0..samples).map(sample).collect(), 0)
    }

    /// Returns the request that goes on after a pause. All tokens are read again.
    pub fn resumption(&self, forced: &ForcedTokens) -> EngineRequest {
        let mut sample = self.sample_request(forced);
        // The engine draws one random number per token.
        for _ in self.turn.start..self.record.len() {
            let _: f64 = sample.random.random();
        }
        engine_request(self.rollout, self.record.tokens.clone(), vec![sample], self.record.sampled)
    }

    /// Returns the engine's input for the next turn.
    pub fn continuation(&mut self, forced: &ForcedTokens) -> Continuation {
        Continuation {
            tokens: std::mem::take(&mut self.turn.inserted),
            sample: self.sample_request(forced),
            new_tokens_max: self.tokens_left(),
        }
    }

    /// Returns the request for the first turn of a part, if one has just begun.
    pub fn next_part(&mut self, forced: &ForcedTokens) -> Option<EngineRequest> {
        let begins = std::mem::take(&mut self.turn.begins_part);
        let tokens = || self.record.tokens.clone();
        begins.then(|| {
            engine_request(self.rollout, tokens(), vec![self.sample_request(forced)], self.record.sampled)
        })
    }

    fn sample_request(&self, forced: &ForcedTokens) -> SampleRequest {
        self.coordinates.sample_request(self.rollout, self.turns_ended(), forced)
    }

    /// Returns how many tokens may still be sampled.
    pub(super) fn tokens_left(&self) -> usize {
        tokens_left(self.rollout, self.record.sampled, self.record.len())
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
        new_tokens_max: tokens_left(rollout, sampled, tokens.len()),
        tokens,
        samples,
        version: None,
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
