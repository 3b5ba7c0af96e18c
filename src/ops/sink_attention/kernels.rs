//! The declarations of `kernels/sink_attention.cuh` in Rust: the parameter struct, the kernel names and the
//! launch sizes.
//!
//! The module has no CUDA types and is compiled in every build, so a test without a GPU can compare it with
//! the header.

/// `Tile` of the header: a part of one sequence. A query tile has 128 packed rows, and a key tile has
/// [`KernelSet::dkv_keys`] keys. Both begin at `first`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Tile {
    /// Index of the sequence.
    pub sequence: i32,
    /// The first packed row, or the first key. The packed row of a token and a head is token · group size +
    /// index of the head in its group.
    pub first: i32,
}

/// `ChunkTile` of the header: a [`Tile`] of packed rows, and one chunk of the keys that are visible to these
/// rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct ChunkTile {
    /// The packed rows.
    pub tile: Tile,
    /// Index of the chunk. The first key of the chunk is this index times [`CHUNK_KEYS`].
    pub chunk: i32,
}

/// `SinkAttention` of the header, which documents each field. Pointers are device addresses.
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

/// The head size of the kernels.
pub const HEAD_DIM: usize = 64;
/// Number of packed query rows per block of the forward pass and of dQ.
pub const TILE_ROWS: usize = 128;
/// Number of keys per step and per page.
pub const BLOCK_KEYS: usize = 64;
/// Number of keys per chunk. The softmax starts again at multiples of this number.
pub const CHUNK_KEYS: usize = 512;
/// Number of floats of the output of a part. A part is the state of a row after one chunk: its output and its
/// softmax state ([`PART_SUMS`]).
pub const PART_OUT: usize = HEAD_DIM;
/// Number of floats of the softmax state of a part: the maximum and the sum of four lanes.
pub const PART_SUMS: usize = 8;

/// A kernel: its location and launch configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel {
    /// The name of the function.
    pub function: &'static str,
    /// The stem of the name of the file in `kernels/`.
    pub file: &'static str,
    /// Number of threads per block.
    pub threads: usize,
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: usize,
}

/// All kernel sets.
pub static KERNEL_SETS: [KernelSet; 2] = [WGMMA, MMA];

/// The kernels of a forward pass and its backward pass. A run uses one set in all its passes, because two
/// sets round differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelSet {
    /// The name in reports, which is the instruction of its products.
    pub name: &'static str,
    /// Number of blocks: query tiles × key-value heads.
    pub forward: Kernel,
    /// Computes one chunk of the forward pass. Number of blocks: chunk tiles × key-value heads.
    pub chunk: Kernel,
    /// Merges the chunks. Number of blocks: query tiles × key-value heads.
    pub merge: Kernel,
    /// Number of blocks: the number of rows of [T, N] divided by [`DELTA_ROWS`].
    pub delta: Kernel,
    /// Number of blocks: key tiles × key-value heads.
    pub dkv: Kernel,
    /// Number of keys per key tile.
    pub dkv_keys: usize,
    /// Number of blocks: query tiles × key-value heads.
    pub dq: Kernel,
    /// Number of blocks: heads.
    pub dsinks: Kernel,
}

/// Number of rows of `[T, N]` per block of `delta`.
pub const DELTA_ROWS: usize = 32;

const BLOCK_BYTES: usize = BLOCK_KEYS * HEAD_DIM * 2;
const TILE_BYTES: usize = TILE_ROWS * HEAD_DIM * 2;

const fn kernel(function: &'static str, file: &'static str, threads: usize, shared_bytes: usize) -> Kernel {
    Kernel { function, file, threads, shared_bytes }
}

/// The kernels with warp-wide tensor-core products (`mma.sync`).
pub const MMA: KernelSet = KernelSet {
    name: "mma.sync",
    forward: kernel("sink_attention_forward", "sink_attention_forward", 128, FORWARD_BYTES),
    chunk: kernel("sink_attention_chunk", "sink_attention_forward", 128, FORWARD_BYTES),
    merge: kernel("sink_attention_merge", "sink_attention_forward", 128, 0),
    delta: kernel("sink_attention_delta", "sink_attention_backward", 256, 0),
    dkv: kernel("sink_attention_dkv", "sink_attention_backward", 128, 6 * BLOCK_BYTES + 2 * 3 * 64 * 4),
    dkv_keys: BLOCK_KEYS,
    dq: kernel("sink_attention_dq", "sink_attention_backward", 256, 2 * TILE_BYTES + 4 * BLOCK_BYTES),
    dsinks: kernel("sink_attention_dsinks", "sink_attention_backward", 256, 256 * 4),
};

