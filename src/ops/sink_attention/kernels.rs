//! Rust mirror of `kernels/sink_attention.cuh`: parameter struct, kernel names and launch sizes.
//!
//! It has no CUDA types and is compiled in every build.

/// `Tile` of `kernels/sink_attention.cuh`: a part of one sequence, from `first` on. A query tile has 128
/// packed rows. A key tile has [`KernelSet::dkv_keys`] keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Tile {
    /// Index of the sequence.
    pub sequence: i32,
    /// First packed row (token · group + head of the group) or first key.
    pub first: i32,
}

/// `ChunkTile` of `kernels/sink_attention.cuh`: a [`Tile`] of packed rows and one chunk of their visible
/// keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct ChunkTile {
    /// The rows.
    pub tile: Tile,
    /// Index of the chunk. Its first key is [`CHUNK_KEYS`] times this index.
    pub chunk: i32,
}

/// `SinkAttention` of `kernels/sink_attention.cuh`, which documents each field. Pointers are device
/// addresses.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
#[allow(missing_docs)]
pub struct SinkAttentionParams {
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub sinks: u64,
    pub cu_seqlens_q: u64,
    pub cu_seqlens_k: u64,
    pub page_table: u64,
    pub tiles: u64,
    pub chunk_tiles: u64,
    pub part_starts: u64,
    pub part_out: u64,
    pub part_sums: u64,
    pub out: u64,
    pub lse: u64,
    pub dout: u64,
    pub delta: u64,
    pub dq: u64,
    pub dk: u64,
    pub dv: u64,
    pub dsinks: u64,
    pub tokens: i32,
    pub heads: i32,
    pub kv_heads: i32,
    pub kv_token_stride: i32,
    pub kv_head_stride: i32,
    pub pages_max: i32,
    pub window: i32,
    pub scale: f32,
    pub scale_log2: f32,
}

const _: () = assert!(size_of::<SinkAttentionParams>() == 200 && align_of::<SinkAttentionParams>() == 8);
const _: () = assert!(size_of::<Tile>() == 8 && align_of::<Tile>() == 4);
const _: () = assert!(size_of::<ChunkTile>() == 12 && align_of::<ChunkTile>() == 4);

/// The head sizes of the kernels.
pub const HEAD_DIMS: [usize; 2] = [64, 128];
/// Number of packed query rows per thread block of the forward pass and of dQ.
pub const TILE_ROWS: usize = 128;
/// Number of keys per step of a kernel, and per page of the cache.
pub const BLOCK_KEYS: usize = 64;
/// Number of keys per chunk. The softmax starts again with each chunk.
pub const CHUNK_KEYS: usize = 512;
/// Number of f32 values of the softmax state in a part: a maximum and a sum for each of four lanes. A part is
/// the result of one row for one chunk. A part also has an output, one f32 per element of the head.
pub const PART_SUMS: usize = 8;

/// A kernel: its location and launch configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    /// Name of its function.
    pub function: &'static str,
    /// Name of its file in `kernels/`, without the extension.
    pub file: &'static str,
    /// Threads per block.
    pub threads: usize,
    /// Dynamic shared memory per block, bytes.
    pub shared_bytes: usize,
}

/// The kernel sets of each head size, in the order of [`HEAD_DIMS`].
static KERNEL_SETS: [[KernelSet; 2]; 2] = [[WGMMA, MMA], [WGMMA_128, MMA_128]];

/// Returns the kernel sets for heads of `head_dim`, if there are any.
pub fn kernel_sets(head_dim: usize) -> Option<&'static [KernelSet; 2]> {
    HEAD_DIMS.iter().position(|&known| known == head_dim).map(|i| &KERNEL_SETS[i])
}

/// The kernels of a forward pass and of its backward pass. A run uses only one set, because the sets round
/// differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelSet {
    /// Its name in reports: the instruction of its products.
    pub name: &'static str,
    /// Its head size.
    pub head_dim: usize,
    /// Computes the whole forward pass. Number of blocks: query tiles × key-value heads.
    pub forward: Kernel,
    /// Computes one chunk of the forward pass. Number of blocks: chunk tiles × key-value heads.
    pub chunk: Kernel,
    /// Merges the chunks. Number of blocks: query tiles × key-value heads.
    pub merge: Kernel,
    /// Computes the dot products of outputs and their gradients. Number of blocks: `T · N` divided by
    /// [`DELTA_ROWS`], rounded up.
    pub delta: Kernel,
    /// Computes the gradients of keys and values. Number of blocks: key tiles × key-value heads.
    pub dkv: Kernel,
    /// Keys per key tile.
    pub dkv_keys: usize,
    /// Computes the gradient of queries. Number of blocks: query tiles × key-value heads.
    pub dq: Kernel,
    /// Computes the gradient of sinks. Number of blocks: heads.
    pub dsinks: Kernel,
}

/// Number of (token, head) pairs per block of the kernel [`KernelSet::delta`].
pub const DELTA_ROWS: usize = 32;

pub const fn kernel(
    function: &'static str,
    file: &'static str,
    threads: usize,
    shared_bytes: usize,
) -> Kernel {
    Kernel { function, file, threads, shared_bytes }
}

