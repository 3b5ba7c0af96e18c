//! The allocator's large blocks: they keep their values, and mappings never exceed the peak of use.

#[path = "../../src/allocator/large_blocks.rs"]
mod large_blocks;

use large_blocks::{LARGE_BYTES_MIN, LargeBlocks};
use rand::Rng;
use rloss::random::{Purpose, stream};

const MIB: usize = 1 << 20;

/// Writes `value` at the start, in the middle and at the end of a block.
fn mark(pointer: *mut u8, size: usize, value: u8) {
    for at in [0, size / 2, size - 1] {
        // SAFETY: the block has `size` bytes.
        unsafe { *pointer.add(at) = value };
    }
}

fn marks(pointer: *mut u8, size: usize) -> [u8; 3] {
    // SAFETY: the block has `size` bytes.
    [0, size / 2, size - 1].map(|at| unsafe { *pointer.add(at) })
}

#[test]
fn blocks_of_changing_sizes_keep_their_values_and_never_map_more_than_was_in_use() {
    let (mut blocks, mut random) = (LargeBlocks::new(), stream(7, Purpose::Problem, &[]));
    let mut held: Vec<(*mut u8, usize, u8)> = vec![];
    for round in 0..2000_u32 {
        let value = (round % 251 + 1) as u8;
        let size = random.random_range(LARGE_BYTES_MIN..48 * MIB);
        match random.random_range(0..5) {
            0 | 1 if held.len() < 8 => {
                let zeroed = round % 2 == 0;
                let pointer = blocks.alloc(size, zeroed);
                assert!(!pointer.is_null());
                assert!(!zeroed || marks(pointer, size) == [0; 3]);
                mark(pointer, size, value);
                held.push((pointer, size, value));
            }
            2 if !held.is_empty() => {
                let index = random.random_range(0..held.len());
                let (pointer, old, value) = held[index];
                let moved = blocks.resize(pointer, size).expect("a block");
                assert_eq!(marks(moved, 1), [value; 3]);
                assert!(size < old || marks(moved, old) == [value; 3]);
                mark(moved, size, value);
                held[index] = (moved, size, value);
            }
            _ if !held.is_empty() => {
                let (pointer, size, value) = held.swap_remove(random.random_range(0..held.len()));
                assert_eq!(marks(pointer, size), [value; 3]);
                assert!(blocks.free(pointer) && !blocks.free(pointer));
            }
            _ => {}
        }
        let free: usize = blocks.free.iter().map(|(bytes, _)| bytes).sum();
        assert_eq!(blocks.bytes_mapped, blocks.bytes_in_use + free);
        assert!(blocks.bytes_mapped <= blocks.bytes_in_use_max);
    }
    assert!(held.iter().all(|(pointer, size, value)| marks(*pointer, *size) == [*value; 3]));
}

#[test]
fn a_free_block_becomes_smaller_and_larger_ones() {
    let mut blocks = LargeBlocks::new();
    let first = blocks.alloc(64 * MIB, false);
    assert!(blocks.free(first));
    let parts = [blocks.alloc(20 * MIB, false), blocks.alloc(44 * MIB, false)];
    assert_eq!((blocks.bytes_in_use, blocks.bytes_mapped), (64 * MIB, 64 * MIB));
    assert!(parts.into_iter().all(|part| blocks.free(part)));
    let whole = blocks.alloc(60 * MIB, true);
    assert_eq!(marks(whole, 60 * MIB), [0; 3]);
    assert_eq!(blocks.bytes_mapped, 60 * MIB);
    assert!(blocks.alloc(usize::MAX - MIB, false).is_null() && !blocks.free(std::ptr::null_mut()));
}
