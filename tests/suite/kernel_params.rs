//! Structs that kernels take by value, and their mirrors in Rust: fields of the same names and types, in the
//! same order. The sources are compared, so no GPU and no CUDA compiler is needed.
//!
//! A mirror's documentation begins with the struct and its file: `Rope` of `kernels/rope.cuh`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// A file: its path from the root, and its text.
type Source = (String, String);

/// A struct in Rust that mirrors a C++ struct.
struct Mirror {
    /// The C++ struct, and the file that has it.
    of: String,
    file: String,
    /// The Rust struct, and its file.
    name: String,
    path: String,
    /// Name and type of each field, in order.
    fields: Vec<(String, String)>,
}

fn sources(folder: &str, extensions: &[&str]) -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = vec![];
    for entry in fs::read_dir(root.join(folder)).unwrap_or_else(|e| panic!("{folder}: {e}")) {
        let path = entry.expect("an entry").path();
        if path.extension().is_some_and(|e| extensions.iter().any(|wanted| e == *wanted)) {
            let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            found.push((path.strip_prefix(root).expect("below the root").display().to_string(), text));
        }
    }
    found.sort();
    found
}

/// The files with mirrors, and the kernels.
fn both_sides() -> (Vec<Source>, Vec<Source>) {
    let rust = [sources("src/ops/cuda", &["rs"]), sources("src/ops/sink_attention", &["rs"])].concat();
    (rust, sources("kernels", &["cu", "cuh"]))
}

/// Returns the words between the first two pairs of backticks of a mirror's documentation: struct and file.
fn names(line: &str) -> Option<(&str, &str)> {
    let (name, rest) = line.trim().strip_prefix("/// `")?.split_once("` of `")?;
    Some((name, rest.split_once('`')?.0)).filter(|(_, file)| file.starts_with("kernels/"))
}

/// Returns every struct whose documentation names a struct of the kernels, and the names of all others
/// that are declared as parameters.
fn mirrors((path, text): &Source) -> (Vec<Mirror>, Vec<String>) {
    let (mut found, mut without) = (vec![], vec![]);
    let mut documented = None;
    let mut is_parameter = false;
    let mut lines = text.lines().map(str::trim);
    while let Some(line) = lines.next() {
        if line.starts_with("kernel_params! {") || line == "}" {
            is_parameter = line != "}";
        }
        documented = names(line).or(documented);
        let head = line.strip_prefix("pub ").unwrap_or(line);
        let Some(name) = head.strip_prefix("struct ").and_then(|rest| rest.strip_suffix(" {")) else {
            continue;
        };
        let body = lines.by_ref().take_while(|line| *line != "}");
        let fields = body.filter(|line| !line.starts_with("//") && !line.starts_with("#["));
        let fields = fields
            .map(|line| line.strip_prefix("pub ").unwrap_or(line).trim_end_matches(','))
            .filter_map(|line| line.split_once(": "))
            .map(|(field, kind)| (field.into(), kind.into()))
            .collect();
        match documented.take() {
            Some((of, file)) => found.push(Mirror {
                of: of.into(),
                file: file.into(),
                name: name.into(),
                path: path.clone(),
                fields,
            }),
            None if is_parameter => without.push(format!("{path}: {name} names no struct of the kernels")),
            None => {}
        }
    }
    (found, without)
}

/// Returns name and type of each field of a C++ struct; `*` for every pointer.
fn cpp_fields(kernels: &[Source], file: &str, name: &str) -> Option<Vec<(String, String)>> {
    let text = &kernels.iter().find(|(path, _)| path == file)?.1;
    let body = text.split(&format!("\nstruct {name} {{\n")).nth(1)?.split("\n};").next()?;
    let code = body.lines().map(|line| line.split("//").next().unwrap_or_default());
    let code: String = code.collect::<Vec<_>>().join(" ");
    let fields = code.split(';').map(str::trim).filter(|field| !field.is_empty());
    fields
        .map(|field| {
            let (kind, name) = field.rsplit_once(' ')?;
            let kind = if kind.ends_with('*') { "*" } else { kind };
            Some((name.into(), kind.into()))
        })
        .collect()
}

