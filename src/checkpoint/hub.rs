//! Models by their name on the Hugging Face Hub, such as `Qwen/Qwen2.5-0.5B-Instruct`: where the hub's client
//! has downloaded them. Nothing is downloaded here.

use std::env::{current_dir, var_os};
use std::path::{Path, PathBuf};

/// The folder in which the hub's client keeps models: `HF_HUB_CACHE`, or `hub` in `HF_HOME`, which by default
/// is `~/.cache/huggingface`.
fn cache() -> Option<PathBuf> {
    let folder = |name: &str| var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || {
        let caches = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
        folder("HF_HOME").or_else(|| Some(caches?.join("huggingface")))
    };
    folder("HF_HUB_CACHE").or_else(|| Some(home()?.join("hub")))
}

/// Returns the hub's name that `path` may mean: `OWNER/NAME`, relative to the working directory, where
/// nothing is.
pub fn name(path: &Path) -> Option<String> {
    let relative = if path.is_absolute() { path.strip_prefix(current_dir().ok()?).ok()? } else { path };
    let parts: Vec<&str> = relative.to_str()?.split('/').collect();
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let is_part = |part: &&str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.chars().all(allowed)
            && !part.contains("--")
    };
    let is_name = parts.len() == 2 && parts.iter().all(is_part) && !relative.exists();
    is_name.then(|| parts.join("/"))
}

/// Returns the folder of the model `name` in the client's cache: the revision that was downloaded last.
fn snapshot(name: &str) -> Option<PathBuf> {
    let model = cache()?.join(format!("models--{}", name.replace('/', "--")));
    let revision = std::fs::read_to_string(model.join("refs/main")).ok()?;
    let revision = revision.trim();
    let is_hash = !revision.is_empty() && revision.chars().all(|c| c.is_ascii_alphanumeric());
    let folder = model.join("snapshots").join(revision);
    (is_hash && folder.join("config.json").is_file()).then_some(folder)
}

/// Returns the folder of the model that `path` means, if it is a name of the hub and the client has it.
pub fn find(path: &Path) -> Option<PathBuf> {
    snapshot(&name(path)?)
}

/// Returns the end of a message about a missing model at `path`: how to download it, if it is a name of the
/// hub; empty otherwise.
pub fn advice(path: &Path) -> String {
    let (Some(name), Some(cache)) = (name(path), cache()) else { return String::new() };
    format!("; the hub's {name} is not in {}: download it with: hf download {name}", cache.display())
}

/// Returns the hub's name of the model in `folder`, if the folder is in a client's cache.
pub fn name_of_snapshot(folder: &Path) -> Option<String> {
    let parts: Vec<&str> = folder.iter().map(|part| part.to_str()).collect::<Option<_>>()?;
    let [.., model, "snapshots", _] = parts[..] else { return None };
    let (owner, name) = model.strip_prefix("models--")?.split_once("--")?;
    Some(format!("{owner}/{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_hub_are_told_from_paths() {
        let here = current_dir().unwrap();
        assert_eq!(name(Path::new("Qwen/Qwen2.5-0.5B")).as_deref(), Some("Qwen/Qwen2.5-0.5B"));
        assert_eq!(name(&here.join("Qwen/Qwen2.5-0.5B")).as_deref(), Some("Qwen/Qwen2.5-0.5B"));
        for path in ["model", "a/b/c", "/tmp/Qwen/x", "./a", "../a", "src/checkpoint", "a/b c", "a--b/c"] {
            assert_eq!(name(Path::new(path)), None, "{path}");
        }
        let folder = Path::new("/home/u/.cache/huggingface/hub/models--Qwen--Qwen2.5-0.5B/snapshots/ab12");
        assert_eq!(name_of_snapshot(folder).as_deref(), Some("Qwen/Qwen2.5-0.5B"));
        assert_eq!(name_of_snapshot(Path::new("/models/Qwen2.5-0.5B")), None);
    }
}
