//! Reads `figures.toml`: the figures and their curves.

use crate::bad_input;
use crate::bounded_file::{self, TOML_BYTES_MAX};
use anyhow::Result;
use serde::Deserialize;
use std::path::Path;

/// Name of the manifest. A folder with this file is a set of figures.
pub(crate) const FILE: &str = "figures.toml";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    figure: Vec<Figure>,
}

/// One figure: panels side by side, each with all curves of the figure.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Figure {
    /// The stem of the figure's SVG file.
    pub name: String,
    pub title: String,
    /// The figure's caption, one or two sentences.
    pub about: String,
    /// The metric of each panel.
    pub panels: Vec<String>,
    pub curves: Vec<CurveEntry>,
}

/// One curve: the runs in `<recipe>/seed-*`, in the manifest's folder.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CurveEntry {
    /// The recipe's file name without extension, which is also the folder of its runs.
    pub recipe: String,
    pub label: String,
}

/// Reads the manifest in `folder`.
///
/// # Errors
/// [`crate::error::BadInput`] with the line, when the manifest cannot be read or a name has characters that
/// are not allowed.
pub(super) fn read(folder: &Path) -> Result<Vec<Figure>> {
    let file = folder.join(FILE);
    let path_text = file.display();
    let text = bounded_file::read_text(&file, TOML_BYTES_MAX)
        .map_err(|e| bad_input!("{path_text}: cannot be read ({e})."))?;
    let manifest: Manifest = toml::from_str(&text).map_err(|e| {
        let line = e.span().map_or(1, |span| text.get(..span.start).unwrap_or("").matches('\n').count() + 1);
        bad_input!(
            "{path_text}: line {line}: {}. recipes/figures/figures.toml is a valid example.",
            e.message()
        )
    })?;
    for (index, figure) in manifest.figure.iter().enumerate() {
        if manifest.figure[..index].iter().any(|earlier| earlier.name == figure.name) {
            return Err(bad_input!("{path_text}: two figures are named {}; rename one.", figure.name));
        }
        let names = std::iter::once(&figure.name).chain(figure.curves.iter().map(|curve| &curve.recipe));
        for name in names {
            let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
            if name.is_empty() || !name.chars().all(plain) {
                return Err(bad_input!(
                    "{path_text}: {name:?} is not a plain name; use letters, digits, _ and - for figures and recipes."
                ));
            }
        }
        if figure.panels.is_empty() || figure.curves.is_empty() {
            return Err(bad_input!(
                "{path_text}: {} has no panels or no curves; give at least one of each.",
                figure.name
            ));
        }
    }
    Ok(manifest.figure)
}
