//! What a launch on a GPU takes is worked out on the host: the mirror of the kernels' header, the tiles,
//! the refusals. No GPU is needed for any of it.

use super::*;
use crate::cli::text_of;
use candle_core::DType;
use rloss::ops::SequenceRows;
use rloss::ops::argument::Argument;
use rloss::ops::logits::device_logits_rows;
use rloss::ops::sink_attention::kernels::{self, ChunkTile, Tile, kernel_sets};
use rloss::ops::sink_attention::plan::{LaunchSequences, check_attention, check_device, padded_chunks};
use rloss::ops::sink_attention::{Attention, sink_attention};

fn header() -> String {
    text_of(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/sink_attention.cuh"))
}

/// A number that the header gives.
fn constant(name: &str) -> usize {
    let text = header();
    let value =
        text.split(&format!("constexpr int {name} = ")).nth(1).and_then(|rest| rest.split(';').next());
    value.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{name} is no number in the header"))
}

/// scripts/check_kernels.sh has the compiler say what the header's constants are, and writes it to the table.
#[test]
fn the_launch_sizes_are_the_headers() {
    let panel = constant("panel_columns");
    assert_eq!(kernels::HEAD_DIMS, [panel, 2 * panel]);
    assert!(kernel_sets(96).is_none());
    assert_eq!(kernels::TILE_ROWS, constant("tile_rows"));
    assert_eq!(kernels::BLOCK_KEYS, constant("block_keys"));
    assert_eq!(kernels::CHUNK_KEYS, constant("chunk_keys"));
    assert_eq!(kernels::DELTA_ROWS, constant("delta_rows"));
    let block = constant("block_keys");
    let [wgmma, mma] = kernel_sets(64).unwrap();
    assert_eq!((mma.dkv_keys, wgmma.dkv_keys), (block, 2 * block));
    assert!(header().contains("constexpr int dkv_hopper_tile_keys = 128 / panels;"));
    assert!(kernel_sets(128).unwrap().iter().all(|set| set.dkv_keys == block));
    let root = env!("CARGO_MANIFEST_DIR");
    let table = text_of(format!("{root}/kernels/resources.txt"));
    let row = |kernel: &str| -> Vec<usize> {
        let line = table.lines().find(|line| line.split_whitespace().next() == Some(kernel));
        let line = line.unwrap_or_else(|| panic!("{kernel} is not in resources.txt"));
        line.split_whitespace().skip(1).map(|x| x.parse().unwrap()).collect()
    };
    let all = |set: &kernels::KernelSet| {
        [set.forward, set.chunk, set.merge, set.delta, set.dkv, set.dq, set.dsinks]
    };
    for kernel in kernels::HEAD_DIMS.iter().flat_map(|&d| kernel_sets(d).unwrap()).flat_map(all) {
        let [_registers, threads, _static, dynamic_shared, spills, ..] = row(kernel.function)[..] else {
            panic!("resources.txt has other columns")
        };
        assert_eq!((kernel.threads, kernel.shared_bytes, spills), (threads, dynamic_shared, 0), "{kernel:?}");
        let file = format!("{root}/kernels/{}.cu", kernel.file);
        let source = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{file}: {e}"));
        assert!(source.contains(&format!("\n{}(const __grid_constant__ SinkAttention", kernel.function)));
    }
}

fn attention(heads: usize, kv_heads: usize, window: Option<usize>) -> Attention {
    Attention { heads, kv_heads, head_dim: 64, window, sinks: true, sink_gradient: true }
}

/// Every query and every key in exactly one tile, whatever the lengths.
#[test]
fn tiles_cover_all_rows_and_keys_once() {
    for (counts, held, group, window, tile_keys) in [
        (vec![1, 0, 17, 400], vec![0, 0, 0, 0], 8, None, 64),
        (vec![300, 5], vec![0, 0], 3, Some(70), 128),
        (vec![1, 9, 0], vec![640, 3, 77], 8, Some(128), 64),
        (vec![1; 5], vec![0, 63, 64, 65, 1000], 16, None, 128),
    ] {
        let sequences = LaunchSequences::for_cached_sequences(&counts, &held).unwrap();
        let attention = attention(2 * group, 2, window);
        let mut rows: Vec<Tile> = sequences.query_tiles(&attention);
        let mut keys: Vec<Tile> = sequences.key_tiles(&attention, tile_keys);
        rows.sort_by_key(|t| (t.sequence, t.first));
        keys.sort_by_key(|t| (t.sequence, t.first));
        let (mut all_rows, mut all_keys) = (vec![], vec![]);
        for (s, (&count, &held)) in counts.iter().zip(&held).enumerate() {
            let tile = |first: usize| Tile { sequence: s as i32, first: first as i32 };
            all_rows.extend((0..count * group).step_by(128).map(tile));
            all_keys.extend((0..count + held).step_by(tile_keys).map(tile));
        }
        assert_eq!((rows, keys), (all_rows, all_keys));
        assert_eq!(sequences.tokens(), counts.iter().sum::<usize>());
        let bounds = sequences.key_bounds();
        assert_eq!(bounds[0], 0);
        assert_eq!(
            *bounds.last().unwrap() as usize,
            counts.iter().sum::<usize>() + held.iter().sum::<usize>()
        );
    }
}

/// Of every tile exactly the chunks that one of its rows sees, whatever the window; a part for every token
/// and chunk.
#[test]
fn chunk_tiles_are_the_chunks_that_a_tile_sees() {
    let sequences =
        LaunchSequences::for_cached_sequences(&[1, 0, 40, 1, 3], &[510, 7, 1000, 1024, 0]).unwrap();
    for window in [None, Some(1), Some(100), Some(520), Some(5000)] {
        let attention = attention(6, 2, window);
        let mut expected = vec![];
        for (s, (count, held)) in [(1, 510), (0, 7), (40, 1000), (1, 1024), (3, 0)].into_iter().enumerate() {
            for first in (0..3 * count).step_by(128) {
                let rows = first..(first + 128).min(3 * count);
                let sees = |row: usize, chunk: usize| {
                    let position = held + row / 3;
                    let keys = (position + 1).saturating_sub(window.unwrap_or(usize::MAX))..=position;
                    (512 * chunk..512 * chunk + 512).any(|key| keys.contains(&key))
                };
                for chunk in (0..4).filter(|&chunk| rows.clone().any(|row| sees(row, chunk))) {
                    let tile = Tile { sequence: s as i32, first: first as i32 };
                    expected.push(ChunkTile { tile, chunk: chunk as i32 });
                }
            }
        }
        assert_eq!(sequences.chunk_tiles(&attention), expected, "window {window:?}");
    }
    // Tokens times chunks: 1 x 1, 0 x 1, 40 x 3, 1 x 3, 3 x 1.
    assert_eq!(sequences.part_starts(), [0, 1, 1, 121, 124, 127]);
}

#[test]
fn few_long_sequences_are_spread_and_nothing_else() {
    let decode = |sequences: usize, keys: usize, window| {
        let launch =
            LaunchSequences::for_cached_sequences(&vec![1; sequences], &vec![keys - 1; sequences]).unwrap();
        launch.should_split_keys(&attention(64, 8, window))
    };
    assert!(decode(1, 8192, None) && decode(32, 1024, None) && decode(1, 1 << 17, None));
    assert!(!decode(1, 512, None), "one chunk");
    assert!(!decode(33, 8192, None), "the tiles fill the GPU");
    assert!(!decode(1, 1 << 17, Some(128)), "a window sees one or two chunks of many");
    let prefill = LaunchSequences::for_cached_sequences(&[500], &[1 << 17]).unwrap();
    assert!(!prefill.should_split_keys(&attention(64, 8, None)), "the parts take too much memory");
}

/// Sequences of 500 keys and more, which grow by one token a step: what a decode launch takes stays the same.
#[test]
fn a_decode_launch_changes_seldom_while_sequences_grow() {
    let decode = |step: usize| {
        let lengths = [500, 3000, 1200, 500].map(|length| length + step);
        LaunchSequences::for_cached_sequences(&[1; 4], &lengths).unwrap()
    };
    let (full, window) = (attention(64, 8, None), attention(64, 8, Some(128)));
    let chunks = |step| padded_chunks(decode(step).chunk_tiles(&full).len());
    for step in 0..600 {
        let order = decode(step).decode_tiles(&full);
        assert_eq!(order.iter().map(|tile| tile.sequence).collect::<Vec<_>>(), [1, 2, 0, 3], "step {step}");
        assert_eq!(order, decode(step).decode_tiles(&window));
        assert!(decode(step).should_split_decode(&full) && chunks(step) == 32, "step {step}");
        assert!(!decode(step).should_split_decode(&window), "step {step}");
    }
    // The keys of a window lie in two chunks for some steps.
    let single = |step: usize| LaunchSequences::for_cached_sequences(&[1], &[500 + step]).unwrap();
    assert!((0..600).any(|step| single(step).should_split_keys(&window)));
    assert!((0..600).all(|step| !single(step).should_split_decode(&window)));
    assert_eq!([1, 32, 33, 128, 129, 2049].map(padded_chunks), [32, 32, 128, 128, 512, 8192]);
    // The padded parts, too, fit in the memory for parts.
    let many = |sequences: usize| {
        let lengths = vec![(1 << 17) - 1; sequences];
        LaunchSequences::for_cached_sequences(&vec![1; sequences], &lengths).unwrap()
    };
    assert!(many(32).should_split_keys(&full) && many(32).should_split_decode(&full));
    let wide = attention(128, 8, None);
    assert!(many(9).should_split_keys(&wide) && !many(9).should_split_decode(&wide));
}

#[test]
fn the_head_of_1024_sequences_is_two_products() {
    assert_eq!(device_logits_rows(201_088), 640);
    assert_eq!(1024_usize.div_ceil(device_logits_rows(201_088)), 2);
}

#[test]
fn the_tiles_with_the_most_work_come_first() {
    let first = |tiles: Vec<Tile>| tiles.iter().map(|t| (t.sequence, t.first)).collect::<Vec<_>>();
    let sequences = LaunchSequences::for_packed_sequences(&[0, 64, 192]).unwrap();
    // 16 tokens a tile; a tile sees the key blocks up to its last token.
    let tiles = first(sequences.query_tiles(&attention(8, 1, None)));
    let later = [512, 640, 768, 896].map(|row| (1, row));
    assert_eq!(tiles[..4], later);
    assert_eq!(tiles[4], (0, 0), "equal work in the order of the sequences");
    // The queries after a key see it: the longer sequence's first keys have the most.
    assert_eq!(first(sequences.key_tiles(&attention(8, 1, None), 64)), [(1, 0), (0, 0), (1, 64)]);
    // With a window of one every key has one query.
    assert_eq!(first(sequences.key_tiles(&attention(8, 1, Some(1)), 64)), [(0, 0), (1, 0), (1, 64)]);
}

fn message<T>(result: candle_core::Result<T>) -> String {
    result.err().expect("refused").to_string()
}

fn assert_says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "'{message}' does not say '{part}'");
    }
}

