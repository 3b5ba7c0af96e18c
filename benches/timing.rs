//! Timing of the benchmarks.

use std::time::Instant;

/// Returns the median seconds of two alternatives over `rounds` interleaved rounds. `prepare` is not timed.
pub fn medians<S>(
    rounds: usize,
    mut prepare: impl FnMut() -> S,
    mut run: impl FnMut(bool, &mut S),
) -> (f64, f64) {
    let mut seconds = [vec![], vec![]];
    run(false, &mut prepare());
    run(true, &mut prepare());
    for round in 0..rounds {
        // The order alternates too, so that neither always runs second.
        for turn in 0..2 {
            let second = (round + turn) % 2 == 1;
            let mut prepared = prepare();
            let start = Instant::now();
            run(second, &mut prepared);
            seconds[usize::from(second)].push(start.elapsed().as_secs_f64());
        }
    }
    let median = |values: &mut Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    (median(&mut seconds[0]), median(&mut seconds[1]))
}
