//! Normalisation of an answer before it is parsed: each meaning gets one spelling.

/// Returns whether `command` is an operator or a closing delimiter: a command that cannot start a factor.
pub fn is_operator(command: &str) -> bool {
    const OPERATORS: [&str; 42] = [
        "\\cdot",
        "\\times",
        "\\ast",
        "\\div",
        "\\slash",
        "\\pm",
        "\\mp",
        "\\cup",
        "\\cap",
        "\\setminus",
        "\\backslash",
        "\\leqslant",
        "\\geqslant",
        "\\leq",
        "\\geq",
        "\\le",
        "\\ge",
        "\\neq",
        "\\ne",
        "\\not",
        "\\lt",
        "\\gt",
        "\\approx",
        "\\simeq",
        "\\in",
        "\\notin",
        "\\equiv",
        "\\to",
        "\\rightarrow",
        "\\mapsto",
        "\\mid",
        "\\subset",
        "\\subseteq",
        "\\colon",
        "\\end",
        "\\rvert",
        "\\rfloor",
        "\\rceil",
        "\\degree",
        "\\prime",
        "\\circ",
        "\\over",
    ];
    OPERATORS.contains(&command)
}

/// Returns the function of a LaTeX command.
pub fn latex_function(command: &str) -> Option<&str> {
    let name = command.strip_prefix('\\')?;
    match name {
        "lg" => Some("log"),
        "min" | "max" | "gcd" | "sinh" | "cosh" | "tanh" | "arcsin" | "arccos" | "arctan" => Some(name),
        "sqrt" => None,
        name => word_function(name),
    }
}

