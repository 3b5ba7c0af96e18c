//! Saved weights: a folder for each path `tinker://RUN/KIND/NAME`, complete or absent. It has PEFT's files, a
//! manifest, what this module writes, and the optimizer state if the path is of `weights`.

use super::futures::KeyDigest;
use crate::actor::Actor;
use crate::atomic_file::{is_partial, remove_folder, replace_folder};
use crate::bad_input;
use crate::bounded_file::{SMALL_FILE_BYTES_MAX, read_text};
use crate::checkpoint::ModelFiles;
use crate::checkpoint::peft::AdapterFolder;
use crate::integrity::Manifest;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The file with what PEFT's files do not say.
const STATE_FILE: &str = "tinker.json";
const SCHEME: &str = "tinker://";
/// The kinds of paths: with and without optimizer state.
pub const WEIGHTS: &str = "weights";
pub const SAMPLER_WEIGHTS: &str = "sampler_weights";
/// Maximum bytes of a name.
const NAME_BYTES_MAX: usize = 128;

/// A saved path, split.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedPath {
    pub run: String,
    pub kind: String,
    pub name: String,
}

/// The state that is saved beside the weights.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SavedState {
    pub base_model: String,
    pub rank: usize,
    /// Number of updates so far.
    pub updates: u64,
    /// The digest of the key that may read it, in hexadecimal.
    pub owner: String,
    /// Seconds since 1970 after which the path is gone.
    pub expires: Option<u64>,
    pub user_metadata: Value,
}

/// The error for a path that is not there, or that another key made.
fn missing(path: &SavedPath) -> anyhow::Error {
    bad_input!("there is no {path} in this store, or another API key made it")
}

/// The folder of all saved paths.
pub struct Store {
    folder: PathBuf,
}

/// Returns the seconds since 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Checks the name of a path.
///
/// # Errors
/// [`crate::error::BadInput`] when it is not one component of `[A-Za-z0-9._-]`.
pub fn check_name(name: &str) -> Result<()> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let is_name = !name.is_empty() && name.len() <= NAME_BYTES_MAX && name.bytes().all(is_plain);
    match is_name && name.bytes().any(|byte| byte != b'.') && !is_partial(name.as_ref()) {
        true => Ok(()),
        false => Err(bad_input!(
            "the name {name:?} is not usable; take 1 to {NAME_BYTES_MAX} of the characters A-Z, a-z, 0-9, '.', '_' and '-'"
        )),
    }
}

impl SavedPath {
    /// Splits a path.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when it does not have the form `tinker://RUN/KIND/NAME`.
    pub fn parse(path: &str) -> Result<Self> {
        let wrong = || bad_input!("{path:?} is not a saved path; they look like tinker://RUN/weights/NAME");
        let rest = path.strip_prefix(SCHEME).ok_or_else(wrong)?;
        let [run, kind, name] = rest.split('/').collect::<Vec<_>>()[..] else { return Err(wrong()) };
        let is_run = |byte: u8| byte.is_ascii_alphanumeric() || b":-".contains(&byte);
        if ![WEIGHTS, SAMPLER_WEIGHTS].contains(&kind) || run.is_empty() || !run.bytes().all(is_run) {
            return Err(wrong());
        }
        check_name(name)?;
        Ok(Self { run: run.to_owned(), kind: kind.to_owned(), name: name.to_owned() })
    }
}

impl std::fmt::Display for SavedPath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{SCHEME}{}/{}/{}", self.run, self.kind, self.name)
    }
}

