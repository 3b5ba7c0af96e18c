//! Attention over more than one chunk of 512 keys: the definition, its errors, and that every path and any
//! number of threads walk the same chunks.

use super::attention::Case;
use super::*;
use rloss::ops::cpu::should_parallelize;
use rloss::ops::kv_cache::KvBlocks;
use rloss::ops::math::{exp, max_lanes, sum_lanes};
use rloss::ops::sink_attention::{Attention, cached_sink_attention};

/// On both sides of one chunk and of two.
const LENGTHS: [usize; 5] = [511, 512, 513, 1024, 1025];

/// Within a block, across blocks, across a chunk's boundary, a chunk and one key more or less, over more
/// than two chunks.
const WINDOWS: [Option<usize>; 8] =
    [None, Some(1), Some(20), Some(300), Some(511), Some(512), Some(513), Some(1024)];

/// Wide enough that a single new row at 512 keys or more is shared out over threads.
const SIZES: (usize, usize, usize) = (8, 2, 16);

#[test]
fn values_and_gradients_are_those_of_a_plain_attention_with_sinks() {
    for (lengths, window) in [
        (&[511][..], None),
        (&[512], None),
        (&[513], None),
        (&[1024], None),
        (&[513, 1, 1025], None),
        (&[1025], Some(300)),
        (&[1025], Some(513)),
        (&[1025], Some(20)),
    ] {
        let case = Case::new((2, 1, 4), window, lengths);
        let [q, kv, sinks] = case.inputs(80);
        let what = format!("lengths {lengths:?}, window {window:?}");
        check_some(&what, &[&q, &kv, &sinks], |v| case.run(&tensors(v)), |v| case.reference(v), 5);
    }
}

/// The definition, one query at a time and without a cache.
fn defined(attention: &Attention, v: &[&Tensor], length: usize) -> Vec<f32> {
    let Attention { heads, kv_heads, head_dim: d, window, .. } = *attention;
    let [q, kv, sinks] = [floats(v[0]), floats(v[1]), floats(v[2])];
    let scale = 1.0 / (d as f32).sqrt();
    let mut out = vec![];
    for (i, h) in (0..length).flat_map(|i| (0..heads).map(move |h| (i, h))) {
        let kv_head = h / (heads / kv_heads);
        let key = |j: usize| &kv[(j * 2 * kv_heads + kv_head) * d..][..d];
        let value = |j: usize| &kv[(j * 2 * kv_heads + kv_heads + kv_head) * d..][..d];
        let query = &q[(i * heads + h) * d..][..d];
        let score = |j: usize| scale * query.iter().zip(key(j)).fold(0f32, |sum, (x, k)| x.mul_add(*k, sum));
        let seen = |j: usize| j <= i && window.is_none_or(|w| j + w > i);
        // The running state, then every chunk's, hidden ones too.
        let (mut m, mut l, mut o) = (sinks[h], 0f32, vec![0f32; d]);
        for chunk in 0..length.div_ceil(512) {
            let (mut m_c, mut l_c, mut o_c) = (sinks[h], 0f32, vec![0f32; d]);
            for block in 16 * chunk..16 * (chunk + 1) {
                let score = |j: usize| if seen(j) { score(j) } else { f32::NEG_INFINITY };
                let scores: Vec<f32> = (32 * block..32 * (block + 1)).map(score).collect();
                let highest = m_c.max(max_lanes(&scores));
                let p: Vec<f32> = scores.iter().map(|s| exp(s - highest)).collect();
                let shrink = exp(m_c - highest);
                m_c = highest;
                l_c = l_c * shrink + sum_lanes([&p[..]], |[p]| p);
                for (c, x) in o_c.iter_mut().enumerate() {
                    let seen = (32 * block..).zip(&p).filter(|(j, _)| seen(*j));
                    *x = seen.fold(*x * shrink, |sum, (j, p)| p.mul_add(value(j)[c], sum));
                }
            }
            let highest = m.max(m_c);
            let (a, b) = (exp(m - highest), exp(m_c - highest));
            m = highest;
            l = l.mul_add(a, l_c * b);
            o.iter_mut().zip(o_c).for_each(|(x, y)| *x = x.mul_add(a, y * b));
        }
        out.extend(o.iter().map(|x| x / (l + exp(sinks[h] - m))));
    }
    out
}

#[test]
fn it_is_the_definition_to_the_last_bit() {
    for window in WINDOWS {
        // Four chunks: with three, a wrong order may still add the same numbers.
        let case = Case::new((2, 1, 4), window, &[1600]);
        let [q, kv, sinks] = case.inputs(81);
        let v = [q.as_tensor(), kv.as_tensor(), sinks.as_tensor()];
        assert_eq!(floats(&case.run(&v)), defined(&case.attention, &v, 1600), "window {window:?}");
    }
}

/// Rows `start..start + count` of one sequence.
fn rows(tensor: &Tensor, start: usize, count: usize) -> Tensor {
    tensor.narrow(0, start, count).unwrap().contiguous().unwrap()
}

/// The rows of a sequence whose tokens come in `pieces`; keys behind the window are freed as the model
/// frees them.
fn cached(attention: &Attention, v: &[&Tensor], pieces: impl IntoIterator<Item = usize>) -> Vec<f32> {
    let mut cache = KvBlocks::new(attention.kv_heads, attention.head_dim);
    let mut out = vec![];
    for count in pieces {
        let [q, kv] = [rows(v[0], cache.len(), count), rows(v[1], cache.len(), count)];
        let piece = cached_sink_attention(&q, &kv, v[2], &mut [&mut cache], &[count], *attention).unwrap();
        out.extend(floats(&piece));
        if let Some(window) = attention.window {
            cache.forget_before(cache.len(), window);
        }
    }
    out
}

