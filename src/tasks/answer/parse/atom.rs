//! Parsing of atoms: numbers, brackets, letters, commands, functions, matrices.

use super::{Parser, normalise};
use crate::tasks::answer::expr::Expr;
use crate::tasks::number::digits_of;
use num_bigint::BigInt;
use num_rational::BigRational;

impl<'a> Parser<'a> {
    pub(super) fn atom(&mut self) -> Option<Expr> {
        match self.peek()? {
            '0'..='9' | '.' => self.number(),
            '(' | '[' => self.with_depth(Self::parse_bracketed),
            '{' => self.with_depth(Self::parse_braced),
            '|' => self.between("|", "|", "abs"),
            '∞' => {
                self.at += '∞'.len_utf8();
                Some(Expr::symbol("\\infty"))
            }
            '\\' => self.with_depth(Self::command),
            c if c.is_alphabetic() => self.letter(c),
            _ => None,
        }
    }

    /// Parses `12`, `1,234.5`, `.5`, `0.\overline{3}`.
    fn number(&mut self) -> Option<Expr> {
        let mut digits = self.digits().to_owned();
        if self.reading.thousands && (1..=3).contains(&digits.len()) && !digits.starts_with('0') {
            while let Some(group) =
                self.rest().strip_prefix([',', ' ']).filter(|group| digits_of(group).len() == 3)
            {
                digits.push_str(digits_of(group));
                self.at += 4;
            }
        }
        let (mut scale, mut decimal) = (0u32, false);
        let mut fraction = None;
        if self.rest().starts_with('.') {
            self.at += 1;
            let decimals = self.digits();
            scale = decimals.len() as u32;
            digits.push_str(decimals);
            decimal = scale > 0;
            if let Some(rest) = self.rest().strip_prefix("\\overline{") {
                let repeating = digits_of(rest);
                if repeating.is_empty() || !rest[repeating.len()..].starts_with('}') {
                    return None;
                }
                self.at += "\\overline{}".len() + repeating.len();
                let nines = BigInt::from(10).pow(repeating.len() as u32) - 1;
                fraction = Some(BigRational::new(repeating.parse().ok()?, nines));
                decimal = false;
            }
        }
        if digits.is_empty() {
            fraction.as_ref()?;
            digits.push('0');
        }
        let whole = BigRational::from_integer(digits.parse().ok()?);
        let mut value = (whole + fraction.unwrap_or_else(|| BigRational::from_integer(0.into())))
            / BigInt::from(10).pow(scale);
        if let Some((power, length)) = exponent(self.rest()).filter(|_| self.reading.exponents) {
            self.at += length;
            value *= BigRational::from_integer(10.into()).pow(power);
        }
        Some(Expr::Number { value, decimal })
    }

