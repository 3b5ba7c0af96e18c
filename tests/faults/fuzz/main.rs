//! Every parser of what comes from outside, fed with damaged inputs: none may panic, hang or run out of
//! stack.
//!
//! ```text
//! cargo test --release --test fuzz                                  a few thousand inputs, always the same
//! cargo test --release --test fuzz -- --inputs 1000000 --seed 7     as many as asked for
//! cargo test --release --test fuzz -- --target recipe --at 1234     one input again, printed
//! ```
//!
//! An input is a function of the seed and its number: a sound example, damaged a few times.

mod damage;
mod targets;

use damage::damaged;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::exit;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use targets::targets;

const INPUTS: u64 = 4_000;
const SEED: u64 = 20;
/// An input takes milliseconds; a machine may be busy.
const HANG_S: u64 = 120;

fn main() {
    let (mut inputs, mut seed, mut only, mut at) = (INPUTS, SEED, None, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || arguments.next().and_then(|text| text.parse().ok());
        match argument.as_str() {
            "--inputs" => inputs = number().expect("--inputs N"),
            "--seed" => seed = number().expect("--seed N"),
            "--at" => at = number(),
            "--target" => only = arguments.next(),
            // What `cargo test` passes to tests of the usual kind.
            _ => {}
        }
    }
    // Those that are caught where they belong are silent, others are told.
    rloss::panics::install_panic_hook(1);
    let scratch = tempfile::tempdir().expect("a folder");
    let mut targets = targets(scratch.path());
    if let Some(only) = &only {
        targets.retain(|target| target.name == only);
        assert!(!targets.is_empty(), "no target {only}");
    }
    println!("fuzz: {inputs} inputs, seed {seed}");
    let now = &*Box::leak(Box::new(AtomicU64::new(0)));
    std::thread::spawn(move || watch(now, seed));
    let mut counts = vec![(0u64, Duration::ZERO); targets.len()];
    for number in at.map_or(0..inputs, |at| at..at + 1) {
        now.store(number, Ordering::Relaxed);
        let mut random = ChaCha8Rng::seed_from_u64(seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let weights = targets.iter().map(|target| target.weight);
        let mut left = random.random_range(0..weights.sum());
        let index = targets
            .iter()
            .position(|t| {
                left < t.weight || {
                    left -= t.weight;
                    false
                }
            })
            .expect("one");
        let target = &targets[index];
        let input = damaged(target, &mut random);
        if at.is_some() {
            println!("{}: {}", target.name, input.escape_ascii());
        }
        let begun = Instant::now();
        if catch_unwind(AssertUnwindSafe(|| (target.parse)(&input))).is_err() {
            println!("PANIC in {} at input {number}, seed {seed}: {}", target.name, input.escape_ascii());
            exit(1);
        }
        counts[index].0 += 1;
        counts[index].1 += begun.elapsed();
    }
    for (target, (count, time)) in targets.iter().zip(counts) {
        println!("{:>16} {count:>8} in {:.1} s", target.name, time.as_secs_f64());
    }
    println!("no panic, no hang");
}

/// Ends the process when one input takes too long.
fn watch(now: &AtomicU64, seed: u64) {
    let mut before = None;
    loop {
        std::thread::sleep(Duration::from_secs(HANG_S));
        let number = now.load(Ordering::Relaxed);
        if before == Some(number) {
            println!("HANG at input {number}, seed {seed}");
            exit(1);
        }
        before = Some(number);
    }
}