impl Store {
    /// Returns the store in `folder`, as it is.
    pub(super) fn at(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// Opens the store in `folder`, and removes what an interrupted program left half-written, and paths
    /// whose time is over.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the folder cannot be made or read.
    pub fn open(folder: &Path) -> Result<Self> {
        let cannot = |error: std::io::Error| {
            bad_input!("{}: cannot be used as a store: {error}; name another with --store", folder.display())
        };
        std::fs::create_dir_all(folder).map_err(cannot)?;
        let store = Self::at(folder);
        for run in folders(folder).map_err(cannot)? {
            for kind in [WEIGHTS, SAMPLER_WEIGHTS] {
                for saved in folders(&run.join(kind)).map_err(cannot)? {
                    let is_over = || read_state(&saved).is_ok_and(|state| is_over(&state));
                    if is_partial(saved.file_name().unwrap_or_default()) || is_over() {
                        remove_folder(&saved)?;
                    }
                }
            }
        }
        Ok(store)
    }

    /// Returns the folder of a path, whether it exists or not.
    pub fn place(&self, path: &SavedPath) -> PathBuf {
        self.run_folder(&path.run).join(&path.kind).join(&path.name)
    }

    /// Returns the folder of a run.
    pub fn run_folder(&self, run: &str) -> PathBuf {
        self.folder.join(run.replace(':', "-"))
    }

    /// Writes the weights of `actor` as `path`, with the optimizer state if the path is of `weights`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the path exists and must not be replaced. When writing fails; then the
    /// path is as it was.
    pub fn save(
        &self,
        path: &SavedPath,
        (actor, files): (&Actor, &ModelFiles),
        state: &SavedState,
        overwrite: bool,
    ) -> Result<()> {
        let place = self.place(path);
        if place.exists() && !overwrite && self.read(path).is_ok() {
            return Err(bad_input!("{path} exists; choose another name, or pass overwrite=True"));
        }
        std::fs::create_dir_all(place.parent().unwrap_or(&self.folder))
            .with_context(|| format!("saving {path}"))?;
        let has_optimizer = path.kind == WEIGHTS;
        let write = |folder: &Path| {
            let mut manifest = files.write(folder, &actor.parameters, has_optimizer)?;
            manifest.write_file(folder, STATE_FILE, &serde_json::to_vec_pretty(state)?)?;
            manifest.write(folder)
        };
        replace(&place, write).with_context(|| format!("saving {path}"))
    }

    /// Returns what is saved beside the weights of `path`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when there is no such path.
    pub fn read(&self, path: &SavedPath) -> Result<SavedState> {
        let state = read_state(&self.place(path)).ok().filter(|state| !is_over(state));
        state.ok_or_else(|| missing(path))
    }

    /// Returns the saved paths, the oldest first.
    pub fn paths(&self) -> Vec<String> {
        let runs = folders(&self.folder).unwrap_or_default();
        let kinds = runs.iter().flat_map(|run| [WEIGHTS, SAMPLER_WEIGHTS].map(|kind| run.join(kind)));
        let saved = kinds.flat_map(|folder| folders(&folder).unwrap_or_default());
        let mut states: Vec<_> = saved
            .filter_map(|folder| Some((folder.join(STATE_FILE).metadata().ok()?.modified().ok()?, folder)))
            .collect();
        states.sort();
        let name = |folder: &Path| folder.file_name().map(|name| name.to_string_lossy().into_owned());
        let path = |folder: &Path| {
            let kind = folder.parent()?;
            // See run_folder.
            let run = name(kind.parent()?)?.replace("-train-", ":train:");
            Some(format!("{SCHEME}{run}/{}/{}", name(kind)?, name(folder)?))
        };
        states.iter().filter_map(|(_, folder)| path(folder)).collect()
    }

    /// Returns what is saved beside the weights of `path`, if `owner` may read it.
    ///
    /// # Errors
    /// Errors of [`Self::read`].
    pub fn read_own(&self, path: &SavedPath, owner: KeyDigest) -> Result<SavedState> {
        let state = self.read(path)?;
        if state.owner == hex(owner) { Ok(state) } else { Err(missing(path)) }
    }

    /// Returns the state of any saved path of a run that `owner` may read.
    pub fn read_run(&self, run: &str, owner: KeyDigest) -> Option<SavedState> {
        let of_kind = |kind: &str| folders(&self.run_folder(run).join(kind)).unwrap_or_default();
        let saved = [WEIGHTS, SAMPLER_WEIGHTS].into_iter().flat_map(of_kind);
        let mut states = saved.filter_map(|folder| read_state(&folder).ok());
        states.find(|state| state.owner == hex(owner) && !is_over(state))
    }

    /// Returns a frozen actor with the weights of `path` on the base of `base`.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the path is missing or damaged, or belongs to another base.
    pub fn actor(&self, path: &SavedPath, base: &Actor, base_digest: Option<&str>) -> Result<Actor> {
        let place = self.place(path);
        ensure!(Manifest::check(&place)?, bad_input!("{path}: has no checksum; load another path"));
        let specs = base.parameters.without_adapter().specs;
        let folder = AdapterFolder::open(&place, &specs)?;
        let saved = folder.base.as_ref().map(|base| base.digest.as_str());
        if base_digest.is_some() && saved != base_digest {
            return Err(bad_input!("{path}: was trained on another model; serve that one"));
        }
        let mut parameters = base.parameters.without_adapter();
        parameters.attach_adapter(folder.lora.clone(), folder.read_values(&specs)?)?;
        Ok(base.beside(parameters))
    }

    /// Removes a path.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(&self, path: &SavedPath) -> Result<()> {
        remove_folder(&self.place(path))
    }
}

