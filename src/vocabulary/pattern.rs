//! Regular expressions of a tokenizer, matched in a bounded number of steps.
//!
//! The engine of the `tokenizers` crate limits the backtracks of a match, but neither the steps of a text nor
//! the characters that it reads again and again. So this matcher counts each step. It finds the matches that
//! `fancy-regex`, which parses the expressions, finds.

use anyhow::{Context, Result, bail, ensure};
use fancy_regex::{Assertion, Expr, LookAround};
use regex_syntax::hir::{Class, HirKind};
use std::cell::Cell;
use tokenizers::pattern::Pattern;

/// Maximum number of instructions of an expression. Those of published tokenizers have up to 120.
const INSTRUCTIONS_MAX: usize = 2000;
/// Maximum number of places to go back to.
const PLACES_MAX: usize = 1 << 20;
/// Steps that a text of any length may take, and further steps for each of its bytes. With the expressions of
/// published tokenizers, a byte takes up to 40.
const STEPS: [u64; 2] = [100_000, 64];

/// Number of steps that are left for a text.
pub(super) struct StepBudget(Cell<u64>);

impl StepBudget {
    /// Returns the budget of a text of `bytes` bytes.
    pub(super) fn of_text(bytes: usize) -> Self {
        Self(Cell::new(STEPS[0].saturating_add(STEPS[1].saturating_mul(bytes as u64))))
    }

    fn spend(&self, steps: usize) -> Result<()> {
        let left = self.0.get().checked_sub(steps as u64);
        self.0.set(left.context("the tokenizer's regular expressions take too many steps for this text")?);
        Ok(())
    }
}

/// A compiled regular expression.
pub(super) struct SplitPattern {
    program: Vec<Instruction>,
    /// Number of parts compiled so far.
    parts: usize,
}

enum Instruction {
    /// Reads as many characters of the set as possible.
    Read {
        set: CharSet,
        min: usize,
        max: usize,
    },
    /// Goes on at the first place; later, perhaps, at the second.
    Either(usize, usize),
    Jump(usize),
    Assert(Assertion),
    /// Matches the instructions up to `end` by themselves. Without a `look`, they are read (atomic group).
    Inner {
        look: Option<LookAround>,
        end: usize,
    },
    Done,
}

/// A place to go back to: an instruction, and a position in the text. If `low` is below the position, the
/// place stands for all positions from `low` to the one before.
struct Place {
    instruction: usize,
    at: usize,
    low: usize,
}

/// A set of characters.
struct CharSet {
    ascii: u128,
    ranges: Vec<(char, char)>,
}

impl CharSet {
    /// Returns the set of an expression for one character.
    fn new(expression: &str, ignores_case: bool) -> Result<Self> {
        let parser = regex_syntax::ParserBuilder::new().case_insensitive(ignores_case).build();
        let parsed = { parser }.parse(expression)?;
        let ranges: Vec<(char, char)> = match parsed.kind() {
            HirKind::Class(Class::Unicode(class)) => {
                class.ranges().iter().map(|r| (r.start(), r.end())).collect()
            }
            HirKind::Literal(literal) => {
                let text = std::str::from_utf8(&literal.0)?;
                ensure!(text.chars().count() == 1, "{text:?} is not one character");
                text.chars().map(|c| (c, c)).collect()
            }
            _ => bail!("{expression:?} is not a set of characters"),
        };
        let contains = |c: char| ranges.iter().any(|(low, high)| (*low..=*high).contains(&c));
        let ascii = (0..128u8).filter(|code| contains(char::from(*code))).map(|code| 1 << code).sum();
        Ok(Self { ascii, ranges })
    }

    fn contains(&self, c: char) -> bool {
        match c.is_ascii() {
            true => self.ascii >> u32::from(c) & 1 == 1,
            false => {
                let after = self.ranges.partition_point(|(low, _)| *low <= c);
                after > 0 && c <= self.ranges[after - 1].1
            }
        }
    }
}

impl SplitPattern {
    /// Compiles an expression.
    ///
    /// # Errors
    /// When the expression is invalid, too large, or has a construct that tokenizers do not use.
    pub(super) fn new(expression: &str) -> Result<Self> {
        let mut compiled = Self { program: vec![], parts: 0 };
        let tree = Expr::parse_tree(expression).map_err(|e| anyhow::anyhow!("{e}"))?;
        compiled.compile(&tree.expr)?;
        compiled.push(Instruction::Done);
        Ok(compiled)
    }

    fn push(&mut self, instruction: Instruction) -> usize {
        self.program.push(instruction);
        self.program.len() - 1
    }

