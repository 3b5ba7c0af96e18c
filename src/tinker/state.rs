//! The clients of the server: their sessions, models and samplers. Each belongs to the key that made it, and
//! ends with its session.

use super::error::TinkerError;
use super::futures::{KeyDigest, Promise};
use super::passes::PassTask;
use super::store::SavedPath;
use crate::actor::UpdateSettings;
use crate::engine::PolicyVersion;
use crate::http::Share;
use crate::model::adapter::Lora;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A session without a heartbeat for this time is over. The SDK sends one every ten seconds.
pub const SESSION_SECONDS_MAX: Duration = Duration::from_secs(120);
/// When the adapters of a client that has ended are free again, for errors.
const FREED: &str = "ServiceClient.close(\"success\") frees a client's adapters, and without it they stay for two minutes after its \
     end";
/// A session without a heartbeat for this time may be over soon.
const SESSION_SECONDS_QUIET: Duration = Duration::from_secs(25);
/// How far a `seq_id` may be ahead of the one that runs next.
const AHEAD_MAX: i64 = 4096;
/// Maximum number of sessions.
const SESSIONS_MAX: usize = 1024;
/// Maximum number of sampled sequences that a model remembers for the metric `mismatch:max`.
const SAMPLED_MAX: usize = 1 << 14;

/// A client's session.
pub struct Session {
    pub owner: KeyDigest,
    seen: Instant,
}

/// A model that is trained.
pub struct TrainedModel {
    pub owner: KeyDigest,
    pub session: String,
    pub rank: usize,
    pub user_metadata: Value,
    /// Bytes of the adapter with gradients, optimizer state and its samplers.
    pub bytes: u64,
    pub last_request: u64,
    /// The `seq_id` that runs next.
    next: i64,
    /// Requests that came too early.
    early: BTreeMap<i64, ModelTask>,
    /// The weights whose samples are remembered, and these samples: a digest of each sequence.
    pub sampled_version: u64,
    sampled: HashSet<[u8; 16]>,
}

/// Weights that sample.
#[derive(Default)]
pub struct Sampler {
    pub owner: KeyDigest,
    pub session: String,
    /// `None` while the weights are only in the store.
    pub version: Option<PolicyVersion>,
    pub path: Option<SavedPath>,
    /// The model and its number of updates, if the weights are of a model of this process.
    pub of: Option<(String, u64)>,
    /// The session's number of the sampler.
    pub number: u64,
    pub bytes: u64,
    pub used: u64,
}

/// One piece of work on a model.
pub struct ModelTask {
    pub model: String,
    /// `None` if nobody waits for the result.
    pub promise: Option<Arc<Promise>>,
    pub work: Work,
    /// The memory of a waiting request.
    pub _share: Option<Share>,
}

/// The work on a model.
pub enum Work {
    /// Makes the adapter with a seed, and trains it.
    Create {
        lora: Lora,
        seed: u64,
    },
    /// Loads saved weights. `creates`: whether the model is new.
    Load {
        path: SavedPath,
        optimizer: bool,
        creates: bool,
    },
    Pass(Box<PassTask>),
    Step(UpdateSettings),
    Save {
        path: SavedPath,
        overwrite: bool,
        expires: Option<u64>,
        user_metadata: Value,
    },
    /// Makes a sampler of the current weights.
    Sample {
        sampler: String,
        number: u64,
    },
    /// Frees the model.
    End,
    /// A request that was accepted only to fail in its turn.
    Fail(String),
}

/// All that clients have made.
#[derive(Default)]
pub struct State {
    pub sessions: HashMap<String, Session>,
    pub models: HashMap<String, TrainedModel>,
    pub samplers: HashMap<String, Sampler>,
    /// Work that can run now, in order.
    pub ready: VecDeque<ModelTask>,
    uses: u64,
}

