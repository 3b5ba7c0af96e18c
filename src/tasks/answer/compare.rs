//! Compares two expressions as answers.

use super::ComparisonOptions;
use super::evaluate::{Value, evaluate, rational_value};
use super::expr::{Expr, Relation};
use super::sets::real_parts;
use num_complex::Complex64;
use num_traits::{Signed, ToPrimitive, Zero};
use std::cell::Cell;

/// Number of points at which expressions with variables are compared. At least [`POINTS_NEEDED`] of the
/// points must give a value.
const POINTS: u64 = 8;
const POINTS_NEEDED: usize = 3;
/// Maximum relative difference of two values that differ only by rounding.
const ROUNDING: f64 = 1e-10;
/// Maximum number of value comparisons per answer. An answer that needs more counts as unequal.
const COMPARISONS_MAX: usize = 20_000;

/// Returns whether `answer` is the same answer as `reference`.
pub fn is_same_answer(reference: &Expr, answer: &Expr, options: &ComparisonOptions) -> bool {
    let comparison = Comparison { options, left: Cell::new(COMPARISONS_MAX) };
    comparison.same(&expand_plus_minus(reference), &expand_plus_minus(answer), false)
}

/// Replaces an expression with ±, such as `1 ± √2`, by the list of its two values.
fn expand_plus_minus(expr: &Expr) -> Expr {
    let spread = |items: &[Expr]| items.iter().flat_map(Expr::expand_signs).collect();
    match expr {
        Expr::List(items) => Expr::List(spread(items)),
        Expr::Set(items) => condition(items).unwrap_or_else(|| Expr::Set(spread(items))),
        other => {
            let mut signs = other.expand_signs();
            if signs.len() == 1 { signs.remove(0) } else { Expr::List(signs) }
        }
    }
}

/// Returns the interval of `\{x \mid x > 2\}`.
fn condition(items: &[Expr]) -> Option<Expr> {
    let [Expr::Relation(terms, relations)] = items else { return None };
    let after = relations.iter().position(|&relation| relation == Relation::Other('|'))? + 1;
    interval_of(&Expr::Relation(terms.get(after..)?.to_vec(), relations.get(after..)?.to_vec()))
}

struct Comparison<'a> {
    options: &'a ComparisonOptions,
    left: Cell<usize>,
}

