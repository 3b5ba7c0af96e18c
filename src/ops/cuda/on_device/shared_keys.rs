//! Tests of a key-value head that several GPUs share, with a thread in the place of each GPU.

use super::{assert_refused, floats, numbers, to_gpu};
use crate::ops::SequenceRows;
use crate::ops::cuda::open;
use crate::ops::graph::differentiate;
use crate::ops::operation::DeviceArgument;
use crate::ops::sink_attention::{Attention, KeySharing, sink_attention, sink_attention_with_shared_keys};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, Device, Result, Tensor};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;

/// Threads in the place of the GPUs that share a head.
struct Threads {
    index: usize,
    /// The gathered values of each thread.
    values: Arc<Mutex<Vec<Vec<CpuStorage>>>>,
    all_there: Arc<Barrier>,
}

impl Threads {
    fn all(ranks: usize) -> Vec<Self> {
        let (values, all_there) = (Arc::new(Mutex::new(vec![vec![]; ranks])), Arc::new(Barrier::new(ranks)));
        (0..ranks).map(|index| Self { index, values: values.clone(), all_there: all_there.clone() }).collect()
    }
}

/// Returns the values that `layout` covers, in host memory.
fn on_host((storage, layout): &DeviceArgument) -> CpuStorage {
    let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
    match storage.to_cpu_storage().unwrap() {
        CpuStorage::BF16(values) => CpuStorage::BF16(values[range].to_vec()),
        CpuStorage::F32(values) => CpuStorage::F32(values[range].to_vec()),
        other => panic!("{other:?}"),
    }
}

impl KeySharing for Threads {
    fn place(&self) -> (usize, usize) {
        (self.index, self.values.lock().unwrap().len())
    }

    fn gather(&self, values: &[DeviceArgument]) -> Result<Vec<CudaStorage>> {
        self.values.lock().unwrap()[self.index] = values.iter().map(on_host).collect();
        self.all_there.wait();
        let gathered = self.values.lock().unwrap();
        let device = values[0].0.device();
        let one = |i: usize| {
            let parts: Vec<&CpuStorage> = gathered.iter().map(|of_rank| &of_rank[i]).collect();
            let all = match parts[0] {
                CpuStorage::BF16(_) => CpuStorage::BF16(
                    parts.iter().flat_map(|x| x.as_slice::<half::bf16>().unwrap().to_vec()).collect(),
                ),
                _ => CpuStorage::F32(
                    parts.iter().flat_map(|x| x.as_slice::<f32>().unwrap().to_vec()).collect(),
                ),
            };
            device.storage_from_cpu_storage(&all)
        };
        (0..values.len()).map(one).collect()
    }
}

/// Inputs of attention and the gradient of its output: `q [T, N, D]`, `kv [T, 2, 1, D]`, `sinks [N]`,
/// `dout [T, N·D]`.
fn inputs(attention: &Attention, tokens: usize, gpu: &Device) -> [Tensor; 4] {
    let Attention { heads, head_dim, .. } = *attention;
    let rows = |seed, width, size| to_gpu(&numbers(seed, tokens, width, size), gpu);
    [
        rows(1, heads * head_dim, 0.5).reshape((tokens, heads, head_dim)).unwrap(),
        rows(2, 2 * head_dim, 0.5).reshape((tokens, 2, 1, head_dim)).unwrap(),
        numbers(3, 1, heads, 1.0).flatten_all().unwrap().to_device(gpu).unwrap(),
        rows(4, heads * head_dim, 1.0),
    ]
}

/// Returns the gradients of `q`, `kv` and `sinks` for the `attention.heads` query heads from `first` on.
fn gradients(
    [q, kv, sinks, dout]: &[Tensor; 4],
    first: usize,
    rows: &Arc<SequenceRows>,
    attention: Attention,
    sharing: Option<Arc<dyn KeySharing>>,
) -> Result<[Vec<f32>; 3]> {
    let Attention { heads, head_dim, .. } = attention;
    let q = q.narrow(1, first, heads)?.contiguous()?;
    let sinks = sinks.narrow(0, first, heads)?.contiguous()?;
    let dout = dout.narrow(1, first * head_dim, heads * head_dim)?.contiguous()?;
    let found = differentiate(&[&q, kv, &sinks], || -> Result<_> {
        let out = match sharing {
            None => sink_attention(&q, kv, &sinks, rows, attention)?,
            sharing => sink_attention_with_shared_keys(&q, kv, &sinks, rows, attention, sharing)?,
        };
        Ok(vec![(out, dout)])
    })?;
    let [dq, dkv, dsinks] = <[Option<Tensor>; 3]>::try_from(found).unwrap();
    Ok([dq, dkv, dsinks].map(|gradient| floats(&gradient.unwrap())))
}

