//! Atomic writes of files and folders. A write goes to a temporary path, which is then synced and renamed.
//!
//! `folder/NAME` is first written as `folder/.NAME.partial`. A killed process may leave this temporary path
//! behind, but never an incomplete `NAME`. The next write of `NAME` replaces the temporary path.

use anyhow::{Context, Result, anyhow};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Writes `content` to the file `path`, and replaces an existing file.
///
/// # Errors
/// When writing fails. An existing file then stays unchanged.
pub fn write_file(path: &Path, content: &str) -> Result<()> {
    replace_file(path, |temporary| Ok(fs::write(temporary, content)?))
}

/// Replaces the file `path`. `write` gets a temporary path and creates the new file there.
///
/// # Errors
/// Errors of `write`, and when writing fails. An existing file then stays unchanged.
pub fn replace_file(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let replace = |temporary: &Path| {
        write(temporary)?;
        sync(temporary)?;
        Ok(fs::rename(temporary, path)?)
    };
    replace_with(path, replace, |temporary| fs::remove_file(temporary))
}

/// Replaces the folder `path`. `write` gets the path of a new, empty folder, writes its files there and
/// syncs them.
///
/// # Errors
/// Errors of `write`, and when writing fails. An existing folder then stays unchanged, unless the last step
/// fails: the existing folder is removed before the rename, because a folder cannot be renamed over another
/// one.
pub fn replace_folder(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let replace = |temporary: &Path| {
        fs::create_dir(temporary)?;
        write(temporary)?;
        sync(temporary)?;
        if path.exists() {
            remove_folder(path)?;
        }
        Ok(fs::rename(temporary, path)?)
    };
    replace_with(path, replace, |temporary| fs::remove_dir_all(temporary))
}

/// Removes the folder `path`. A process that is killed during the removal may leave a folder under a
/// temporary name, but never an incomplete `path`.
///
/// # Errors
/// When the folder cannot be renamed or removed.
pub fn remove_folder(path: &Path) -> Result<()> {
    let remove = || -> Result<()> {
        let mut old = path.as_os_str().to_owned();
        old.push(".old");
        let old = PathBuf::from(old);
        let (_, temporary) = temporary_path(&old)?;
        let _ = fs::remove_dir_all(&temporary);
        fs::rename(path, &temporary)?;
        Ok(fs::remove_dir_all(&temporary)?)
    };
    remove().with_context(|| format!("removing {}", path.display()))
}

/// Returns whether `name` is a temporary path: of a file or folder that a process is writing, or was writing
/// when it was killed.
pub fn is_partial(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    name.starts_with(b".") && name.ends_with(b".partial")
}

/// Runs `replace` with a temporary path in the folder of `path`, and syncs the folder. After an error the
/// temporary path is removed, because it may have filled the disk.
fn replace_with(
    path: &Path,
    replace: impl FnOnce(&Path) -> Result<()>,
    remove: impl Fn(&Path) -> std::io::Result<()>,
) -> Result<()> {
    let write = || {
        let (folder, temporary) = temporary_path(path)?;
        let _ = remove(&temporary);
        replace(&temporary).inspect_err(|_| drop(remove(&temporary)))?;
        sync(folder)
    };
    write().with_context(|| format!("writing {}", path.display()))
}

/// Returns the folder of `path`, and the temporary path in this folder.
fn temporary_path(path: &Path) -> Result<(&Path, PathBuf)> {
    let name = path.file_name().ok_or_else(|| anyhow!("the path names no file"))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut temporary = OsString::from(".");
    temporary.push(name);
    temporary.push(".partial");
    Ok((folder, folder.join(temporary)))
}

/// Syncs the content of a file, or the entries of a folder.
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
    fn a_file_is_replaced_whole_and_no_temporary_file_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        write_file(&path, "one").unwrap();
        // A killed process left this file.
        fs::write(folder.path().join(".a.json.partial"), "much longer than the next content").unwrap();
        replace_file(&path, |temporary| {
            assert!(is_partial(temporary.file_name().unwrap()) && !is_partial(path.file_name().unwrap()));
            assert_eq!(
                fs::read_to_string(&path).unwrap(),
                "one",
                "the old file stays until the new one is complete"
            );
            assert!(!temporary.exists());
            Ok(fs::write(temporary, "two")?)
        })
        .unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(names(folder.path()), ["a.json"]);
    }

    #[test]
    fn a_failed_write_leaves_what_was_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        write_file(&path, "one").unwrap();
        let half = |temporary: &Path| {
            fs::write(temporary, "tw")?;
            bail!("no space left")
        };
        let error = format!("{:#}", replace_file(&path, half).unwrap_err());
        assert!(error.contains("a.json") && error.contains("no space left"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "one");
        assert_eq!(names(folder.path()), ["a.json"]);
        let nowhere = folder.path().join("no/b.json");
        assert!(format!("{:#}", write_file(&nowhere, "x").unwrap_err()).contains("b.json"));
        assert!(write_file(Path::new("/"), "x").is_err());
    }

    #[test]
    fn a_folder_is_replaced_whole_or_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("step-000001");
        let with = |name: &'static str| move |temporary: &Path| Ok(fs::write(temporary.join(name), name)?);
        replace_folder(&path, with("old")).unwrap();
        let half = |temporary: &Path| {
            fs::write(temporary.join("new"), "n")?;
            bail!("no space left")
        };
        assert!(replace_folder(&path, half).is_err());
        assert_eq!((names(&path), names(folder.path())), (vec!["old".into()], vec!["step-000001".into()]));
        // Files that a killed process left are not part of the next folder.
        fs::create_dir(folder.path().join(".step-000001.partial")).unwrap();
        fs::write(folder.path().join(".step-000001.partial/stale"), "s").unwrap();
        replace_folder(&path, with("new")).unwrap();
        assert_eq!((names(&path), names(folder.path())), (vec!["new".into()], vec!["step-000001".into()]));
    }
}
