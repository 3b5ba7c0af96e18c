//! The rules of README.md and docs/*.md: every link leads to a file, every anchor to a heading, and headings
//! have no gaps.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns README.md and docs/*.md, with their texts.
fn pages() -> Vec<(PathBuf, String)> {
    let mut paths = vec![root().join("README.md")];
    for entry in fs::read_dir(root().join("docs")).expect("docs") {
        let path = entry.expect("entry").path();
        if path.extension().is_some_and(|extension| extension == "md") {
            paths.push(path);
        }
    }
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), read(&path))).collect()
}

/// Returns the lines of a page outside code blocks.
fn lines_outside_code(text: &str) -> Vec<&str> {
    let mut in_code = false;
    let mut lines = vec![];
    for line in text.lines() {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        if !in_code && !is_fence {
            lines.push(line);
        }
    }
    lines
}

/// Returns the headings of a page: level and text.
fn headings(text: &str) -> Vec<(usize, &str)> {
    let heading_level = |line: &str| {
        let level = line.chars().take_while(|&c| c == '#').count();
        ((1..=6).contains(&level) && line[level..].starts_with(' ')).then_some(level)
    };
    lines_outside_code(text)
        .into_iter()
        .filter_map(|line| heading_level(line).map(|level| (level, line[level..].trim())))
        .collect()
}

/// Returns the anchor that GitHub gives a heading: lower case, spaces as hyphens, no punctuation.
fn slug(heading: &str) -> String {
    let kept = |c: char| c.is_alphanumeric() || c == '-' || c == '_';
    let lower = without_targets(heading).to_lowercase();
    lower.chars().map(|c| if c == ' ' { '-' } else { c }).filter(|&c| kept(c)).collect()
}

/// Returns `text` with each link replaced by its text.
fn without_targets(text: &str) -> String {
    let mut parts = text.split("](");
    let mut plain = parts.next().unwrap_or("").to_owned();
    for part in parts {
        plain.push_str(part.split_once(')').map_or(part, |(_, rest)| rest));
    }
    plain
}

/// Returns the anchors of a page. GitHub numbers the later ones of equal headings.
fn anchors(text: &str) -> Vec<String> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut anchors = vec![];
    for (_, heading) in headings(text) {
        let slug = slug(heading);
        let count = counts.entry(slug.clone()).or_default();
        anchors.push(if *count == 0 { slug } else { format!("{slug}-{count}") });
        *count += 1;
    }
    anchors
}

/// Returns the targets of a page's links and images. Code within a line has none.
fn link_targets(text: &str) -> Vec<String> {
    let mut targets = vec![];
    for paragraph in lines_outside_code(text).split(|line| line.trim().is_empty()) {
        let paragraph = paragraph.join("\n");
        let without_code: String = paragraph.split('`').step_by(2).collect();
        for part in without_code.split("](").skip(1) {
            let target = part.split(|c: char| c == ')' || c.is_whitespace()).next().unwrap_or("");
            targets.push(target.to_owned());
        }
    }
    targets
}

/// Returns the links of the page `path` that lead nowhere.
fn dead_links(path: &Path, text: &str) -> Vec<String> {
    let folder = path.parent().expect("a folder");
    let mut dead = vec![];
    for target in link_targets(text) {
        if target.contains("://") || target.starts_with("mailto:") {
            continue;
        }
        let (file, anchor) = match target.split_once('#') {
            Some((file, anchor)) => (file, Some(anchor)),
            None => (target.as_str(), None),
        };
        let linked = if file.is_empty() { path.to_owned() } else { folder.join(file) };
        if !file.is_empty() && !linked.exists() {
            dead.push(format!("{target}: no such file"));
            continue;
        }
        let is_page = linked.extension().is_some_and(|extension| extension == "md");
        if let Some(anchor) = anchor.filter(|_| is_page) {
            let linked_text = if file.is_empty() { text.to_owned() } else { read(&linked) };
            if !anchors(&linked_text).iter().any(|known| known == anchor) {
                dead.push(format!("{target}: no such heading"));
            }
        }
    }
    dead
}

/// Returns what is wrong with the headings of a page.
fn heading_mistakes(text: &str) -> Vec<String> {
    let headings = headings(text);
    let mut mistakes = vec![];
    let titles = headings.iter().filter(|(level, _)| *level == 1).count();
    if titles != 1 {
        mistakes.push(format!("{titles} headings of level 1"));
    }
    let mut before = 0;
    for (level, heading) in headings {
        if level > before + 1 {
            mistakes.push(format!("{heading}: level {level} after level {before}"));
        }
        before = level;
    }
    mistakes
}

/// Applies `check` to every page and expects no findings.
fn expect_none(check: impl Fn(&Path, &str) -> Vec<String>) {
    let mut wrong = vec![];
    for (path, text) in pages() {
        let name = path.strip_prefix(root()).expect("below the root").display();
        wrong.extend(check(&path, &text).into_iter().map(|finding| format!("{name}: {finding}")));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn links_of_pages_lead_to_files_and_headings() {
    expect_none(dead_links);
}

#[test]
fn pages_have_one_title_and_no_gap_between_heading_levels() {
    expect_none(|_, text| heading_mistakes(text));
}

#[test]
fn broken_links_and_headings_are_found() {
    let text = "# A page's `title`\n\n[a](#a-pages-title) [b](#none) [c](none.md)\n\
                [d](README.md#none) `[e](none)`\n\n\
                ```sh\n# no heading [f](none)\n```\n### Skipped\n";
    let dead = dead_links(&root().join("page.md"), text);
    assert_eq!(dead.len(), 3, "{dead:#?}");
    for (finding, target) in dead.iter().zip(["#none", "none.md", "README.md#none"]) {
        assert!(finding.starts_with(target), "{finding}");
    }
    assert_eq!(heading_mistakes(text), ["Skipped: level 3 after level 1"]);
    assert_eq!(heading_mistakes("# a\n# b\n"), ["2 headings of level 1"]);
    assert_eq!(anchors("# A, b: C_d-e\n## [x](y) z\n## x z\n"), ["a-b-c_d-e", "x-z", "x-z-1"]);
}
