//! The thread that trains: it alone holds the adapters, and does what clients ask in the order of
//! [`super::state::State::order`].

use super::Door;
use super::futures::FutureReply;
use super::passes::{PassResult, PassTask};
use super::state::{ModelTask, Sampler, Work};
use super::store::{SavedPath, SavedState, hex};
use crate::actor::{Actor, GradientNorm, OptimizerSettings, UpdateSettings};
use crate::bad_input;
use crate::engine::PolicyVersion;
use crate::error::BadInput;
use crate::metrics::{Metrics, Phase, Row};
use crate::model::names::TensorRole;
use anyhow::{Context, Result, anyhow};
use serde_json::json;
use std::collections::HashMap;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Interval between checks for vanished clients, and for the end.
const POLL: Duration = Duration::from_millis(200);

/// A model in training.
struct Trained {
    actor: Actor,
    /// The passes since the last update.
    window: Window,
    /// A number of the weights: it rises whenever they change.
    version: u64,
}

#[derive(Default)]
struct Window {
    loss: f64,
    tokens: usize,
    seconds: f64,
    mismatch: f64,
    known: usize,
    unknown: usize,
}

impl Door<'_> {
    /// Works until `is_closed` returns true.
    pub(super) fn train(&self, is_closed: &dyn Fn() -> bool) {
        let mut models: HashMap<String, Trained> = HashMap::new();
        while !is_closed() {
            let Some(task) = self.next_task() else { continue };
            let (model, promise) = (task.model.clone(), task.promise.clone());
            let done = catch_unwind(AssertUnwindSafe(|| self.run(&mut models, &task)));
            let done = done.unwrap_or_else(|_| {
                // Nobody knows in what state the model is.
                models.remove(&model);
                Err(anyhow!("a bug in the server; the model is lost, load a saved path into a new one"))
            });
            let reply = done.unwrap_or_else(|error| {
                FutureReply::failed(&format!("{error:#}"), error.downcast_ref::<BadInput>().is_some())
            });
            if let Some(promise) = promise {
                promise.set(reply);
            }
        }
    }

    /// Waits for the next task, at most [`POLL`]. Ends the sessions of clients that have vanished.
    fn next_task(&self) -> Option<ModelTask> {
        let mut state = self.lock();
        for session in state.vanished() {
            state.end_session(&session);
            self.futures.end_session(&session);
        }
        let waited = self.wakes.wait_timeout_while(state, POLL, |state| state.ready.is_empty());
        let (mut state, _) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        state.ready.pop_front()
    }

    fn run(&self, models: &mut HashMap<String, Trained>, task: &ModelTask) -> Result<FutureReply> {
        let id = &task.model;
        match &task.work {
            Work::Create { lora, seed } => {
                let created =
                    self.settings.base.with_adapter(lora.clone(), *seed).and_then(|a| self.start(a));
                let trained = created.inspect_err(|_| self.drop_model(id))?;
                models.insert(id.clone(), trained);
                Ok(FutureReply::json(&json!({"type": "create_model", "model_id": id})))
            }
            Work::Load { path, optimizer, creates } => {
                let mut trained = self.load(path, *optimizer).inspect_err(|_| {
                    if *creates {
                        self.drop_model(id)
                    }
                })?;
                trained.version = models.get(id).map_or(0, |former| former.version + 1);
                self.lock().new_version(id, trained.version);
                models.insert(id.clone(), trained);
                Ok(FutureReply::json(
                    &json!({"type": "load_weights", "path": path.to_string(), "model_id": id}),
                ))
            }
            Work::End => {
                models.remove(id);
                Ok(FutureReply::json(&json!({})))
            }
            Work::Fail(reason) => Err(bad_input!("{reason}")),
            work => {
                let lost = || bad_input!("the model {id:?} is not here; load a saved path into a new one");
                let trained = models.get_mut(id).ok_or_else(lost)?;
                self.run_on(id, trained, work)
            }
        }
    }

    fn run_on(&self, id: &str, trained: &mut Trained, work: &Work) -> Result<FutureReply> {
        if matches!(work, Work::Pass(_) | Work::Step(_)) {
            self.trained.fetch_add(1, Ordering::Relaxed);
        }
        match work {
            Work::Pass(pass) => {
                let result = self.pass(id, trained, pass)?;
                Ok(FutureReply::Protobuf(result.output.into()))
            }
            Work::Step(update) => self.step(id, trained, update),
            Work::Save { path, overwrite, expires, user_metadata } => {
                let owner = self.lock().models.get(id).map(|model| (model.owner, model.rank));
                let (owner, rank) = owner.context("a model without an owner")?;
                let state = SavedState {
                    base_model: self.settings.model_name.clone(),
                    rank,
                    updates: trained.actor.updates(),
                    owner: hex(owner),
                    expires: *expires,
                    user_metadata: user_metadata.clone(),
                };
                self.store.save(path, (&trained.actor, &self.settings.files), &state, *overwrite)?;
                let kind = if path.kind == super::store::WEIGHTS {
                    "save_weights"
                } else {
                    "save_weights_for_sampler"
                };
                Ok(FutureReply::json(&json!({"type": kind, "path": path.to_string()})))
            }
            Work::Sample { sampler, number } => {
                let version = self.version_of(&trained.actor.snapshot(None)?)?;
                let mut state = self.lock();
                let model = state.models.get(id).map(|model| (model.owner, model.session.clone()));
                let (owner, session) = model.context("a model without an owner")?;
                let made = Sampler {
                    owner,
                    session,
                    version: Some(version),
                    of: Some((id.to_owned(), trained.version)),
                    number: *number,
                    bytes: factor_bytes(&trained.actor),
                    ..Sampler::default()
                };
                state.add_sampler(sampler.clone(), made, self.sampler_limits());
                Ok(FutureReply::json(
                    &json!({"type": "save_weights_for_sampler", "path": null, "sampling_session_id": sampler}),
                ))
            }
            _ => Err(anyhow!("work without a model")),
        }
    }

    /// Makes the adapter of `actor` trainable, with a fresh optimizer.
    fn start(&self, mut actor: Actor) -> Result<Trained> {
        actor.set_training_threads(self.settings.training_threads.clone());
        let specs = &actor.parameters.specs;
        let trained: Vec<bool> = specs.iter().map(|spec| spec.role == TensorRole::AdapterFactor).collect();
        actor.parameters.set_trainable(&trained)?;
        actor.start_optimizer(&OptimizerSettings::default(), self.settings.rounds_to_bf16)?;
        Ok(Trained { actor, window: Window::default(), version: 0 })
    }

    fn load(&self, path: &SavedPath, optimizer: bool) -> Result<Trained> {
        let saved = self.store.read(path)?;
        let digest = self.settings.files.base.map(|base| base.digest.as_str());
        let mut trained = self.start(self.store.actor(path, self.settings.base, digest)?)?;
        if optimizer {
            let place = self.store.place(path);
            let loaded = trained.actor.load(&place, Some(saved.updates));
            loaded.with_context(|| format!("loading {path}"))?;
        }
        Ok(trained)
    }

    /// Forgets a model that could not be made.
    fn drop_model(&self, id: &str) {
        self.lock().models.remove(id);
    }

    /// Returns the weights of `actor` for the engine. They must not change.
    pub(super) fn version_of(&self, actor: &Actor) -> Result<PolicyVersion> {
        Ok(PolicyVersion::new(actor.updates(), actor.policy(None)?))
    }

    fn pass(&self, id: &str, trained: &mut Trained, pass: &PassTask) -> Result<PassResult> {
        let has_sampled =
            |sequence: &[u8; 16]| self.lock().models.get(id).is_some_and(|model| model.has_sampled(sequence));
        let begun = Instant::now();
        let result = pass.run(&mut trained.actor, &has_sampled)?;
        let window = &mut trained.window;
        window.seconds += begun.elapsed().as_secs_f64();
        if !pass.forward_only {
            window.loss += result.loss;
            window.tokens += result.tokens;
            window.mismatch = window.mismatch.max(result.mismatch);
            window.known += result.known;
            window.unknown += result.unknown;
        }
        Ok(result)
    }

    fn step(&self, id: &str, trained: &mut Trained, update: &UpdateSettings) -> Result<FutureReply> {
        let begun = Instant::now();
        let norm = match trained.actor.optim_step(update)? {
            GradientNorm::Applied(norm) => norm,
            GradientNorm::Skipped(norm) => {
                return Err(bad_input!(
                    "the gradient's norm is {norm}: no weight changed, and the gradients were cleared; lower the learning rate, or clip"
                ));
            }
        };
        trained.version += 1;
        self.lock().new_version(id, trained.version);
        let Window { loss, tokens, seconds, mismatch, known, unknown } = std::mem::take(&mut trained.window);
        let seconds = seconds + begun.elapsed().as_secs_f64();
        let mut metrics = Metrics::new();
        metrics.set("tinker/loss", loss);
        metrics.set("actor/grad_norm", norm);
        metrics.set("actor/lr", update.lr);
        metrics.set("perf/throughput", tokens as f64 / seconds.max(1e-9));
        metrics.set("timing_s/step", seconds);
        metrics.set("tinker/mismatch_tokens", known as f64);
        metrics.set("tinker/mismatch_unknown_tokens", unknown as f64);
        if known > 0 {
            metrics.set("engine/logprob_abs_diff_max", mismatch);
        }
        let row = Row { step: trained.actor.updates(), phase: Phase::Rl, metrics };
        self.record(id, &row)?;
        Ok(FutureReply::json(&json!({"type": "optim_step", "metrics": {"optim/grad_norm": norm}})))
    }

    /// Adds a row to the metrics of a run, for its report.
    fn record(&self, run: &str, row: &Row) -> Result<()> {
        let folder = self.store.run_folder(run);
        let write = || {
            std::fs::create_dir_all(&folder)?;
            let path = folder.join("metrics.jsonl");
            let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
            file.write_all((row.to_json() + "\n").as_bytes())
        };
        write().with_context(|| {
            format!("the weights were updated, but {}/metrics.jsonl cannot be written", folder.display())
        })
    }
}

/// Returns the bytes of the adapter of `actor`.
pub(super) fn factor_bytes(actor: &Actor) -> u64 {
    let factors = actor.parameters.specs.iter().filter(|spec| spec.role == TensorRole::AdapterFactor);
    factors.map(|spec| (spec.element_count() * size_of::<f32>()) as u64).sum()
}