/// Returns the function of a typed word.
pub fn word_function(word: &str) -> Option<&str> {
    const WORDS: [&str; 13] =
        ["sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "ln", "log", "exp", "sqrt"];
    WORDS.contains(&word).then_some(word)
}

/// Commands that only change the appearance, with their replacements. They are replaced in this order.
const MARKUP: [(&str, &str); 49] = [
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("\\cfrac", "\\frac"),
    ("\\dbinom", "\\binom"),
    ("\\tbinom", "\\binom"),
    ("\\left", ""),
    ("\\right", ""),
    ("\\Bigl", ""),
    ("\\Bigr", ""),
    ("\\bigl", ""),
    ("\\bigr", ""),
    ("\\Big", ""),
    ("\\big", ""),
    ("\\displaystyle", ""),
    ("\\limits", ""),
    ("\\qquad", " "),
    ("\\quad", " "),
    ("\\lbrace", "\\{"),
    ("\\rbrace", "\\}"),
    ("\\lbrack", "["),
    ("\\rbrack", "]"),
    ("\\vert", "|"),
    ("\\ldots", "..."),
    ("\\cdots", "..."),
    ("\\dots", "..."),
    ("\\bullet", "\\cdot"),
    ("−", "-"),
    ("–", "-"),
    ("×", "\\times "),
    ("·", "\\cdot "),
    ("÷", "\\div "),
    ("π", "\\pi "),
    ("∞", "\\infty "),
    ("≤", "\\le "),
    ("≥", "\\ge "),
    ("≠", "\\ne "),
    ("≈", "\\approx "),
    ("∪", "\\cup "),
    ("∩", "\\cap "),
    ("∈", "\\in "),
    ("±", "\\pm "),
    ("√", "\\sqrt "),
    ("\u{2011}", "-"),
    ("°", "^\\circ "),
    ("²", "^2"),
    ("³", "^3"),
    ("∅", "\\emptyset "),
    ("\u{a0}", " "),
    ("\u{202f}", " "),
];

/// Commands for words or upright letters. They are replaced by `\text`.
const WORDS: [&str; 9] = [
    "\\textnormal",
    "\\textbf",
    "\\textit",
    "\\textrm",
    "\\mbox",
    "\\operatorname",
    "\\mathrm",
    "\\mathbf",
    "\\mathit",
];

/// Units that people write after a number without markup.
const UNITS: [&str; 30] = [
    "cm",
    "mm",
    "km",
    "meters",
    "metres",
    "inches",
    "feet",
    "ft",
    "miles",
    "kg",
    "grams",
    "hours",
    "hour",
    "minutes",
    "minute",
    "seconds",
    "days",
    "years",
    "degrees",
    "dollars",
    "cents",
    "units",
    "square units",
    "cubic units",
    "sq units",
    "square",
    "mph",
    "km/h",
    "people",
    "ways",
];

/// Replaces the command `from`, but not at the start of a longer command.
pub(super) fn replace_command(text: &str, from: &str, to: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(from) {
        let after = &rest[at + from.len()..];
        out.push_str(&rest[..at]);
        // `\quadx` is a misspelling of `\quad x`. Any other longer name is another command.
        let whole = !after.starts_with(|c: char| c.is_ascii_alphabetic())
            || !from.ends_with(|c: char| c.is_ascii_alphabetic())
            || from.ends_with("quad");
        out.push_str(if whole { to } else { from });
        rest = after;
    }
    out + rest
}

/// The end of a matrix row in normalised text. It replaces the doubled backslash of LaTeX.
pub const ROW_END: &str = "¶";

/// Converts doubled backslashes. In a matrix they end a row. Elsewhere they are escaped backslashes, as in
/// text that was encoded as JSON twice.
fn unescape(text: &str) -> String {
    if text.contains("matrix}") || text.contains("array}") || text.contains("cases}") {
        return text.replace("\\\\", ROW_END);
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("\\\\") {
        let after = &rest[at + 2..];
        out.push_str(&rest[..at]);
        out.push_str(if after.starts_with(|c: char| c.is_ascii_alphabetic() || c == '{') {
            "\\"
        } else {
            " "
        });
        rest = after;
    }
    out + rest
}

/// Joins groups of digits that a thin space or a comma in braces separates: `14{,}916`, `12,\! 000`,
/// `1\,000`.
fn join_groups(text: &str) -> String {
    let mut out = text.replace("{, }", "{,}").replace(" {,}", "{,}").replace("{,}", ",\\!");
    for separator in [",\\! ", ",\\!", "\\,", "\\;"] {
        let mut joined = String::with_capacity(out.len());
        let mut rest = out.as_str();
        while let Some(at) = rest.find(separator) {
            let after = &rest[at + separator.len()..];
            let digits = after.len() - after.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            joined.push_str(&rest[..at]);
            let inside = digits == 3 && rest[..at].ends_with(|c: char| c.is_ascii_digit());
            joined.push_str(if inside { "" } else { separator });
            rest = after;
        }
        joined.push_str(rest);
        out = joined;
    }
    out
}

/// Puts the digits after a root sign into braces: LaTeX takes only the next digit.
fn with_braced_roots(text: &str) -> String {
    let mut parts = text.split('√');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        match digits {
            0 => out.push('√'),
            _ => out.push_str(&format!("\\sqrt{{{}}}", &part[..digits])),
        }
        out.push_str(&part[digits..]);
    }
    out
}

/// Returns the normalised `text`, ready for [`super::parse::parse`].
pub fn normalise(text: &str) -> String {
    let mut out = join_groups(&unescape(text.trim()));
    out = out.replace("\\$", "").replace('$', "").replace("\\%", "%").replace(['\n', '\t', '\r'], " ");
    out = with_braced_roots(&out);
    for (from, to) in MARKUP {
        if out.contains(from) {
            out = replace_command(&out, from, to);
        }
    }
    for space in ["\\!", "\\,", "\\;", "\\:", "\\ ", "~"] {
        out = out.replace(space, " ");
    }
    for words in WORDS {
        out = replace_command(&out, words, "\\text");
    }
    out = out
        .replace("\\text{and}", ",")
        .replace("\\text{or}", ",")
        .replace("\\text{e}", "e")
        .replace("\\text{i}", "i");
    for word in
        ["\\text{ and }", "\\text{ or }", "\\text{and }", "\\text{or }", "\\text{ and}", "\\text{ or}"]
    {
        out = out.replace(word, ",");
    }
    for (word, to) in [("and", ","), ("or", ","), ("percentage", "%"), ("percent", "%"), ("pct", "%")] {
        out = replace_word(&out, word, to);
    }
    let out = out.trim().trim_end_matches(['.', ',', ':']).trim();
    without_unit(out).to_owned()
}

/// Replaces `word` where no letter is next to it.
fn replace_word(text: &str, word: &str, to: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find(word) {
        let after = &rest[at + word.len()..];
        out.push_str(&rest[..at]);
        let letter = |c: char| c.is_alphabetic() || c == '\\' || c == '_';
        let alone = !out.ends_with(letter) && !after.starts_with(letter);
        out.push_str(if alone { to } else { word });
        rest = after;
    }
    out + rest
}

/// Removes a unit after a number: `35 cm` becomes `35`.
fn without_unit(text: &str) -> &str {
    for unit in UNITS {
        if let Some(before) = text.strip_suffix(unit)
            && let number = before.trim_end()
            && number.len() < before.len()
            && number.ends_with(|c: char| c.is_ascii_digit() || c == '}')
        {
            return number;
        }
    }
    text
}

/// Returns the letters and signs of a text, without word markup, white space, and the brackets around a
/// single choice.
pub fn strip_markup(text: &str) -> String {
    let cleaned = normalise(text);
    let mut plain = String::with_capacity(cleaned.len());
    let mut rest = cleaned.as_str();
    while let Some((before, after)) = rest.split_once("\\text{") {
        let (words, after) = after.split_once('}').unwrap_or((after, ""));
        plain.push_str(before);
        plain.push_str(words);
        rest = after;
    }
    plain.push_str(rest);
    plain.retain(|c| !c.is_whitespace());
    while let Some(inner) = plain.strip_prefix('{').and_then(|p| p.strip_suffix('}')) {
        if inner.contains(['{', '}']) {
            break;
        }
        plain = inner.to_owned();
    }
    // `(C)` is the choice C.
    if let Some(choice) = plain.strip_prefix('(').and_then(|p| p.strip_suffix(')'))
        && choice.chars().count() == 1
        && choice.starts_with(|c: char| c.is_ascii_uppercase())
    {
        plain = choice.to_owned();
    }
    if plain.chars().filter(|c| c.is_alphabetic()).count() > 1 && plain.chars().all(char::is_alphabetic) {
        plain = plain.to_lowercase();
    }
    plain
}
