//! The syntax tree of an answer.

use num_rational::BigRational;

/// A mathematical expression, or a structure of several expressions.
#[derive(Debug, Clone, PartialEq)]
pub enum Expr {
    /// An exact number. `decimal`: whether it was written with a decimal point, so that it may be rounded.
    Number {
        value: BigRational,
        decimal: bool,
    },
    /// A variable or a constant, such as `x`, `\alpha`, `\pi`.
    Symbol(String),
    /// Words, such as `\text{even}`. After a number, words are units and are dropped.
    Text(String),
    Sum(Vec<Expr>),
    Product(Vec<Expr>),
    Negative(Box<Expr>),
    Reciprocal(Box<Expr>),
    Power(Box<Expr>, Box<Expr>),
    /// `±x` (`true`) or `∓x` (`false`). All signs of an answer change together.
    PlusMinus(bool, Box<Expr>),
    /// A known or unknown function with its arguments. A name with a subscript, such as `x_1`, counts as a
    /// function of the subscript.
    Call(String, Vec<Expr>),
    Percent(Box<Expr>),
    /// `(a, b]`: a tuple, a point or an interval. The brackets decide which.
    Tuple(char, Vec<Expr>, char),
    /// `\{a, b\}`: a set. The order does not matter.
    Set(Vec<Expr>),
    /// `a, b`: several answers without brackets.
    List(Vec<Expr>),
    /// Union, intersection, difference.
    SetOperation(char, Box<Expr>, Box<Expr>),
    /// `a < b = c`. There is one more expression than there are operators.
    Relation(Vec<Expr>, Vec<Relation>),
    /// `a : b : c`
    Ratio(Vec<Expr>),
    Matrix(Vec<Vec<Expr>>),
}

/// The relation between two sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relation {
    Equal,
    NotEqual,
    Approximately,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    /// Congruence, divisibility or an arrow. Such relations are only compared, never evaluated.
    Other(char),
}

impl Relation {
    /// Returns the relation with its sides exchanged.
    pub fn flip(self) -> Self {
        match self {
            Relation::Less => Relation::Greater,
            Relation::LessOrEqual => Relation::GreaterOrEqual,
            Relation::Greater => Relation::Less,
            Relation::GreaterOrEqual => Relation::LessOrEqual,
            other => other,
        }
    }

    pub fn is_inequality(self) -> bool {
        self.flip() != self
    }
}

impl Expr {
    pub fn integer(value: i64) -> Self {
        Expr::Number { value: BigRational::from_integer(value.into()), decimal: false }
    }

    pub fn negate(self) -> Self {
        Expr::Negative(Box::new(self))
    }

    pub fn symbol(name: &str) -> Self {
        Expr::Symbol(name.to_owned())
    }

    /// Returns the direct parts of the expression.
    pub fn children(&self) -> Vec<&Expr> {
        match self {
            Expr::Number { .. } | Expr::Symbol(_) | Expr::Text(_) => vec![],
            Expr::Sum(items) | Expr::Product(items) | Expr::Call(_, items) | Expr::Tuple(_, items, _) => {
                items.iter().collect()
            }
            Expr::Set(items) | Expr::List(items) | Expr::Ratio(items) | Expr::Relation(items, _) => {
                items.iter().collect()
            }
            Expr::Negative(a) | Expr::Reciprocal(a) | Expr::Percent(a) | Expr::PlusMinus(_, a) => vec![a],
            Expr::Power(a, b) | Expr::SetOperation(_, a, b) => vec![a, b],
            Expr::Matrix(rows) => rows.iter().flatten().collect(),
        }
    }

    /// Returns the expression with `change` applied to each of its direct parts.
    pub fn map(&self, change: &mut impl FnMut(&Expr) -> Expr) -> Expr {
        let mut all = |items: &[Expr]| items.iter().map(&mut *change).collect::<Vec<_>>();
        match self {
            Expr::Number { .. } | Expr::Symbol(_) | Expr::Text(_) => self.clone(),
            Expr::Sum(items) => Expr::Sum(all(items)),
            Expr::Product(items) => Expr::Product(all(items)),
            Expr::Call(name, items) => Expr::Call(name.clone(), all(items)),
            Expr::Tuple(open, items, close) => Expr::Tuple(*open, all(items), *close),
            Expr::Set(items) => Expr::Set(all(items)),
            Expr::List(items) => Expr::List(all(items)),
            Expr::Ratio(items) => Expr::Ratio(all(items)),
            Expr::Relation(items, relations) => Expr::Relation(all(items), relations.clone()),
            Expr::Matrix(rows) => Expr::Matrix(rows.iter().map(|row| all(row)).collect()),
            Expr::Negative(a) => Expr::Negative(Box::new(change(a))),
            Expr::Reciprocal(a) => Expr::Reciprocal(Box::new(change(a))),
            Expr::Percent(a) => Expr::Percent(Box::new(change(a))),
            Expr::PlusMinus(sign, a) => Expr::PlusMinus(*sign, Box::new(change(a))),
            Expr::Power(a, b) => Expr::Power(Box::new(change(a)), Box::new(change(b))),
            Expr::SetOperation(op, a, b) => Expr::SetOperation(*op, Box::new(change(a)), Box::new(change(b))),
        }
    }

    /// Returns whether the expression, or a part of it, satisfies `test`.
    pub fn any(&self, test: &impl Fn(&Expr) -> bool) -> bool {
        test(self) || self.children().into_iter().any(|part| part.any(test))
    }

    /// Returns whether a variable or an unknown function occurs. π, e and i are constants.
    pub fn has_variables(&self) -> bool {
        self.any(&|e| match e {
            Expr::Symbol(name) => !matches!(name.as_str(), "\\pi" | "e" | "i"),
            Expr::Call(name, _) => !super::evaluate::is_known_function(name),
            Expr::Text(_) => true,
            _ => false,
        })
    }

    /// Returns whether the expression is a name, so that `name = value` gives a value. Names are `x`, `f(x)`,
    /// `x_1`, `|AB|`, `AB`, `\frac{NO}{BO}`, `A:B`, `(p, q)`.
    pub fn is_name(&self) -> bool {
        match self {
            Expr::Symbol(_) | Expr::Text(_) => true,
            Expr::Call(name, arguments) => match name.as_str() {
                "abs" => arguments.iter().all(Expr::is_name),
                name => !super::evaluate::is_known_function(name),
            },
            Expr::Tuple(_, items, _) | Expr::Ratio(items) => items.iter().all(Expr::is_name),
            Expr::Product(_) => self.is_capitals(),
            _ => false,
        }
    }

    /// Returns whether the expression is a product or quotient of capital letters: lengths, areas and their
    /// ratios.
    fn is_capitals(&self) -> bool {
        match self {
            Expr::Symbol(name) => name.starts_with(|c: char| c.is_uppercase()),
            Expr::Reciprocal(below) => below.is_capitals(),
            Expr::Product(factors) => factors.iter().all(Expr::is_capitals),
            _ => false,
        }
    }

    /// Returns all answers that the `±` signs stand for: two if there are signs, otherwise one.
    pub fn expand_signs(&self) -> Vec<Expr> {
        if !self.any(&|e| matches!(e, Expr::PlusMinus(..))) {
            return vec![self.clone()];
        }
        fn with_sign(e: &Expr, up: bool) -> Expr {
            match e {
                Expr::PlusMinus(sign, a) if *sign == up => with_sign(a, up),
                Expr::PlusMinus(_, a) => with_sign(a, up).negate(),
                e => e.map(&mut |part| with_sign(part, up)),
            }
        }
        vec![with_sign(self, true), with_sign(self, false)]
    }
}
