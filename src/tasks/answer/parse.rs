//! Reads an answer in LaTeX, or as people type mathematics, into an [`Expr`].
//!
//! Tolerant where markup varies (`\frac12`, `\dfrac{1}{2}`, `1/2`), but what it does not understand
//! gives `None`: the caller then has only the text to compare. Nothing is ever executed.

use super::expr::{Expr, Relation};
use num_bigint::BigInt;
use num_rational::BigRational;

/// Brackets, arguments and exponents inside each other; deeper text is not read.
const DEPTH_MAX: usize = 48;

/// Reads `text`, cleaned by [`super::normalise::clean`].
///
/// `thousands`: whether `1,234` is one number (or else a list of two).
pub fn parse(text: &str, thousands: bool) -> Option<Expr> {
    let mut parser = Parser { text, at: 0, depth: 0, bars: 0, thousands };
    let expr = parser.groups()?;
    parser.skip_space();
    (parser.at == text.len()).then_some(expr)
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    /// Open `|`.
    bars: usize,
    thousands: bool,
}

/// A list of one is that one.
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

    /// The next character after white space.
    fn peek(&mut self) -> Option<char> {
        self.skip_space();
        self.rest().chars().next()
    }

    /// Takes `token` when it is next; a command is not taken out of a longer one.
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
        tokens.iter().find(|(token, _)| self.take(token)).map(|&(_, meaning)| meaning)
    }

    fn nested<T>(&mut self, inner: impl FnOnce(&mut Self) -> Option<T>) -> Option<T> {
        if self.depth == DEPTH_MAX {
            return None;
        }
        self.depth += 1;
        let (bars, result) = (std::mem::take(&mut self.bars), inner(self));
        self.bars = bars;
        self.depth -= 1;
        result
    }

    /// `a, b; c, d`: groups of lists.
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

    /// Statements between commas; an empty place, as in `1, 2, , 3`, is passed over.
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
        const RELATIONS: [(&str, Relation); 30] = [
            ("\\leqslant", Relation::LessOrEqual),
            ("\\geqslant", Relation::GreaterOrEqual),
            ("\\leq", Relation::LessOrEqual),
            ("\\geq", Relation::GreaterOrEqual),
            ("\\le", Relation::LessOrEqual),
            ("\\ge", Relation::GreaterOrEqual),
            ("<=", Relation::LessOrEqual),
            (">=", Relation::GreaterOrEqual),
            ("\\neq", Relation::NotEqual),
            ("\\ne", Relation::NotEqual),
            ("\\not=", Relation::NotEqual),
            ("!=", Relation::NotEqual),
            ("\\lt", Relation::Less),
            ("\\gt", Relation::Greater),
            ("<", Relation::Less),
            (">", Relation::Greater),
            ("\\approx", Relation::Approximately),
            ("\\simeq", Relation::Approximately),
            ("==", Relation::Equal),
            (":=", Relation::Equal),
            ("=", Relation::Equal),
            ("\\in", Relation::In),
            ("\\notin", Relation::Other('n')),
            ("\\equiv", Relation::Other('m')),
            ("\\to", Relation::Other('t')),
            ("\\rightarrow", Relation::Other('t')),
            ("\\mapsto", Relation::Other('t')),
            ("\\mid", Relation::Other('|')),
            ("\\subset", Relation::Other('s')),
            ("\\subseteq", Relation::Other('s')),
        ];
        let (mut terms, mut relations) = (vec![self.ratio()?], Vec::new());
        while let Some(relation) = self.take_any(&RELATIONS) {
            relations.push(relation);
            terms.push(self.ratio()?);
        }
        if relations.is_empty() { terms.pop() } else { Some(Expr::Relation(terms, relations)) }
    }

    fn ratio(&mut self) -> Option<Expr> {
        let mut parts = vec![self.sets()?];
        while !self.rest().trim_start().starts_with(":=") && (self.take(":") || self.take("\\colon")) {
            parts.push(self.sets()?);
        }
        if parts.len() == 1 { parts.pop() } else { Some(Expr::Ratio(parts)) }
    }

    fn sets(&mut self) -> Option<Expr> {
        const OPERATIONS: [(&str, char); 4] =
            [("\\cup", '∪'), ("\\cap", '∩'), ("\\setminus", '∖'), ("\\backslash", '∖')];
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
                term = term.negative();
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
        const TIMES: [&str; 4] = ["\\cdot", "\\times", "\\ast", "*"];
        let mut factors = vec![self.power()?];
        loop {
            if TIMES.iter().any(|token| self.take(token)) {
                factors.push(self.signed_power()?);
            } else if ["/", "\\div", "\\slash"].iter().any(|token| self.take(token)) {
                factors.push(Expr::Reciprocal(Box::new(self.signed_power()?)));
            } else if self.starts_factor() {
                let next = self.power()?;
                match mixed(factors.last(), &next) {
                    Some(number) => *factors.last_mut()? = number,
                    None => factors.push(next),
                }
            } else {
                break;
            }
        }
        // Units beside a number: `5 \text{ cm}`.
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

    /// A factor that may carry a sign, as in `2 \cdot -3`.
    fn signed_power(&mut self) -> Option<Expr> {
        let mut minus = false;
        while let Some(next) = self.take_any(&[("+", false), ("-", true)]) {
            minus ^= next;
        }
        let factor = self.power()?;
        Some(if minus { factor.negative() } else { factor })
    }

    /// Whether a factor without an operator before it follows.
    fn starts_factor(&mut self) -> bool {
        match self.peek() {
            Some('\\') => {
                let name = command(self.rest());
                name == "\\{" || (name.len() > 2 && !super::normalise::is_operator(name))
            }
            Some('|') => self.bars == 0,
            Some(c) => c.is_alphanumeric() || matches!(c, '(' | '[' | '{' | '.' | '∞'),
            None => false,
        }
    }

    /// An atom with its exponents, subscripts, factorials and percent signs.
    fn power(&mut self) -> Option<Expr> {
        let mut expr = self.atom()?;
        for _ in 0..DEPTH_MAX {
            if self.rest().trim_start().starts_with("!=") {
                break;
            }
            expr = if self.take("^") {
                // `90^\circ`: an angle in degrees is its number.
                if self.take("{\\circ}") || self.take("\\circ") || self.take("\\degree") {
                    expr
                } else if self.peek() == Some('\'') || self.take("\\prime") {
                    self.take("'");
                    Expr::Call("prime".into(), vec![expr])
                } else {
                    let exponent = self.argument()?;
                    // `cm^2` is a unit like `cm`.
                    if matches!(expr, Expr::Text(_)) {
                        expr
                    } else {
                        Expr::Power(Box::new(expr), Box::new(exponent))
                    }
                }
            } else if self.take("**") {
                Expr::Power(Box::new(expr), Box::new(self.nested(Self::signed_power)?))
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

    fn atom(&mut self) -> Option<Expr> {
        match self.peek()? {
            '0'..='9' | '.' => self.number(),
            '(' | '[' => self.nested(Self::bracketed),
            '{' => self.nested(Self::braced),
            '|' => self.between("|", "|", "abs"),
            '∞' => {
                self.at += '∞'.len_utf8();
                Some(Expr::symbol("\\infty"))
            }
            '\\' => self.nested(Self::command),
            c if c.is_alphabetic() => self.letter(c),
            _ => None,
        }
    }

    /// `12`, `1,234.5`, `.5`, `0.\overline{3}`.
    fn number(&mut self) -> Option<Expr> {
        let mut digits = self.digits().to_owned();
        if self.thousands && (1..=3).contains(&digits.len()) && !digits.starts_with('0') {
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
        let value = (whole + fraction.unwrap_or_else(|| BigRational::from_integer(0.into())))
            / BigInt::from(10).pow(scale);
        Some(Expr::Number { value, decimal })
    }

    fn digits(&mut self) -> &'a str {
        let digits = digits_of(self.rest());
        self.at += digits.len();
        digits
    }

    /// `(a)`, `(a, b]`
    fn bracketed(&mut self) -> Option<Expr> {
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

    fn braced(&mut self) -> Option<Expr> {
        self.take("{");
        let inner = self.groups();
        if self.take("}") { inner } else { None }
    }

    /// `open … close` as `function` of what is between.
    fn between(&mut self, open: &str, close: &str, function: &str) -> Option<Expr> {
        self.nested(|p| {
            p.take(open);
            p.bars = 1;
            let inner = p.statement()?;
            p.take(close).then(|| Expr::Call(function.into(), vec![inner]))
        })
    }

    /// What a command applies to: a group in braces, or one token.
    fn argument(&mut self) -> Option<Expr> {
        match self.peek()? {
            '{' => self.nested(Self::braced),
            '-' => {
                self.take("-");
                self.argument_token().map(Expr::negative)
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
            '(' => self.nested(Self::bracketed),
            '\\' => self.nested(Self::command),
            c if c.is_alphabetic() => {
                self.at += c.len_utf8();
                Some(Expr::Symbol(c.to_string()))
            }
            _ => None,
        }
    }

    /// One letter is a variable; a run of letters may be a function's name, else it is a product.
    fn letter(&mut self, first: char) -> Option<Expr> {
        let rest = self.rest();
        let run = &rest[..rest.len() - rest.trim_start_matches(|c: char| c.is_alphabetic()).len()];
        if let Some(name) = super::normalise::plain_function(run) {
            self.at += run.len();
            return self.function(name);
        }
        match run {
            "pi" => {
                self.at += 2;
                return Some(Expr::symbol("\\pi"));
            }
            "inf" | "infinity" | "oo" => {
                self.at += run.len();
                return Some(Expr::symbol("\\infty"));
            }
            _ => {}
        }
        self.at += first.len_utf8();
        // `f(x)`: these letters stand for functions.
        if matches!(first, 'f' | 'g' | 'h' | 'F' | 'G' | 'H') && self.rest().starts_with('(') {
            let argument = self.nested(Self::bracketed)?;
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
                let below = self.argument()?;
                Some(Expr::Product(vec![above, Expr::Reciprocal(Box::new(below))]))
            }
            "\\sqrt" => {
                let degree = if self.take("[") {
                    let degree = self.sum()?;
                    self.take("]").then_some(())?;
                    Some(degree)
                } else {
                    None
                };
                let below = self.argument()?;
                Some(match degree {
                    Some(degree) => Expr::Call("root".into(), vec![degree, below]),
                    None => Expr::Call("sqrt".into(), vec![below]),
                })
            }
            "\\binom" => {
                let above = self.argument()?;
                Some(Expr::Call("binom".into(), vec![above, self.argument()?]))
            }
            "\\{" => {
                let mut items = self.items()?;
                while self.take(";") {
                    items.extend(self.items()?);
                }
                self.take("\\}").then_some(Expr::Set(items))
            }
            "\\emptyset" | "\\varnothing" => Some(Expr::Set(vec![])),
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
            "\\mathbb" | "\\vec" | "\\hat" | "\\bar" | "\\overline" | "\\tilde" | "\\overrightarrow" => {
                let inner = self.argument()?;
                Some(Expr::Call(name.to_owned(), vec![inner]))
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
            name => match super::normalise::latex_function(name) {
                Some(function) => self.function(function),
                None if super::normalise::is_operator(name) || name.len() < 3 => None,
                None => Some(Expr::symbol(name)),
            },
        }
    }

    /// `\sin^2 x`, `\log_2 8`, `\sin(x)`, `\cos 2x`: the name is read already.
    fn function(&mut self, name: &str) -> Option<Expr> {
        let base = if name == "log" && self.take("_") { Some(self.argument()?) } else { None };
        let exponent = if self.take("^") { Some(self.argument()?) } else { None };
        let argument = self.nested(Self::function_argument)?;
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
        Some(match exponent {
            Some(exponent) => Expr::Power(Box::new(call), Box::new(exponent)),
            None => call,
        })
    }

    /// A bracket, or the factors up to an operator, a bracket or the next function.
    fn function_argument(&mut self) -> Option<Expr> {
        if matches!(self.peek()?, '(' | '{' | '[') {
            return self.atom();
        }
        let mut factors = vec![self.power()?];
        while self.starts_factor() && !matches!(self.peek(), Some('(' | '[')) {
            let rest = self.rest();
            if super::normalise::latex_function(command(rest)).is_some() || rest.starts_with("\\text") {
                break;
            }
            factors.push(self.power()?);
        }
        if factors.len() == 1 { factors.pop() } else { Some(Expr::Product(factors)) }
    }

    /// `\begin{pmatrix} a & b \\ c & d \end{pmatrix}`, and arrays.
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
            } else if self.take(super::normalise::ROW_END) {
                rows.push(Vec::new());
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

/// The decimal digits at the start of `rest`.
fn digits_of(rest: &str) -> &str {
    &rest[..rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len()]
}

/// The command at the start of `rest`: a backslash with letters, or with one other character.
fn command(rest: &str) -> &str {
    let Some(after) = rest.strip_prefix('\\') else { return "" };
    let letters = after.len() - after.trim_start_matches(|c: char| c.is_ascii_alphabetic()).len();
    let length = if letters > 0 { letters } else { after.chars().next().map_or(0, char::len_utf8) };
    &rest[..1 + length]
}

/// `2 \frac{1}{3}` is two and a third: a whole number before a fraction of whole numbers.
fn mixed(before: Option<&Expr>, next: &Expr) -> Option<Expr> {
    let whole = |e: &Expr| matches!(e, Expr::Number { value, decimal: false } if value.is_integer());
    let fraction = match next {
        Expr::Product(parts) => match parts.as_slice() {
            [above, Expr::Reciprocal(below)] => whole(above) && whole(below),
            _ => false,
        },
        _ => false,
    };
    (before.is_some_and(whole) && fraction)
        .then(|| Expr::Sum(vec![before.cloned().unwrap_or(Expr::integer(0)), next.clone()]))
}
