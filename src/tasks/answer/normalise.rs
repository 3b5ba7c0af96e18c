//! Normalisation of an answer before it is parsed: each meaning gets one spelling.

use crate::tasks::number::{MINUS_SIGNS, digits_of};

/// Returns whether `command` is an operator or a closing delimiter: a command that cannot start a factor.
pub fn is_operator(command: &str) -> bool {
    const OPERATORS: &str = "cdot times ast div slash pm mp cup cap setminus backslash leqslant geqslant \
                             leq geq le ge neq ne not lt gt approx simeq in notin equiv to rightarrow \
                             mapsto mid subset subseteq colon end rvert rfloor rceil degree prime circ \
                             over";
    command.strip_prefix('\\').is_some_and(|name| OPERATORS.split(' ').any(|operator| operator == name))
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

/// Commands that only change the appearance, each with its replacement. They are replaced in this order.
const MARKUP: &str = r"\dfrac>\frac \tfrac>\frac \cfrac>\frac \dbinom>\binom \tbinom>\binom \left>
    \right> \Bigl> \Bigr> \bigl> \bigr> \Big> \big> \displaystyle> \limits> \qquad>~ \quad>~ \lbrace>\{
    \rbrace>\} \lbrack>[ \rbrack>] \vert>| \ldots>... \cdots>... \dots>... \bullet>\cdot \langle>( \rangle>)
    \Bbb>\mathbb \varepsilon>\epsilon \varphi>\phi \varnothing>\emptyset";

/// Unicode characters, each with its LaTeX.
const CHARACTERS: &str = r"×\times ·\cdot ⋅\cdot ∙\cdot ∗* ÷\div ∕/ ⁄/ ∶: ∣| ∞\infty ≤\le ⩽\le ≥\ge ⩾\ge
    ≠\ne ≈\approx ≡\equiv →\to ∪\cup ∩\cap ∖\setminus ∈\in ∅\emptyset ±\pm ∓\mp √\sqrt ∛\sqrt[3] °^\circ ⟨(
    ⟩) ⌊\lfloor ⌋\rfloor ⌈\lceil ⌉\rceil …... ℝ\mathbb{R} ℚ\mathbb{Q} ℤ\mathbb{Z} ℕ\mathbb{N} ℂ\mathbb{C}
    α\alpha β\beta γ\gamma δ\delta ε\epsilon ϵ\epsilon ζ\zeta η\eta θ\theta ι\iota κ\kappa λ\lambda μ\mu
    µ\mu ν\nu ξ\xi π\pi ρ\rho σ\sigma τ\tau υ\upsilon φ\phi ϕ\phi χ\chi ψ\psi ω\omega Γ\Gamma Δ\Delta
    Θ\Theta Λ\Lambda Ξ\Xi Π\Pi Σ\Sigma Φ\Phi Ψ\Psi Ω\Omega ½\frac{1}{2} ⅓\frac{1}{3} ⅔\frac{2}{3}
    ¼\frac{1}{4} ¾\frac{3}{4} ⅕\frac{1}{5} ⅖\frac{2}{5} ⅗\frac{3}{5} ⅘\frac{4}{5} ⅙\frac{1}{6} ⅚\frac{5}{6}
    ⅐\frac{1}{7} ⅛\frac{1}{8} ⅜\frac{3}{8} ⅝\frac{5}{8} ⅞\frac{7}{8} ⅑\frac{1}{9} ⅒\frac{1}{10} € £ ¥ ₹";

/// The digits and signs of powers and of indices, in the order of [`SCRIPT_TEXT`].
const SCRIPTS: [(&str, char); 2] = [("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", '^'), ("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙ", '_')];
const SCRIPT_TEXT: &str = "0123456789+-()n";

/// Returns the LaTeX of a Unicode character.
pub fn latex_of(c: char) -> Option<&'static str> {
    CHARACTERS.split_whitespace().find_map(|item| item.strip_prefix(c))
}