/// Writes the folder `place`. An existing one is exchanged with it in one step, so the path is complete at
/// any moment.
fn replace(place: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    if place.exists() {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        let name = place.file_name().unwrap_or_default().to_string_lossy();
        // What an interrupted program leaves under this name is removed at the next start.
        let next = place.with_file_name(format!(".{name}.next.partial"));
        if next.exists() {
            remove_folder(&next)?;
        }
        replace_folder(&next, write)?;
        renameat_with(CWD, &next, CWD, place, RenameFlags::EXCHANGE)?;
        return remove_folder(&next);
    }
    replace_folder(place, write)
}

/// Returns `owner` in hexadecimal.
pub fn hex(owner: KeyDigest) -> String {
    blake3::Hash::from_bytes(owner).to_hex().to_string()
}

fn is_over(state: &SavedState) -> bool {
    state.expires.is_some_and(|expires| expires <= now())
}

fn read_state(folder: &Path) -> Result<SavedState> {
    let text = read_text(&folder.join(STATE_FILE), SMALL_FILE_BYTES_MAX)?;
    Ok(serde_json::from_str(&text)?)
}

/// Returns the folders in `folder`, in order; none if it does not exist.
fn folders(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found = vec![];
    match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        entries => {
            for entry in entries? {
                let path = entry?.path();
                if path.is_dir() {
                    found.push(path);
                }
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_paths_have_one_form_and_leave_no_folder() {
        for name in ["a", "final", "000060", "a.b-c_d", "..a"] {
            assert!(check_name(name).is_ok(), "{name}");
            let path = format!("tinker://00ff:train:0/weights/{name}");
            assert_eq!(SavedPath::parse(&path).unwrap().to_string(), path);
        }
        for name in ["", ".", "..", "a/b", "../x", "a b", "ä", "a\0", "a\\b", &"a".repeat(129)] {
            assert!(check_name(name).is_err(), "{name}");
        }
        for path in [
            "",
            "tinker://",
            "tinker://a:train:0/weights",
            "tinker://a:train:0/weights/../x",
            "tinker://a:train:0/other/x",
            "tinker://../weights/x",
            "tinker:///weights/x",
            "file://a:train:0/weights/x",
        ] {
            assert!(SavedPath::parse(path).is_err(), "{path}");
        }
    }

    #[test]
    fn a_wrong_path_is_answered_with_the_paths_that_are_there() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::at(folder.path());
        assert!(store.paths().is_empty());
        let paths = ["tinker://0a:train:0/weights/first", "tinker://0a:train:0/sampler_weights/b"];
        for path in paths {
            let saved = store.place(&SavedPath::parse(path).unwrap());
            std::fs::create_dir_all(&saved).unwrap();
            std::fs::write(saved.join(STATE_FILE), "{}").unwrap();
        }
        let mut found = store.paths();
        found.sort();
        assert_eq!(found, [paths[1], paths[0]]);
        let error = crate::tinker::saved_folder(folder.path(), "tinker://0b:train:0/weights/first");
        let text = format!("{:#}", error.unwrap_err());
        assert!(paths.iter().all(|path| text.contains(path)) && text.contains("--store"), "{text}");
    }
}