impl State {
    /// Opens a session.
    ///
    /// # Errors
    /// When there are too many.
    pub fn open_session(&mut self, id: String, owner: KeyDigest) -> Result<(), TinkerError> {
        if self.sessions.len() >= SESSIONS_MAX {
            return Err(TinkerError::busy(format!("{SESSIONS_MAX} sessions are open; try again later")));
        }
        self.sessions.insert(id, Session { owner, seen: Instant::now() });
        Ok(())
    }

    /// Checks that the session is the owner's, and notes that its client is alive.
    ///
    /// # Errors
    /// When there is no such session.
    pub fn see(&mut self, id: &str, owner: KeyDigest) -> Result<(), TinkerError> {
        let session = self.sessions.get_mut(id).filter(|session| session.owner == owner);
        let session = session.ok_or_else(|| {
            TinkerError::not_found(format!(
                "there is no session {id:?}; it is over after {} seconds without a heartbeat; make a new client",
                SESSION_SECONDS_MAX.as_secs()
            ))
        })?;
        session.seen = Instant::now();
        Ok(())
    }

    /// Returns a model of `owner`.
    ///
    /// # Errors
    /// When there is none.
    pub fn model(&mut self, id: &str, owner: KeyDigest) -> Result<&mut TrainedModel, TinkerError> {
        let model = self.models.get_mut(id).filter(|model| model.owner == owner);
        let model = model.ok_or_else(|| {
            TinkerError::not_found(format!("there is no model {id:?}; load a saved path into a new one"))
        })?;
        if let Some(session) = self.sessions.get_mut(&model.session) {
            session.seen = Instant::now();
        }
        model.last_request = super::store::now();
        Ok(model)
    }

    /// Adds a model without weights yet.
    ///
    /// # Errors
    /// When there is no place for it.
    pub fn add_model(
        &mut self,
        id: &str,
        (owner, session, rank): (KeyDigest, &str, usize),
        bytes: u64,
        user_metadata: Value,
        (adapters_max, bytes_max): (usize, u64),
    ) -> Result<(), TinkerError> {
        let used: u64 = self.models.values().map(|model| model.bytes).sum();
        let problem = if self.models.len() >= adapters_max {
            format!(
                "all {adapters_max} adapters are in use; {FREED}; start the server with a larger --adapters"
            )
        } else if used + bytes > bytes_max {
            format!(
                "adapters take {:.2} of {:.2} GB, and this one would take {:.2} GB; {FREED}; choose a smaller rank, or start the server with a larger --adapters",
                used as f64 / 1e9,
                bytes_max as f64 / 1e9,
                bytes as f64 / 1e9
            )
        } else {
            let model = TrainedModel {
                owner,
                session: session.to_owned(),
                rank,
                user_metadata,
                bytes,
                last_request: super::store::now(),
                next: 1,
                early: BTreeMap::new(),
                sampled_version: 0,
                sampled: HashSet::new(),
            };
            self.models.insert(id.to_owned(), model);
            return Ok(());
        };
        // The adapters of a client that has vanished become free soon.
        let is_quiet = |session: &Session| session.seen.elapsed() > SESSION_SECONDS_QUIET;
        match self.sessions.values().any(is_quiet) {
            true => Err(TinkerError::busy(problem)),
            false => Err(TinkerError::invalid(problem)),
        }
    }

    /// Puts a request in its turn.
    ///
    /// # Errors
    /// When its number was already used, or is far ahead.
    pub fn order(&mut self, number: i64, task: ModelTask) -> Result<(), TinkerError> {
        let Some(model) = self.models.get_mut(&task.model) else {
            return Err(TinkerError::not_found(format!("there is no model {:?}", task.model)));
        };
        if number < model.next || number >= model.next + AHEAD_MAX {
            return Err(TinkerError::invalid(format!(
                "seq_id is {number}, but this model's next one is {}; numbers rise by 1 from 1",
                model.next
            )));
        }
        model.early.insert(number, task);
        while let Some(task) = model.early.remove(&model.next) {
            model.next += 1;
            self.ready.push_back(task);
        }
        Ok(())
    }

