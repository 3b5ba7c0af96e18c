//! The endpoints.

use super::bodies::{
    AdamBody, CreateBody, LoadBody, LoraBody, ModelBody, SamplingSessionBody, SaveBody, SessionBody, StepBody,
};
use super::error::TinkerError;
use super::futures::{Begun, KeyDigest, Promise};
use super::passes::PassTask;
use super::sample::{SampleBody, SampleLimits};
use super::state::{ModelTask, Sampler, Work};
use super::store::{SAMPLER_WEIGHTS, SavedPath, SavedState, WEIGHTS, check_name, now};
use super::wire::decode_request;
use super::{Door, PLANNED_RANK, RANK_MAX, adapter_bytes, lora};
use crate::actor::UpdateSettings;
use crate::http::{HttpRequest, Response};
use crate::random::{Purpose, stream};
use crate::serve::{BODY_BYTES_MAX, Hub, Requests};
use chrono::DateTime;
use percent_encoding::percent_decode_str;
use rand::RngCore;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// The beginning of the paths of all endpoints.
pub const PREFIX: &str = "/api/v1/";
/// Bytes of a result in JSON.
const JSON_RESULT_BYTES: usize = 1 << 10;
/// Maximum bytes of a model's or a path's metadata.
const METADATA_BYTES_MAX: usize = 16 << 10;
/// Bytes of a waiting request in memory, for each byte of its body.
const REQUEST_FACTOR: usize = 4;
/// Number of samples that a client may have open, so that its connections fit.
const CLIENT_SAMPLES_MAX: usize = 64;

type Answer = Result<Response<'static>, TinkerError>;

/// Returns the owner that a key stands for.
pub fn owner_of(key: &str) -> KeyDigest {
    *blake3::hash(key.trim().as_bytes()).as_bytes()
}

fn read<T: DeserializeOwned>(request: &HttpRequest) -> Result<T, TinkerError> {
    let body = request.json().map_err(|(status, why)| TinkerError::new(status, why))?;
    // Numbers keep their text, so they are read from a value.
    serde_json::from_value((*body).clone())
        .map_err(|error| TinkerError::invalid(format!("the body: {error}")))
}

fn ok(value: &Value) -> Answer {
    Ok(Response::whole("200 OK", "application/json", value.to_string().into()))
}

fn check_metadata(metadata: &Value) -> Result<(), TinkerError> {
    match metadata.to_string().len() {
        0..=METADATA_BYTES_MAX => Ok(()),
        bytes => Err(TinkerError::invalid(format!(
            "user_metadata has {bytes} bytes; at most {METADATA_BYTES_MAX} are kept"
        ))),
    }
}