/// GPUs that share a head rounded their parts of its gradient before the sum: moments were up to 6e-3 apart.
#[test]
fn keys_of_a_shared_head_have_the_gradients_of_one_gpu() {
    let gpu = open(0).unwrap();
    // Four tiles of keys with heads of 64, of which one has a single key; a window and none.
    let rows = Arc::new(SequenceRows::from_cu_seqlens(&[0, 70, 71, 71, 210]));
    for (heads, ranks, head_dim, window) in [(4, 2, 64, None), (3, 3, 64, Some(20)), (4, 2, 128, None)] {
        let all = Attention { heads, kv_heads: 1, head_dim, window, sinks: true, sink_gradient: true };
        let inputs = inputs(&all, 210, &gpu);
        let [dq, dkv, dsinks] = gradients(&inputs, 0, &rows, all, None).unwrap();
        let own = Attention { heads: heads / ranks, ..all };
        let shares: Vec<[Vec<f32>; 3]> = thread::scope(|scope| {
            let start = |sharing: Threads| {
                let (inputs, rows) = (&inputs, &rows);
                let first = sharing.index * own.heads;
                scope.spawn(move || gradients(inputs, first, rows, own, Some(Arc::new(sharing))).unwrap())
            };
            let threads: Vec<_> = Threads::all(ranks).into_iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (i, expected) in dkv.iter().enumerate() {
            let found: Vec<f32> = shares.iter().map(|share| share[1][i]).filter(|&x| x != 0.0).collect();
            assert!(found.len() <= 1, "value {i} is in {} shares", found.len());
            assert_eq!(found.first().unwrap_or(&0.0), expected, "value {i}, {all:?} on {ranks} GPUs");
        }
        assert!(shares.iter().all(|share| share[1].iter().any(|&x| x != 0.0)), "a share without keys");
        let width = own.heads * head_dim;
        for (index, [share, _, of_sinks]) in shares.iter().enumerate() {
            for (row, share) in dq.chunks_exact(heads * head_dim).zip(share.chunks_exact(width)) {
                assert_eq!(&row[index * width..(index + 1) * width], share, "queries of GPU {index}");
            }
            assert_eq!(&dsinks[index * own.heads..(index + 1) * own.heads], of_sinks);
        }
    }
}

/// One tile of keys on two GPUs: one of them has no work.
#[test]
fn a_gpu_without_a_share_of_the_keys_has_zeros_and_several_shared_heads_are_refused() {
    let gpu = open(0).unwrap();
    let rows = Arc::new(SequenceRows::from_cu_seqlens(&[0, 5]));
    let all =
        Attention { heads: 2, kv_heads: 1, head_dim: 64, window: None, sinks: false, sink_gradient: false };
    let own = Attention { heads: 1, ..all };
    let inputs = inputs(&all, 5, &gpu);
    let [_, dkv, _] = gradients(&inputs, 0, &rows, all, None).unwrap();
    let shares: Vec<Vec<f32>> = thread::scope(|scope| {
        let start = |sharing: Threads| {
            let (inputs, rows) = (&inputs, &rows);
            let first = sharing.index;
            scope.spawn(move || {
                gradients(inputs, first, rows, own, Some(Arc::new(sharing))).unwrap()[1].clone()
            })
        };
        let threads: Vec<_> = Threads::all(2).into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(shares, [dkv.clone(), vec![0.0; dkv.len()]]);

    let [q, kv, sinks, dout] = &inputs;
    let kv = Tensor::cat(&[kv, kv], 2).unwrap();
    let sharing = Threads::all(1).remove(0);
    let two = [q.clone(), kv, sinks.clone(), dout.clone()];
    let several = Attention { kv_heads: 2, ..all };
    let refused = gradients(&two, 0, &rows, several, Some(Arc::new(sharing)));
    assert_refused(refused, "2 key-value heads are shared, not 1");
}