    fn compile(&mut self, part: &Expr) -> Result<()> {
        self.parts += 1;
        let is_small = self.program.len().max(self.parts) <= INSTRUCTIONS_MAX;
        ensure!(is_small, "a regular expression has more than {INSTRUCTIONS_MAX} instructions");
        match part {
            Expr::Empty => {}
            Expr::Group(part) => self.compile(part)?,
            Expr::Concat(parts) => parts.iter().try_for_each(|part| self.compile(part))?,
            Expr::Alt(parts) => {
                let (last, others) = parts.split_last().context("no alternatives")?;
                let mut jumps = vec![];
                for part in others {
                    let either = self.push(Instruction::Jump(0));
                    self.compile(part)?;
                    jumps.push(self.push(Instruction::Jump(0)));
                    self.program[either] = Instruction::Either(either + 1, self.program.len());
                }
                self.compile(last)?;
                let end = self.program.len();
                jumps.into_iter().for_each(|jump| self.program[jump] = Instruction::Jump(end));
            }
            Expr::Repeat { child, lo, hi, greedy } => self.compile_repeat(child, (*lo, *hi), *greedy)?,
            Expr::LookAround(part, look) => self.compile_inner(part, Some(*look))?,
            Expr::AtomicGroup(part) => self.compile_inner(part, None)?,
            Expr::Assertion(assertion) => {
                use Assertion::*;
                let (EndText
                | StartText
                | StartLine { crlf: false }
                | EndLine { crlf: false }
                | WordBoundary
                | NotWordBoundary) = assertion
                else {
                    bail!("{assertion:?} is not supported in a regular expression");
                };
                self.push(Instruction::Assert(*assertion));
            }
            Expr::Literal { val, casei } => {
                for c in val.chars() {
                    let set = CharSet::new(&regex_syntax::escape(c.encode_utf8(&mut [0; 4])), *casei)?;
                    self.push(Instruction::Read { set, min: 1, max: 1 });
                }
            }
            one => match set_of(one)? {
                Some(set) => drop(self.push(Instruction::Read { set, min: 1, max: 1 })),
                None => bail!("{one:?} is not supported in a regular expression"),
            },
        }
        Ok(())
    }

    fn compile_repeat(&mut self, child: &Expr, (min, max): (usize, usize), greedy: bool) -> Result<()> {
        if let Some(set) = set_of(child)?.filter(|_| greedy) {
            self.push(Instruction::Read { set, min, max });
            return Ok(());
        }
        (0..min).try_for_each(|_| self.compile(child))?;
        let either =
            |next, end| if greedy { Instruction::Either(next, end) } else { Instruction::Either(end, next) };
        let mut starts = vec![];
        for _ in min..if max == usize::MAX { min + 1 } else { max } {
            starts.push(self.push(Instruction::Jump(0)));
            self.compile(child)?;
        }
        if max == usize::MAX {
            self.push(Instruction::Jump(starts[0]));
        }
        let end = self.program.len();
        starts.into_iter().for_each(|start| self.program[start] = either(start + 1, end));
        Ok(())
    }

    fn compile_inner(&mut self, part: &Expr, look: Option<LookAround>) -> Result<()> {
        let start = self.push(Instruction::Jump(0));
        self.compile(part)?;
        let end = self.push(Instruction::Done) + 1;
        self.program[start] = Instruction::Inner { look, end };
        Ok(())
    }

    /// Returns the end of the match of the instructions from `instruction` on that begins at `at`. With
    /// `end`, the match must end there.
    fn run(
        &self,
        text: &str,
        (mut instruction, mut at): (usize, usize),
        end: Option<usize>,
        places: &mut Vec<Place>,
        steps: &StepBudget,
    ) -> Result<Option<usize>> {
        let base = places.len();
        loop {
            steps.spend(1)?;
            let next = match &self.program[instruction] {
                Instruction::Read { set, min, max } => {
                    let (mut count, mut low) = (0, at);
                    for c in text[at..].chars().take_while(|c| set.contains(*c)).take(*max) {
                        at += c.len_utf8();
                        count += 1;
                        if count == *min {
                            low = at;
                        }
                    }
                    steps.spend(count)?;
                    if count > *min {
                        places.push(Place { instruction: instruction + 1, at, low });
                    }
                    (count >= *min).then_some(instruction + 1)
                }
                Instruction::Either(first, second) => {
                    ensure!(
                        places.len() < PLACES_MAX,
                        "the tokenizer's regular expression needs too much memory"
                    );
                    places.push(Place { instruction: *second, at, low: at });
                    Some(*first)
                }
                Instruction::Jump(next) => Some(*next),
                Instruction::Assert(assertion) => holds(*assertion, text, at).then_some(instruction + 1),
                Instruction::Inner { look, end } => {
                    let start = instruction + 1;
                    let is_behind = matches!(look, Some(LookAround::LookBehind | LookAround::LookBehindNeg));
                    let found = if is_behind {
                        let ends = text[..at].char_indices().rev().map(|(start, _)| start);
                        let mut starts = std::iter::once(at).chain(ends);
                        starts.find_map(|from| {
                            self.run(text, (start, from), Some(at), places, steps).transpose()
                        })
                    } else {
                        self.run(text, (start, at), None, places, steps).transpose()
                    };
                    let found = found.transpose()?;
                    let is_negative =
                        matches!(look, Some(LookAround::LookAheadNeg | LookAround::LookBehindNeg));
                    at = if look.is_none() { found.unwrap_or(at) } else { at };
                    (found.is_some() != is_negative).then_some(*end)
                }
                Instruction::Done if end.is_none_or(|end| end == at) => {
                    places.truncate(base);
                    return Ok(Some(at));
                }
                Instruction::Done => None,
            };
            match next {
                Some(next) => instruction = next,
                None => {
                    let place = if places.len() > base { places.pop() } else { None };
                    let Some(place) = place else { return Ok(None) };
                    (instruction, at) = (place.instruction, place.at);
                    if place.low < place.at {
                        at = text[..at].char_indices().next_back().map_or(0, |(start, _)| start);
                        if place.low < at {
                            places.push(Place { at, ..place });
                        }
                    }
                }
            }
        }
    }

