//! Parses an answer in LaTeX, or as typed mathematics, into an [`Expr`].
//!
//! The parser accepts variants of markup (`\frac12`, `\dfrac{1}{2}`, `1/2`). For text that it does not
//! understand it returns `None`, and the caller can only compare strings. Nothing is ever executed.

mod atom;

use super::expr::{Expr, Relation};
use super::normalise;
use atom::command;

/// Maximum nesting of brackets, arguments and exponents. Deeper text is not parsed.
const DEPTH_MAX: usize = 48;

/// A reading of ambiguous spellings.
#[derive(Debug, Clone, Copy)]
pub struct Reading {
    /// Whether `1,234` is one number. Otherwise it is a list of two.
    pub thousands: bool,
    /// Whether `2e-3` is 0.002. Otherwise it has Euler's number.
    pub exponents: bool,
}

/// All readings of an answer.
pub const READINGS: [Reading; 3] = [
    Reading { thousands: true, exponents: true },
    Reading { thousands: false, exponents: true },
    Reading { thousands: true, exponents: false },
];

/// Parses `text`, which must be normalised.
pub fn parse(text: &str, reading: Reading) -> Option<Expr> {
    let mut parser = Parser { text, at: 0, depth: 0, bars: 0, in_set: false, reading };
    let expr = parser.groups()?;
    parser.skip_space();
    (parser.at == text.len()).then_some(expr)
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    /// Number of open `|`.
    bars: usize,
    /// Whether `|` and `:` may separate the elements of a set from their condition.
    in_set: bool,
    reading: Reading,
}

/// The spellings of relations. A symbol comes before its own prefixes (`<=` before `<`), so that the longest
/// one matches. A command matches only as a whole, so the order of commands has no effect.
const RELATIONS: [(&str, Relation); 13] = [
    ("\\leqslant \\leq \\le <=", Relation::LessOrEqual),
    ("\\geqslant \\geq \\ge >=", Relation::GreaterOrEqual),
    ("\\neq \\ne \\not= !=", Relation::NotEqual),
    ("\\lt <", Relation::Less),
    ("\\gt >", Relation::Greater),
    ("\\approx \\simeq", Relation::Approximately),
    ("== := =", Relation::Equal),
    ("\\in", Relation::In),
    ("\\notin", Relation::Other('n')),
    ("\\equiv", Relation::Other('m')),
    ("\\to \\rightarrow \\mapsto", Relation::Other('t')),
    ("\\mid", Relation::Other('|')),
    ("\\subset \\subseteq", Relation::Other('s')),
];

