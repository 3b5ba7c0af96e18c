//! Sets of real numbers: unions of intervals and points.

use super::evaluate::{Value, evaluate};
use super::expr::Expr;

/// Maximum number of members of a set. It bounds the cost.
const MEMBERS_MAX: usize = 64;

/// A place on the real line: just before a number (`false`), or just after it.
type Cut = (f64, bool);
/// Disjoint parts of the real line in rising order. Each is as long as possible.
type Parts = Vec<(Cut, Cut)>;

/// Returns the parts of a set of real numbers, such as `[1, 2] \cup \{5\}`. A number
/// counts as a set of one. `None` for other expressions.
pub fn real_parts(expr: &Expr) -> Option<Parts> {
    let point = |number| bound(number).map(|value| vec![((value, false), (value, true))]);
    match expr {
        Expr::Tuple(open, ends, close) => {
            let [low, high] = ends.as_slice() else { return None };
            let part = ((bound(low)?, *open == '('), (bound(high)?, *close == ']'));
            Some(if part.0 < part.1 { vec![part] } else { vec![] })
        }
        // `{1, 2}` without backslashes is a list.
        Expr::Set(members) | Expr::List(members) if members.len() <= MEMBERS_MAX => {
            members.iter().try_fold(vec![], |set, member| Some(combine('∪', &set, &point(member)?)))
        }
        Expr::SetOperation(operation, a, b) => Some(combine(*operation, &real_parts(a)?, &real_parts(b)?)),
        number => point(number),
    }
}

/// Applies ∪, ∩ or ∖. Between two neighbouring cuts all numbers are inside a set, or none.
fn combine(operation: char, a: &[(Cut, Cut)], b: &[(Cut, Cut)]) -> Parts {
    let mut cuts: Vec<Cut> = a.iter().chain(b).flat_map(|&(start, end)| [start, end]).collect();
    cuts.sort_by(|x, y| x.0.total_cmp(&y.0).then(x.1.cmp(&y.1)));
    let mut parts = Parts::new();
    for pair in cuts.windows(2) {
        let [start, end] = [pair[0], pair[1]];
        let inside = |parts: &[(Cut, Cut)]| parts.iter().any(|part| part.0 <= start && start < part.1);
        let kept = match operation {
            '∪' => inside(a) || inside(b),
            '∩' => inside(a) && inside(b),
            _ => inside(a) && !inside(b),
        };
        match parts.last_mut() {
            Some(last) if kept && last.1 == start => last.1 = end,
            _ if kept && start < end => parts.push((start, end)),
            _ => {}
        }
    }
    parts
}

/// Returns a real number or ±∞, without the digits that rounding changes.
fn bound(expr: &Expr) -> Option<f64> {
    match expr {
        Expr::Symbol(name) if name == "\\infty" => Some(f64::INFINITY),
        Expr::Negative(inner) => bound(inner).map(|value| 0.0 - value),
        _ if expr.has_variables() => None,
        _ => match evaluate(expr, 0)? {
            Value::Scalar(value) if value.im == 0.0 => format!("{:.11e}", value.re + 0.0).parse().ok(),
            _ => None,
        },
    }
}
