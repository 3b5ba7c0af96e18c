//! The Python tool for a long time: sound, hungry, endless and dying code on both interpreters, with and
//! without memory between calls. Memory, descriptors and children of this process must be as flat at the
//! end as after the first third.
//!
//! ```text
//! cargo test --release --test soak                       a few seconds
//! cargo test --release --test soak -- --seconds 1800
//! ```

use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rloss::interpreter::{
    CPython, EmbeddedInterpreter, Interpreter, InterpreterSettings, InterpreterState, SessionId,
};
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

const SECONDS: f64 = 3.0;
const SEED: u64 = 20;

const SNIPPETS: [&str; 12] = [
    "1 + 1",
    "x = [i * i for i in range(1000)]\nsum(x)",
    "x = globals().get('x', 0)",
    "print('a' * 100000)",
    "def f(n): return f(n + 1)\nf(0)",
    "x = 'a' * 10**9",
    "x = [0] * 10**19",
    "while True: pass",
    "10**10**7",
    "import os\nos._exit(3)",
    "raise ValueError('no')",
    "(((((",
];

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let after = |flag: &str| arguments.iter().skip_while(|a| *a != flag).nth(1).cloned();
    let seconds: f64 = after("--seconds").map_or(SECONDS, |text| text.parse().expect("--seconds N"));
    let seed: u64 = after("--seed").map_or(SEED, |text| text.parse().expect("--seed N"));
    println!("soak: {seconds} s, seed {seed}");
    let mut tools: Vec<Box<dyn Interpreter>> = vec![];
    for state in [InterpreterState::Call, InterpreterState::Trajectory] {
        let program = env!("CARGO_BIN_EXE_rloss");
        let settings = InterpreterSettings {
            state,
            time_limit_s: 0.2,
            wall_clock_s: 1.0,
            memory_mib: 64,
            workers: 2,
            output_chars_max: 4096,
            ..InterpreterSettings::default()
        };
        tools.push(Box::new(EmbeddedInterpreter::new(settings.clone(), program.into()).expect("a sandbox")));
        match Command::new("python3").arg("--version").output() {
            Ok(_) => tools.push(Box::new(CPython::new(settings, program.into(), 64).expect("a sandbox"))),
            Err(_) => println!("soak: without the machine's Python, no python3 on the PATH"),
        }
    }
    let (mut samples, mut outcomes) = (vec![], BTreeMap::new());
    let (begun, mut sampled) = (Instant::now(), Instant::now());
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut calls = 0u64;
    while begun.elapsed() < Duration::from_secs_f64(seconds) {
        let tool = tools.choose(&mut random).expect("a tool");
        // A dozen live trajectories, some of which end.
        let session = SessionId(random.random_range(0..12));
        let reply = tool.call(session, SNIPPETS.choose(&mut random).expect("a snippet"));
        *outcomes.entry(reply.outcome.name()).or_insert(0u64) += 1;
        calls += 1;
        if random.random_bool(0.2) {
            tool.close(session);
        }
        if sampled.elapsed().as_secs_f64() > seconds / 60.0 {
            sampled = Instant::now();
            // Between calls, with every trajectory over, so that what is left is what leaks.
            tools.iter().for_each(|tool| (0..12).for_each(|n| tool.close(SessionId(n))));
            samples.push(sample());
        }
    }
    println!("{calls} calls: {outcomes:?}");
    let third = samples.len() / 3;
    let most = |part: &[[u64; 3]], place: usize| part.iter().map(|s| s[place]).max().unwrap_or(0);
    for (place, name) in ["resident KiB", "descriptors", "children"].into_iter().enumerate() {
        let (early, late) = (most(&samples[third..2 * third], place), most(&samples[2 * third..], place));
        println!("{name}: {early} in the middle third, {late} in the last");
        let room = if place == 0 { early / 10 + 2048 } else { 0 };
        assert!(late <= early + room, "{name} grew");
    }
    drop(tools);
    assert_eq!(sample()[2], 0, "children are left");
}

/// Resident memory in KiB, descriptors and children of this process.
fn sample() -> [u64; 3] {
    let status = fs::read_to_string("/proc/self/status").expect("/proc");
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    let resident = resident.trim().trim_end_matches(" kB").parse().expect("a number");
    let descriptors = fs::read_dir("/proc/self/fd").expect("/proc").count() as u64;
    let own = std::process::id().to_string();
    let is_child = |stat: &String| {
        let after = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        after.split(' ').nth(1) == Some(&own)
    };
    let entries = fs::read_dir("/proc").expect("/proc").flatten();
    let stats = entries.filter_map(|entry| fs::read_to_string(entry.path().join("stat")).ok());
    [resident, descriptors, stats.filter(is_child).count() as u64]
}
