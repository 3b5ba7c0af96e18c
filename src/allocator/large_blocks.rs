//! Blocks of 16 MiB and more, such as the activations of a real model, in mappings of their own.
//!
//! The sizes of such blocks differ from micro-batch to micro-batch. An allocator that reuses only whole free
//! blocks keeps far more memory than is in use at one time. Here a free block becomes a block of another
//! size: its tail is cut off, or `mremap` adds pages to it. The pages it had are not cleared again. All
//! mappings together never exceed the most that was in use at one time.

use std::collections::{BTreeMap, BTreeSet};
use std::ptr::null_mut;

/// Minimum size of a block, in bytes.
pub(super) const LARGE_BYTES_MIN: usize = 16 << 20;

/// Unit of a block's size: a huge page of x86-64, in bytes.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// The part of a block that may stay unused: a free block that is larger by at most this part is not cut.
const UNUSED_FRACTION: usize = 16;

/// A new or reused block. Its first `used` bytes may hold old values, the rest is zero.
struct Block {
    address: usize,
    bytes: usize,
    used: usize,
}

/// The large blocks of a process: those in use, and free ones.
pub(super) struct LargeBlocks {
    /// Size of each block in use, by address.
    in_use: BTreeMap<usize, usize>,
    /// Size and address of each free block.
    pub(super) free: BTreeSet<(usize, usize)>,
    pub(super) bytes_in_use: usize,
    pub(super) bytes_in_use_max: usize,
    /// Size of all blocks.
    pub(super) bytes_mapped: usize,
}

impl LargeBlocks {
    pub(super) const fn new() -> Self {
        Self {
            in_use: BTreeMap::new(),
            free: BTreeSet::new(),
            bytes_in_use: 0,
            bytes_in_use_max: 0,
            bytes_mapped: 0,
        }
    }

    /// Returns a block of at least `size` bytes. With `zeroed`, its first `size` bytes are zero. Returns null
    /// if the system refuses the memory.
    pub(super) fn alloc(&mut self, size: usize, zeroed: bool) -> *mut u8 {
        let Some(bytes) = size.checked_next_multiple_of(HUGE_PAGE_BYTES) else { return null_mut() };
        let Some(block) = self.reuse(bytes).or_else(|| self.map(bytes)) else { return null_mut() };
        self.insert(block.address, block.bytes);
        self.release_unneeded();
        let pointer = block.address as *mut u8;
        if zeroed {
            // SAFETY: the block has `used` bytes, and nothing else uses them.
            unsafe { pointer.write_bytes(0, block.used.min(size)) };
        }
        pointer
    }

    /// Frees the block at `pointer`. Returns false if there is no such block.
    pub(super) fn free(&mut self, pointer: *mut u8) -> bool {
        let Some(bytes) = self.in_use.remove(&(pointer as usize)) else { return false };
        self.bytes_in_use -= bytes;
        self.free.insert((bytes, pointer as usize));
        true
    }

    /// Changes the size of the block at `pointer` to at least `size` bytes, and keeps its values. Returns
    /// `None` if there is no such block, and null if the system refuses the memory.
    pub(super) fn resize(&mut self, pointer: *mut u8, size: usize) -> Option<*mut u8> {
        let old = *self.in_use.get(&(pointer as usize))?;
        let Some(bytes) = size.checked_next_multiple_of(HUGE_PAGE_BYTES) else { return Some(null_mut()) };
        if bytes == old {
            return Some(pointer);
        }
        let Some(address) = remap(pointer as usize, old, bytes) else { return Some(null_mut()) };
        self.in_use.remove(&(pointer as usize));
        self.bytes_in_use -= old;
        self.bytes_mapped = self.bytes_mapped - old + bytes;
        self.insert(address, bytes);
        self.release_unneeded();
        Some(address as *mut u8)
    }

    fn insert(&mut self, address: usize, bytes: usize) {
        self.in_use.insert(address, bytes);
        self.bytes_in_use += bytes;
        self.bytes_in_use_max = self.bytes_in_use_max.max(self.bytes_in_use);
    }

    /// Makes a block of `bytes` from the smallest free block that has as many or, if none has, from the
    /// largest.
    fn reuse(&mut self, bytes: usize) -> Option<Block> {
        let larger = self.free.range((bytes, 0)..).next().copied();
        let (old, address) = larger.or_else(|| self.free.last().copied())?;
        self.free.remove(&(old, address));
        if old < bytes {
            let Some(address) = remap(address, old, bytes) else {
                self.unmap(address, old);
                return None;
            };
            self.bytes_mapped += bytes - old;
            return Some(Block { address, bytes, used: old });
        }
        if old - bytes <= bytes / UNUSED_FRACTION {
            return Some(Block { address, bytes: old, used: old });
        }
        let (rest, tail) = (old - bytes, address + bytes);
        match rest >= LARGE_BYTES_MIN {
            true => _ = self.free.insert((rest, tail)),
            false => self.unmap(tail, rest),
        }
        Some(Block { address, bytes, used: bytes })
    }

    /// Maps a new block. If the system refuses, gives all free blocks back and tries again.
    fn map(&mut self, bytes: usize) -> Option<Block> {
        let address = map(bytes).or_else(|| {
            while let Some((bytes, address)) = self.free.pop_first() {
                self.unmap(address, bytes);
            }
            map(bytes)
        })?;
        self.bytes_mapped += bytes;
        Some(Block { address, bytes, used: 0 })
    }

    /// Gives the smallest free blocks back until no more is mapped than was in use at one time.
    fn release_unneeded(&mut self) {
        while self.bytes_mapped > self.bytes_in_use_max
            && let Some((bytes, address)) = self.free.pop_first()
        {
            self.unmap(address, bytes);
        }
    }

    fn unmap(&mut self, address: usize, bytes: usize) {
        // SAFETY: the range is a free block or a part of one, so nothing uses it.
        unsafe { libc::munmap(address as *mut libc::c_void, bytes) };
        self.bytes_mapped -= bytes;
    }
}

/// Maps `bytes` zero bytes, a multiple of [`HUGE_PAGE_BYTES`].
fn map(bytes: usize) -> Option<usize> {
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the system chooses the address, so no other mapping changes.
    let address = unsafe { libc::mmap(null_mut(), bytes, access, flags, -1, 0) };
    (address != libc::MAP_FAILED).then_some(address as usize)
}

/// Changes the size of a mapping, which may move it, and keeps its values. Further bytes are zero.
fn remap(address: usize, old: usize, bytes: usize) -> Option<usize> {
    // SAFETY: the range is a block of this module. Its owner uses only the returned address afterwards.
    let moved = unsafe { libc::mremap(address as *mut libc::c_void, old, bytes, libc::MREMAP_MAYMOVE) };
    (moved != libc::MAP_FAILED).then_some(moved as usize)
}
