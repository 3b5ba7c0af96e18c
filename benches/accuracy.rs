//! Error of attention against f64: outputs and gradients of random rows with scores of several widths.
//! Prints the largest and the root-mean-square error, relative to the largest value of each tensor, as
//! means over the draws. `cargo bench --bench accuracy`.

use candle_core::{Device, Tensor, Var};
use rand::Rng;
use rand_chacha::ChaCha8Rng;
use rloss::ops::SequenceRows;
use rloss::ops::graph::differentiate;
use rloss::ops::sink_attention::{Attention, sink_attention};
use rloss::random::{Purpose, stream};
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const HEADS: usize = 2;
const DIM: usize = 16;

fn noise(rng: &mut ChaCha8Rng, count: usize, width: f32) -> Vec<f32> {
    (0..count).map(|_| rng.random_range(-width..width)).collect()
}

/// Results of one head in f64: `o [T][D]`, and the gradients of `Σ o·g` for q, k, v and the sink.
struct Exact {
    o: Vec<f64>,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    sink: f64,
}

/// Computes one head; `q`, `k`, `v`, `g` are `[T][D]`, and a query sees `window` keys.
fn exact(q: &[f32], k: &[f32], v: &[f32], g: &[f32], sink: f32, window: usize) -> Exact {
    let tokens = q.len() / DIM;
    let scale = 1.0 / (DIM as f64).sqrt();
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum::<f64>();
    let row = |x: &[f32], t: usize| -> Vec<f32> { x[t * DIM..(t + 1) * DIM].to_vec() };
    let zeros = || vec![0f64; tokens * DIM];
    let mut all = Exact { o: zeros(), q: zeros(), k: zeros(), v: zeros(), sink: 0.0 };
    for t in 0..tokens {
        let seen = (t + 1).saturating_sub(window)..t + 1;
        let scores: Vec<f64> = seen.clone().map(|s| dot(&row(q, t), &row(k, s)) * scale).collect();
        let highest = scores.iter().copied().fold(f64::from(sink), f64::max);
        let of_sink = (f64::from(sink) - highest).exp();
        let total = of_sink + scores.iter().map(|s| (s - highest).exp()).sum::<f64>();
        let p: Vec<f64> = scores.iter().map(|s| (s - highest).exp() / total).collect();
        for (&p, s) in p.iter().zip(seen.clone()) {
            for c in 0..DIM {
                all.o[t * DIM + c] += p * f64::from(v[s * DIM + c]);
            }
        }
        let delta: f64 = (0..DIM).map(|c| all.o[t * DIM + c] * f64::from(g[t * DIM + c])).sum();
        all.sink -= of_sink / total * delta;
        for (&p, s) in p.iter().zip(seen) {
            let ds = p * (dot(&row(g, t), &row(v, s)) - delta) * scale;
            for c in 0..DIM {
                all.v[s * DIM + c] += p * f64::from(g[t * DIM + c]);
                all.q[t * DIM + c] += ds * f64::from(k[s * DIM + c]);
                all.k[s * DIM + c] += ds * f64::from(q[t * DIM + c]);
            }
        }
    }
    all
}

/// Returns the largest and the root-mean-square difference, relative to the largest exact value.
fn errors(ours: &[f32], exact: &[f64]) -> (f64, f64) {
    let largest = exact.iter().fold(0f64, |m, x| m.max(x.abs()));
    let differences: Vec<f64> =
        ours.iter().zip(exact).map(|(&x, y)| (f64::from(x) - y).abs() / largest).collect();
    let square = differences.iter().map(|d| d * d).sum::<f64>() / differences.len() as f64;
    (differences.iter().copied().fold(0.0, f64::max), square.sqrt())
}