impl Comparison<'_> {
    /// Compares two answers. `listed`: whether they are items of a list, where `x = 1` and `y = 1` differ.
    fn same(&self, reference: &Expr, answer: &Expr, listed: bool) -> bool {
        use Expr::*;
        let Some(left) = self.left.get().checked_sub(1) else { return false };
        self.left.set(left);
        if [reference, answer].iter().any(|expr| matches!(expr, SetOperation(..)))
            && let Some((reference, answer)) = real_parts(reference).zip(real_parts(answer))
        {
            return reference == answer;
        }
        match (reference, answer) {
            (List(g) | Set(g), List(a) | Set(a)) => self.same_in_any_order(g, a),
            (Tuple(open, g, close), Tuple(o, a, c)) => (open, close) == (o, c) && self.same_in_order(g, a),
            // `(1, 3)` and `1, 3`
            (Tuple('(', g, ')'), List(a)) | (List(g), Tuple('(', a, ')')) => self.same_in_order(g, a),
            (Relation(..), Relation(..)) => self.same_relations(reference, answer, listed),
            (Relation(..), _) => {
                let readings = [value_of(reference), interval_of(reference)];
                readings.into_iter().flatten().any(|g| self.same(&g, answer, listed))
            }
            (_, Relation(..)) => {
                let interval = if self.options.relation_for_set { interval_of(answer) } else { None };
                let result = if reference.has_variables() { None } else { result_of(answer) };
                let readings = [value_of(answer), interval, result];
                readings.into_iter().flatten().any(|a| self.same(reference, &a, listed))
            }
            (Percent(g), Percent(a)) => self.same(g, a, listed),
            // `28\%` may be written as 28 or as 0.28.
            (Percent(g), a) => self.same(g, a, listed) || self.same_values(reference, a),
            (g, Percent(a)) => self.same(g, a, listed) || self.same_values(g, answer),
            (SetOperation('∪', ..), SetOperation('∪', ..)) => {
                self.same_in_any_order(&union_members(reference), &union_members(answer))
            }
            (SetOperation(g, g1, g2), SetOperation(a, a1, a2)) => {
                g == a && self.same(g1, a1, listed) && self.same(g2, a2, listed)
            }
            (Ratio(g), Ratio(a)) => self.same_ratios(g, a),
            (Ratio(g), a) if g.len() == 2 => self.same(&quotient(g), a, listed),
            (g, Ratio(a)) if a.len() == 2 => self.same(g, &quotient(a), listed),
            // `\{5\}` and 5
            (Set(one), other) if one.len() == 1 => self.same_values(&one[0], other),
            (other, Set(one)) if one.len() == 1 => self.same_values(other, &one[0]),
            (List(_) | Set(_) | Tuple(..) | SetOperation(..) | Ratio(_), _) => false,
            (_, List(_) | Set(_) | Tuple(..) | SetOperation(..) | Ratio(_)) => false,
            (Text(g), Text(a)) => g == a,
            _ => self.same_values(reference, answer),
        }
    }

    fn same_in_order(&self, reference: &[Expr], answer: &[Expr]) -> bool {
        reference.len() == answer.len() && reference.iter().zip(answer).all(|(g, a)| self.same(g, a, true))
    }

    /// Compares sets of answers. An answer that is written twice counts once.
    fn same_in_any_order(&self, reference: &[Expr], answer: &[Expr]) -> bool {
        let distinct = |items: &[Expr]| -> Vec<Expr> {
            let is_first = |&(at, item): &(usize, &Expr)| !items[..at].contains(item);
            items.iter().enumerate().filter(is_first).map(|(_, item)| item.clone()).collect()
        };
        let (reference, mut open) = (distinct(reference), distinct(answer));
        reference.len() == open.len()
            && reference.iter().all(|g| {
                let found = open.iter().position(|a| self.same(g, a, true));
                found.map(|at| open.swap_remove(at)).is_some()
            })
    }

    fn same_ratios(&self, reference: &[Expr], answer: &[Expr]) -> bool {
        let ([g1, gs @ ..], [a1, others @ ..]) = (reference, answer) else { return false };
        let cross = |x: &Expr, y: &Expr| Expr::Product(vec![x.clone(), y.clone()]);
        let zero = |e: &Expr| rational_value(e).is_some_and(|v| v.is_zero());
        if reference.iter().chain(answer).any(zero) {
            return self.same_in_order(reference, answer);
        }
        gs.len() == others.len()
            && gs.iter().zip(others).all(|(g, a)| self.same_values(&cross(g, a1), &cross(a, g1)))
    }

    fn same_relations(&self, reference: &Expr, answer: &Expr, listed: bool) -> bool {
        let (Expr::Relation(g, gold_signs), Expr::Relation(a, answer_signs)) = (reference, answer) else {
            return false;
        };
        let flipped: Vec<Expr> = a.iter().rev().cloned().collect();
        let flipped_signs: Vec<Relation> = answer_signs.iter().rev().map(|r| r.flip()).collect();
        if self.same_chains(g, gold_signs, a, answer_signs)
            || self.same_chains(g, gold_signs, &flipped, &flipped_signs)
        {
            return true;
        }
        match (value_of(reference), value_of(answer)) {
            (Some(x), Some(y)) => (!listed || g.first() == a.first()) && self.same(&x, &y, listed),
            // `2 < x < 5` and `x \in (2, 5)`
            (None, Some(y)) => interval_of(reference).is_some_and(|x| self.same(&x, &y, listed)),
            (Some(x), None) if self.options.relation_for_set => {
                interval_of(answer).is_some_and(|y| self.same(&x, &y, listed))
            }
            _ => false,
        }
    }

    /// Compares two chains of relations, such as `a < b = c`, relation by relation. Two relations are the
    /// same if their sides are, or if their differences left − right are proportional. For inequalities, the
    /// factor must be positive, or negative if the relations have opposite directions.
    fn same_chains(
        &self,
        reference: &[Expr],
        gold_signs: &[Relation],
        answer: &[Expr],
        signs: &[Relation],
    ) -> bool {
        reference.len() == answer.len()
            && (0..gold_signs.len()).all(|i| {
                let (Some([g1, g2]), Some([a1, a2])) = (reference.get(i..i + 2), answer.get(i..i + 2)) else {
                    return false;
                };
                let (Some(&g), Some(&a)) = (gold_signs.get(i), signs.get(i)) else { return false };
                let aligned = g == a && self.same(g1, a1, true) && self.same(g2, a2, true);
                let turned = a.flip() == g && g.is_inequality();
                let scaled = match g {
                    Relation::Equal | Relation::NotEqual => g == a,
                    _ => g.is_inequality() && (g == a || turned),
                };
                aligned
                    || (scaled && self.proportional((g1, g2), (a1, a2), g.is_inequality().then_some(!turned)))
            })
    }

    /// Returns whether the difference of the two expressions of `reference` is a constant multiple of that of
    /// `answer`. `positive` gives the required sign of the constant, if any. False if one of the differences
    /// has no variables.
    fn proportional(
        &self,
        reference: (&Expr, &Expr),
        answer: (&Expr, &Expr),
        positive: Option<bool>,
    ) -> bool {
        let difference = |(x, y): (&Expr, &Expr)| Expr::Sum(vec![x.clone(), y.clone().negate()]);
        let (reference, answer) = (difference(reference), difference(answer));
        if !reference.has_variables() || !answer.has_variables() {
            return false;
        }
        let mut factor: Option<Complex64> = None;
        let mut points = 0;
        for point in 0..POINTS {
            let (Some(Value::Scalar(g)), Some(Value::Scalar(a))) =
                (evaluate(&reference, point), evaluate(&answer, point))
            else {
                continue;
            };
            if a.norm() < 1e-9 || g.norm() < 1e-9 {
                continue;
            }
            let k = *factor.get_or_insert(g / a);
            if (g - k * a).norm() > 1e-8 * g.norm()
                || positive.is_some_and(|p| (k.re > 0.0) != p || k.im.abs() > 1e-9)
            {
                return false;
            }
            points += 1;
        }
        points >= POINTS_NEEDED
    }

    /// Returns whether two expressions (not lists, not relations) have the same value.
    fn same_values(&self, reference: &Expr, answer: &Expr) -> bool {
        if let (Expr::Matrix(g), Expr::Matrix(a)) = (reference, answer) {
            return g.len() == a.len() && g.iter().zip(a).all(|(g, a)| self.same_in_order(g, a));
        }
        let decimal =
            [reference, answer].iter().any(|e| e.any(&|e| matches!(e, Expr::Number { decimal: true, .. })));
        // A decimal number may be rounded, but a small number never equals 0.
        let rounded = 0.5 * 10f64.powi(-(self.options.decimals as i32)) * (1.0 + 1e-9);
        let near = |difference: f64, size: f64| decimal && difference <= rounded.min(0.05 * size);
        if let (Some(g), Some(a)) = (rational_value(reference), rational_value(answer)) {
            let (difference, size) = ((&g - &a).abs().to_f64(), g.abs().max(a.abs()).to_f64());
            return g == a || difference.zip(size).is_some_and(|(difference, size)| near(difference, size));
        }
        // Of values that are not exact, such as sin π, one may miss 0 by rounding.
        let close = |g: Complex64, a: Complex64| {
            let (difference, size) = ((g - a).norm(), g.norm().max(a.norm()));
            let equal = difference <= ROUNDING * size || difference <= 1e-13;
            size.is_finite() && (equal || near(difference, size))
        };
        let symbolic = reference.has_variables() || answer.has_variables();
        let mut points = 0;
        for point in 0..if symbolic { POINTS } else { 1 } {
            let equal = match (evaluate(reference, point), evaluate(answer, point)) {
                (None, None) => continue,
                (Some(Value::Scalar(g)), Some(Value::Scalar(a))) => close(g, a),
                (Some(Value::Matrix(g)), Some(Value::Matrix(a))) => {
                    let row = |(g, a): (&Vec<Complex64>, &Vec<Complex64>)| {
                        g.len() == a.len() && g.iter().zip(a).all(|(&g, &a)| close(g, a))
                    };
                    g.len() == a.len() && g.iter().zip(&a).all(row)
                }
                _ => false,
            };
            if !equal {
                return false;
            }
            points += 1;
        }
        points >= if symbolic { POINTS_NEEDED } else { 1 }
    }
}

