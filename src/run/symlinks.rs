//! Symbolic links in a run folder. A folder from another user may have links that redirect writes to other
//! places.

use crate::bad_input;
use anyhow::Result;
use std::fs;
use std::path::Path;

/// Files and folders of a run that are written in place, so that a symbolic link would be followed. All other
/// writes replace a link.
const IN_PLACE: [&str; 5] = [".lock", "metrics.jsonl", "checkpoints", "eval", "rollout"];
/// Folders that are written in place, together with the files in them.
const IN_PLACE_FOLDERS: [&str; 3] = ["trajectories", "tensorboard", "token_exports"];

/// Checks the paths in `folder` that this program writes in place. None of them may be a symbolic link.
///
/// # Errors
/// [`crate::error::BadInput`] with the first link.
pub fn refuse_symlinks(folder: &Path) -> Result<()> {
    IN_PLACE.iter().chain(&IN_PLACE_FOLDERS).try_for_each(|name| refuse_symlink(&folder.join(name)))?;
    for name in IN_PLACE_FOLDERS {
        let entries = fs::read_dir(folder.join(name)).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).try_for_each(|path| refuse_symlink(&path))?;
    }
    Ok(())
}

/// Checks that `path` is not a symbolic link.
///
/// # Errors
/// [`crate::error::BadInput`] with the path.
pub fn refuse_symlink(path: &Path) -> Result<()> {
    if fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink()) {
        return Err(bad_input!(
            "{}: is a symbolic link; rloss does not write through links in a run folder; replace it by its target, \
             remove it, or name another folder with --out",
            path.display()
        ));
    }
    Ok(())
}