/// Returns the errors of `o`, `dq`, `dkv`, `dsinks` for one draw.
fn draw(seed: u64, tokens: usize, window: usize, width: f32) -> candle_core::Result<[(f64, f64); 4]> {
    let mut rng = stream(seed, Purpose::Problem, &[tokens as u64, window as u64]);
    let count = tokens * HEADS * DIM;
    let (q, g) = (noise(&mut rng, count, width), noise(&mut rng, count, 1.0));
    let kv = noise(&mut rng, 2 * count, width);
    let sinks = noise(&mut rng, HEADS, 2.0);
    let cpu = &Device::Cpu;
    let q_var = Var::from_vec(q.clone(), (tokens, HEADS, DIM), cpu)?;
    let kv_var = Var::from_vec(kv.clone(), (tokens, 2, HEADS, DIM), cpu)?;
    let sinks_var = Var::from_vec(sinks.clone(), HEADS, cpu)?;
    let attention = Attention {
        heads: HEADS,
        kv_heads: HEADS,
        head_dim: DIM,
        window: (window < tokens).then_some(window),
        sinks: true,
        sink_gradient: true,
    };
    let (mut o, dy) = (None, Tensor::from_vec(g.clone(), (tokens, HEADS * DIM), cpu)?);
    let rows = Arc::new(SequenceRows::from_cu_seqlens(&[0, tokens]));
    let gradients = differentiate(&[&q_var, &kv_var, &sinks_var], || {
        let out = sink_attention(&q_var, &kv_var, &sinks_var, &rows, attention)?;
        o = Some(out.clone());
        candle_core::Result::Ok(vec![(out, dy)])
    })?;
    let flat = |t: &Tensor| t.flatten_all()?.to_vec1::<f32>();
    let of = |i: usize| flat(gradients[i].as_ref().expect("a gradient"));
    let ours = [flat(&o.expect("an output"))?, of(0)?, of(1)?, of(2)?];

    let mut wanted = [vec![0f64; count], vec![0f64; count], vec![0f64; 2 * count], vec![0f64; HEADS]];
    for head in 0..HEADS {
        let take = |x: &[f32], stride: usize, part: usize| -> Vec<f32> {
            let rows = (0..tokens).map(|t| (t * stride + part) * DIM);
            rows.flat_map(|start| x[start..start + DIM].to_vec()).collect()
        };
        let (k, v) = (take(&kv, 2 * HEADS, head), take(&kv, 2 * HEADS, HEADS + head));
        let head_exact = exact(&take(&q, HEADS, head), &k, &v, &take(&g, HEADS, head), sinks[head], window);
        for t in 0..tokens {
            for c in 0..DIM {
                let from = t * DIM + c;
                let to = (t * HEADS + head) * DIM + c;
                wanted[0][to] = head_exact.o[from];
                wanted[1][to] = head_exact.q[from];
                wanted[2][(t * 2 * HEADS + head) * DIM + c] = head_exact.k[from];
                wanted[2][(t * 2 * HEADS + HEADS + head) * DIM + c] = head_exact.v[from];
            }
        }
        wanted[3][head] = head_exact.sink;
    }
    Ok([0, 1, 2, 3].map(|i| errors(&ours[i], &wanted[i])))
}

fn main() -> candle_core::Result<()> {
    const DRAWS: u64 = 24;
    println!(
        "{:>6} {:>7} {:>6}   largest error, then root mean square, x 1e-7: o, dq, dkv, dsinks",
        "tokens", "window", "width"
    );
    for (tokens, window) in [(100, 100), (511, 511), (513, 513), (1025, 1025), (1025, 700), (2050, 2050)] {
        for width in [1.0, 4.0] {
            let mut means = [(0.0, 0.0); 4];
            for seed in 0..DRAWS {
                for (mean, error) in means.iter_mut().zip(draw(seed, tokens, window, width)?) {
                    mean.0 += error.0 / DRAWS as f64;
                    mean.1 += error.1 / DRAWS as f64;
                }
            }
            print!("{tokens:>6} {window:>7} {width:>6}  ");
            for (largest, square) in means {
                print!("  {:>6.2} {:>6.3}", largest * 1e7, square * 1e7);
            }
            println!();
        }
    }
    Ok(())
}
