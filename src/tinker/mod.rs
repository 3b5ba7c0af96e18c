//! The Tinker API: a client's own Python holds loop, data and rewards; this server holds weights and answers
//! `forward_backward`, `optim_step`, `sample`, `save` and `load`.
//!
//! | module | contents |
//! | --- | --- |
//! | [`wire`] | the messages in protobuf |
//! | [`routes`], [`bodies`] | the endpoints, and their requests in JSON |
//! | [`state`] | sessions, models, samplers; the order of a model's requests |
//! | [`futures`] | results that clients fetch later |
//! | [`trainer`] | the thread that trains |
//! | [`passes`], [`datums`] | forward and backward passes of a client's data |
//! | [`sample`] | sampling |
//! | [`store`] | saved weights |
//!
//! Each model runs its requests in the order of their `seq_id`. A model's results depend on its own requests
//! alone: not on other sessions, the order of arrival, or ids.

mod bodies;
mod datums;
mod error;
mod futures;
mod passes;
mod routes;
mod sample;
mod state;
mod store;
mod trainer;
pub mod wire;

pub use futures::RESULT_BYTES_MAX;
pub use sample::Decode;
pub use store::Store;

use crate::actor::Actor;
use crate::bad_input;
use crate::checkpoint::ModelFiles;
use crate::engine::PolicyVersion;
use crate::http::{Budget, HttpRequest, Refusal, Response};
use crate::model::adapter::{HEAD, Lora, is_adaptable, specs_with_head};
use crate::ops::threads::Threads;
use crate::serve::{ApiError, Hub, SecondApi};
use anyhow::Result;
use error::TinkerError;
use futures::{Futures, KeyDigest};
use state::State;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use store::SavedPath;

/// `alpha` of an adapter: its scale is `ALPHA / rank`.
const ALPHA: f64 = 32.0;
/// The rank that the memory of `--adapters` is planned for, and the maximum.
pub const PLANNED_RANK: usize = 32;
const RANK_MAX: usize = 1024;
/// Number of samplers with weights that are kept, for each adapter.
const SAMPLERS_PER_ADAPTER: usize = 4;
/// Maximum bytes of requests that wait for their turn.
pub const WAITING_BYTES_MAX: usize = 128 << 20;

/// The model and the limits of the API.
pub struct TinkerSettings<'a> {
    /// The frozen base of all adapters.
    pub base: &'a Actor,
    /// The files beside an adapter.
    pub files: ModelFiles<'a>,
    /// Whether the model computes with weights in bf16.
    pub rounds_to_bf16: bool,
    /// The threads of passes and updates, beside those of the engine.
    pub training_threads: Arc<Threads>,
    pub model_name: String,
    /// The folder or name from which a client loads its tokenizer.
    pub tokenizer: String,
    pub decode: Decode,
    /// The tokens that end a sample.
    pub stop_tokens: Vec<u32>,
    pub tokens_max: usize,
    pub samples_max: usize,
    /// Maximum number of adapters.
    pub adapters_max: usize,
    /// Maximum number of datums of a request that the client is told.
    pub chunk_datums: usize,
    /// Starts adapters and samples whose request has no seed.
    pub seed: u64,
    /// Makes ids that nobody can guess.
    pub secret: [u8; 32],
}

/// Maximum number of saved paths that an error names.
const PATHS_SHOWN: usize = 3;

/// The Tinker API of one base model.
pub struct Door<'a> {
    settings: TinkerSettings<'a>,
    store: Store,
    futures: Futures,
    state: Arc<Mutex<State>>,
    /// Wakes the thread that trains.
    wakes: Condvar,
    waiting: Arc<Budget>,
    ids: AtomicU64,
    /// Number of passes and updates so far.
    trained: AtomicU64,
    /// The weights of the base.
    base_version: PolicyVersion,
}

/// Returns the folder of the saved path `path` in the store `folder`.
///
/// # Errors
/// [`crate::error::BadInput`] when there is no such path. It names the newest paths of the store.
pub fn saved_folder(folder: &Path, path: &str) -> Result<PathBuf> {
    let (store, path) = (Store::at(folder), SavedPath::parse(path)?);
    if store.read(&path).is_err() {
        let shown = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        let paths = store.paths();
        let newest: Vec<&str> = paths.iter().rev().take(PATHS_SHOWN).map(String::as_str).collect();
        let has = if paths.is_empty() {
            "it has no saved path".into()
        } else {
            format!("its newest are {}", newest.join(", "))
        };
        return Err(bad_input!(
            "there is no {path} in the store {}: {has}; name another store with --store",
            shown.display()
        ));
    }
    Ok(store.place(&path))
}