/// The kernels with warpgroup-wide tensor-core products (`wgmma`).
pub const WGMMA: KernelSet = KernelSet {
    name: "wgmma",
    forward: kernel(
        "sink_attention_forward_hopper",
        "sink_attention_forward_hopper",
        256,
        ROW_STATE_BYTES + ring_bytes(4),
    ),
    chunk: kernel(
        "sink_attention_chunk_hopper",
        "sink_attention_forward_hopper",
        256,
        ROW_STATE_BYTES + ring_bytes(4),
    ),
    dkv: kernel(
        "sink_attention_dkv_hopper",
        "sink_attention_backward_hopper",
        256,
        4 * BLOCK_BYTES + ring_bytes(4) + 4 * 3 * 64 * 4,
    ),
    dkv_keys: 128,
    dq: kernel(
        "sink_attention_dq_hopper",
        "sink_attention_backward_hopper",
        256,
        2 * TILE_BYTES + ring_bytes(8),
    ),
    ..MMA
};

/// Size of the shared memory for the saved state of the rows of a tile, in bytes. A warp has 16 rows, and
/// each of its 32 lanes saves 11 × 16 bytes.
const ROW_STATE_BYTES: usize = TILE_ROWS / 16 * 32 * 11 * 16;
const FORWARD_BYTES: usize = TILE_BYTES + 4 * BLOCK_BYTES + ROW_STATE_BYTES;

/// Returns the size of `stages` pipeline stages, in bytes. A stage has a block of keys, a block of values and
/// two barriers.
const fn ring_bytes(stages: usize) -> usize {
    stages * (2 * BLOCK_BYTES + 2 * 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A C type of the header.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum CType {
        /// Any pointer.
        Pointer,
        /// `int32_t`.
        Int,
        /// `float`.
        Float,
    }

    macro_rules! fields {
        ($($ctype:ident: $($name:ident)*;)*) => {
            [$($((stringify!($name), CType::$ctype, std::mem::offset_of!(SinkAttentionParams, $name))),*),*]
        };
    }

    /// Name, C type and offset in bytes of every field, in order.
    const FIELDS: [(&str, CType, usize); 29] = fields! {
        Pointer: q k v sinks cu_seqlens_q cu_seqlens_k page_table tiles chunk_tiles part_starts part_out
            part_sums out lse dout delta dq dk dv dsinks;
        Int: tokens heads kv_heads kv_token_stride kv_head_stride pages_max window;
        Float: scale scale_log2;
    };

    /// Returns the lines between `start` and the next `};`, without comments.
    fn body(start: &str) -> Vec<String> {
        let header = include_str!("../../../kernels/sink_attention.cuh");
        let inside = header.split(start).nth(1).expect("in the header").split("};").next().unwrap();
        let code = inside.lines().map(|line| line.split("//").next().unwrap().trim().to_owned());
        code.filter(|line| !line.is_empty()).collect()
    }

    #[test]
    fn the_parameters_are_the_headers_field_by_field() {
        let lines = body("struct SinkAttention {");
        let mut offset = 0;
        let mut fields = vec![];
        for line in &lines {
            let (ctype, name) = line.trim_end_matches(';').rsplit_once(' ').expect("a type and a name");
            let (ctype, size) = match ctype.trim() {
                pointer if pointer.ends_with('*') => (CType::Pointer, 8),
                "int32_t" => (CType::Int, 4),
                "float" => (CType::Float, 4),
                other => panic!("{other} {name}: the mirror knows no such type"),
            };
            offset = usize::next_multiple_of(offset, size);
            fields.push((name.to_owned(), ctype, offset));
            offset += size;
        }
        let mirror: Vec<_> = FIELDS.iter().map(|&(name, ctype, at)| (name.to_owned(), ctype, at)).collect();
        assert_eq!(fields, mirror);
        assert_eq!(offset.next_multiple_of(8), size_of::<SinkAttentionParams>());
        assert_eq!(body("struct Tile {"), ["int32_t sequence;", "int32_t first;"]);
        assert_eq!(body("struct ChunkTile {"), ["Tile tile;", "int32_t chunk;"]);
    }
}
