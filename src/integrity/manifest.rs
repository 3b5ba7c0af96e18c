//! The manifest of a folder. It has a line `DIGEST  NAME` per file, and a last line with the digest of the
//! lines above.
//!
//! `head -n -1 manifest.b3 | b3sum --check` checks the files without this program.

use super::file_digest;
use crate::atomic_file;
use crate::bad_input;
use crate::bounded_file::{self, SMALL_FILE_BYTES_MAX};
use anyhow::{Context, Result};
use blake3::{Hash, Hasher};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

pub const MANIFEST_FILE: &str = "manifest.b3";
/// The folder of a model's templates beyond the first, as transformers names it.
const TEMPLATE_FOLDER: &str = "additional_chat_templates";
/// Maximum number of errors that a message lists.
const ERRORS_SHOWN_MAX: usize = 8;

/// Digests of the files of a folder, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Manifest(BTreeMap<String, Hash>);

impl Manifest {
    /// Returns the names of the files, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// Adds the digest of the file `name`.
    pub fn record(&mut self, name: &str, digest: Hash) {
        self.0.insert(name.to_owned(), digest);
    }

    /// Returns the digest of the file `name`, if it is listed.
    pub fn get(&self, name: &str) -> Option<Hash> {
        self.0.get(name).copied()
    }

    /// Writes and syncs the new file `name` in `folder`, and records its digest. Creates a folder that the
    /// name has.
    ///
    /// # Errors
    /// When the file exists or cannot be written.
    pub fn write_file(&mut self, folder: &Path, name: &str, content: &[u8]) -> Result<()> {
        let path = folder.join(name);
        let write = || {
            let parent = path.parent().unwrap_or(folder);
            fs::create_dir_all(parent)?;
            let mut file = File::create_new(&path)?;
            file.write_all(content)?;
            file.sync_all()?;
            // Whoever writes `folder` syncs it at the end.
            if parent == folder { Ok(()) } else { File::open(parent)?.sync_all() }
        };
        write().with_context(|| format!("{}: cannot be written", path.display()))?;
        self.record(name, blake3::hash(content));
        Ok(())
    }

