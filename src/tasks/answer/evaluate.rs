//! Evaluation of expressions: exact if rational, otherwise as complex numbers at given points.
//!
//! Two expressions with variables are compared by their values at pseudo-random points (as in the
//! Schwartz–Zippel lemma). An expression that cannot be evaluated, such as an unknown function or a sum over
//! an index, gets a hash of its parts as its value. Equal parts therefore give equal values.

use super::expr::Expr;
use crate::random::{Purpose, stream};
use num_bigint::BigInt;
use num_complex::Complex64;
use num_rational::BigRational;
use num_traits::{One, Signed, ToPrimitive, Zero};
use rand::Rng;

/// Maximum size of exact numbers, in bits. It bounds the cost.
const BITS_MAX: u64 = 16_384;
/// Maximum argument of an exact factorial or binomial coefficient.
const FACTORIAL_MAX: u32 = 1_000;

/// Returns whether the function `name` can be evaluated. Other names are unknown functions.
pub fn is_known_function(name: &str) -> bool {
    const KNOWN: &str = "abs sqrt root sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log \
                         exp factorial binom floor ceil";
    KNOWN.split(' ').any(|known| known == name)
}

fn small(value: BigRational) -> Option<BigRational> {
    (value.numer().bits() <= BITS_MAX && value.denom().bits() <= BITS_MAX).then_some(value)
}

/// Returns the rational value of `expr`, if there is one and its computation is cheap.
pub fn rational_value(expr: &Expr) -> Option<BigRational> {
    match expr {
        Expr::Number { value, .. } => small(value.clone()),
        Expr::Sum(items) => {
            items.iter().try_fold(BigRational::zero(), |sum, e| small(sum + rational_value(e)?))
        }
        Expr::Product(items) => {
            items.iter().try_fold(BigRational::one(), |p, e| small(p * rational_value(e)?))
        }
        Expr::Negative(a) => rational_value(a).map(|a| -a),
        Expr::Reciprocal(a) => rational_value(a).filter(|a| !a.is_zero()).map(|a| a.recip()),
        Expr::Percent(a) => rational_value(a).map(|a| a / BigInt::from(100)),
        Expr::Power(base, exponent) => exact_power(&rational_value(base)?, &rational_value(exponent)?),
        Expr::Call(name, arguments) => {
            let values = arguments.iter().map(rational_value).collect::<Option<Vec<_>>>()?;
            exact_call(name, &values)
        }
        _ => None,
    }
}

fn exact_power(base: &BigRational, exponent: &BigRational) -> Option<BigRational> {
    if !exponent.is_integer() {
        return None;
    }
    let exponent = exponent.to_integer().to_i32()?;
    let bits = base.numer().bits().max(base.denom().bits());
    if bits.saturating_mul(u64::from(exponent.unsigned_abs())) > BITS_MAX || (base.is_zero() && exponent < 0)
    {
        return None;
    }
    Some(base.pow(exponent))
}

fn exact_call(name: &str, values: &[BigRational]) -> Option<BigRational> {
    let whole = |value: &BigRational| if value.is_integer() { value.to_integer().to_u32() } else { None };
    match (name, values) {
        ("abs", [a]) => Some(a.abs()),
        ("floor", [a]) => Some(a.floor()),
        ("ceil", [a]) => Some(a.ceil()),
        ("sqrt", [a]) if !a.is_negative() => {
            let root = BigRational::new(a.numer().sqrt(), a.denom().sqrt());
            (&root * &root == *a).then_some(root)
        }
        ("factorial", [n]) => {
            let n = whole(n).filter(|&n| n <= FACTORIAL_MAX)?;
            small(BigRational::from_integer((1..=n).map(BigInt::from).product()))
        }
        ("binom", [n, k]) => {
            let (n, k) = (whole(n).filter(|&n| n <= FACTORIAL_MAX)?, whole(k)?);
            let (one, steps) = (BigInt::one(), 0..k.min(n.saturating_sub(k)));
            let value = if k > n { BigInt::zero() } else { steps.fold(one, |v, i| v * (n - i) / (i + 1)) };
            small(BigRational::from_integer(value))
        }
        _ => None,
    }
}