    /// Returns a sampler of `owner`, and marks it as used.
    ///
    /// # Errors
    /// When there is none.
    pub fn sampler(&mut self, id: &str, owner: KeyDigest) -> Result<&mut Sampler, TinkerError> {
        self.uses += 1;
        let sampler = self.samplers.get_mut(id).filter(|sampler| sampler.owner == owner);
        let sampler = sampler.ok_or_else(|| {
            TinkerError::not_found(format!(
                "there is no sampler {id:?}; samplers of the last weights are kept, so make a new one; after a restart of the server, \
                 go on from a saved path"
            ))
        })?;
        sampler.used = self.uses;
        if let Some(session) = self.sessions.get_mut(&sampler.session) {
            session.seen = Instant::now();
        }
        Ok(sampler)
    }

    /// Adds a sampler, and frees the ones that were not used for longest if there are more than `count_max`
    /// with weights, or they take more than `bytes_max`.
    pub fn add_sampler(&mut self, id: String, mut sampler: Sampler, (count_max, bytes_max): (usize, u64)) {
        self.uses += 1;
        sampler.used = self.uses;
        self.samplers.insert(id, sampler);
        loop {
            let with_weights =
                || self.samplers.iter().filter(|(_, sampler)| sampler.version.is_some() && sampler.bytes > 0);
            let bytes: u64 = with_weights().map(|(_, sampler)| sampler.bytes).sum();
            let count = with_weights().count();
            if count <= 1 || (count <= count_max && bytes <= bytes_max) {
                return;
            }
            let Some(oldest) = with_weights().min_by_key(|(_, sampler)| sampler.used) else { return };
            let id = oldest.0.clone();
            match self.samplers.get_mut(&id) {
                // It can be read again.
                Some(sampler) if sampler.path.is_some() => sampler.version = None,
                _ => drop(self.samplers.remove(&id)),
            }
        }
    }

    /// Ends a session: its models and samplers are freed. Returns whether there was one.
    pub fn end_session(&mut self, id: &str) -> bool {
        let models: Vec<String> =
            self.models.iter().filter(|(_, model)| model.session == id).map(|(id, _)| id.clone()).collect();
        for model in models {
            self.models.remove(&model);
            self.ready.retain(|task| task.model != model);
            self.ready.push_back(ModelTask { model, promise: None, work: Work::End, _share: None });
        }
        self.samplers.retain(|_, sampler| sampler.session != id);
        self.sessions.remove(id).is_some()
    }

    /// Returns the sessions whose clients have vanished.
    pub fn vanished(&self) -> Vec<String> {
        let is_over = |session: &Session| session.seen.elapsed() > SESSION_SECONDS_MAX;
        self.sessions.iter().filter(|(_, session)| is_over(session)).map(|(id, _)| id.clone()).collect()
    }

    /// Remembers a sequence that the weights of `of` sampled, if they are the model's current ones.
    pub fn remember_sample(&mut self, (model, version): &(String, u64), sequence: [u8; 16]) {
        if let Some(model) = self.models.get_mut(model)
            && model.sampled_version == *version
            && model.sampled.len() < SAMPLED_MAX
        {
            model.sampled.insert(sequence);
        }
    }

    /// Forgets the samples of a model's former weights.
    pub fn new_version(&mut self, model: &str, version: u64) {
        if let Some(model) = self.models.get_mut(model) {
            model.sampled_version = version;
            model.sampled.clear();
        }
    }
}

impl TrainedModel {
    /// Returns whether the current weights sampled the sequence.
    pub fn has_sampled(&self, sequence: &[u8; 16]) -> bool {
        self.sampled.contains(sequence)
    }
}

/// Returns the digest of a sequence.
pub fn sequence_digest(tokens: &[u32]) -> [u8; 16] {
    let digest = blake3::hash(bytemuck::cast_slice(tokens));
    let mut short = [0; 16];
    short.copy_from_slice(&digest.as_bytes()[..16]);
    short
}
