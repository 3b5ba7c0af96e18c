//! Tests of decode steps that are loaded, captured and replayed, compared with single calls.

use super::{assert_refused, floats, numbers, to_gpu};
use crate::ops::cuda::arguments::output;
use crate::ops::cuda::{
    DecodeBatch, DecodeStep, KvPages, KvPool, RecordedGraph, kernel_set, open, overwrite,
    paged_sink_attention, upload,
};
use crate::ops::sink_attention::Attention;
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// One layer has a window and sinks, the next has neither, the last has heads of 128.
const LAYERS: [Attention; 3] = [
    Attention { heads: 4, kv_heads: 2, head_dim: 64, window: Some(20), sinks: true, sink_gradient: true },
    Attention { heads: 3, kv_heads: 1, head_dim: 64, window: None, sinks: false, sink_gradient: true },
    Attention { heads: 2, kv_heads: 1, head_dim: 128, window: None, sinks: false, sink_gradient: true },
];

/// Returns rows of queries, and of keys and values, of each layer.
fn rows(seed: u64, count: usize, gpu: &Device) -> [[Tensor; 2]; 3] {
    LAYERS.map(|Attention { heads, kv_heads, head_dim, .. }| {
        let of = |seed: u64, shape: &[usize]| {
            let width = shape[1..].iter().product();
            to_gpu(&numbers(seed, count, width, 1.0).reshape(shape).unwrap(), gpu)
        };
        [of(seed, &[count, heads, head_dim]), of(seed + 1, &[count, 2, kv_heads, head_dim])]
    })
}

fn sinks(layer: usize, gpu: &Device) -> Tensor {
    numbers(9, 1, LAYERS[layer].heads, 1.0).reshape(LAYERS[layer].heads).unwrap().to_device(gpu).unwrap()
}

/// Returns, for each layer, its pool and caches of sequences with these lengths.
fn begun(lengths: &[usize], gpu: &Device) -> (Vec<Arc<KvPool>>, [Vec<KvPages>; 3]) {
    let device = gpu.as_cuda_device().unwrap();
    let pools =
        LAYERS.map(|attention| KvPool::new(device, attention.kv_heads, attention.head_dim, 40).unwrap());
    let count = lengths.iter().sum();
    let sequences = [0, 1, 2].map(|layer| {
        let mut sequences: Vec<KvPages> = lengths.iter().map(|_| pools[layer].new_sequence()).collect();
        let [q, kv] = &rows(70, count, gpu)[layer];
        let mut open: Vec<_> = sequences.iter_mut().collect();
        let kernels = kernel_set(device, LAYERS[layer].head_dim).unwrap();
        paged_sink_attention(kernels, q, kv, &sinks(layer, gpu), &mut open, lengths, &LAYERS[layer]).unwrap();
        sequences
    });
    (pools.into(), sequences)
}

fn step(sequences: &mut [Vec<KvPages>; 3]) -> DecodeStep {
    let mut step = DecodeStep::default();
    for (layer, attention) in LAYERS.into_iter().enumerate() {
        step.add_layer(attention, &mut sequences[layer].iter_mut().collect::<Vec<_>>()).unwrap();
    }
    step
}

#[test]
fn replayed_steps_have_the_bits_of_single_calls() {
    let gpu = open(0).unwrap();
    // A new page begins during the steps, and the longest sequence is split into chunks of keys.
    for lengths in [vec![62, 5, 300], vec![1030]] {
        let (pools, mut replayed) = begun(&lengths, &gpu);
        let (own_pools, mut plain) = begun(&lengths, &gpu);
        let count = lengths.len();
        let empty =
            || [0, 1, 2].map(|layer| rows(0, count, &gpu)[layer].each_ref().map(|x| x.zeros_like().unwrap()));
        let (inputs, first) = (empty(), step(&mut replayed));
        let outputs =
            LAYERS.map(|a| Tensor::zeros((count, a.heads * a.head_dim), DType::BF16, &gpu).unwrap());
        let mut batch = DecodeBatch::new(&gpu, &first).unwrap();
        let held = [0, 1, 2].map(|layer| sinks(layer, &gpu));
        let mut recorded: Option<RecordedGraph> = None;
        let mut next = Some(first);
        for turn in 0..5 {
            let step = next.take().unwrap_or_else(|| step(&mut replayed));
            assert!(batch.has_shape_of(&step), "{lengths:?}, turn {turn}");
            batch.load(&step).unwrap();
            let fed = rows(100 + 2 * turn, count, &gpu);
            for (input, fed) in inputs.as_flattened().iter().zip(fed.as_flattened()) {
                overwrite(input, fed).unwrap();
            }
            let both = || {
                for (layer, [q, kv]) in inputs.iter().enumerate() {
                    overwrite(&outputs[layer], &batch.attend(layer, q, kv, &held[layer])?)?;
                }
                Ok(())
            };
            match &recorded {
                None if turn == 0 => both().unwrap(),
                None => {
                    let made = RecordedGraph::record(&gpu, both).unwrap();
                    made.launch().unwrap();
                    recorded = Some(made);
                }
                Some(recorded) => recorded.launch().unwrap(),
            }
            for (layer, attention) in LAYERS.iter().enumerate() {
                let mut open: Vec<_> = plain[layer].iter_mut().collect();
                let [q, kv] = &fed[layer];
                let kernels = kernel_set(gpu.as_cuda_device().unwrap(), attention.head_dim).unwrap();
                let (out, _) =
                    paged_sink_attention(kernels, q, kv, &held[layer], &mut open, &vec![1; count], attention)
                        .unwrap();
                assert_eq!(floats(&outputs[layer]), floats(&out), "{lengths:?}, turn {turn}, layer {layer}");
            }
        }
        for (pool, own) in pools.iter().zip(&own_pools) {
            assert!(pool.values().unwrap() == own.values().unwrap());
            assert_eq!(pool.free_pages(), own.free_pages());
        }
    }
}

