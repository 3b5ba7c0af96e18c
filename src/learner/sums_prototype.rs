//! PROTOTYPE: runs one update's passes under several sums, `RLOSS_SUMS=time:ROUNDS:ARM,…`, `errors:1:ARM,…` or
//! `train:1:ARM`. An arm: `0` today's chain, `128` blocks of 128 rows of a sequence, `m512` of a micro-batch's rows,
//! `v128` vectors alone.

use super::batch_runner::BatchRunner;
use crate::ops::cpu::host_values;
use crate::ops::fixed;
use anyhow::Result;
use std::io::Write;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

#[derive(Clone)]
pub struct Arm(String);

impl Arm {
    pub fn set(&self) {
        let digits = self.0.trim_start_matches(['m', 'v']);
        fixed::set(digits.parse().unwrap(), self.0.starts_with('m'), self.0.starts_with('v'));
    }
}

pub enum Plan {
    Off,
    Train(Arm),
    Each { rounds: usize, arms: Vec<Arm>, errors: bool },
}

pub fn plan() -> &'static Plan {
    static PLAN: OnceLock<Plan> = OnceLock::new();
    PLAN.get_or_init(|| {
        let number = |name: &str| std::env::var(name).ok().and_then(|v| v.parse().ok());
        if let Some(min) = number("RLOSS_SUMS_TILES_MIN") {
            fixed::TILES_MIN.store(min, Relaxed);
        }
        if let Some(stride) = number("RLOSS_SUMS_STRIDE") {
            fixed::REFERENCE_STRIDE.store(stride, Relaxed);
        }
        let Ok(text) = std::env::var("RLOSS_SUMS") else { return Plan::Off };
        let [kind, rounds, arms] = text.split(':').collect::<Vec<_>>()[..] else { panic!("RLOSS_SUMS") };
        let arms: Vec<Arm> = arms.split(',').map(|arm| Arm(arm.into())).collect();
        match kind {
            "train" => Plan::Train(arms[0].clone()),
            _ => Plan::Each { rounds: rounds.parse().unwrap(), arms, errors: kind == "errors" },
        }
    })
}

/// Wall and processor seconds.
pub fn spent() -> [f64; 2] {
    static START: OnceLock<Instant> = OnceLock::new();
    // SAFETY: as in benches/step.rs.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 * 1e-6;
    let wall = START.get_or_init(Instant::now).elapsed().as_secs_f64();
    [wall, seconds(usage.ru_utime) + seconds(usage.ru_stime)]
}

static FINISH: Mutex<[f64; 2]> = Mutex::new([0.0; 2]);

pub fn note_finish(before: [f64; 2]) {
    let now = spent();
    *FINISH.lock().unwrap() = [now[0] - before[0], now[1] - before[1]];
}

fn print(line: &str) {
    let path = std::env::var("RLOSS_SUMS_OUT").unwrap_or("/dev/stderr".into());
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
    writeln!(file, "{line}").unwrap();
}

pub fn run_arm<R>(
    runner: &BatchRunner,
    rounds: usize,
    arms: &[Arm],
    errors: bool,
    run: &dyn Fn() -> Result<R>,
) -> Result<R> {
    if errors {
        arms.iter().filter(|arm| arm.0 != "0").try_for_each(|arm| {
            arm.set();
            run().map(drop)
        })?;
        fixed::set(fixed::REFERENCE, false, false);
        run()?;
        let mut last = None;
        for arm in arms {
            arm.set();
            last = Some(run()?);
            compare(runner, arm)?;
        }
        fixed::SUMS.read().unwrap().iter().flatten().for_each(|sum| sum.reference.lock().unwrap().fill(0.0));
        return Ok(last.unwrap());
    }
    static CALIBRATED: OnceLock<()> = OnceLock::new();
    if CALIBRATED.get().is_none() {
        for arm in arms {
            arm.set();
            run()?;
        }
        let _ = CALIBRATED.set(());
    }
    let mut last = None;
    for round in 0..rounds {
        for i in 0..arms.len() {
            // Every other round backwards.
            let arm = &arms[if round % 2 == 0 { i } else { arms.len() - 1 - i }];
            arm.set();
            let before = spent();
            last = Some(run()?);
            let now = spent();
            let finish = *FINISH.lock().unwrap();
            print(&format!(
                "{{\"arm\":\"{}\",\"round\":{round},\"wall\":{:.6},\"cpu\":{:.6},\"finish_wall\":{:.6},\"finish_cpu\":{:.6}}}",
                arm.0, now[0] - before[0], now[1] - before[1], finish[0], finish[1]
            ));
        }
    }
    Ok(last.unwrap())
}

fn compare(runner: &BatchRunner, arm: &Arm) -> Result<()> {
    let parameters = runner.parameters;
    for (index, gradient) in parameters.gradients().enumerate() {
        let Some(gradient) = gradient else { continue };
        let Some(sum) = fixed::SUMS.read().unwrap().get(index).cloned().flatten() else { continue };
        let reference = sum.reference.lock().unwrap();
        if reference.is_empty() {
            continue;
        }
        let found = host_values(gradient)?;
        let (mut error2, mut norm2, mut error_max, mut norm_max) = (0f64, 0f64, 0f64, 0f64);
        let (mut nonzero, mut lost, mut buckets) = (0usize, 0usize, [0usize; 6]);
        let mut relative = Vec::with_capacity(found.len());
        let mut zero_wrong = 0usize;
        for (&g, &r) in found.iter().zip(reference.iter()) {
            let e = (f64::from(g) - r).abs();
            error2 += e * e;
            norm2 += r * r;
            error_max = error_max.max(e);
            norm_max = norm_max.max(r.abs());
            if r != 0.0 {
                nonzero += 1;
                lost += usize::from(g == 0.0);
                let share = e / r.abs();
                for (i, power) in [-20, -16, -12, -8, -4, 0].into_iter().enumerate() {
                    buckets[i] += usize::from(share > 2f64.powi(power));
                }
                relative.push(share as f32);
            } else {
                zero_wrong += usize::from(g != 0.0);
            }
        }
        let mut small = [0usize; 3];
        for &r in reference.iter().filter(|r| **r != 0.0) {
            for (i, power) in [-16, -24, -40].into_iter().enumerate() {
                small[i] += usize::from(r.abs() < norm_max * 2f64.powi(power));
            }
        }
        relative.sort_by(f32::total_cmp);
        let at = |share: f64| relative.get(((relative.len() as f64 - 1.0).max(0.0) * share) as usize).copied().unwrap_or(0.0);
        print(&format!(
            "{{\"arm\":\"{}\",\"name\":\"{}\",\"values\":{},\"nonzero\":{nonzero},\"lost\":{lost},\"zero_wrong\":{zero_wrong},\"l2\":{:e},\"max\":{:e},\"median\":{:e},\"p99\":{:e},\"largest\":{:e},\"above\":{buckets:?},\"small\":{small:?},\"exponent\":{},\"norm\":{:e}}}",
            arm.0, parameters.specs[index].name, found.len(), (error2 / norm2.max(1e-300)).sqrt(),
            error_max / norm_max.max(1e-300), at(0.5), at(0.99), at(1.0), sum.exponent.load(Relaxed), norm2.sqrt()
        ));
    }
    Ok(())
}