/// Returns the bytes of an adapter of rank `rank` on all that can have one, with gradients, optimizer state
/// and its samplers.
///
/// # Errors
/// When a target is not a matrix.
pub fn adapter_bytes(base: &Actor, rank: usize) -> Result<u64> {
    let factors = lora(base, rank, [true; 3]).factor_specs(&base.parameters.specs)?;
    let bytes: u64 = factors.iter().map(|spec| (spec.element_count() * size_of::<f32>()) as u64).sum();
    // Weights, gradient and two moments, and the samplers' weights.
    Ok(bytes * (4 + SAMPLERS_PER_ADAPTER as u64))
}

/// Returns an adapter of rank `rank` on the head, on MLPs and on attention, if so.
fn lora(base: &Actor, rank: usize, [head, mlp, attention]: [bool; 3]) -> Lora {
    let specs = specs_with_head(&base.parameters.specs);
    let is_target = |name: &str| match name {
        HEAD => head,
        name if name.contains(".self_attn.") => attention,
        _ => mlp,
    };
    let targets = specs.into_iter().filter(is_adaptable).map(|spec| spec.name).filter(|name| is_target(name));
    Lora { rank, alpha: ALPHA, rslora: false, targets: targets.collect() }
}

impl<'a> Door<'a> {
    /// Returns the API with the paths of `store`.
    ///
    /// # Errors
    /// When a tensor is missing.
    pub fn new(settings: TinkerSettings<'a>, store: Store) -> Result<Self> {
        let base_version = PolicyVersion::new(0, settings.base.policy(None)?);
        Ok(Self {
            settings,
            store,
            futures: Futures::new(),
            state: Arc::default(),
            wakes: Condvar::new(),
            waiting: Budget::new(WAITING_BYTES_MAX),
            ids: AtomicU64::new(0),
            trained: AtomicU64::new(0),
            base_version,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a new id that nobody can guess.
    fn new_id(&self) -> String {
        let number = self.ids.fetch_add(1, Ordering::Relaxed);
        let digest = blake3::keyed_hash(&self.settings.secret, &number.to_le_bytes());
        digest.to_hex().as_str()[..32].to_owned()
    }

    /// Returns the maximum number and bytes of samplers with weights.
    fn sampler_limits(&self) -> (usize, u64) {
        let count = SAMPLERS_PER_ADAPTER * self.settings.adapters_max;
        (count, self.adapter_bytes_max() / 2)
    }

    /// Returns the maximum bytes of all adapters.
    fn adapter_bytes_max(&self) -> u64 {
        let one = adapter_bytes(self.settings.base, PLANNED_RANK).unwrap_or(0);
        one * self.settings.adapters_max as u64
    }

    /// Returns the weights of a saved path.
    fn saved_version(&self, path: &SavedPath, owner: KeyDigest) -> Result<(PolicyVersion, u64), TinkerError> {
        self.store.read_own(path, owner).map_err(|error| TinkerError::not_found(error.to_string()))?;
        let digest = self.settings.files.base.map(|base| base.digest.as_str());
        let actor = self.store.actor(path, self.settings.base, digest)?;
        Ok((self.version_of(&actor)?, trainer::factor_bytes(&actor)))
    }
}

impl SecondApi for Door<'_> {
    fn owns(&self, path: &str) -> bool {
        path.starts_with(routes::PREFIX)
    }

    fn answer(&self, hub: &Hub, request: Result<&HttpRequest, Refusal>) -> Response<'static> {
        let answer = || match request {
            Ok(request) => self.route(hub, request),
            Err(refusal) => Err(TinkerError::refused(refusal)),
        };
        // A bug must not end the server.
        let answer = catch_unwind(AssertUnwindSafe(answer));
        let answer = answer.unwrap_or_else(|_| Err(TinkerError::internal("a bug in the server")));
        answer.unwrap_or_else(|error| error.to_response())
    }

    fn version(&self, name: &str, key: &str) -> Option<Result<PolicyVersion, ApiError>> {
        if !name.starts_with("tinker://") {
            return None;
        }
        let owner = routes::owner_of(key);
        let version = SavedPath::parse(name).map_err(TinkerError::from).and_then(|path| {
            let id = format!("{path} {}", store::hex(owner));
            if let Ok(sampler) = self.lock().sampler(&id, owner)
                && let Some(version) = &sampler.version
            {
                return Ok(version.clone());
            }
            let (version, bytes) = self.saved_version(&path, owner)?;
            let sampler = state::Sampler {
                owner,
                version: Some(version.clone()),
                path: Some(path),
                bytes,
                ..state::Sampler::default()
            };
            self.lock().add_sampler(id, sampler, self.sampler_limits());
            Ok(version)
        });
        Some(version.map_err(|error| ApiError::refused(error.status, &error.detail)))
    }

    fn trained(&self) -> u64 {
        self.trained.load(Ordering::Relaxed)
    }

    fn work(&self, is_closed: &dyn Fn() -> bool) {
        self.train(is_closed);
    }
}
