//! Tasks with generated problems: the trait and the split. The split holds out about one problem in ten.

use super::{Demonstration, Problem, Reward, Task, Transcript, ValidationSet};
use crate::random::{Purpose, stream};
use anyhow::Result;
use rand::Rng;
use std::collections::HashSet;
use std::marker::PhantomData;

/// A type of problem that is drawn at random.
pub trait GeneratedProblem: Sized + 'static {
    /// The task's name.
    const NAME: &'static str;
    const USES_PYTHON: bool;

    fn draw(rng: &mut impl Rng) -> Self;

    /// Returns whether the problem is in the held-out tenth. Depends only on the problem's content.
    fn is_held_out(&self) -> bool;

    fn problem(&self) -> Problem;

    /// Returns a whole conversation as an example, noisy on purpose.
    fn demonstration(&self, rng: &mut impl Rng) -> Demonstration;

    /// Grades a finished conversation.
    ///
    /// # Errors
    /// When `problem` belongs to another task.
    fn reward(problem: &Problem, transcript: &Transcript) -> Result<Reward>;

    /// Draws problems from `rng` until [`Self::is_held_out`] equals `held_out`. Returns the last one.
    fn draw_split(rng: &mut impl Rng, held_out: bool) -> Self {
        loop {
            let drawn = Self::draw(rng);
            if drawn.is_held_out() == held_out {
                return drawn;
            }
        }
    }

    /// Returns at most `count` distinct held-out problems, the same in every run. Draws at most `100 * count`
    /// problems.
    fn validation(count: usize) -> Vec<Problem> {
        let mut rng = stream(0, Purpose::Problem, &[u64::MAX]);
        let mut problems: Vec<Problem> = Vec::with_capacity(count);
        let mut seen = HashSet::new();
        let mut draws_left = count.saturating_mul(100);
        while problems.len() < count && draws_left > 0 {
            draws_left -= 1;
            let problem = Self::draw_split(&mut rng, true).problem();
            if seen.insert(problem.id.clone()) {
                problems.push(problem);
            }
        }
        problems
    }
}

/// A task with generated problems of type `P`.
pub struct GeneratedTask<P> {
    validation: [ValidationSet; 1],
    problems: PhantomData<fn() -> P>,
}

impl<P: GeneratedProblem> GeneratedTask<P> {
    /// Returns the task with at most `validation_problems` held-out problems.
    pub fn new(validation_problems: usize) -> Self {
        let problems = P::validation(validation_problems);
        Self { validation: [ValidationSet { name: P::NAME.into(), problems }], problems: PhantomData }
    }
}

impl<P: GeneratedProblem> Task for GeneratedTask<P> {
    fn name(&self) -> &str {
        P::NAME
    }

    fn training_problem(&self, seed: u64, index: u64) -> Problem {
        P::draw_split(&mut stream(seed, Purpose::Problem, &[index]), false).problem()
    }

    fn validation_sets(&self) -> &[ValidationSet] {
        &self.validation
    }

    fn uses_python(&self) -> bool {
        P::USES_PYTHON
    }

    fn demonstration(&self, seed: u64, index: u64) -> Option<Demonstration> {
        let mut rng = stream(seed, Purpose::Demonstration, &[index]);
        Some(P::draw_split(&mut rng, false).demonstration(&mut rng))
    }

    fn held_out_demonstration(&self, index: u64) -> Option<Demonstration> {
        let mut rng = stream(0, Purpose::Demonstration, &[u64::MAX, index]);
        Some(P::draw_split(&mut rng, true).demonstration(&mut rng))
    }

    fn reward(&self, problem: &Problem, transcript: &Transcript) -> Result<Reward> {
        P::reward(problem, transcript)
    }
}