/// Returns a pseudo-random number in (−2, −0.5) or (0.5, 2) that depends only on `name` and `indices`.
fn random_value(name: &str, indices: &[u64]) -> f64 {
    let coordinates: Vec<u64> = indices.iter().copied().chain(name.bytes().map(u64::from)).collect();
    let mut rng = stream(indices.len() as u64, Purpose::Evaluation, &coordinates);
    let size = rng.random_range(0.5..2.0);
    if rng.random() { size } else { -size }
}

/// The value of an expression at one point: a scalar or a matrix.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Scalar(Complex64),
    Matrix(Vec<Vec<Complex64>>),
}

impl Value {
    fn add(self, other: Value) -> Option<Value> {
        match (self, other) {
            (Value::Scalar(a), Value::Scalar(b)) => Some(Value::Scalar(a + b)),
            (Value::Matrix(a), Value::Matrix(b)) => {
                let same = a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| a.len() == b.len());
                let row = |(a, b): (&Vec<Complex64>, &Vec<Complex64>)| {
                    a.iter().zip(b).map(|(a, b)| a + b).collect()
                };
                same.then(|| Value::Matrix(a.iter().zip(&b).map(row).collect()))
            }
            _ => None,
        }
    }

    fn multiply(self, other: Value) -> Option<Value> {
        match (self, other) {
            (Value::Scalar(a), Value::Scalar(b)) => Some(Value::Scalar(a * b)),
            (Value::Scalar(k), Value::Matrix(m)) | (Value::Matrix(m), Value::Scalar(k)) => Some(
                Value::Matrix(m.into_iter().map(|row| row.into_iter().map(|a| a * k).collect()).collect()),
            ),
            (Value::Matrix(a), Value::Matrix(b)) => {
                let width = b.first()?.len();
                if b.iter().any(|row| row.len() != width) || a.iter().any(|row| row.len() != b.len()) {
                    return None;
                }
                let cell = |row: &Vec<Complex64>, j: usize| row.iter().zip(&b).map(|(x, r)| x * r[j]).sum();
                Some(Value::Matrix(a.iter().map(|row| (0..width).map(|j| cell(row, j)).collect()).collect()))
            }
        }
    }
}

/// Returns the value of `expr` at point number `point`. `None` if there is no value (division by zero,
/// matrices of different shapes).
pub fn evaluate(expr: &Expr, point: u64) -> Option<Value> {
    let scalar = |e: &Expr| if let Value::Scalar(value) = evaluate(e, point)? { Some(value) } else { None };
    let number = match expr {
        Expr::Number { value, .. } => Complex64::from(value.to_f64()?),
        Expr::Symbol(name) => match name.as_str() {
            "\\pi" => std::f64::consts::PI.into(),
            "e" => std::f64::consts::E.into(),
            "i" => Complex64::I,
            name => random_value(name, &[point]).into(),
        },
        Expr::Text(words) => random_value(words, &[u64::MAX]).into(),
        Expr::Sum(items) | Expr::Product(items) => {
            let join = if matches!(expr, Expr::Sum(_)) { Value::add } else { Value::multiply };
            let mut values = items.iter().map(|e| evaluate(e, point));
            let first = values.next()??;
            return values.try_fold(first, |all, next| join(all, next?));
        }
        Expr::Negative(a) => return evaluate(a, point)?.multiply(Value::Scalar((-1.0).into())),
        Expr::Reciprocal(a) => Some(scalar(a)?).filter(|a| a.norm() > 1e-12)?.inv(),
        Expr::Percent(a) => scalar(a)? / 100.0,
        Expr::Power(base, exponent) => power(scalar(base)?, scalar(exponent)?, rational_value(exponent)),
        Expr::Call(name, arguments) => {
            let values = arguments.iter().map(scalar).collect::<Option<Vec<_>>>()?;
            call(name, &values).unwrap_or_else(|| opaque(name, &values))
        }
        Expr::Matrix(rows) => {
            let row = |row: &Vec<Expr>| row.iter().map(scalar).collect::<Option<Vec<_>>>();
            return rows.iter().map(row).collect::<Option<Vec<_>>>().map(Value::Matrix);
        }
        // A structure inside an expression, such as the bounds of a sum, gets a hash of its parts.
        other => {
            let values = other.children().into_iter().map(scalar).collect::<Option<Vec<_>>>()?;
            opaque(&shape(other), &values)
        }
    };
    number.is_finite().then_some(Value::Scalar(number))
}

