//! Figures: curves over several seeds, on one page and as one SVG file per figure.
//!
//! ```text
//! figures.toml ─ manifest.rs ─> Figure ─ curve.rs: its runs ─┬─ panel.rs ─> figure.svg ─┬─> <name>.svg
//!                                                            └─ table.rs ───────────────┴─> report.html
//! ```

mod curve;
mod manifest;
mod panel;
mod table;

pub(super) use manifest::FILE;

use crate::atomic_file::write_file;
use crate::bad_input;
use anyhow::Result;
use curve::Curve;
use minijinja::{Environment, Value, context};
use std::path::{Path, PathBuf};

/// Draws the figures of `folder`: one `report.html` with all figures, and `<name>.svg` for each. Returns the
/// path of `report.html`.
///
/// # Errors
/// [`crate::error::BadInput`] when the manifest or a run cannot be read, or when there is no run at all.
pub(super) fn write(folder: &Path, environment: &mut Environment<'static>) -> Result<PathBuf> {
    let figures = manifest::read(folder)?;
    environment.add_template("figure.svg", include_str!("figure.svg"))?;
    environment.add_template("figures.html", include_str!("figures.html"))?;
    let mut drawn_figures = Vec::new();
    for figure in &figures {
        let curves: Vec<Curve> =
            figure.curves.iter().map(|curve| Curve::load(folder, curve)).collect::<Result<_>>()?;
        if curves.iter().all(|curve| curve.seeds.is_empty()) {
            continue;
        }
        let drawing = panel::FigureLayout::new(&figure.title, &figure.panels, &curves);
        let svg =
            environment.get_template("figure.svg")?.render(context! { title => &figure.title, drawing })?;
        write_file(&folder.join(format!("{}.svg", figure.name)), &svg)?;
        let missing = curves.iter().filter(|curve| curve.seeds.is_empty()).map(|curve| &curve.label);
        drawn_figures.push(context! {
            name => figure.name,
            title => figure.title,
            about => figure.about,
            svg => Value::from_safe_string(svg),
            table => table::table(&curves),
            // The labels of curves without runs.
            missing => missing.collect::<Vec<_>>(),
        });
    }
    if drawn_figures.is_empty() {
        return Err(bad_input!(
            "{}: has {FILE} but no run of any of its recipes. Run scripts/reproduce_figures.sh first.",
            folder.display()
        ));
    }
    let style = Value::from_safe_string(include_str!("../page.css").to_owned());
    let page =
        environment.get_template("figures.html")?.render(context! { style, figures => drawn_figures })?;
    let path = folder.join("report.html");
    write_file(&path, &page)?;
    Ok(path)
}