    /// Writes the manifest into `folder` and replaces an existing manifest. This is the last step of writing
    /// a folder.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, folder: &Path) -> Result<()> {
        atomic_file::write_file(&folder.join(MANIFEST_FILE), &self.text(MANIFEST_FILE))
    }

    /// Returns the text of a manifest file with the name `file_name`.
    pub fn text(&self, file_name: &str) -> String {
        let lines: String = self.0.iter().map(|(name, digest)| format!("{digest}  {name}\n")).collect();
        let own = blake3::hash(lines.as_bytes());
        format!("{lines}{own}  {file_name}\n")
    }

    /// Computes the manifest of `folder` from its files.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when a file cannot be read, or when its name has a line break or a
    /// backslash.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let mut manifest = Self::default();
        for name in file_names(folder)? {
            let path = folder.join(&name);
            if name.contains(['\n', '\r', '\\']) {
                return Err(bad_input!(
                    "{}: a manifest cannot list this name; rename the file",
                    path.display()
                ));
            }
            let digest = file_digest(&path, None);
            let digest = digest.map_err(|e| bad_input!("{}: cannot be read: {e}", path.display()))?;
            manifest.record(&name, digest);
        }
        Ok(manifest)
    }

    /// Reads the manifest of `folder`; `None` if the folder has no manifest.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the manifest itself is damaged.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        Self::read_file(&folder.join(MANIFEST_FILE))
    }

    /// Reads the manifest in the file `path`; `None` if there is no such file.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] when the file is damaged.
    pub fn read_file(path: &Path) -> Result<Option<Self>> {
        let damaged = |problem: &str| bad_input!("{}: damaged: {problem}", path.display());
        let text = match bounded_file::read_text(path, SMALL_FILE_BYTES_MAX) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(damaged(&e.to_string())),
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Ok(Some(Self::parse(&text, &name).map_err(|problem| damaged(&problem))?))
    }

    fn parse(text: &str, file_name: &str) -> Result<Self, String> {
        let body = text.strip_suffix('\n').unwrap_or(text);
        let (lines, last) = text.split_at(body.rfind('\n').map_or(0, |at| at + 1));
        if last != format!("{}  {file_name}\n", blake3::hash(lines.as_bytes())) {
            return Err("the digest in its last line does not match the lines above".to_owned());
        }
        let mut manifest = Self::default();
        for (line, number) in lines.lines().zip(1..) {
            let entry = line.split_once("  ").and_then(|(hex, name)| Some((Hash::from_hex(hex).ok()?, name)));
            match entry {
                Some((digest, name)) if is_listed_name(name) => manifest.record(name, digest),
                _ => {
                    return Err(format!(
                        "line {number} is not a digest and the name of a file in the folder"
                    ));
                }
            }
        }
        Ok(manifest)
    }

    /// Compares every file of `folder` with the manifest. Returns false if the folder has no manifest.
    ///
    /// # Errors
    /// [`crate::error::BadInput`] that names the files that are missing, changed or not listed.
    pub fn check(folder: &Path) -> Result<bool> {
        let Some(manifest) = Self::read(folder)? else { return Ok(false) };
        let mut errors = vec![];
        for (name, digest) in &manifest.0 {
            let path_text = folder.join(name).display().to_string();
            match file_digest(&folder.join(name), None) {
                Ok(found) if found == *digest => {}
                Ok(_) => errors.push(format!("{path_text}: damaged: its digest differs from the manifest")),
                Err(e) => errors.push(format!("{path_text}: damaged: cannot be read: {e}")),
            }
        }
        // A file that is not listed but would be loaded is an error too.
        let is_loaded =
            |name: &String| [".safetensors", ".json", ".jinja"].iter().any(|end| name.ends_with(end));
        for name in
            file_names(folder)?.iter().filter(|name| is_loaded(name) && !manifest.0.contains_key(*name))
        {
            errors.push(format!("{}: is not in {MANIFEST_FILE}", folder.join(name).display()));
        }
        if errors.is_empty() {
            return Ok(true);
        }
        let more = errors.len().saturating_sub(ERRORS_SHOWN_MAX);
        errors.truncate(ERRORS_SHOWN_MAX);
        let more = if more > 0 { format!("; and {more} more") } else { String::new() };
        Err(bad_input!("{}{more}", errors.join("; ")))
    }
}

/// Returns whether a manifest can list `name`: a file of the folder, or of a folder in it.
fn is_listed_name(name: &str) -> bool {
    let is_plain = |part: &str| Path::new(part).file_name().is_some_and(|plain| plain == part);
    match name.split_once('/') {
        Some((folder, name)) => is_plain(folder) && is_plain(name),
        None => is_plain(name),
    }
}

/// Returns the sorted names of the files in `folder`, and of those in its folder of templates. Hidden files
/// and the manifest are left out.
fn file_names(folder: &Path) -> Result<Vec<String>> {
    let mut names = plain_names(folder)?;
    let templates = folder.join(TEMPLATE_FOLDER);
    if templates.is_dir() {
        let of_templates = plain_names(&templates)?;
        names.extend(of_templates.iter().map(|name| format!("{TEMPLATE_FOLDER}/{name}")));
        names.sort();
    }
    Ok(names)
}