    /// Returns the start and the end of each match, as `fancy-regex` iterates over them.
    fn matches(&self, text: &str, steps: &StepBudget) -> Result<Vec<(usize, usize)>> {
        let (mut found, mut places, mut start) = (vec![], vec![], 0);
        while start <= text.len() {
            let next = start + text[start..].chars().next().map_or(1, char::len_utf8);
            match self.run(text, (0, start), None, &mut places, steps)? {
                Some(end) if end > start => {
                    found.push((start, end));
                    start = end;
                }
                Some(_) => {
                    // An empty match right after a match does not count.
                    if found.last().is_none_or(|(_, end)| *end != start) {
                        found.push((start, start));
                    }
                    start = next;
                }
                None => start = next,
            }
        }
        Ok(found)
    }
}

/// Returns the set of an expression that stands for one character.
fn set_of(part: &Expr) -> Result<Option<CharSet>> {
    Ok(Some(match part {
        Expr::Any { newline } => CharSet::new(if *newline { "(?s:.)" } else { "." }, false)?,
        Expr::Delegate { inner, casei, .. } => CharSet::new(inner, *casei)?,
        Expr::Group(part) => return set_of(part),
        _ => return Ok(None),
    }))
}

fn holds(assertion: Assertion, text: &str, at: usize) -> bool {
    let (before, after) = (text[..at].chars().next_back(), text[at..].chars().next());
    let is_word = |c: Option<char>| c.is_some_and(regex_syntax::is_word_character);
    match assertion {
        Assertion::StartText => before.is_none(),
        Assertion::EndText => after.is_none(),
        Assertion::StartLine { .. } => before.is_none_or(|c| c == '\n'),
        Assertion::EndLine { .. } => after.is_none_or(|c| c == '\n'),
        Assertion::WordBoundary => is_word(before) != is_word(after),
        _ => is_word(before) == is_word(after),
    }
}

/// An expression that splits a text in the rest of its steps.
pub(super) struct Bounded<'a>(pub(super) &'a SplitPattern, pub(super) &'a StepBudget);