#[test]
fn training_prefill_and_decode_give_the_same_bits_on_any_number_of_threads() {
    for window in WINDOWS {
        let case = Case::new(SIZES, window, &[1025]);
        let [q, kv, sinks] = case.inputs(82);
        let v = [q.as_tensor(), kv.as_tensor(), sinks.as_tensor()];
        let expected = case.run(&v);
        let row = floats(&expected).len() / 1025;
        for threads in 1..=4 {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let what = format!("window {window:?}, {threads} threads");
            pool.install(|| {
                assert_eq!(should_parallelize(512 * row), threads > 1);
                for length in LENGTHS {
                    let [q, kv] = [rows(v[0], 0, length), rows(v[1], 0, length)];
                    let expected = &floats(&expected)[..length * row];
                    let short = Case { attention: case.attention, lengths: vec![length] };
                    let v = [&q, &kv, v[2]];
                    assert_eq!(floats(&short.run(&v)), expected, "{what}: training, {length}");
                    assert_eq!(cached(&case.attention, &v, [length]), expected, "{what}: prefill, {length}");
                }
                let pieces = [500, 11, 1, 1, 20, 491, 1];
                assert_eq!(cached(&case.attention, &v, pieces), floats(&expected), "{what}: pieces");
                assert_eq!(cached(&case.attention, &v, [1; 1025]), floats(&expected), "{what}: decode");
            });
        }
    }
}

/// New tokens of several sequences in one call, one or more each, are what each alone gives.
#[test]
fn sequences_side_by_side_give_what_each_gives_alone() {
    let case = Case::new(SIZES, None, &[1300]);
    let [q, kv, sinks] = case.inputs(83);
    let v = [q.as_tensor(), kv.as_tensor(), sinks.as_tensor()];
    let expected = floats(&case.run(&v));
    let row = expected.len() / 1300;
    let (starts, counts) = ([1024, 0, 511, 1299, 100], [1, 1, 40, 1, 1]);
    let from = |tensor: &Tensor| {
        let parts: Vec<_> = starts.iter().zip(counts).map(|(&s, n)| rows(tensor, s, n)).collect();
        Tensor::cat(&parts, 0).unwrap()
    };
    let (new_q, new_kv) = (from(v[0]), from(v[1]));
    for threads in 1..=4 {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut caches = starts.map(|start| {
            let mut cache = KvBlocks::new(case.attention.kv_heads, case.attention.head_dim);
            cache.append(&floats(v[1])[..start * 2 * case.attention.kv_heads * case.attention.head_dim]);
            cache
        });
        let mut caches: Vec<_> = caches.iter_mut().collect();
        let run =
            || cached_sink_attention(&new_q, &new_kv, v[2], &mut caches, &counts, case.attention).unwrap();
        let out = floats(&pool.install(run));
        let mut at = 0;
        for (start, count) in starts.into_iter().zip(counts) {
            let expected = &expected[start * row..(start + count) * row];
            assert_eq!(&out[at * row..(at + count) * row], expected, "{threads} threads, rows from {start}");
            at += count;
        }
    }
}

#[test]
fn hidden_keys_change_nothing() {
    for window in [1, 20, 512, 600] {
        let case = Case::new((2, 1, 4), Some(window), &[1600]);
        let [q, kv, sinks] = case.inputs(84);
        let expected = floats(&case.run(&[&q, &kv, &sinks]));
        // The last query's first key.
        let first = 1600 - window;
        let mut other = floats(kv.as_tensor());
        other[..first * 8].fill(1e30);
        let other = Tensor::from_vec(other, kv.shape(), &Device::Cpu).unwrap();
        let out = floats(&case.run(&[&q, &other, &sinks]));
        let row = out.len() / 1600;
        assert!(out[(first - 1) * row..first * row] != expected[(first - 1) * row..first * row]);
        assert_eq!(out[1599 * row..], expected[1599 * row..], "window {window}");
    }
}

/// Chunks that lie far above and below each other and the sink, in every order. Scores are exact: every
/// key of chunk `c` has `levels[c]`.
#[test]
fn chunks_and_sinks_at_extreme_levels_are_weighed_as_in_double_precision() {
    let case = Case::new((1, 1, 4), None, &[1536]);
    for levels in
        [[0f32, 80.0, -80.0], [80.0, 0.0, -80.0], [-80.0, 0.0, 80.0], [300.0, 300.0, 301.0], [1.0, 0.0, 2.0]]
    {
        for sink in [-1e6f32, -80.0, 0.0, 2.0, 80.0, 300.0] {
            let q = [1f32, 0.0, 0.0, 0.0].repeat(1536);
            let mut kv = noise(1536 * 8, 2.0, 85);
            for (j, row) in kv.chunks_exact_mut(8).enumerate() {
                row[..4].copy_from_slice(&[2.0 * levels[j / 512], 0.0, 0.0, 0.0]);
            }
            let cpu = &Device::Cpu;
            let q = Var::from_vec(q, (1536, 1, 4), cpu).unwrap();
            let kv = Var::from_vec(kv, (1536, 2, 1, 4), cpu).unwrap();
            let sinks = Var::new(&[sink], cpu).unwrap();
            let what = format!("levels {levels:?}, sink {sink}");
            let inputs = [&q, &kv, &sinks];
            let (gradients, out, _) = gradients(&inputs, |v| case.run(&tensors(v)));
            let exact = inputs.map(|v| floats(v).into_iter().map(f64::from).collect());
            assert_close(&what, &out, &case.reference(&exact));
            assert!(gradients.iter().flatten().all(|g| g.is_finite()), "{what}");
        }
    }
}