const FORWARD: &str = "sink_attention_forward";
const FORWARD_HOPPER: &str = "sink_attention_forward_hopper";
const BACKWARD: &str = "sink_attention_backward";
const BACKWARD_HOPPER: &str = "sink_attention_backward_hopper";

/// Kernels with warp-wide tensor-core products, `mma.sync`.
pub const MMA: KernelSet = KernelSet {
    name: "mma.sync",
    head_dim: 64,
    forward: kernel("sink_attention_forward", FORWARD, 128, forward_bytes(64)),
    chunk: kernel("sink_attention_chunk", FORWARD, 128, forward_bytes(64)),
    merge: kernel("sink_attention_merge", FORWARD, 128, 0),
    delta: kernel("sink_attention_delta", BACKWARD, 256, 0),
    dkv: kernel("sink_attention_dkv", BACKWARD, 128, dkv_bytes(64)),
    dkv_keys: BLOCK_KEYS,
    dq: kernel("sink_attention_dq", BACKWARD, 256, dq_bytes(64)),
    dsinks: kernel("sink_attention_dsinks", BACKWARD, 256, 256 * 4),
};

/// Kernels with warpgroup-wide products, `wgmma`.
pub const WGMMA: KernelSet = KernelSet {
    name: "wgmma",
    forward: kernel("sink_attention_forward_hopper", FORWARD_HOPPER, 256, forward_hopper_bytes(64)),
    chunk: kernel("sink_attention_chunk_hopper", FORWARD_HOPPER, 256, forward_hopper_bytes(64)),
    dkv: kernel("sink_attention_dkv_hopper", BACKWARD_HOPPER, 256, dkv_hopper_bytes(64, 128)),
    dkv_keys: 128,
    dq: kernel("sink_attention_dq_hopper", BACKWARD_HOPPER, 256, dq_hopper_bytes(64, 8)),
    ..MMA
};

/// [`MMA`] for heads of 128.
pub const MMA_128: KernelSet = KernelSet {
    head_dim: 128,
    forward: kernel("sink_attention_forward_128", FORWARD, 256, forward_bytes(128)),
    chunk: kernel("sink_attention_chunk_128", FORWARD, 256, forward_bytes(128)),
    merge: kernel("sink_attention_merge_128", FORWARD, 128, 0),
    delta: kernel("sink_attention_delta_128", BACKWARD, 512, 0),
    dkv: kernel("sink_attention_dkv_128", BACKWARD, 256, dkv_bytes(128)),
    dq: kernel("sink_attention_dq_128", BACKWARD, 256, dq_bytes(128)),
    ..MMA
};

/// [`WGMMA`] for heads of 128.
pub const WGMMA_128: KernelSet = KernelSet {
    name: WGMMA.name,
    forward: kernel("sink_attention_forward_hopper_128", FORWARD_HOPPER, 256, forward_hopper_bytes(128)),
    chunk: kernel("sink_attention_chunk_hopper_128", FORWARD_HOPPER, 256, forward_hopper_bytes(128)),
    dkv: kernel("sink_attention_dkv_hopper_128", BACKWARD_HOPPER, 256, dkv_hopper_bytes(128, 64)),
    dq: kernel("sink_attention_dq_hopper_128", BACKWARD_HOPPER, 256, dq_hopper_bytes(128, 4)),
    ..MMA_128
};

/// Returns the bytes of shared memory of a block of keys.
const fn block_bytes(head_dim: usize) -> usize {
    BLOCK_KEYS * head_dim * 2
}

/// Returns the bytes of shared memory of a tile of rows.
const fn tile_bytes(head_dim: usize) -> usize {
    TILE_ROWS * head_dim * 2
}

/// Returns the bytes of shared memory for the saved state of a tile's rows. One warp owns 16 rows; each of
/// its 32 lanes saves its outputs and 3 × 16 bytes more.
const fn row_state_bytes(head_dim: usize) -> usize {
    TILE_ROWS / 16 * 32 * (head_dim / 8 + 3) * 16
}

/// Returns the bytes of shared memory of `stages` stages. A stage has two blocks of keys and two barriers.
const fn ring_bytes(head_dim: usize, stages: usize) -> usize {
    stages * (2 * block_bytes(head_dim) + 2 * 8)
}

const fn forward_bytes(head_dim: usize) -> usize {
    tile_bytes(head_dim) + 4 * block_bytes(head_dim) + row_state_bytes(head_dim)
}

const fn dkv_bytes(head_dim: usize) -> usize {
    6 * block_bytes(head_dim) + 2 * 3 * 64 * 4
}

const fn dq_bytes(head_dim: usize) -> usize {
    2 * tile_bytes(head_dim) + 4 * block_bytes(head_dim)
}

const fn forward_hopper_bytes(head_dim: usize) -> usize {
    row_state_bytes(head_dim) + ring_bytes(head_dim, 4)
}

const fn dkv_hopper_bytes(head_dim: usize, keys: usize) -> usize {
    keys / BLOCK_KEYS * 2 * block_bytes(head_dim) + ring_bytes(head_dim, 4) + 4 * 3 * 64 * 4
}

const fn dq_hopper_bytes(head_dim: usize, stages: usize) -> usize {
    2 * tile_bytes(head_dim) + ring_bytes(head_dim, stages)
}
