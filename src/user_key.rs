//! Secret keys that only processes of this user can read.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Returns the folder of the keys of this user; `None` if neither `XDG_CONFIG_HOME` nor `HOME` is set.
pub fn key_folder() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let config = variable("XDG_CONFIG_HOME").or_else(|| variable("HOME").map(|home| home.join(".config")));
    config.map(|config| config.join("rloss"))
}

/// Returns random bytes that nobody can guess.
///
/// # Errors
/// When the system gives no random bytes.
pub fn random_bytes<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Returns the key `name` of `folder`: 32 random bytes that only processes of this user can read. The first
/// process that needs the key makes it.
///
/// # Errors
/// When the key cannot be made or read, or when another user can read it.
pub fn user_key(folder: &Path, name: &str) -> Result<[u8; 32], String> {
    let file = folder.join(name);
    let make = || -> std::io::Result<()> {
        let key = random_bytes::<32>()?;
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let temporary = folder.join(format!(".{name}.{}", blake3::hash(&key)));
        std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)?
            .write_all(&key)?;
        // If another process made the key first, its key is kept.
        let linked = std::fs::hard_link(&temporary, &file);
        std::fs::remove_file(&temporary)?;
        linked.or_else(|e| if e.kind() == ErrorKind::AlreadyExists { Ok(()) } else { Err(e) })
    };
    let read = || {
        if !file.exists() {
            make()?;
        }
        let metadata = std::fs::metadata(&file)?;
        let is_private = metadata.mode() & 0o077 == 0 && metadata.uid() == rustix::process::getuid().as_raw();
        let invalid_key =
            || std::io::Error::other("it must be 32 bytes that only its owner can read; remove it");
        if !is_private || metadata.len() != 32 {
            return Err(invalid_key());
        }
        <[u8; 32]>::try_from(std::fs::read(&file)?).map_err(|_| invalid_key())
    };
    read().map_err(|e| format!("{}: {e}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::user_key;

    #[test]
    fn processes_of_a_user_share_a_key_that_nobody_else_can_read() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("config/rloss");
        let keys: Vec<[u8; 32]> = std::thread::scope(|scope| {
            let all: Vec<_> =
                (0..8).map(|_| scope.spawn(|| user_key(&place, "ranks.key").unwrap())).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert!(keys.iter().all(|key| *key == keys[0]));
        assert_eq!(std::fs::read_dir(&place).unwrap().count(), 1, "no temporary file is left");
        let file = place.join("ranks.key");
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
        assert!(user_key(&place, "ranks.key").unwrap_err().contains("ranks.key"));
        assert!(user_key(&folder.path().join("nowhere\0"), "ranks.key").is_err());
    }
}