#[test]
fn steps_of_another_shape_do_not_fit() {
    let gpu = open(0).unwrap();
    let (_, mut three) = begun(&[62, 5, 9], &gpu);
    let (_, mut two) = begun(&[62, 5], &gpu);
    let of_three = step(&mut three);
    let mut batch = DecodeBatch::new(&gpu, &of_three).unwrap();
    assert!(batch.has_shape_of(&step(&mut three)));
    let of_two = step(&mut two);
    assert!(!batch.has_shape_of(&of_two));
    assert_refused(batch.load(&of_two), "the step and the buffers have different shapes");
    // A sequence of 65 positions or more has two pages.
    assert!(!batch.has_shape_of(&step(&mut three)));
    let mut fewer = DecodeStep::default();
    fewer.add_layer(LAYERS[0], &mut three[0].iter_mut().collect::<Vec<_>>()).unwrap();
    assert!(!batch.has_shape_of(&fewer));
    assert_refused(fewer.add_layer(LAYERS[0], &mut []), "decode: no sequence");
    let [[q, kv], ..] = rows(3, 3, &gpu);
    assert_refused(batch.attend(3, &q, &kv, &sinks(0, &gpu)), "decode: no layer 3");
    let [[short, _], ..] = rows(3, 2, &gpu);
    assert_refused(batch.attend(0, &short, &kv, &sinks(0, &gpu)), "q has shape [2, 4, 64]");
}

#[test]
fn a_full_cache_is_refused_before_a_step() {
    let gpu = open(0).unwrap();
    let pool = KvPool::new(gpu.as_cuda_device().unwrap(), 2, 64, 1).unwrap();
    let mut both = [pool.new_sequence(), pool.new_sequence()];
    let mut open: Vec<_> = both.iter_mut().collect();
    assert_refused(DecodeStep::default().add_layer(LAYERS[0], &mut open), "key-value cache too small");
    assert_eq!((both[0].len(), pool.free_pages()), (0, 1));
}

#[test]
fn work_that_fails_leaves_no_recording_begun() {
    let gpu = open(0).unwrap();
    let x = Tensor::zeros((2, 8), DType::BF16, &gpu).unwrap();
    let context = gpu.as_cuda_device().unwrap().cuda_stream().context().clone();
    let stops = || candle_core::bail!("of the work");
    assert_eq!(
        RecordedGraph::record(&gpu, stops).err().unwrap().to_string().lines().next(),
        Some("of the work")
    );
    assert!(context.is_event_tracking());
    // Later work runs instead of being captured.
    let from = to_gpu(&numbers(1, 2, 8, 1.0), &gpu);
    overwrite(&x, &from).unwrap();
    assert_eq!(floats(&x), floats(&from));
}

#[test]
fn an_empty_allocation_can_be_captured() {
    let gpu = open(0).unwrap();
    let device = gpu.as_cuda_device().unwrap();
    let x = Tensor::zeros((2, 8), DType::BF16, &gpu).unwrap();
    let from = to_gpu(&numbers(1, 2, 8, 1.0), &gpu);
    let recorded = RecordedGraph::record(&gpu, || {
        assert_eq!(output::<f32>(device, 0)?.len(), 0);
        overwrite(&x, &from)
    });
    recorded.unwrap().launch().unwrap();
    assert_eq!(floats(&x), floats(&from));
}

#[test]
fn numbers_go_where_they_stay() {
    let gpu = open(0).unwrap();
    let ids = Tensor::zeros(3, DType::U32, &gpu).unwrap();
    upload(&ids, &[4, 0, 7]).unwrap();
    assert_eq!(ids.to_vec1::<u32>().unwrap(), [4, 0, 7]);
    assert_refused(upload(&ids, &[1, 2]), "2 values for [3]");
    let x = Tensor::zeros((2, 8), DType::BF16, &gpu).unwrap();
    assert_refused(
        overwrite(&x, &Tensor::zeros((3, 8), DType::BF16, &gpu).unwrap()),
        "decode: the rows has shape [3, 8]",
    );
}