/// Returns the C++ type of a field in Rust. A struct's mirror must be in the same file.
fn cpp_type(kind: &str, path: &str, mirrors: &[Mirror]) -> String {
    let known = [("u64", "*"), ("i64", "int64_t"), ("i32", "int32_t"), ("f32", "float")];
    let of = |mirror: &&Mirror| mirror.name == kind && mirror.path == path;
    match known.iter().find(|(rust, _)| *rust == kind) {
        Some((_, cpp)) => (*cpp).into(),
        None => mirrors.iter().find(of).map_or(format!("no C++ type for {kind}"), |mirror| mirror.of.clone()),
    }
}

/// Returns the types of all kernels' parameters that are passed by value.
fn parameters(kernels: &[Source]) -> BTreeSet<&str> {
    let word = |text: &'_ str| text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    kernels
        .iter()
        .flat_map(|(_, text)| text.split("__grid_constant__ ").skip(1).map(|rest| &rest[..word(rest)]))
        .collect()
}

/// Returns a line for every difference.
fn differences(rust: &[Source], kernels: &[Source]) -> Vec<String> {
    let (found, without): (Vec<_>, Vec<_>) = rust.iter().map(mirrors).unzip();
    let (found, mut wrong): (Vec<Mirror>, Vec<String>) =
        (found.into_iter().flatten().collect(), without.into_iter().flatten().collect());
    for Mirror { of, file, name, path, fields } in &found {
        let mirrored: Vec<(String, String)> =
            fields.iter().map(|(field, kind)| (field.clone(), cpp_type(kind, path, &found))).collect();
        match cpp_fields(kernels, file, of) {
            None => wrong.push(format!("{path}: {name}: {file} has no struct {of} that can be read")),
            Some(expected) if expected != mirrored => {
                wrong.push(format!("{path}: {name} is {mirrored:?}, {of} of {file} is {expected:?}"));
            }
            Some(_) => {}
        }
    }
    let mirrored: BTreeMap<&str, &Mirror> = found.iter().map(|mirror| (mirror.of.as_str(), mirror)).collect();
    let missing = parameters(kernels).into_iter().filter(|name| !mirrored.contains_key(name));
    wrong.extend(missing.map(|name| format!("{name} of the kernels has no mirror in Rust")));
    wrong
}

#[test]
fn every_parameter_of_a_kernel_is_its_mirrors_field_by_field() {
    let (rust, kernels) = both_sides();
    assert!(parameters(&kernels).len() >= 29, "{:?}", parameters(&kernels));
    assert_eq!(differences(&rust, &kernels), Vec::<String>::new());
}

/// Replaces `from` in the file `path`, and returns the differences that this makes.
fn after(path: &str, from: &str, to: &str) -> Vec<String> {
    let (mut rust, mut kernels) = both_sides();
    let file = rust.iter_mut().chain(&mut kernels).find(|(name, _)| name == path);
    let text = &mut file.unwrap_or_else(|| panic!("{path} is not compared")).1;
    assert!(text.contains(from), "{path}: no {from}");
    *text = text.replacen(from, to, 1);
    differences(&rust, &kernels)
}

#[test]
fn a_change_on_one_side_is_found() {
    let cases = [
        ("kernels/rope.cuh", "  int64_t rows;\n", "  int64_t rows;\n  int32_t more;\n"),
        ("src/ops/cuda/rope.rs", "        rows: i64,\n", "        rows: i64,\n        more: i32,\n"),
        ("kernels/rope.cuh", "  int64_t rows;\n", "  int32_t rows;\n"),
        (
            "kernels/muon.cuh",
            "  int32_t rows;\n  int32_t columns;\n",
            "  int32_t columns;\n  int32_t rows;\n",
        ),
        ("kernels/optimizer.cuh", "  AdamWStep step;\n", "  float step;\n"),
        ("src/ops/sink_attention/kernels.rs", "    pub window: i32,\n", ""),
        ("kernels/sink_attention.cuh", "  int32_t chunk;\n", "  float chunk;\n"),
        ("kernels/rope.cu", "__grid_constant__ Rope ", "__grid_constant__ Turned "),
        ("src/ops/cuda/rope.rs", "/// `Rope` of `kernels/rope.cuh`.", "/// Turns rows."),
    ];
    for (path, from, to) in cases {
        assert!(!after(path, from, to).is_empty(), "{path}: {from:?} replaced by {to:?}");
    }
}
