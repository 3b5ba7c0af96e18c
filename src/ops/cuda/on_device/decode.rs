//! Tests of decode steps that are loaded, captured and replayed, compared with single calls.

use super::{assert_refused, floats, numbers, to_gpu};
use crate::ops::cuda::arguments::output;
use crate::ops::cuda::{
    DecodeBatch, DecodeStep, DecodeTable, KvPages, KvPool, PagedPass, RecordedGraph, kernel_set, open,
    overwrite, upload,
};
use crate::ops::rope::{RopeTable, Rotation};
use crate::ops::sink_attention::Attention;
use crate::ops::{rope, rope_keys_with_values};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;

/// One layer has a window and sinks, the next has neither, the last has heads of 128. Each has its own pool.
const LAYERS: [Attention; 3] = [
    Attention { heads: 4, kv_heads: 2, head_dim: 64, window: Some(20), sinks: true, sink_gradient: true },
    Attention { heads: 3, kv_heads: 1, head_dim: 64, window: None, sinks: false, sink_gradient: true },
    Attention { heads: 2, kv_heads: 1, head_dim: 128, window: None, sinks: false, sink_gradient: true },
];
/// Bytes of a vector of the page table, and of its place.
const ENTRY_BYTES: usize = 16 + 4;

/// Returns rows of queries, keys and values of each layer, before the rotation.
fn rows(seed: u64, count: usize, gpu: &Device) -> [[Tensor; 3]; 3] {
    LAYERS.map(|Attention { heads, kv_heads, head_dim, .. }| {
        let of = |seed: u64, heads: usize| to_gpu(&numbers(seed, count, heads * head_dim, 1.0), gpu);
        [of(seed, heads), of(seed + 1, kv_heads), of(seed + 2, kv_heads)]
    })
}

/// Returns the rotation of rows in a layer. A row's position depends on its index only.
fn rotation(layer: usize, count: usize) -> Rotation {
    let half = LAYERS[layer].head_dim / 2;
    let frequencies: Vec<f32> = (0..half).map(|i| 0.5f32.powi(i as i32)).collect();
    let positions = (0..count as u32).map(|row| row * 7 % 61).collect();
    Rotation::new(Arc::new(RopeTable::new(&frequencies, 61, 1.0)), positions)
}

/// Rotates rows of a layer in separate launches.
fn rotate([q, k, v]: &[Tensor; 3], layer: usize) -> [Tensor; 2] {
    let Attention { heads, kv_heads, .. } = LAYERS[layer];
    let rotation = rotation(layer, q.dim(0).unwrap());
    [rope(q, heads, &rotation).unwrap(), rope_keys_with_values(k, v, kv_heads, &rotation).unwrap()]
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
        let [q, kv] = &rotate(&rows(70, count, gpu)[layer], layer);
        let mut open: Vec<_> = sequences.iter_mut().collect();
        let kernels = kernel_set(device, LAYERS[layer].head_dim).unwrap();
        let pass = PagedPass::with_kernels(kernels, &mut open, lengths, &LAYERS[layer]).unwrap();
        pass.attend(0, q, kv, &sinks(layer, gpu)).unwrap();
        sequences
    });
    (pools.into(), sequences)
}

/// Returns a table for each layer, with 4 rows for up to 1,100 positions.
fn tables(sequences: &[Vec<KvPages>; 3]) -> Vec<DecodeTable> {
    sequences.iter().map(|sequences| DecodeTable::new(&sequences[0], 4, 1100).unwrap()).collect()
}

/// Returns a step of the sequences in the rows from 0 on.
fn step(tables: &mut [DecodeTable], sequences: &mut [Vec<KvPages>; 3], rows: usize) -> Vec<DecodeStep> {
    let layers = tables.iter_mut().zip(LAYERS).zip(sequences);
    let step = |((table, attention), sequences): ((&mut DecodeTable, _), &mut Vec<KvPages>)| {
        table.step(attention, &mut sequences.iter_mut().collect::<Vec<_>>(), rows).unwrap()
    };
    layers.map(step).collect()
}

/// Runs one plain call of every layer. Returns the outputs.
fn plain(sequences: &mut [Vec<KvPages>; 3], fed: &[[Tensor; 3]; 3], gpu: &Device) -> [Vec<f32>; 3] {
    [0, 1, 2].map(|layer| {
        let count = sequences[layer].len();
        let mut open: Vec<_> = sequences[layer].iter_mut().collect();
        let own = fed[layer].each_ref().map(|x| x.narrow(0, 0, count).unwrap());
        let [q, kv] = &rotate(&own, layer);
        let kernels = kernel_set(gpu.as_cuda_device().unwrap(), LAYERS[layer].head_dim).unwrap();
        let (counts, sinks) = (vec![1; count], sinks(layer, gpu));
        let pass = PagedPass::with_kernels(kernels, &mut open, &counts, &LAYERS[layer]).unwrap();
        let (out, _) = pass.attend(0, q, kv, &sinks).unwrap();
        if let Some(window) = LAYERS[layer].window {
            sequences[layer].iter_mut().for_each(|pages| pages.forget_before(pages.len(), window));
        }
        floats(&out)
    })
}