#[test]
fn a_device_without_the_architecture_is_refused_and_the_fallback_named() {
    assert!(check_device("NVIDIA H100", (9, 0)).is_ok());
    for capability in [(8, 0), (8, 9), (10, 0), (12, 0)] {
        let text = message(check_device("NVIDIA Some", capability));
        assert_says(
            &text,
            &["NVIDIA Some", &format!("{}.{}", capability.0, capability.1), "9.0", "Device::Cpu"],
        );
    }
}

#[test]
fn sizes_that_the_kernels_do_not_know_are_refused() {
    assert!(check_attention(&attention(64, 8, Some(128))).is_ok());
    assert!(check_attention(&Attention { head_dim: 128, ..attention(8, 1, None) }).is_ok());
    let other = Attention { head_dim: 96, ..attention(8, 1, None) };
    assert_says(&message(check_attention(&other)), &["head_dim is 96", "[64, 128]", "Device::Cpu"]);
    assert_says(&message(check_attention(&attention(9, 2, None))), &["9 query heads", "2 key-value heads"]);
    assert_says(&message(check_attention(&attention(9, 0, None))), &["0 key-value heads"]);
    assert_says(&message(check_attention(&attention(8, 1, Some(0)))), &["window of 0", "1 or more"]);
}

#[test]
fn tensors_that_do_not_fit_are_refused_with_shape_and_remedy() {
    let tensor = Tensor::zeros((6, 4, 64), DType::BF16, &Device::Cpu).unwrap();
    let check = |tensor: &Tensor, dtype, shape: &[usize]| {
        Argument { op: "sink_attention", name: "q", dtype: tensor.dtype(), layout: tensor.layout() }
            .check(dtype, shape)
    };
    assert!(check(&tensor, DType::BF16, &[6, 4, 64]).is_ok());
    // A part of the rows begins 16-byte aligned.
    assert!(check(&tensor.narrow(0, 2, 3).unwrap(), DType::BF16, &[3, 4, 64]).is_ok());
    let text = message(check(&tensor, DType::BF16, &[7, 4, 64]));
    assert_says(&text, &["q has shape [6, 4, 64]", "expected [7, 4, 64]"]);
    assert_says(&message(check(&tensor, DType::F32, &[6, 4, 64])), &["BF16", "expected F32", "to_dtype"]);
    let turned = tensor.transpose(0, 1).unwrap();
    let text = message(check(&turned, DType::BF16, &[4, 6, 64]));
    assert_says(&text, &["q [4, 6, 64]", "strides [64, 256, 1]", "not contiguous", "contiguous()"]);
    let odd = Tensor::zeros(100, DType::BF16, &Device::Cpu).unwrap().narrow(0, 3, 64).unwrap();
    assert_says(
        &message(check(&odd, DType::BF16, &[64])),
        &["starts 3 elements", "multiple of 8", "force_contiguous()"],
    );
    // What it says helps.
    assert!(check(&odd.force_contiguous().unwrap(), DType::BF16, &[64]).is_ok());
}