fn quotient(parts: &[Expr]) -> Expr {
    let mut factors: Vec<Expr> = parts.iter().take(1).cloned().collect();
    factors.extend(parts.iter().skip(1).map(|below| Expr::Reciprocal(Box::new(below.clone()))));
    Expr::Product(factors)
}

/// Returns the members of a union.
fn union_members(expr: &Expr) -> Vec<Expr> {
    match expr {
        Expr::SetOperation('∪', left, right) => [union_members(left), union_members(right)].concat(),
        other => vec![other.clone()],
    }
}

/// Returns the value that a relation gives to its left side: `x = 3`, `f(1) = 2 + 1 = 3`, `x \approx 3` or
/// `x \in S`.
pub(super) fn value_of(relation: &Expr) -> Option<Expr> {
    let Expr::Relation(terms, relations) = relation else { return None };
    match (terms.as_slice(), relations.as_slice()) {
        ([name, set], [Relation::In]) if name.is_name() => return Some(set.clone()),
        ([name, number], [Relation::Approximately]) if name.is_name() => return Some(number.clone()),
        _ => {}
    }
    // Terms after `\approx` are only close to the value.
    let exact_terms =
        relations.iter().position(|&r| r == Relation::Approximately).map_or(terms.len(), |i| i + 1);
    if !relations.iter().take(exact_terms - 1).all(|&r| r == Relation::Equal) {
        return None;
    }
    match terms.get(..exact_terms)? {
        [value] => Some(value.clone()),
        [name, value] if name.is_name() => Some(value.clone()),
        [before, value] => (!before.has_variables() && !value.has_variables()).then(|| value.clone()),
        [.., value] => Some(value.clone()),
        [] => None,
    }
}