#[test]
fn replayed_steps_have_the_bits_of_single_calls() {
    let gpu = open(0).unwrap();
    // A new page begins during the steps, and the longest sequence is split into chunks of keys. One row of
    // the first batch is padding.
    for (lengths, count) in [(vec![62, 5, 300], 4), (vec![1030], 1)] {
        let (pools, mut replayed) = begun(&lengths, &gpu);
        let (own_pools, mut own) = begun(&lengths, &gpu);
        let mut tables = tables(&replayed);
        let empty =
            || [0, 1, 2].map(|layer| rows(0, count, &gpu)[layer].each_ref().map(|x| x.zeros_like().unwrap()));
        let (inputs, first) = (empty(), step(&mut tables, &mut replayed, count));
        let outputs =
            LAYERS.map(|a| Tensor::zeros((count, a.heads * a.head_dim), DType::BF16, &gpu).unwrap());
        let mut batch = DecodeBatch::new(&gpu, &first).unwrap();
        let held = [0, 1, 2].map(|layer| sinks(layer, &gpu));
        let turned = [0, 1, 2].map(|layer| rotation(layer, count));
        let mut recorded: Option<RecordedGraph> = None;
        let mut next = Some(first);
        for turn in 0..5 {
            let steps = next.take().unwrap_or_else(|| step(&mut tables, &mut replayed, count));
            assert!(batch.has_shape_of(&steps), "{lengths:?}, turn {turn}");
            batch.load(&steps).unwrap();
            let fed = rows(100 + 2 * turn, count, &gpu);
            for (input, fed) in inputs.as_flattened().iter().zip(fed.as_flattened()) {
                overwrite(input, fed).unwrap();
            }
            let all = || {
                for (layer, qkv) in inputs.iter().enumerate() {
                    // Layers without sinks need none.
                    let sinks = Some(&held[layer]).filter(|_| layer == 0);
                    let out = batch.attend(&tables, (layer, 0), qkv.each_ref(), &turned[layer], sinks)?;
                    overwrite(&outputs[layer], &out)?;
                }
                Ok(())
            };
            match &recorded {
                None if turn == 0 => all().unwrap(),
                None => {
                    let made = RecordedGraph::record(&gpu, all).unwrap();
                    made.launch().unwrap();
                    recorded = Some(made);
                }
                Some(recorded) => recorded.launch().unwrap(),
            }
            for (layer, out) in plain(&mut own, &fed, &gpu).into_iter().enumerate() {
                let got = outputs[layer].narrow(0, 0, lengths.len()).unwrap();
                assert_eq!(floats(&got), out, "{lengths:?}, turn {turn}, layer {layer}");
            }
        }
        for (pool, own) in pools.iter().zip(&own_pools) {
            assert_eq!(pool.free_pages() + 1, own.free_pages(), "the padding has a page");
        }
    }
}

#[test]
fn a_step_sends_what_has_changed() {
    let gpu = open(0).unwrap();
    let (_, mut sequences) = begun(&[62, 5, 300], &gpu);
    let mut tables = tables(&sequences);
    let first = step(&mut tables, &mut sequences, 4);
    let mut batch = DecodeBatch::new(&gpu, &first).unwrap();
    batch.load(&first).unwrap();
    // The arrays are there now. In the tables, 300 positions have five pages, in two vectors. The first
    // sequence has page 0, which is there before.
    assert_eq!(batch.load(&first).unwrap(), LAYERS.len() * (1 + 2 + 1) * ENTRY_BYTES);
    // Per layer: the bounds of 4 rows, and the slots of 3 sequences.
    let steady = LAYERS.len() * 4 * (4 + 3);
    for turn in 1..8 {
        let steps = step(&mut tables, &mut sequences, 4);
        // The sequence of 62 begins a page at its third step.
        let begun = if turn == 2 { LAYERS.len() * ENTRY_BYTES } else { 0 };
        assert_eq!(batch.load(&steps).unwrap(), steady + begun, "turn {turn}");
    }
}

