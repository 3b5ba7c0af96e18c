//! Atomic writes of files and folders: they are written to a temporary path, synced and renamed.
//!
//! `folder/NAME` is first written as `folder/.NAME.partial`. A killed process may leave that path behind, but
//! never an incomplete `NAME`. The next write of `NAME` replaces it.

use anyhow::{Context, Result, anyhow};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Writes `content` to the file `path` and replaces an existing file.
///
/// # Errors
/// When the disk refuses; an existing file stays unchanged.
pub fn write_file(path: &Path, content: &str) -> Result<()> {
    replace_file(path, |aside| Ok(fs::write(aside, content)?))
}

/// Replaces the file `path` by a file that `write` creates at the path it is given.
///
/// # Errors
/// Those of `write`, and when the disk refuses; an existing file stays unchanged.
pub fn replace_file(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let replace = |aside: &Path| {
        write(aside)?;
        sync(aside)?;
        Ok(fs::rename(aside, path)?)
    };
    replace_by(path, replace, |aside| fs::remove_file(aside))
}

/// Replaces the folder `path` by a folder that `write` fills. `write` gets an existing, empty folder, and
/// syncs its own files.
///
/// # Errors
/// Those of `write`, and when the disk refuses. An existing folder stays unchanged unless the last step
/// fails: it is removed before the rename, as a folder cannot be renamed over another.
pub fn replace_folder(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let replace = |aside: &Path| {
        fs::create_dir(aside)?;
        write(aside)?;
        sync(aside)?;
        if path.exists() {
            remove_folder(path)?;
        }
        Ok(fs::rename(aside, path)?)
    };
    replace_by(path, replace, |aside| fs::remove_dir_all(aside))
}

/// Removes the folder `path`. A process killed meanwhile leaves a partial folder, never an incomplete `path`.
///
/// # Errors
/// When the disk refuses.
pub fn remove_folder(path: &Path) -> Result<()> {
    let remove = || -> Result<()> {
        let mut old = path.as_os_str().to_owned();
        old.push(".old");
        let old = PathBuf::from(old);
        let (_, aside) = beside(&old)?;
        let _ = fs::remove_dir_all(&aside);
        fs::rename(path, &aside)?;
        Ok(fs::remove_dir_all(&aside)?)
    };
    remove().with_context(|| format!("removing {}", path.display()))
}

/// Whether `name` is a file or folder that is being written, or was when its process was killed.
pub fn is_partial(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    name.starts_with(b".") && name.ends_with(b".partial")
}

/// Runs `replace` with a temporary path beside `path`, and syncs the folder. After an error it removes the
/// temporary path, which may have filled the disk.
fn replace_by(
    path: &Path,
    replace: impl FnOnce(&Path) -> Result<()>,
    remove: impl Fn(&Path) -> std::io::Result<()>,
) -> Result<()> {
    let write = || {
        let (folder, aside) = beside(path)?;
        let _ = remove(&aside);
        replace(&aside).inspect_err(|_| drop(remove(&aside)))?;
        sync(folder)
    };
    write().with_context(|| format!("writing {}", path.display()))
}

/// Returns the folder of `path`, and the temporary path in it.
fn beside(path: &Path) -> Result<(&Path, PathBuf)> {
    let name = path.file_name().ok_or_else(|| anyhow!("the path names no file"))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut aside = OsString::from(".");
    aside.push(name);
    aside.push(".partial");
    Ok((folder, folder.join(aside)))
}

/// Syncs a file's content, or a folder's entries.
fn sync(path: &Path) -> Result<()> {
    Ok(File::open(path)?.sync_all()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    fn names(folder: &Path) -> Vec<String> {
        let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut names: Vec<String> = fs::read_dir(folder).unwrap().map(name).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_whole_and_nothing_is_left_aside() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("a.json");
        write_file(&path, "one").unwrap();
        // A killed process left this.
        fs::write(place.path().join(".a.json.partial"), "much longer than what comes").unwrap();
        replace_file(&path, |aside| {
            assert!(is_partial(aside.file_name().unwrap()) && !is_partial(path.file_name().unwrap()));
            assert_eq!(
                fs::read_to_string(&path).unwrap(),
                "one",
                "the old file is there until the new one is whole"
            );
            assert!(!aside.exists());
            Ok(fs::write(aside, "two")?)
        })
        .unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(names(place.path()), ["a.json"]);
    }

    #[test]
    fn a_failed_write_leaves_what_was_there() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("a.json");
        write_file(&path, "one").unwrap();
        let half = |aside: &Path| {
            fs::write(aside, "tw")?;
            bail!("no space left")
        };
        let error = format!("{:#}", replace_file(&path, half).unwrap_err());
        assert!(error.contains("a.json") && error.contains("no space left"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "one");
        assert_eq!(names(place.path()), ["a.json"]);
        let nowhere = place.path().join("no/b.json");
        assert!(format!("{:#}", write_file(&nowhere, "x").unwrap_err()).contains("b.json"));
        assert!(write_file(Path::new("/"), "x").is_err());
    }

    #[test]
    fn a_folder_is_replaced_whole_or_stays() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("step-000001");
        let with = |name: &'static str| move |aside: &Path| Ok(fs::write(aside.join(name), name)?);
        replace_folder(&path, with("old")).unwrap();
        let half = |aside: &Path| {
            fs::write(aside.join("new"), "n")?;
            bail!("no space left")
        };
        assert!(replace_folder(&path, half).is_err());
        assert_eq!((names(&path), names(place.path())), (vec!["old".into()], vec!["step-000001".into()]));
        // A killed process's leftovers are not part of the next folder.
        fs::create_dir(place.path().join(".step-000001.partial")).unwrap();
        fs::write(place.path().join(".step-000001.partial/stale"), "s").unwrap();
        replace_folder(&path, with("new")).unwrap();
        assert_eq!((names(&path), names(place.path())), (vec!["new".into()], vec!["step-000001".into()]));
    }
}