    fn digits(&mut self) -> &'a str {
        let digits = digits_of(self.rest());
        self.at += digits.len();
        digits
    }

    /// Parses `(a)` and `(a, b]`.
    fn parse_bracketed(&mut self) -> Option<Expr> {
        let open = if self.take("(") { '(' } else { '[' };
        self.at += usize::from(self.rest().starts_with('['));
        let mut items = self.items()?;
        while self.take(";") {
            items.extend(self.items()?);
        }
        let close = self.take_any(&[(")", ')'), ("]", ']')])?;
        match items.len() {
            0 => None,
            1 if matches!((open, close), ('(', ')') | ('[', ']')) => items.pop(),
            _ => Some(Expr::Tuple(open, items, close)),
        }
    }

    fn parse_braced(&mut self) -> Option<Expr> {
        self.take("{");
        let inner = self.groups();
        if self.take("}") { inner } else { None }
    }

    /// Parses `open … close` as a call of `function`, such as `|x|`.
    fn between(&mut self, open: &str, close: &str, function: &str) -> Option<Expr> {
        self.with_depth(|p| {
            p.take(open);
            p.bars = 1;
            let inner = p.statement()?;
            p.take(close).then(|| Expr::Call(function.into(), vec![inner]))
        })
    }

    /// Parses the argument of a command: a group in braces, or one token.
    pub(super) fn argument(&mut self) -> Option<Expr> {
        match self.peek()? {
            '{' => self.with_depth(Self::parse_braced),
            '-' => {
                self.take("-");
                self.argument_token().map(Expr::negate)
            }
            _ => self.argument_token(),
        }
    }

    fn argument_token(&mut self) -> Option<Expr> {
        match self.peek()? {
            digit @ '0'..='9' => {
                self.at += 1;
                digit.to_digit(10).map(|d| Expr::integer(d.into()))
            }
            '(' => self.with_depth(Self::parse_bracketed),
            '\\' => self.with_depth(Self::command),
            c if c.is_alphabetic() => {
                self.at += c.len_utf8();
                Some(Expr::Symbol(c.to_string()))
            }
            _ => None,
        }
    }

    /// Parses a letter as a variable, and several letters as a function's name or a product.
    fn letter(&mut self, first: char) -> Option<Expr> {
        let rest = self.rest();
        let run = &rest[..rest.len() - rest.trim_start_matches(|c: char| c.is_alphabetic()).len()];
        if let Some(name) = normalise::word_function(run) {
            self.at += run.len();
            return self.function(name);
        }
        let constant = match run {
            "pi" => Some("\\pi"),
            "inf" | "infinity" | "oo" => Some("\\infty"),
            _ => None,
        };
        if let Some(name) = constant {
            self.at += run.len();
            return Some(Expr::symbol(name));
        }
        self.at += first.len_utf8();
        // In `f(x)`, these letters are functions.
        if matches!(first, 'f' | 'g' | 'h' | 'F' | 'G' | 'H') && self.rest().starts_with('(') {
            let argument = self.with_depth(Self::parse_bracketed)?;
            return Some(Expr::Call(first.to_string(), vec![argument]));
        }
        Some(Expr::Symbol(first.to_string()))
    }

    fn command(&mut self) -> Option<Expr> {
        let name = command(self.rest());
        self.at += name.len();
        match name {
            "\\frac" => {
                let above = self.argument()?;
                Some(Expr::Product(vec![above, Expr::Reciprocal(Box::new(self.argument()?))]))
            }
            "\\sqrt" => {
                if !self.take("[") {
                    return Some(Expr::Call("sqrt".into(), vec![self.argument()?]));
                }
                let degree = self.sum()?;
                self.take("]").then_some(())?;
                Some(Expr::Call("root".into(), vec![degree, self.argument()?]))
            }
            "\\binom" => {
                let above = self.argument()?;
                Some(Expr::Call("binom".into(), vec![above, self.argument()?]))
            }
            "\\{" => {
                self.in_set = true;
                let mut items = self.items()?;
                while self.take(";") {
                    items.extend(self.items()?);
                }
                self.take("\\}").then_some(Expr::Set(items))
            }
            "\\emptyset" => Some(Expr::Set(vec![])),
            "\\lvert" => self.between("", "\\rvert", "abs"),
            "\\lfloor" => self.between("", "\\rfloor", "floor"),
            "\\lceil" => self.between("", "\\rceil", "ceil"),
            "\\begin" => self.matrix(),
            "\\text" => {
                self.take("{").then_some(())?;
                let (words, _) = self.rest().split_once('}')?;
                self.at += words.len() + 1;
                Some(Expr::Text(words.trim().to_lowercase()))
            }
            // The real numbers are an interval.
            "\\mathbb" if self.take("{R}") || self.take("R") => {
                let infinity = Expr::symbol("\\infty");
                Some(Expr::Tuple('(', vec![infinity.clone().negate(), infinity], ')'))
            }
            "\\mathbb" | "\\vec" | "\\hat" | "\\bar" | "\\overline" | "\\tilde" | "\\overrightarrow" => {
                Some(Expr::Call(name.to_owned(), vec![self.argument()?]))
            }
            "\\sum" | "\\prod" | "\\int" | "\\lim" => {
                let (mut parts, mut marks) = (Vec::new(), String::from(name));
                for mark in ["_", "^"] {
                    if self.take(mark) {
                        marks.push_str(mark);
                        parts.push(self.argument()?);
                    }
                }
                parts.push(self.product()?);
                Some(Expr::Call(marks, parts))
            }
            name => match normalise::latex_function(name) {
                Some(function) => self.function(function),
                None if normalise::is_operator(name) || name.len() < 3 => None,
                None => Some(Expr::symbol(name)),
            },
        }
    }

    /// Parses the rest of `\sin^2 x`, `\log_2 8`, `\sin(x)` or `\cos 2x` after the function's name.
    fn function(&mut self, name: &str) -> Option<Expr> {
        let base = if name == "log" && self.take("_") { Some(self.argument()?) } else { None };
        let exponent = if self.take("^") { Some(self.argument()?) } else { None };
        let argument = self.with_depth(Self::function_argument)?;
        let inverse = matches!(&exponent, Some(Expr::Negative(one)) if **one == Expr::integer(1));
        let trigonometric = matches!(name, "sin" | "cos" | "tan");
        if inverse && trigonometric {
            return Some(Expr::Call(format!("arc{name}"), vec![argument]));
        }
        let mut arguments: Vec<Expr> = base.into_iter().collect();
        match argument {
            Expr::Tuple('(', items, ')') => arguments.extend(items),
            argument => arguments.push(argument),
        }
        let call = Expr::Call(name.to_owned(), arguments);
        let Some(exponent) = exponent else { return Some(call) };
        Some(Expr::Power(Box::new(call), Box::new(exponent)))
    }

    /// Parses a function's argument: a bracket, or the factors up to an operator, a bracket or the next
    /// function.
    fn function_argument(&mut self) -> Option<Expr> {
        if matches!(self.peek()?, '(' | '{' | '[') {
            return self.atom();
        }
        let mut factors = vec![self.power()?];
        while self.starts_factor() && !matches!(self.peek(), Some('(' | '[')) {
            let rest = self.rest();
            if normalise::latex_function(command(rest)).is_some() || rest.starts_with("\\text") {
                break;
            }
            factors.push(self.power()?);
        }
        if factors.len() == 1 { factors.pop() } else { Some(Expr::Product(factors)) }
    }

    /// Parses `\begin{pmatrix} a & b \\ c & d \end{pmatrix}`, and arrays.
    fn matrix(&mut self) -> Option<Expr> {
        let (name, _) = self.rest().strip_prefix('{')?.split_once('}')?;
        if !name.ends_with("matrix") && name != "array" {
            return None;
        }
        self.at += name.len() + 2;
        if name == "array" && self.rest().starts_with('{') {
            self.at += self.rest().find('}')? + 1;
        }
        let mut rows = vec![Vec::new()];
        loop {
            if self.take("\\end") {
                let close = self.rest().find('}')? + 1;
                self.at += close;
                break;
            } else if self.take(normalise::ROW_END) {
                rows.push(Vec::new());
                // The height of the gap: `\\[4pt]`.
                let gap = self.rest().strip_prefix('[').and_then(|gap| gap.split_once("pt]"));
                self.at += gap.map_or(0, |(height, _)| height.len() + "[pt]".len());
            } else if !self.take("&") {
                let cell = self.statement()?;
                rows.last_mut()?.push(cell);
            }
        }
        rows.retain(|row| !row.is_empty());
        if name == "vmatrix" {
            return Some(Expr::Call("det".into(), vec![Expr::Matrix(rows)]));
        }
        (!rows.is_empty()).then_some(Expr::Matrix(rows))
    }
}

/// Maximum size of the exponent in `4e-3`.
const EXPONENT_MAX: u32 = 1_000;

/// Returns the exponent at the start of `rest`, as in `e-3` or `E+10`, and its length in bytes.
fn exponent(rest: &str) -> Option<(i32, usize)> {
    let after = rest.strip_prefix(['e', 'E'])?;
    let unsigned = after.strip_prefix(['+', '-']).unwrap_or(after);
    let length = rest.len() - unsigned.len() + digits_of(unsigned).len();
    let power: i32 = rest[1..length].parse().ok()?;
    (power.unsigned_abs() <= EXPONENT_MAX).then_some((power, length))
}

/// Returns the command at the start of `rest`: a backslash and letters, or a backslash and one other
/// character.
pub(super) fn command(rest: &str) -> &str {
    let Some(after) = rest.strip_prefix('\\') else { return "" };
    let letters = after.len() - after.trim_start_matches(|c: char| c.is_ascii_alphabetic()).len();
    let length = if letters > 0 { letters } else { after.chars().next().map_or(0, char::len_utf8) };
    &rest[..1 + length]
}
