//! Finds the commands in the text of a page.

/// A command of a page, without its comment.
pub struct Shown {
    /// From 1.
    pub line: usize,
    pub text: String,
}

/// The programs that a code span must begin with to be a command.
const PROGRAMS: [&str; 12] = [
    "rloss", "cargo", "just", "curl", "hf", "pip", "python3", "torchrun", "sbatch", "eval", "bash", "source",
];

/// Splits a command into words as a shell does. Returns the words and where a comment begins, or the length.
fn split(command: &str) -> (Vec<String>, usize) {
    let (mut words, mut word, mut quote) = (vec![], None::<String>, None);
    for (at, c) in command.char_indices() {
        match quote {
            Some(mark) if c == mark => quote = None,
            Some(_) => word.get_or_insert_default().push(c),
            None if c == '\'' || c == '"' => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            None if c.is_whitespace() => words.extend(word.take()),
            None if c == '#' && word.is_none() => return (words, at),
            None => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    (words, command.len())
}

/// Returns the words of a command as a shell splits them.
pub fn shell_words(command: &str) -> Vec<String> {
    split(command).0
}

/// Returns the command of a line without its comment; `None` if nothing is left.
fn command(line: &str) -> Option<String> {
    let text = line[..split(line).1].trim();
    // A binary that cargo builds and runs is the one under test.
    let text = text.replacen("cargo run --release -- ", "rloss ", 1);
    (!text.is_empty()).then_some(text)
}

/// Returns the command of a code span; `None` if the span is something else.
fn command_of_span(span: &str) -> Option<String> {
    let text = command(span)?.split_whitespace().collect::<Vec<_>>().join(" ");
    let (program, rest) = text.split_once(' ')?;
    let is_script = ["scripts/", "tests/", ".ci/"].iter().any(|folder| program.starts_with(folder));
    if !is_script && !PROGRAMS.contains(&program) {
        return None;
    }
    // A subcommand alone, or with an option alone, is a mention. Its help shows that both exist.
    match rest.split(' ').collect::<Vec<_>>().as_slice() {
        [name] if program == "rloss" && *name != "help" => Some(format!("rloss {name} --help")),
        [name, option] if program == "rloss" && option.starts_with("--") => {
            Some(format!("rloss {name} --help | grep -e {option}"))
        }
        _ => Some(text),
    }
}

/// Adds the commands of the code spans in `paragraph`, which begins on line `first`.
fn add_spans(found: &mut Vec<Shown>, paragraph: &str, first: usize) {
    let mut line = first;
    for (index, part) in paragraph.split('`').enumerate() {
        if index % 2 == 1 {
            found.extend(command_of_span(part).map(|text| Shown { line, text }));
        }
        line += part.matches('\n').count();
    }
}

/// Returns the commands of a page, in order: lines of `sh` blocks, lines after `$ ` of other blocks, and code
/// spans that name a program with arguments. Of a TOML file: those of its comments.
pub fn shown_commands(page: &str, text: &str) -> Vec<Shown> {
    if page.ends_with(".toml") { commands_of_recipe(page, text) } else { commands_of_page(text) }
}

fn commands_of_page(text: &str) -> Vec<Shown> {
    let mut found = vec![];
    let mut block: Option<&str> = None;
    let mut paragraph = String::new();
    let (mut paragraph_start, mut joined) = (1, None::<(usize, String)>);
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        let fence = line.trim_start().strip_prefix("```");
        // A table has no empty lines, and its rows are paragraphs of their own.
        if fence.is_some() || block.is_none() && (line.trim().is_empty() || line.starts_with('|')) {
            add_spans(&mut found, &std::mem::take(&mut paragraph), paragraph_start);
        }
        match (block, fence) {
            (None, Some(language)) => block = Some(language.trim()),
            (Some(_), Some(_)) => block = None,
            (None, None) => {
                if paragraph.is_empty() {
                    paragraph_start = number;
                }
                paragraph.push_str(line);
                paragraph.push('\n');
            }
            (Some("sh" | "bash" | "console"), None) => {
                let (start, before) = joined.take().unwrap_or((number, String::new()));
                let line = line.trim().strip_prefix("$ ").unwrap_or(line.trim());
                match line.strip_suffix('\\') {
                    Some(part) => joined = Some((start, format!("{before}{} ", part.trim()))),
                    None => {
                        let text = command(&format!("{before}{line}"));
                        found.extend(text.map(|text| Shown { line: start, text }));
                    }
                }
            }
            (Some(_), None) => {
                let text = line.strip_prefix("$ ").and_then(command);
                found.extend(text.map(|text| Shown { line: number, text }));
            }
        }
    }
    add_spans(&mut found, &paragraph, paragraph_start);
    found
}

/// Returns the commands of a recipe's comments. Lines that begin with `--set` are changes of this recipe.
fn commands_of_recipe(page: &str, text: &str) -> Vec<Shown> {
    let mut found: Vec<Shown> = vec![];
    let mut is_set_list = false;
    for (index, line) in text.lines().enumerate() {
        let line_number = index + 1;
        let Some(comment) = line.strip_prefix('#').map(str::trim) else {
            is_set_list = false;
            continue;
        };
        let sets = comment.starts_with("--set ").then(|| command(comment)).flatten();
        match (sets, found.last_mut()) {
            (Some(sets), Some(last)) if is_set_list => last.text += &format!(" {sets}"),
            (Some(sets), _) => {
                let text = format!("rloss check {page} {sets}");
                found.push(Shown { line: line_number, text });
                is_set_list = true;
                continue;
            }
            (None, _) => is_set_list = false,
        }
        if is_set_list {
            continue;
        }
        let start = comment.starts_with("rloss ").then_some(0);
        match start.or_else(|| comment.find(": rloss ").map(|at| at + 2)) {
            Some(at) => found.extend(command(&comment[at..]).map(|text| Shown { line: line_number, text })),
            None => add_spans(&mut found, comment, line_number),
        }
    }
    found
}

/// Returns the first block of a page that contains `part`, in any language.
pub fn code_block<'a>(text: &'a str, part: &str) -> Option<&'a str> {
    let blocks = text.split("\n```").skip(1).step_by(2);
    blocks.filter_map(|block| block.split_once('\n')).map(|(_, code)| code).find(|code| code.contains(part))
}