fn plain_names(folder: &Path) -> Result<Vec<String>> {
    let unreadable = |e: io::Error| bad_input!("{}: cannot be read: {e}", folder.display());
    let mut names = vec![];
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let is_file = fs::metadata(entry.path()).is_ok_and(|metadata| metadata.is_file());
        if let (Ok(name), true) = (entry.file_name().into_string(), is_file)
            && !name.starts_with('.')
            && name != MANIFEST_FILE
        {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// A writer that computes the digest of the bytes that it writes.
pub struct DigestWriter<W> {
    pub inner: W,
    hasher: Hasher,
}

impl<W> DigestWriter<W> {
    pub fn new(inner: W) -> Self {
        Self { inner, hasher: Hasher::new() }
    }

    /// Returns the digest of the bytes written so far.
    pub fn digest(&self) -> Hash {
        self.hasher.finalize()
    }
}

impl<W: Write> Write for DigestWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hasher.update(bytes.get(..written).unwrap_or_default());
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> (tempfile::TempDir, Manifest) {
        let folder = tempfile::tempdir().unwrap();
        let mut manifest = Manifest::default();
        let template = format!("{TEMPLATE_FOLDER}/tool_use.jinja");
        for name in ["a.json", &template, "b.safetensors", "notes.txt"] {
            manifest.write_file(folder.path(), name, name.repeat(100).as_bytes()).unwrap();
        }
        manifest.write(folder.path()).unwrap();
        (folder, manifest)
    }

    #[test]
    fn a_folder_is_checked_against_its_manifest() {
        let (folder, manifest) = folder();
        assert!(Manifest::check(folder.path()).unwrap());
        assert_eq!(Manifest::read(folder.path()).unwrap(), Some(manifest.clone()));
        assert_eq!(Manifest::from_folder(folder.path()).unwrap(), manifest);
        let error = |what: &str| {
            let text = format!("{:#}", Manifest::check(folder.path()).unwrap_err());
            assert!(text.contains(what), "{text}");
        };
        fs::write(folder.path().join("more.safetensors"), "x").unwrap();
        error("more.safetensors: is not in manifest.b3");
        fs::remove_file(folder.path().join("more.safetensors")).unwrap();
        fs::write(folder.path().join("readme.md"), "nobody reads it").unwrap();
        assert!(Manifest::check(folder.path()).unwrap());
        let other = folder.path().join(TEMPLATE_FOLDER).join("rag.jinja");
        fs::write(&other, "x").unwrap();
        error("additional_chat_templates/rag.jinja: is not in manifest.b3");
        fs::remove_file(&other).unwrap();
        for name in ["a.json", &format!("{TEMPLATE_FOLDER}/tool_use.jinja")] {
            let content = fs::read(folder.path().join(name)).unwrap();
            fs::remove_file(folder.path().join(name)).unwrap();
            error(&format!("{name}: damaged: cannot be read"));
            fs::write(folder.path().join(name), content).unwrap();
        }
        fs::remove_file(folder.path().join(MANIFEST_FILE)).unwrap();
        assert!(!Manifest::check(folder.path()).unwrap());
    }

    #[test]
    fn every_flipped_bit_is_found() {
        let (folder, _) = folder();
        for name in ["a.json", MANIFEST_FILE] {
            let path = folder.path().join(name);
            let intact = fs::read(&path).unwrap();
            for bit in 0..intact.len() * 8 {
                let mut bytes = intact.clone();
                bytes[bit / 8] ^= 1 << (bit % 8);
                fs::write(&path, &bytes).unwrap();
                assert!(Manifest::check(folder.path()).is_err(), "{name}: bit {bit}");
            }
            // A file that is truncated to any length is an error too.
            for length in 0..intact.len() {
                fs::write(&path, &intact[..length]).unwrap();
                assert!(Manifest::check(folder.path()).is_err(), "{name}: {length} bytes");
            }
            fs::write(&path, &intact).unwrap();
        }
        assert!(Manifest::check(folder.path()).unwrap());
    }

    #[test]
    fn no_line_names_a_file_elsewhere() {
        for name in ["../other.json", "a/../b.json", "./a", "/a", "a/", "a//b", "a/b/c.json", "..", ""] {
            let lines = format!("{}  {name}\n", blake3::hash(b""));
            let text = format!("{lines}{}  {MANIFEST_FILE}\n", blake3::hash(lines.as_bytes()));
            assert!(
                Manifest::parse(&text, MANIFEST_FILE).is_err_and(|text| text.contains("line 1")),
                "{name}"
            );
        }
    }
}