/// Writes unicode characters as LaTeX: `x¹⁰` as `x^{10}`, `½` as `\frac{1}{2}`, `ℝ` as `\mathbb{R}`.
fn latex_of_unicode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let mut end = c.len_utf8();
        if c.is_ascii() {
            out.push(c);
        } else if let Some((script, mark)) = SCRIPTS.iter().find(|(script, _)| script.contains(c)) {
            end = rest.find(|c| !script.contains(c)).unwrap_or(rest.len());
            let meaning = |c| script.chars().zip(SCRIPT_TEXT.chars()).find(|pair| pair.0 == c);
            let inner: String = rest[..end].chars().filter_map(meaning).map(|(_, text)| text).collect();
            out.push_str(&format!("{mark}{{{inner}}}"));
        } else if MINUS_SIGNS.contains(&c) {
            out.push('-');
        } else if let Some(latex) = latex_of(c) {
            out.extend([latex, " "]);
        } else {
            // Full-width forms of ASCII, and white space.
            let ascii = u32::from(c).checked_sub(0xfee0).and_then(char::from_u32);
            let plain = ascii.filter(char::is_ascii_graphic).unwrap_or(c);
            out.push(if c.is_whitespace() { ' ' } else { plain });
        }
        rest = &rest[end..];
    }
    out
}

/// Commands for words or upright letters. They are replaced by `\text`.
const WORDS: &str = r"\textnormal \textbf \textit \textrm \mbox \operatorname \mathrm \mathbf \mathit";

/// Units that people write after a number without markup, among them those of verl.
const UNITS: &str = "cm|mm|km|gm|kg|meters|metres|inches|feet|ft|miles|pounds|grams|hours|hour|minutes|\
                     minute|seconds|days|years|degrees|dollars|cents|points|digits|square units|\
                     cubic units|sq units|squareunits|cubicunits|units|square|mph|km/h|people|students|\
                     meals|edges|integers|multiples|ways";

/// Replaces each `from` by the text that `replacement` returns. It gets the result before this place, and the
/// rest of the text after it.
fn replace_each<'t>(text: &str, from: &str, replacement: impl Fn(&str, &str) -> &'t str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(from) {
        out.push_str(before);
        out.push_str(replacement(&out, after));
        rest = after;
    }
    out + rest
}

/// Replaces the command `from`, but not at the start of a longer command.
pub(super) fn replace_command(text: &str, from: &str, to: &str) -> String {
    let is_letter = |c: char| c.is_ascii_alphabetic();
    // `\quadx` is a misspelling of `\quad x`. Any other longer name is another command.
    let is_open = !from.ends_with(is_letter) || from.ends_with("quad");
    replace_each(text, from, |_, after| if is_open || !after.starts_with(is_letter) { to } else { from })
}

/// The end of a matrix row in normalised text. It replaces the doubled backslash of LaTeX.
pub const ROW_END: &str = "¶";

/// Converts doubled backslashes. In a matrix they end a row. Elsewhere they are escaped backslashes, as in
/// text that was encoded as JSON twice.
fn unescape(text: &str) -> String {
    if text.contains("matrix}") || text.contains("array}") || text.contains("cases}") {
        return text.replace("\\\\", ROW_END);
    }
    let begins_command = |after: &str| after.starts_with(|c: char| c.is_ascii_alphabetic() || c == '{');
    replace_each(text, "\\\\", |_, after| if begins_command(after) { "\\" } else { " " })
}

/// Joins groups of digits that a thin space or a comma in braces separates: `14{,}916`, `12,\! 000`,
/// `1\,000`.
fn join_groups(text: &str) -> String {
    let mut out = text.replace("{, }", "{,}").replace(" {,}", "{,}").replace("{,}", ",\\!");
    for separator in [",\\! ", ",\\!", "\\,", "\\;"] {
        out = replace_each(&out, separator, |before, after| {
            let is_inside = digits_of(after).len() == 3 && before.ends_with(|c: char| c.is_ascii_digit());
            if is_inside { "" } else { separator }
        });
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
    let mut out = latex_of_unicode(&with_braced_roots(text.trim()));
    out = join_groups(&unescape(&out));
    out = out.replace("\\$", "").replace('$', "").replace("\\%", "%").replace(['\n', '\t', '\r'], " ");
    for (from, to) in MARKUP.split_whitespace().filter_map(|item| item.split_once('>')) {
        if out.contains(from) {
            out = replace_command(&out, from, to);
        }
    }
    for space in ["\\!", "\\,", "\\;", "\\:", "\\ ", "\\(", "\\)", "~"] {
        out = out.replace(space, " ");
    }
    for words in WORDS.split(' ') {
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
    let letter = |c: char| c.is_alphabetic() || c == '\\' || c == '_';
    let is_part = |before: &str, after: &str| before.ends_with(letter) || after.starts_with(letter);
    replace_each(text, word, |before, after| if is_part(before, after) { word } else { to })
}

/// Removes a unit after a number: `35 cm` becomes `35`.
pub(super) fn without_unit(text: &str) -> &str {
    for unit in UNITS.split('|') {
        if let Some(before) = text.strip_suffix(unit)
            && let number = before.trim_end()
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
