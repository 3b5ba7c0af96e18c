//! Files and folders that are whole or not there: written aside, made durable, renamed.
//!
//! What is being written to `folder/NAME` lies in `folder/.NAME.partial` until it is whole. A process that is killed may
//! leave that behind, and never half of `NAME`; the next write of `NAME` replaces it.

use anyhow::{Context, Result, anyhow};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Writes `content` to the file `path`, in place of what was there.
///
/// # Errors
/// When the disk refuses; a file that was there stays whole.
pub fn write_file(path: &Path, content: &str) -> Result<()> {
    replace_file(path, |aside| Ok(fs::write(aside, content)?))
}

/// The same for a file that `write` makes at the path it is given.
///
/// # Errors
/// Those of `write`, and when the disk refuses; a file that was there stays whole.
pub fn replace_file(path: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let replace = |aside: &Path| {
        write(aside)?;
        sync(aside)?;
        Ok(fs::rename(aside, path)?)
    };
    replace_by(path, replace, |aside| fs::remove_file(aside))
}

/// Puts a folder that `write` fills at `path`, in place of what was there. `write` finds the folder made and empty, and
/// makes the files it writes there durable itself.
///
/// # Errors
/// Those of `write`, and when the disk refuses. A folder that was there stays whole, but where the very last step fails,
/// after it was removed: a folder cannot be renamed over another.
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

/// Removes the folder `path`. A process that is killed meanwhile leaves what counts as partial, and never half of it at `path`.
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

/// Whether `name` is that of a file or folder which is still being written, or was when its process was killed.
pub fn is_partial(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    name.starts_with(b".") && name.ends_with(b".partial")
}

/// Runs `replace` with a free path beside `path`, and makes the folder's entry durable. What a failure leaves aside is of
/// no use, and may be what fills the disk.
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

/// The folder of `path`, and the path in it that is written first.
fn beside(path: &Path) -> Result<(&Path, PathBuf)> {
    let name = path.file_name().ok_or_else(|| anyhow!("the path names no file"))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut aside = OsString::from(".");
    aside.push(name);
    aside.push(".partial");
    Ok((folder, folder.join(aside)))
}

/// Makes a file's content, or a folder's entries, durable.
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
        // Left by a process that was killed.
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
        // What a killed process left aside is no part of the next folder.
        fs::create_dir(place.path().join(".step-000001.partial")).unwrap();
        fs::write(place.path().join(".step-000001.partial/stale"), "s").unwrap();
        replace_folder(&path, with("new")).unwrap();
        assert_eq!((names(&path), names(place.path())), (vec!["new".into()], vec!["step-000001".into()]));
    }
}