/// Builds a list. A list of one item becomes that item.
fn list(mut items: Vec<Expr>) -> Option<Expr> {
    match items.len() {
        0 => None,
        1 => items.pop(),
        _ => Some(Expr::List(items)),
    }
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip_space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    /// Returns the next character after white space.
    fn peek(&mut self) -> Option<char> {
        self.skip_space();
        self.rest().chars().next()
    }

    /// Consumes `token` if it is next. A token that is only the start of a longer command is not consumed.
    fn take(&mut self, token: &str) -> bool {
        self.skip_space();
        let Some(after) = self.rest().strip_prefix(token) else { return false };
        let letter = |c: char| c.is_ascii_alphabetic();
        let longer = token.len() > 1 && token.ends_with(letter) && after.starts_with(letter);
        if !longer {
            self.at += token.len();
        }
        !longer
    }

    fn take_any<T: Copy>(&mut self, tokens: &[(&str, T)]) -> Option<T> {
        let is_next = |(tokens, _): &&(&str, T)| tokens.split(' ').any(|token| self.take(token));
        tokens.iter().find(is_next).map(|&(_, meaning)| meaning)
    }

    fn with_depth<T>(&mut self, inner: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        if self.depth == DEPTH_MAX {
            return None;
        }
        self.depth += 1;
        let (bars, in_set) = (std::mem::take(&mut self.bars), std::mem::take(&mut self.in_set));
        let result = inner(self);
        (self.bars, self.in_set) = (bars, in_set);
        self.depth -= 1;
        result
    }

    /// Parses `a, b; c, d`: lists, separated by semicolons.
    fn groups(&mut self) -> Option<Expr> {
        let mut groups = vec![self.items()?];
        while self.take(";") {
            groups.push(self.items()?);
        }
        groups.retain(|items| !items.is_empty());
        match groups.len() {
            1 => list(groups.remove(0)),
            _ => list(groups.into_iter().filter_map(list).collect()),
        }
    }

    /// Parses statements between commas. An empty item, as in `1, 2, , 3`, is skipped.
    fn items(&mut self) -> Option<Vec<Expr>> {
        let mut items = Vec::new();
        loop {
            while self.take(",") {}
            match self.peek() {
                None | Some(';' | ')' | ']' | '}') => return Some(items),
                _ if self.rest().starts_with("\\}") => return Some(items),
                _ => items.push(self.statement()?),
            }
            if !self.take(",") {
                return Some(items);
            }
        }
    }

    fn statement(&mut self) -> Option<Expr> {
        let (mut terms, mut relations) = (vec![self.ratio()?], Vec::new());
        const CONDITION: [(&str, Relation); 2] = [("|", Relation::Other('|')), (":", Relation::Other('|'))];
        loop {
            let condition = if self.in_set { self.take_any(&CONDITION) } else { None };
            let Some(relation) = condition.or_else(|| self.take_any(&RELATIONS)) else { break };
            relations.push(relation);
            terms.push(self.ratio()?);
        }
        if relations.is_empty() { terms.pop() } else { Some(Expr::Relation(terms, relations)) }
    }

    fn ratio(&mut self) -> Option<Expr> {
        let mut parts = vec![self.sets()?];
        while !self.in_set
            && !self.rest().trim_start().starts_with(":=")
            && (self.take(":") || self.take("\\colon"))
        {
            parts.push(self.sets()?);
        }
        if parts.len() == 1 { parts.pop() } else { Some(Expr::Ratio(parts)) }
    }

    fn sets(&mut self) -> Option<Expr> {
        const OPERATIONS: [(&str, char); 3] =
            [("\\cup", '∪'), ("\\cap", '∩'), ("\\setminus \\backslash", '∖')];
        let mut left = self.sum()?;
        let mut count = 0;
        while let Some(operation) = self.take_any(&OPERATIONS) {
            count += 1;
            if count > DEPTH_MAX {
                return None;
            }
            left = Expr::SetOperation(operation, Box::new(left), Box::new(self.sum()?));
        }
        Some(left)
    }

    fn sum(&mut self) -> Option<Expr> {
        #[derive(Clone, Copy)]
        enum Sign {
            Plus,
            Minus,
            Either(bool),
        }
        const SIGNS: [(&str, Sign); 4] = [
            ("+", Sign::Plus),
            ("-", Sign::Minus),
            ("\\pm", Sign::Either(true)),
            ("\\mp", Sign::Either(false)),
        ];
        let mut terms = Vec::new();
        let mut sign = self.take_any(&SIGNS);
        loop {
            // `- - x`
            let mut minus = matches!(sign, Some(Sign::Minus));
            let either = if let Some(Sign::Either(up)) = sign { Some(up) } else { None };
            while let Some(next) = self.take_any(&[("+", false), ("-", true)]) {
                minus ^= next;
            }
            let mut term = self.product()?;
            if minus {
                term = term.negate();
            }
            if let Some(up) = either {
                term = Expr::PlusMinus(up, Box::new(term));
            }
            terms.push(term);
            sign = self.take_any(&SIGNS);
            if sign.is_none() {
                break;
            }
        }
        if terms.len() == 1 { terms.pop() } else { Some(Expr::Sum(terms)) }
    }

    fn product(&mut self) -> Option<Expr> {
        const OPERATIONS: [(&str, bool); 2] = [("\\cdot \\times \\ast *", false), ("/ \\div \\slash", true)];
        let mut factors = vec![self.power()?];
        loop {
            if let Some(divides) = self.take_any(&OPERATIONS) {
                let factor = self.signed_power()?;
                factors.push(if divides { Expr::Reciprocal(Box::new(factor)) } else { factor });
            } else if self.starts_factor() {
                // `2 \frac{1}{3}` and `2 1/3` are mixed numbers; `2 3` has no meaning.
                let typed = self.rest().starts_with(|c: char| c.is_ascii_digit() || c == '.');
                let set = self.rest().starts_with("\\frac");
                let mut next = self.power()?;
                if typed {
                    self.take("/").then_some(())?;
                    next = Expr::Product(vec![next, Expr::Reciprocal(Box::new(self.power()?))]);
                }
                let part = if let Expr::Percent(part) = &next { part } else { &next };
                match factors.last_mut() {
                    Some(whole) if (typed || set) && is_whole(whole) && is_fraction(part) => {
                        let sum = Expr::Sum(vec![whole.clone(), part.clone()]);
                        let percent = matches!(next, Expr::Percent(_));
                        *whole = if percent { Expr::Percent(Box::new(sum)) } else { sum };
                    }
                    _ if typed => return None,
                    _ => factors.push(next),
                }
            } else {
                break;
            }
        }
        // Units follow a number: `5 \text{ cm}`.
        let text = |f: &Expr| match f {
            Expr::Text(_) => true,
            Expr::Reciprocal(f) => matches!(&**f, Expr::Text(_)),
            _ => false,
        };
        if factors.iter().any(|f| !text(f)) {
            factors.retain(|f| !text(f));
        }
        if factors.len() == 1 { factors.pop() } else { Some(Expr::Product(factors)) }
    }

    /// Parses a factor that may have a sign, as in `2 \cdot -3`.
    fn signed_power(&mut self) -> Option<Expr> {
        let mut minus = false;
        while let Some(next) = self.take_any(&[("+", false), ("-", true)]) {
            minus ^= next;
        }
        let factor = self.power()?;
        Some(if minus { factor.negate() } else { factor })
    }

    /// Returns whether a factor follows without an operator.
    fn starts_factor(&mut self) -> bool {
        match self.peek() {
            Some('\\') => {
                let name = command(self.rest());
                name == "\\{" || (name.len() > 2 && !normalise::is_operator(name))
            }
            Some('|') => self.bars == 0 && !self.in_set,
            Some(c) => c.is_alphanumeric() || matches!(c, '(' | '[' | '{' | '.' | '∞'),
            None => false,
        }
    }

    /// Parses an atom with its exponents, subscripts, factorials and percent signs.
    fn power(&mut self) -> Option<Expr> {
        let mut expr = self.atom()?;
        for _ in 0..DEPTH_MAX {
            if self.rest().trim_start().starts_with("!=") {
                break;
            }
            expr = if self.take("^") {
                // `90^\circ`: the value of an angle in degrees is its number.
                if self.take("{\\circ}") || self.take("\\circ") || self.take("\\degree") {
                    expr
                } else if self.peek() == Some('\'') || self.take("\\prime") {
                    self.take("'");
                    Expr::Call("prime".into(), vec![expr])
                } else {
                    let exponent = self.argument()?;
                    // `cm^2` is a unit, as `cm` is.
                    if matches!(expr, Expr::Text(_)) {
                        expr
                    } else {
                        Expr::Power(Box::new(expr), Box::new(exponent))
                    }
                }
            } else if self.take("**") {
                Expr::Power(Box::new(expr), Box::new(self.with_depth(Self::signed_power)?))
            } else if self.take("_") {
                let index = self.argument()?;
                match expr {
                    Expr::Symbol(name) => Expr::Call(name + "_", vec![index]),
                    other => Expr::Call("_".into(), vec![other, index]),
                }
            } else if self.take("!") {
                Expr::Call("factorial".into(), vec![expr])
            } else if self.take("%") {
                Expr::Percent(Box::new(expr))
            } else if self.take("'") {
                Expr::Call("prime".into(), vec![expr])
            } else if self.take("\\degree") {
                expr
            } else {
                return Some(expr);
            };
        }
        Some(expr)
    }
}

fn is_whole(expr: &Expr) -> bool {
    matches!(expr, Expr::Number { value, decimal: false } if value.is_integer())
}

/// Returns whether `expr` is a whole number divided by a whole number.
fn is_fraction(expr: &Expr) -> bool {
    let Expr::Product(parts) = expr else { return false };
    match parts.as_slice() {
        [above, Expr::Reciprocal(below)] => is_whole(above) && is_whole(below),
        _ => false,
    }
}