impl Pattern for Bounded<'_> {
    fn find_matches(&self, text: &str) -> tokenizers::Result<Vec<((usize, usize), bool)>> {
        if text.is_empty() {
            return Ok(vec![((0, 0), false)]);
        }
        let (mut parts, mut last) = (vec![], 0);
        for (start, end) in self.0.matches(text, self.1)? {
            if last != start {
                parts.push(((last, start), false));
            }
            parts.push(((start, end), true));
            last = end;
        }
        if last != text.len() {
            parts.push(((last, text.len()), false));
        }
        Ok(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::prelude::*;
    use tokenizers::utils::SysRegex;

    /// The expressions of GPT-2, cl100k, Qwen2, GPT-OSS, Llama 3, DeepSeek and SuperBPE.
    const PUBLISHED: [&str; 9] = [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"(?=(\d{3})+(?!\d))",
    ];
    const PIECES: [&str; 24] = [
        "a", "b", "A", "Z", "é", "ſ", "1", "23", "٣", " ", "  ", "\u{a0}", "\n", "\r\n", "\t", "'s", "'LL",
        "!", "/", "中", "か", "\u{301}", "😀", "_",
    ];

    fn text(random: &mut impl Rng, pieces: usize) -> String {
        (0..pieces).map(|_| *PIECES.choose(random).unwrap()).collect()
    }

    /// Returns a random expression of at most `depth` levels.
    fn expression(random: &mut impl Rng, depth: usize) -> String {
        let leaf = [
            "a", "A", "b", r"\s", r"\S", r"\p{L}", "[^a]", ".", r"\d", "(?i:a)", "[ab1]", r"\b", "^", "$",
            "中",
        ];
        if depth == 0 || random.random_bool(0.3) {
            return leaf.choose(random).unwrap().to_string();
        }
        let inner = |random: &mut _| expression(random, depth - 1);
        match random.random_range(0..9) {
            0 => format!("(?:{}|{})", inner(random), inner(random)),
            1 | 2 => format!("{}{}", inner(random), inner(random)),
            3 => format!(
                "(?:{}){}",
                inner(random),
                ["?", "??", "{2}", "{1,3}", "{0,2}?"].choose(random).unwrap()
            ),
            // Of one character: a repetition of what may be empty is not supported.
            4 | 5 => {
                let leaf = leaf[..11].choose(random).unwrap();
                format!("(?:{leaf}){}", ["*", "+", "*?", "+?", "{2,}"].choose(random).unwrap())
            }
            6 => format!("({}{})", ["?=", "?!"].choose(random).unwrap(), inner(random)),
            7 => {
                format!("({}{})", ["?<=", "?<!"].choose(random).unwrap(), leaf[..11].choose(random).unwrap())
            }
            _ => format!("(?>{})", inner(random)),
        }
    }

    fn check(expression: &str, text: &str) {
        let Ok(library) = SysRegex::new(expression) else { return };
        let own = SplitPattern::new(expression).unwrap_or_else(|e| panic!("{expression}: {e}"));
        let expected: Vec<(usize, usize)> = library.find_iter(text).collect();
        let found = own.matches(text, &StepBudget::of_text(text.len())).unwrap();
        assert_eq!(found, expected, "{expression} on {text:?}");
    }

    #[test]
    fn it_finds_the_matches_of_the_library() {
        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(1);
        for expression in PUBLISHED {
            for pieces in 0..120 {
                check(expression, &text(&mut random, pieces % 60));
            }
        }
        for _ in 0..5_000 {
            let (depth, pieces) = (random.random_range(1..5), random.random_range(0..12));
            check(&expression(&mut random, depth), &text(&mut random, pieces));
        }
    }

    /// It took 34 s for 240 characters, and then the library returned a part of the matches.
    #[test]
    fn bug_a_text_that_takes_too_many_steps_is_an_error() {
        let doubling = |n: usize| format!(r"(?=(?:(?=)[\s\S]|[\s\S](?=)){{{n}}}\x00)|[\s\S]");
        let long = "2+3? ".repeat(2000);
        for (expression, text) in [
            (&*doubling(18), &long[..240]),
            // Each character reads the rest of the text: without going back, and in a part without lookahead.
            (r"(?=[\s\S]*\x00)|[\s\S]", &long),
            (r"[\s\S]*\x00|[\s\S]", &long),
            (r"(?<=\x00[\s\S]*)a|[\s\S]", &long),
            (r"(?:a*)*b|x", "aaaa"),
        ] {
            let pattern = SplitPattern::new(expression).unwrap();
            let error = pattern.matches(text, &StepBudget::of_text(text.len())).expect_err(expression);
            assert!(error.to_string().contains("too m"), "{error}");
        }
        for expression in ["(?:(?:(?:x{900}){900}){900}){900}", r"(a)\1", "(?<n>a)\\k<n>", "a\\Kb", "(a"] {
            assert!(SplitPattern::new(expression).is_err(), "{expression}");
        }
    }

    /// The library stopped at a million places, and the rest of the text became one part.
    #[test]
    fn bug_a_long_run_of_spaces_is_split_as_a_short_one() {
        let text = " ".repeat(3_000_000) + "x yz";
        for expression in &PUBLISHED[..5] {
            let pattern = SplitPattern::new(expression).unwrap();
            let found = pattern.matches(&text, &StepBudget::of_text(text.len())).unwrap();
            assert_eq!(
                found,
                [(0, 2_999_999), (2_999_999, 3_000_001), (3_000_001, 3_000_004)],
                "{expression}"
            );
        }
    }

    #[test]
    fn published_expressions_take_few_steps() {
        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(2);
        let mixed = text(&mut random, 20_000);
        let texts = PIECES.iter().map(|piece| piece.repeat(20_000)).chain([mixed]);
        for text in texts {
            for expression in PUBLISHED {
                let pattern = SplitPattern::new(expression).unwrap();
                let steps = StepBudget(Cell::new(u64::MAX));
                pattern.matches(&text, &steps).unwrap();
                let taken = (u64::MAX - steps.0.get()) / text.len() as u64;
                assert!(taken <= 40 || expression == PUBLISHED[8], "{taken} steps a byte: {expression}");
            }
        }
    }
}