#[test]
fn sequences_that_cannot_be_launched_are_refused() {
    assert_says(&message(LaunchSequences::for_packed_sequences(&[1, 3])), &["[1, 3]", "start at 0"]);
    assert_says(&message(LaunchSequences::for_packed_sequences(&[0, 3, 2])), &["[0, 3, 2]", "not decrease"]);
    assert_says(
        &message(LaunchSequences::for_cached_sequences(&[1, 2], &[5])),
        &["2 sequences", "caches of 1"],
    );
    assert_says(
        &message(LaunchSequences::for_cached_sequences(&[1 << 30], &[0])),
        &["1073741824 queries", "split the batch"],
    );
    let long = LaunchSequences::for_packed_sequences(&[0, 9_000_000]).unwrap();
    assert!(long.check_rows(&attention(8, 1, None)).is_ok());
    assert_says(
        &message(long.check_rows(&attention(16, 1, None))),
        &["9000000 queries, with 16 query heads", "split the sequence"],
    );
}

#[test]
fn a_page_table_that_is_too_small_is_refused() {
    let sequences = LaunchSequences::for_cached_sequences(&[1, 1], &[64, 10]).unwrap();
    assert!(sequences.check_page_table(4, 2).is_ok());
    for (entries, pages_max) in [(2, 1), (3, 2), (0, 0)] {
        let text = message(sequences.check_page_table(entries, pages_max));
        assert_says(&text, &["of 2 sequences, does not cover 65 keys", "2 pages of 64", "wider"]);
    }
}

/// A build without feature `cuda` cannot hold a tensor on a GPU; the CPU's op knows no bf16.
#[test]
fn the_cpu_op_takes_f32_alone() {
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let (q, kv) = (zeros(&[2, 1, 64], DType::BF16), zeros(&[2, 2, 1, 64], DType::BF16));
    let rows = std::sync::Arc::new(SequenceRows::from_cu_seqlens(&[0, 2]));
    let result = sink_attention(&q, &kv, &zeros(&[1], DType::F32), &rows, attention(1, 1, None));
    assert_says(&message(result), &["BF16", "expected F32"]);
}