/// Describes the kind of a structure without its parts.
fn shape(expr: &Expr) -> String {
    match expr {
        Expr::Tuple(open, _, close) => format!("tuple {open}{close}"),
        Expr::SetOperation(operation, ..) => format!("sets {operation}"),
        Expr::Relation(_, relations) => format!("relation {relations:?}"),
        Expr::PlusMinus(sign, _) => format!("sign {sign}"),
        Expr::Set(_) => "set".into(),
        Expr::Ratio(_) => "ratio".into(),
        _ => "list".into(),
    }
}

/// Returns the value of an unknown function. Equal arguments give equal values.
fn opaque(name: &str, values: &[Complex64]) -> Complex64 {
    // Only ten digits are used, because rounding errors in the arguments must not change the value.
    let digits = |x: f64| format!("{:.9e}", if x.abs() < 1e-9 { 0.0 } else { x });
    let key: String = values.iter().map(|v| format!("{},{};", digits(v.re), digits(v.im))).collect();
    random_value(&format!("{name}({key})"), &[0, 0]).into()
}

/// Returns `base^exponent`. Odd roots of negative numbers are real, as in school mathematics.
fn power(base: Complex64, exponent: Complex64, exact: Option<BigRational>) -> Complex64 {
    if let Some(exponent) = exact {
        let odd = |n: &BigInt| n.bit(0);
        if exponent.is_integer() {
            if let Some(n) = exponent.to_integer().to_i32() {
                return base.powi(n);
            }
        } else if base.re < 0.0 && base.im.abs() < 1e-12 && odd(exponent.denom()) {
            let size = (-base.re).powf(exponent.to_f64().unwrap_or(f64::NAN));
            return if odd(exponent.numer()) { -size } else { size }.into();
        }
    }
    if base.norm() == 0.0 {
        return if exponent.re > 0.0 { Complex64::ZERO } else { Complex64::from(f64::NAN) };
    }
    base.powc(exponent)
}

fn call(name: &str, values: &[Complex64]) -> Option<Complex64> {
    Some(match (name, values) {
        ("abs", [x]) => x.norm().into(),
        ("sqrt", [x]) => x.sqrt(),
        // `\sqrt[n]{x}`
        ("root", [n, x]) => {
            let odd = n.im == 0.0 && n.re % 2.0 == 1.0 && x.re < 0.0 && x.im.abs() < 1e-12;
            if odd { (-(-x.re).powf(1.0 / n.re)).into() } else { x.powc(n.inv()) }
        }
        ("sin", [x]) => x.sin(),
        ("cos", [x]) => x.cos(),
        ("tan", [x]) => x.tan(),
        ("cot", [x]) => x.tan().inv(),
        ("sec", [x]) => x.cos().inv(),
        ("csc", [x]) => x.sin().inv(),
        ("arcsin", [x]) => x.asin(),
        ("arccos", [x]) => x.acos(),
        ("arctan", [x]) => x.atan(),
        ("sinh", [x]) => x.sinh(),
        ("cosh", [x]) => x.cosh(),
        ("tanh", [x]) => x.tanh(),
        ("ln", [x]) => x.ln(),
        ("log", [x]) => x.ln() / std::f64::consts::LN_10,
        ("log", [base, x]) => x.ln() / base.ln(),
        ("exp", [x]) => x.exp(),
        ("floor", [x]) if x.im == 0.0 => x.re.floor().into(),
        ("ceil", [x]) if x.im == 0.0 => x.re.ceil().into(),
        _ => return None,
    })
}