impl Door<'_> {
    pub(super) fn route(&self, hub: &Hub, request: &HttpRequest) -> Answer {
        if request.content_encoding.is_some() {
            return Err(TinkerError::new(
                "415 Unsupported Media Type",
                "bodies must not be compressed".to_owned(),
            ));
        }
        let path = request.path_alone().strip_prefix(PREFIX).unwrap_or_default();
        if path == "healthz" {
            return ok(&json!({"status": "ok"}));
        }
        let key = request.api_key.as_deref().ok_or_else(TinkerError::unauthorized)?;
        let owner = owner_of(key);
        let parts: Vec<String> =
            path.split('/').map(|part| percent_decode_str(part).decode_utf8_lossy().into_owned()).collect();
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        match (request.method.as_str(), &parts[..]) {
            ("POST", ["client", "config"]) => ok(&json!({
                "fwdbwd_max_chunk_len": self.settings.chunk_datums,
                // The client's estimate is a little lower than the body.
                "fwdbwd_max_chunk_bytes_count": BODY_BYTES_MAX / 4 * 3,
                "sample_max_concurrent_requests": CLIENT_SAMPLES_MAX.min(self.settings.samples_max),
            })),
            ("POST", ["client", "dynamic_config"]) => ok(&json!({})),
            ("POST", ["telemetry"]) => ok(&json!({"status": "accepted"})),
            ("GET", ["get_server_capabilities"]) => ok(&json!({"supported_models": [{
                "model_name": self.settings.model_name,
                "max_context_length": self.settings.tokens_max,
                "trainable": true,
                "sampleable": true,
            }]})),
            ("POST", ["create_session"]) => self.create_session(owner),
            ("POST", ["session_heartbeat"]) => {
                let SessionBody { session_id } = read(request)?;
                self.lock().see(&session_id, owner)?;
                ok(&json!({"type": "session_heartbeat"}))
            }
            ("POST", ["sessions", id, "finish"]) => {
                // A client that finishes twice, or after its session is over, has what it asked for.
                let is_own = self.lock().see(id, owner).is_ok();
                if is_own && self.lock().end_session(id) {
                    self.futures.end_session(id);
                    self.wakes.notify_all();
                }
                ok(&json!({}))
            }
            ("POST", ["create_model"]) => self.create_model(owner, read(request)?),
            ("POST", ["get_info"]) => self.get_info(owner, read(request)?),
            ("POST", ["forward_backward"]) => self.forward_backward(owner, request),
            ("POST", ["optim_step"]) => self.optim_step(owner, read(request)?),
            ("POST", ["save_weights"]) => self.save(owner, read(request)?, WEIGHTS),
            ("POST", ["save_weights_for_sampler"]) => self.save(owner, read(request)?, SAMPLER_WEIGHTS),
            ("POST", ["load_weights"]) => self.load_weights(owner, read(request)?),
            ("POST", ["create_sampling_session"]) => self.create_sampling_session(owner, read(request)?),
            ("GET", ["samplers", id]) => self.sampler_info(owner, id),
            ("POST", ["asample"]) => self.asample(hub, owner, read(request)?),
            ("POST", ["retrieve_future"]) => {
                let body: Value = read(request)?;
                let id = body["request_id"].as_str();
                let id = id.ok_or_else(|| TinkerError::invalid("\"request_id\" is missing"))?;
                self.futures.fetch(id, owner)
            }
            ("GET", ["training_runs", id]) => self.training_run(owner, id),
            ("DELETE", ["training_runs", id, "checkpoints", kind, name]) => {
                let path = SavedPath::parse(&format!("tinker://{id}/{kind}/{name}"))?;
                self.read_saved(&path, owner)?;
                self.store.remove(&path)?;
                ok(&json!({}))
            }
            ("POST", ["weights_info"]) => {
                let body: Value = read(request)?;
                let path = SavedPath::parse(body["tinker_path"].as_str().unwrap_or_default())?;
                let state = self.read_saved(&path, owner)?;
                ok(&json!({"base_model": state.base_model, "is_lora": true, "lora_rank": state.rank}))
            }
            _ => {
                // Where the official service's command-line tool looks for saved weights.
                let about_paths =
                    ["checkpoint", "weights", "training_runs"].iter().any(|part| path.contains(part));
                let remedy =
                    if about_paths { "; `rloss export PATH --out FOLDER` writes a saved path" } else { "" };
                let text = format!("this server has no {} {PREFIX}{path}{remedy}", request.method);
                Err(TinkerError::not_found(text))
            }
        }
    }

    fn read_saved(&self, path: &SavedPath, owner: KeyDigest) -> Result<SavedState, TinkerError> {
        self.store.read_own(path, owner).map_err(|error| TinkerError::not_found(error.to_string()))
    }

    fn create_session(&self, owner: KeyDigest) -> Answer {
        let id = self.new_id();
        self.lock().open_session(id.clone(), owner)?;
        ok(&json!({"type": "create_session", "session_id": id}))
    }

    fn check_model_name(&self, name: &str) -> Result<(), TinkerError> {
        let served = &self.settings.model_name;
        match name == served {
            true => Ok(()),
            false => Err(TinkerError::invalid(format!(
                "the base model {name:?} is not served here; {served:?} is (--name chooses the name)"
            ))),
        }
    }

    /// Adds a model that does not exist yet, and its first task.
    fn add_model(
        &self,
        owner: KeyDigest,
        (session, number): (&str, u64),
        (rank, bytes): (usize, u64),
        user_metadata: Value,
        work: Work,
    ) -> Answer {
        check_metadata(&user_metadata)?;
        let id = format!("{session}:train:{number}");
        let request_id = format!("{id}:0");
        self.lock().see(session, owner)?;
        let begun = self.futures.begin(&request_id, owner, session, JSON_RESULT_BYTES)?;
        if let Begun::New(promise) = begun {
            let mut state = self.lock();
            let limits = (self.settings.adapters_max, self.adapter_bytes_max());
            if let Err(error) = state.add_model(&id, (owner, session, rank), bytes, user_metadata, limits) {
                drop(state);
                self.futures.forget(&request_id);
                return Err(error);
            }
            state.ready.push_back(ModelTask {
                model: id.clone(),
                promise: Some(promise),
                work,
                _share: None,
            });
            drop(state);
            self.wakes.notify_all();
        }
        ok(&json!({"request_id": request_id, "model_id": id}))
    }

    fn create_model(&self, owner: KeyDigest, body: CreateBody) -> Answer {
        self.check_model_name(&body.base_model)?;
        if let Some(kind) = body.optimizer_config["type"].as_str().filter(|kind| *kind != "adamw") {
            return Err(TinkerError::invalid(format!("the optimizer {kind:?} is not supported; use adamw")));
        }
        let config = body.lora_config.unwrap_or(LoraBody {
            rank: PLANNED_RANK,
            seed: None,
            train_unembed: true,
            train_mlp: true,
            train_attn: true,
        });
        if config.rank == 0 || config.rank > RANK_MAX {
            return Err(TinkerError::invalid(format!(
                "the rank is {}; it must be 1 to {RANK_MAX}",
                config.rank
            )));
        }
        let base = self.settings.base;
        let lora = lora(base, config.rank, [config.train_unembed, config.train_mlp, config.train_attn]);
        if lora.targets.is_empty() {
            return Err(TinkerError::invalid(
                "nothing would be trained; set train_unembed, train_mlp or train_attn",
            ));
        }
        let seed = match config.seed {
            Some(seed) => seed as u64,
            None => stream(self.settings.seed, Purpose::Adapter, &[body.model_seq_id]).next_u64(),
        };
        let bytes = adapter_bytes(base, config.rank)?;
        let place = (body.session_id.as_str(), body.model_seq_id);
        self.add_model(owner, place, (config.rank, bytes), body.user_metadata, Work::Create { lora, seed })
    }

    fn load_weights(&self, owner: KeyDigest, body: LoadBody) -> Answer {
        let read = |creates| {
            let path = SavedPath::parse(&body.path)?;
            let saved = self.read_saved(&path, owner)?;
            if body.optimizer && path.kind != WEIGHTS {
                return Err(TinkerError::invalid(format!(
                    "{path} has no optimizer state; load a path of save_state, or load without the optimizer"
                )));
            }
            Ok((saved.rank, Work::Load { path, optimizer: body.optimizer, creates }))
        };
        if let (Some(session), Some(number)) = (&body.session_id, body.model_seq_id) {
            let (rank, work) = read(true)?;
            let bytes = adapter_bytes(self.settings.base, rank)?;
            return self.add_model(owner, (session, number), (rank, bytes), body.user_metadata, work);
        }
        let (Some(model), Some(number)) = (body.model_id, body.seq_id) else {
            return Err(TinkerError::invalid("load_weights needs session_id and model_seq_id"));
        };
        let own = self.lock().model(&model, owner)?.rank;
        let read = || match read(false)? {
            (rank, work) if rank == own => Ok(work),
            (rank, _) => Err(TinkerError::invalid(format!(
                "{} has rank {rank}, and this model {own}; use create_training_client_from_state",
                body.path
            ))),
        };
        self.submit(owner, &model, number, JSON_RESULT_BYTES, None, read)
    }

    fn get_info(&self, owner: KeyDigest, body: ModelBody) -> Answer {
        let rank = self.lock().model(&body.model_id, owner)?.rank;
        let name = &self.settings.model_name;
        ok(&json!({
            "type": "get_info",
            "model_id": body.model_id,
            "is_lora": true,
            "lora_rank": rank,
            "model_name": name,
            "model_data": {
                "arch": self.settings.base.model.config.family.name,
                "model_name": name,
                "tokenizer_id": self.settings.tokenizer,
            },
        }))
    }

    /// Accepts request `number` of a model, in its turn. A request that came before is not done again. An
    /// error of `work` becomes the result, so that later requests need not wait for this number.
    fn submit(
        &self,
        owner: KeyDigest,
        model: &str,
        number: i64,
        result_bytes: usize,
        share: Option<crate::http::Share>,
        work: impl FnOnce() -> Result<Work, TinkerError>,
    ) -> Answer {
        let session = self.lock().model(model, owner)?.session.clone();
        let request_id = format!("{model}:{number}");
        if let Begun::New(promise) = self.futures.begin(&request_id, owner, &session, result_bytes)? {
            let work = work().unwrap_or_else(|error| Work::Fail(error.detail.clone()));
            let task = ModelTask { model: model.to_owned(), promise: Some(promise), work, _share: share };
            if let Err(error) = self.lock().order(number, task) {
                self.futures.forget(&request_id);
                return Err(error);
            }
            self.wakes.notify_all();
        }
        ok(&json!({"request_id": request_id, "model_id": model}))
    }

    fn forward_backward(&self, owner: KeyDigest, request: &HttpRequest) -> Answer {
        let (bytes, decoded) = request.with_body(|body| (body.len(), decode_request(body)));
        let decoded = decoded.map_err(TinkerError::invalid)?;
        let (model, number) = (decoded.model_id.clone(), i64::from(decoded.seq_id));
        let share = self.waiting.take((REQUEST_FACTOR * bytes).max(1 << 12), Duration::ZERO);
        let share =
            share.ok_or_else(|| TinkerError::busy("requests that wait fill the memory; try again later"))?;
        let vocabulary = self.settings.base.model.config.vocab_size;
        let task = PassTask::read(decoded, vocabulary, self.settings.tokens_max);
        let result_bytes = task.as_ref().map_or(JSON_RESULT_BYTES, PassTask::result_bytes);
        self.submit(owner, &model, number, result_bytes, Some(share), || Ok(Work::Pass(Box::new(task?))))
    }

    fn optim_step(&self, owner: KeyDigest, body: StepBody) -> Answer {
        let number = body.seq_id.ok_or_else(|| TinkerError::invalid("\"seq_id\" is missing"))?;
        self.submit(owner, &body.model_id, number, JSON_RESULT_BYTES, None, || {
            let AdamBody { learning_rate, beta1, beta2, eps, weight_decay, grad_clip_norm } = body.adam_params;
            let fits = |value: f64, max: f64| value >= 0.0 && value <= max;
            let is_decay = |beta: f64| (0.0..1.0).contains(&beta);
            let is_valid = fits(learning_rate, 10.0) && is_decay(beta1) && is_decay(beta2) && eps > 0.0;
            if !(is_valid && fits(eps, 1.0) && fits(weight_decay, 100.0) && fits(grad_clip_norm, 1e9)) {
                return Err(TinkerError::invalid(
                    "adam_params are out of range: learning_rate 0 to 10, beta1 and beta2 0 to below 1, eps above 0 to 1, weight_decay 0 to 100, grad_clip_norm 0 (off) to 1e9",
                ));
            }
            Ok(Work::Step(UpdateSettings {
                lr: learning_rate,
                betas: [beta1, beta2],
                eps,
                weight_decay,
                grad_norm_max: grad_clip_norm,
                norm_limit: None,
            }))
        })
    }

    fn save(&self, owner: KeyDigest, body: SaveBody, kind: &str) -> Answer {
        let number = body.seq_id.ok_or_else(|| TinkerError::invalid("\"seq_id\" is missing"))?;
        let session = self.lock().model(&body.model_id, owner)?.session.clone();
        let (model, overwrite) = (body.model_id.clone(), body.overwrite);
        self.submit(owner, &model, number, JSON_RESULT_BYTES, None, || {
            check_metadata(&body.user_metadata)?;
            match (body.path, body.sampling_session_seq_id) {
                (Some(name), _) => {
                    check_name(&name)?;
                    let path = SavedPath { run: body.model_id, kind: kind.to_owned(), name };
                    let expires = body.ttl_seconds.map(|seconds| now().saturating_add(seconds));
                    // A sampler's path is replaced: the SDK has no flag for it.
                    let overwrite = overwrite || kind == SAMPLER_WEIGHTS;
                    Ok(Work::Save { path, overwrite, expires, user_metadata: body.user_metadata })
                }
                (None, Some(number)) if kind == SAMPLER_WEIGHTS => {
                    Ok(Work::Sample { sampler: format!("{session}:sample:{number}"), number })
                }
                _ => Err(TinkerError::invalid("\"path\" is missing: the name to save under")),
            }
        })
    }

    fn create_sampling_session(&self, owner: KeyDigest, body: SamplingSessionBody) -> Answer {
        let SamplingSessionBody { session_id, sampling_session_seq_id: number, base_model, model_path } =
            body;
        self.lock().see(&session_id, owner)?;
        let id = format!("{session_id}:sample:{number}");
        let is_known = self.lock().sampler(&id, owner).is_ok();
        if !is_known {
            let (version, path, bytes) = match (&model_path, &base_model) {
                (Some(path), _) => {
                    let path = SavedPath::parse(path)?;
                    let (version, bytes) = self.saved_version(&path, owner)?;
                    (Some(version), Some(path), bytes)
                }
                (None, Some(name)) => {
                    self.check_model_name(name)?;
                    (Some(self.base_version.clone()), None, 0)
                }
                (None, None) => return Err(TinkerError::invalid("base_model or model_path is missing")),
            };
            let session = session_id;
            let sampler = Sampler { owner, session, version, path, number, bytes, ..Sampler::default() };
            self.lock().add_sampler(id.clone(), sampler, self.sampler_limits());
        }
        ok(&json!({"type": "create_sampling_session", "sampling_session_id": id}))
    }

    fn sampler_info(&self, owner: KeyDigest, id: &str) -> Answer {
        let mut state = self.lock();
        let path = state.sampler(id, owner)?.path.as_ref().map(SavedPath::to_string);
        let base = &self.settings.model_name;
        ok(&json!({"sampler_id": id, "base_model": base, "model_path": path}))
    }

    fn asample(&self, hub: &Hub, owner: KeyDigest, body: SampleBody) -> Answer {
        let (Some(id), Some(number)) = (body.sampling_session_id.clone(), body.seq_id) else {
            return Err(TinkerError::invalid("sampling_session_id and seq_id are needed"));
        };
        let samples = body.num_samples;
        let request_id = format!("{id}:{number}");
        let settings = &self.settings;
        let limits = SampleLimits {
            vocabulary: settings.base.model.config.vocab_size,
            tokens_max: settings.tokens_max,
            samples_max: settings.samples_max,
            stop_tokens: settings.stop_tokens.clone(),
        };
        let (version, path, of, session, sampler_number) = {
            let mut state = self.lock();
            let Sampler { version, path, of, session, number, .. } = state.sampler(&id, owner)?;
            (version.clone(), path.clone(), of.clone(), session.clone(), *number)
        };
        let mut task = body.read(&limits)?;
        if let Begun::New(promise) = self.futures.begin(&request_id, owner, &session, task.result_bytes())? {
            let submitted = version.map_or_else(|| self.reload(&id, path, owner), Ok).and_then(|version| {
                task.request.version = Some(version);
                let seed = task.seed.unwrap_or_else(|| {
                    stream(settings.seed, Purpose::Request, &[1, sampler_number, number]).next_u64()
                });
                self.start_sampling(hub, task, seed, &promise, of)
            });
            if let Err(error) = submitted {
                self.futures.forget(&request_id);
                return Err(error);
            }
        }
        let sequences: Vec<String> = (0..samples).map(|sample| format!("{request_id}:{sample}")).collect();
        ok(&json!({"request_id": request_id, "sample_sequence_ids": sequences}))
    }

    /// Reads the weights of a sampler again.
    fn reload(
        &self,
        id: &str,
        path: Option<SavedPath>,
        owner: KeyDigest,
    ) -> Result<crate::engine::PolicyVersion, TinkerError> {
        let path =
            path.ok_or_else(|| TinkerError::not_found(format!("the sampler {id:?} has no weights")))?;
        let (version, _) = self.saved_version(&path, owner)?;
        self.lock().sampler(id, owner)?.version = Some(version.clone());
        Ok(version)
    }

    fn start_sampling(
        &self,
        hub: &Hub,
        task: super::sample::SampleTask,
        seed: u64,
        promise: &Arc<Promise>,
        of: Option<(String, u64)>,
    ) -> Result<(), TinkerError> {
        let sink = task.sink(promise.clone(), self.settings.decode.clone(), of, self.state.clone());
        let (bytes, samples) = (task.work_bytes(), task.samples);
        let requests = Requests { requests: vec![task.request], samples, bytes, seed };
        promise.keep(hub.submit_to(requests, &sink)?);
        Ok(())
    }

    fn training_run(&self, owner: KeyDigest, id: &str) -> Answer {
        let live = self
            .lock()
            .model(id, owner)
            .ok()
            .map(|model| (model.rank, model.user_metadata.clone(), model.last_request));
        let saved = || {
            let state = self.store.read_run(id, owner)?;
            Some((state.rank, state.user_metadata, now()))
        };
        let Some((rank, metadata, time)) = live.or_else(saved) else {
            return Err(TinkerError::not_found(format!("there is no training run {id:?}")));
        };
        ok(&json!({
            "training_run_id": id,
            "base_model": self.settings.model_name,
            "model_owner": "local",
            "is_lora": true,
            "lora_rank": rank,
            "last_request_time": utc(time),
            "user_metadata": metadata,
        }))
    }
}

/// Returns seconds since 1970 as a time in ISO 8601.
fn utc(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| DateTime::from_timestamp(seconds, 0));
    time.unwrap_or_default().format("%Y-%m-%dT%H:%M:%SZ").to_string()
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_time_is_the_date_of_its_seconds() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_827_696, "2000-02-29T12:34:56Z"),
            (1_795_996_799, "2026-11-29T23:59:59Z"),
        ] {
            assert_eq!(super::utc(seconds), text);
        }
    }
}
