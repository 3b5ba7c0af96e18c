//! Attention on one thread against two: new tokens of cached sequences, split by chunks of keys and by
//! rows. Medians over interleaved rounds. `cargo bench --bench attention`.

mod timing;

use candle_core::{Device, Tensor};
use rand::Rng;
use rloss::ops::kv_cache::KvBlocks;
use rloss::ops::sink_attention::{Attention, cached_sink_attention};
use rloss::random::{Purpose, stream};
use std::hint::black_box;
use timing::medians;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn noise(shape: &[usize]) -> Tensor {
    let mut rng = stream(0, Purpose::Problem, &[]);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.random_range(-1f32..1.0)).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).expect("tensor")
}

/// Measures `new` tokens for each of `sequences` sequences of `held` positions.
fn measure(name: &str, attention: Attention, sequences: usize, held: usize, new: usize) {
    let Attention { heads, kv_heads, head_dim, .. } = attention;
    let tokens = sequences * new;
    let (q, kv) = (noise(&[tokens, heads, head_dim]), noise(&[tokens, 2, kv_heads, head_dim]));
    let sinks = noise(&[heads]);
    let held_kv =
        noise(&[held, 2 * kv_heads * head_dim]).flatten_all().and_then(|t| t.to_vec1()).expect("values");
    let cache = || {
        let mut cache = KvBlocks::new(kv_heads, head_dim);
        cache.append(&held_kv);
        cache
    };
    let caches: Vec<KvBlocks> = (0..sequences).map(|_| cache()).collect();
    let pools = [1, 2].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("pool"));
    // Every run gets sequences to extend; clones share all full blocks.
    let (one, two) = medians(
        201,
        || caches.clone(),
        |second, caches| {
            let mut caches: Vec<&mut KvBlocks> = caches.iter_mut().collect();
            let counts = vec![new; sequences];
            let attend = || cached_sink_attention(&q, &kv, &sinks, &mut caches, &counts, attention);
            black_box(pools[usize::from(second)].install(attend).expect("attention"));
        },
    );
    println!("{name:<62} {:>12.3} {:>13.3} {:>6.2}", one * 1e3, two * 1e3, one / two);
}

fn main() {
    println!("{:<62} {:>12} {:>13} {:>6}", "", "1 thread (ms)", "2 threads (ms)", "times");
    let sizes = |heads, kv_heads, head_dim, window| Attention {
        heads,
        kv_heads,
        head_dim,
        window,
        sinks: true,
        sink_gradient: true,
    };
    let (tiny, small, large) = (sizes(4, 2, 16, None), sizes(8, 4, 64, None), sizes(64, 8, 64, None));
    measure("decode, 1 sequence of 8192, 4 heads of 16", tiny, 1, 8191, 1);
    measure("decode, 1 sequence of 8192, 8 heads of 64", small, 1, 8191, 1);
    measure("decode, 1 sequence of 8192, 64 heads of 64", large, 1, 8191, 1);
    measure("decode, 1 sequence of 8192, 8 heads of 64, window 128", sizes(8, 4, 64, Some(128)), 1, 8191, 1);
    measure("decode, 64 sequences of 128, 4 heads of 16", tiny, 64, 127, 1);
    measure("prefill, 1 sequence of 2048, 8 heads of 64", small, 1, 0, 2048);
}