#[test]
fn sequences_that_change_rows_take_their_pages_with_them() {
    let gpu = open(0).unwrap();
    let lengths = [62, 5, 300, 130];
    let (_, mut moved) = begun(&lengths, &gpu);
    let (_, mut own) = begun(&lengths, &gpu);
    let mut tables = tables(&moved);
    // The last of four takes the row of one that left; then the rows are exchanged; then two are alone.
    let changes: [fn(&mut Vec<KvPages>); 4] =
        [|_| (), |rows| drop(rows.swap_remove(1)), |rows| rows.rotate_left(1), |rows| drop(rows.remove(0))];
    for (turn, change) in changes.into_iter().enumerate() {
        moved.iter_mut().for_each(change);
        own.iter_mut().for_each(change);
        let steps = step(&mut tables, &mut moved, 4);
        let mut batch = DecodeBatch::new(&gpu, &steps).unwrap();
        batch.load(&steps).unwrap();
        let fed = rows(200 + 2 * turn as u64, 4, &gpu);
        for (layer, out) in plain(&mut own, &fed, &gpu).into_iter().enumerate() {
            let (qkv, sinks) = (fed[layer].each_ref(), sinks(layer, &gpu));
            let got = batch.attend(&tables, (layer, 0), qkv, &rotation(layer, 4), Some(&sinks)).unwrap();
            assert_eq!(floats(&got)[..out.len()], out, "turn {turn}, layer {layer}");
        }
    }
}

#[test]
fn steps_of_another_shape_do_not_fit() {
    let gpu = open(0).unwrap();
    let (_, mut sequences) = begun(&[62, 5, 9], &gpu);
    let mut tables = tables(&sequences);
    let steps = step(&mut tables, &mut sequences, 4);
    let mut batch = DecodeBatch::new(&gpu, &steps).unwrap();
    let other = step(&mut tables, &mut sequences, 3);
    assert!(!batch.has_shape_of(&other));
    assert_refused(batch.load(&other), "the step and the buffers have different shapes");
    assert!(!batch.has_shape_of(&steps[..2]));
    let [[q, k, v], ..] = rows(3, 4, &gpu);
    let (held, turned) = (sinks(0, &gpu), rotation(0, 4));
    let attend = |place, q: &Tensor, sinks| batch.attend(&tables, place, [q, &k, &v], &turned, sinks);
    assert_refused(attend((3, 0), &q, Some(&held)), "decode: no pool 3");
    assert_refused(attend((0, 1), &q, Some(&held)), "key-value cache: no layer 1 of 1");
    assert_refused(attend((0, 0), &q, None), "decode: attention with sinks without sinks");
    let [[short, ..], ..] = rows(3, 2, &gpu);
    assert_refused(attend((0, 0), &short, Some(&held)), "decode: [2, 256] for 4 rows of 4 heads of 64");
    let short = rotation(0, 2);
    let refused = batch.attend(&tables, (0, 0), [&q, &k, &v], &short, Some(&held));
    assert_refused(refused, "rope: 4 rows of 256, 2 positions");
    let mut open: Vec<_> = sequences[0].iter_mut().collect();
    assert_refused(tables[0].step(LAYERS[0], &mut open, 2).map(drop), "decode: 3 sequences for 2 of 4 rows");
    assert_refused(tables[0].step(LAYERS[0], &mut open, 5).map(drop), "decode: 3 sequences for 5 of 4 rows");
}

#[test]
fn a_full_cache_is_refused_before_a_step() {
    let gpu = open(0).unwrap();
    let pool = KvPool::new(gpu.as_cuda_device().unwrap(), 2, 64, 2).unwrap();
    let mut both = [pool.new_sequence(), pool.new_sequence()];
    let mut table = DecodeTable::new(&both[0], 2, 64).unwrap();
    let mut open: Vec<_> = both.iter_mut().collect();
    assert_refused(table.step(LAYERS[0], &mut open, 2).map(drop), "key-value cache too small");
    assert_eq!((both[0].len(), pool.free_pages()), (0, 1));
}

#[test]
fn a_sequence_beyond_the_table_is_refused_before_a_step() {
    let gpu = open(0).unwrap();
    let (pools, mut sequences) = begun(&[256], &gpu);
    let mut table = DecodeTable::new(&sequences[1][0], 1, 256).unwrap();
    let free = pools[1].free_pages();
    assert_refused(table.step(LAYERS[1], &mut [&mut sequences[1][0]], 1).map(drop), "make the table wider");
    assert_eq!((sequences[1][0].len(), pools[1].free_pages()), (256, free));
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
    // A part of a tensor takes its own rows only.
    upload(&ids.narrow(0, 1, 1).unwrap(), &[9]).unwrap();
    assert_eq!(ids.to_vec1::<u32>().unwrap(), [4, 9, 7]);
    assert_refused(upload(&ids, &[1, 2]), "2 values for [3]");
    let x = Tensor::zeros((2, 8), DType::BF16, &gpu).unwrap();
    assert_refused(
        overwrite(&x, &Tensor::zeros((3, 8), DType::BF16, &gpu).unwrap()),
        "decode: the rows has shape [3, 8]",
    );
    overwrite(&x.narrow(0, 1, 1).unwrap(), &Tensor::ones((1, 8), DType::BF16, &gpu).unwrap()).unwrap();
    assert_eq!(floats(&x), [[0.0; 8], [1.0; 8]].concat());
}
