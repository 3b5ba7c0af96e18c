//! The head's output as named columns. A column has one value for each target, in batch order.

use anyhow::{Result, bail};

/// The columns of a head. The gradient with respect to them has the same type.
pub trait Columns: Sized + Send + Sync {
    /// Names the rows of a head's output `[C, R]`.
    ///
    /// # Errors
    /// When the head has another number of rows.
    fn from_rows(rows: Vec<Vec<f32>>) -> Result<Self>;

    /// Returns the columns as rows of the head's output.
    fn into_rows(self) -> Vec<Vec<f32>>;

    /// Returns a gradient of 0 for `targets` targets.
    fn zeros(&self) -> Self;
}

/// The columns of a policy.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PolicyColumns {
    /// The log-probability of each target.
    pub log_probs: Vec<f32>,
    /// The entropy of each target's distribution, in nats.
    pub entropies: Vec<f32>,
    /// The divergence of each target's distribution from the teacher's; `None` without a teacher.
    pub divergences: Option<Vec<f32>>,
}

impl Columns for PolicyColumns {
    fn from_rows(rows: Vec<Vec<f32>>) -> Result<Self> {
        let count = rows.len();
        let mut rows = rows.into_iter();
        match (rows.next(), rows.next(), rows.next(), rows.next()) {
            (Some(log_probs), Some(entropies), divergences, None) => {
                Ok(Self { log_probs, entropies, divergences })
            }
            _ => bail!("the head has {count} columns, but a policy has 2 or 3"),
        }
    }

    fn into_rows(self) -> Vec<Vec<f32>> {
        [self.log_probs, self.entropies].into_iter().chain(self.divergences).collect()
    }

    fn zeros(&self) -> Self {
        let zeros = |column: &Vec<f32>| vec![0.0; column.len()];
        Self {
            log_probs: zeros(&self.log_probs),
            entropies: zeros(&self.entropies),
            divergences: self.divergences.as_ref().map(zeros),
        }
    }
}

/// The columns of a critic.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CriticColumns {
    /// The value of the state before each target.
    pub values: Vec<f32>,
}

impl Columns for CriticColumns {
    fn from_rows(rows: Vec<Vec<f32>>) -> Result<Self> {
        match <[Vec<f32>; 1]>::try_from(rows) {
            Ok([values]) => Ok(Self { values }),
            Err(rows) => bail!("the head has {} columns, but a critic has 1", rows.len()),
        }
    }

    fn into_rows(self) -> Vec<Vec<f32>> {
        vec![self.values]
    }

    fn zeros(&self) -> Self {
        Self { values: vec![0.0; self.values.len()] }
    }
}

/// Joins the columns of consecutive parts of a batch.
///
/// # Errors
/// When a part has other columns than the rest.
pub fn concat<C: Columns>(parts: impl IntoIterator<Item = C>) -> Result<C> {
    let mut all: Option<Vec<Vec<f32>>> = None;
    for part in parts {
        let rows = part.into_rows();
        match &mut all {
            None => all = Some(rows),
            Some(all) if all.len() != rows.len() => bail!("{} columns after {}", rows.len(), all.len()),
            Some(all) => all.iter_mut().zip(rows).for_each(|(all, row)| all.extend(row)),
        }
    }
    match all {
        Some(rows) => C::from_rows(rows),
        None => bail!("a batch without micro-batches"),
    }
}