/// Returns the last term of an equation, such as 116 of `m + n = 116`, if it has no variables.
fn result_of(equation: &Expr) -> Option<Expr> {
    let Expr::Relation(terms, relations) = equation else { return None };
    let is_equation = relations.iter().all(|&relation| relation == Relation::Equal);
    terms.last().filter(|result| is_equation && !result.has_variables()).cloned()
}

/// Returns the set of all `x` that satisfy a relation such as `2 < x \le 5` or `x > 5`.
fn interval_of(relation: &Expr) -> Option<Expr> {
    use Relation::{Greater, GreaterOrEqual, Less, LessOrEqual};
    let Expr::Relation(terms, relations) = relation else { return None };
    let (mut terms, mut relations) = (terms.clone(), relations.clone());
    let falling = |r: &Relation| matches!(r, Greater | GreaterOrEqual);
    if relations.iter().all(falling) {
        terms.reverse();
        relations = relations.iter().rev().map(|r| r.flip()).collect();
    }
    let infinity = Expr::symbol("\\infty");
    let open = |r: Relation| if r == Less { '(' } else { '[' };
    let close = |r: Relation| if r == Less { ')' } else { ']' };
    if !relations.iter().all(|r| matches!(r, Less | LessOrEqual)) {
        return None;
    }
    let set = |open, low: Expr, high: Expr, close| Expr::Tuple(open, vec![low, high], close);
    match (terms.as_slice(), relations.as_slice()) {
        ([low, name, high], &[first, second]) if name.is_name() => {
            let inside = set(open(first), low.clone(), high.clone(), close(second));
            if !is_abs(name) {
                return Some(inside);
            }
            // 1 < |x| < 2 holds on both sides of 0.
            let mirrored = set(open(second), high.clone().negate(), low.clone().negate(), close(first));
            let positive = rational_value(low).is_some_and(|low| low.is_positive());
            positive.then(|| Expr::SetOperation('∪', Box::new(mirrored), Box::new(inside)))
        }
        ([name, high], &[r]) if is_abs(name) => {
            Some(set(open(r), high.clone().negate(), high.clone(), close(r)))
        }
        ([name, high], &[r]) if name.is_name() && !high.is_name() => {
            Some(set('(', infinity.negate(), high.clone(), close(r)))
        }
        ([low, name], &[r]) if name.is_name() && !low.is_name() && !is_abs(name) => {
            Some(set(open(r), low.clone(), infinity, ')'))
        }
        _ => None,
    }
}

fn is_abs(expr: &Expr) -> bool {
    matches!(expr, Expr::Call(name, _) if name == "abs")
}
