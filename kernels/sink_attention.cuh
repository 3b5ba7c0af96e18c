// Attention with one learnable sink per query head: definitions that kernels and callers share.
// docs/KERNELS.md explains it.
//
// T tokens, N query heads, M key-value heads, `group` = N / M query heads per key-value head, head
// dimension D = 64 or 128. The queries of a sequence and one key-value head are packed into rows: row = token * group
// + head of the group. Keys are processed in blocks of 64 and chunks of 512 at absolute positions, in
// ascending order. A row's bits depend on nothing else.
#pragma once

#include "primitives.cuh"
#include "ring.cuh"

// The work of a block: 128 packed rows of a sequence from `first`, or 64 keys (128 in dkv_hopper, not in
// dkv_hopper_128) from `first`. `first` is a multiple of these.
struct Tile {
  int32_t sequence;
  int32_t first;
};

// A tile and one chunk of keys: keys 512 * chunk to 512 * chunk + 511.
struct ChunkTile {
  Tile tile;
  int32_t chunk;
};

// The parameter of every kernel here. All pointers are 16-byte aligned, except those of the small arrays. A
// kernel reads only the fields that its comment names.
struct SinkAttention {
  const bf16* q;                // [T, N, D]
  const bf16* k;                // key head m of key row r: k + r * kv_token_stride + m * kv_head_stride
  const bf16* v;                // strides of k
  const float* sinks;           // [N]; -1e9 for none
  const int32_t* cu_seqlens_q;  // [sequences + 1] first query token of each sequence, then T
  const int32_t* cu_seqlens_k;  // [sequences + 1] running sum of the key counts
  const int32_t* page_table;    // [sequences, pages_max]: page of keys 64p to 64p + 63; null: packed
  const Tile* tiles;            // [blocks / M], largest first
  const ChunkTile* chunk_tiles; // [blocks / M], each tile with each chunk that its rows see
  const int32_t* part_starts;   // [sequences] running sum of tokens * chunks, one part for each
  float* part_out;              // [parts, N, D] output of a chunk, until sink_attention_merge
  float2* part_sums;            // [parts, N, 4] its maximum, and its sum in four lanes
  bf16* out;                    // [T, N, D]
  float* lse;                   // [T, N] natural logarithm of the softmax's sum, sink included
  const bf16* dout;             // [T, N, D]
  float* delta;                 // [T, N] rowsum(dout * out)
  bf16* dq;                     // [T, N, D]
  bf16* dk;                     // strides of k
  bf16* dv;                     // strides of v
  float* dsinks;                // [N]
  int32_t tokens;               // T
  int32_t heads;                // N
  int32_t kv_heads;             // M
  int32_t kv_token_stride;      // elements, a multiple of 8
  int32_t kv_head_stride;       // elements, a multiple of 8
  int32_t pages_max;
  int32_t window;               // keys a query sees, itself included; 0: all. See Sequence
  float scale;                  // of the scores, above 0
  float scale_log2;             // scale * log2(e)
};

namespace sink_attention {

// A head is one panel or two of 64 elements. In shared memory the rows of a panel lie one below the other, 128
// bytes each; the next panel follows.
constexpr int panel_columns = 64;
constexpr int panel_row_bytes = panel_columns * sizeof(bf16);
template <int panels>
constexpr int head_dim = panels * panel_columns;

constexpr int tile_rows = 128;   // packed rows per block of the forward and of dq
constexpr int block_keys = 64;   // keys per step, per page, and per block of dkv
constexpr int chunk_keys = 512;  // keys per chunk; each starts a new softmax
constexpr int chunk_blocks = chunk_keys / block_keys;
constexpr int panel_bytes = block_keys * panel_row_bytes;      // of a block of keys
constexpr int tile_panel_bytes = tile_rows * panel_row_bytes;  // of a tile of rows
template <int panels>
constexpr int block_bytes = panels * panel_bytes;
template <int panels>
constexpr int tile_bytes = panels * tile_panel_bytes;
template <int panels>
constexpr int rows_bytes = 32 * (8 * panels + 3) * 16;  // state of a fragment's 16 rows in shared memory

// Kernels for Hopper's tensor cores (wgmma): two warpgroups per block.
constexpr int hopper_threads = 256;
template <int panels, int stages, int copies_ahead>
using HopperRing = Ring<stages, copies_ahead, hopper_threads / 32, block_bytes<panels>>;
template <int panels>
using ForwardRing = HopperRing<panels, 4, 2>;  // heads of 64: two blocks share a multiprocessor's memory
template <int panels>
using DkvRing = HopperRing<panels, 4, 2>;  // a row's numbers are in registers: only one step ahead
template <int panels>
using DqRing = HopperRing<panels, 8 / panels, 4 - panels>;  // one block uses a multiprocessor's whole memory
template <int panels>
constexpr int dkv_hopper_tile_keys = 128 / panels;  // keys per block of dkv_hopper

// Bytes of dynamic shared memory.
template <int panels>
constexpr int forward_bytes = tile_bytes<panels> + 4 * block_bytes<panels> + tile_rows / 16 * rows_bytes<panels>;
template <int panels>
constexpr int dkv_bytes = 6 * block_bytes<panels> + 2 * 3 * 64 * sizeof(float);
template <int panels>
constexpr int dq_bytes = 2 * tile_bytes<panels> + 4 * block_bytes<panels>;
template <int panels>
constexpr int forward_hopper_bytes = tile_rows / 16 * rows_bytes<panels> + ForwardRing<panels>::bytes;
template <int panels>
constexpr int dkv_hopper_bytes = dkv_hopper_tile_keys<panels> / block_keys * 2 * block_bytes<panels> +
                                 DkvRing<panels>::bytes + DkvRing<panels>::stages * 3 * 64 * sizeof(float);
template <int panels>
constexpr int dq_hopper_bytes = 2 * tile_bytes<panels> + DqRing<panels>::bytes;

// Threads per block and bytes of dynamic shared memory of each kernel; `_128` are those of heads of 128. Blocks:
// tiles * kv_heads; chunk: chunk_tiles * kv_heads; delta: tokens * heads / delta_rows, rounded up; dsinks: heads.
constexpr int forward_threads = 128;
constexpr int forward_shared_bytes = forward_bytes<1>;
constexpr int forward_128_threads = 256;
constexpr int forward_128_shared_bytes = forward_bytes<2>;
constexpr int chunk_threads = forward_threads;
constexpr int chunk_shared_bytes = forward_shared_bytes;
constexpr int chunk_128_threads = forward_128_threads;
constexpr int chunk_128_shared_bytes = forward_128_shared_bytes;
constexpr int merge_threads = 128;
constexpr int merge_128_threads = merge_threads;
constexpr int delta_rows = 32;
constexpr int delta_threads = 256;
constexpr int delta_128_threads = 512;
constexpr int dkv_threads = 128;
constexpr int dkv_shared_bytes = dkv_bytes<1>;
constexpr int dkv_128_threads = 256;
constexpr int dkv_128_shared_bytes = dkv_bytes<2>;
constexpr int dq_threads = 256;
constexpr int dq_shared_bytes = dq_bytes<1>;
constexpr int dq_128_threads = dq_threads;
constexpr int dq_128_shared_bytes = dq_bytes<2>;
constexpr int dsinks_threads = 256;
constexpr int dsinks_shared_bytes = dsinks_threads * sizeof(float);
constexpr int forward_hopper_threads = hopper_threads;
constexpr int forward_hopper_shared_bytes = forward_hopper_bytes<1>;
constexpr int forward_hopper_128_threads = hopper_threads;
constexpr int forward_hopper_128_shared_bytes = forward_hopper_bytes<2>;
constexpr int chunk_hopper_threads = hopper_threads;
constexpr int chunk_hopper_shared_bytes = forward_hopper_shared_bytes;
constexpr int chunk_hopper_128_threads = hopper_threads;
constexpr int chunk_hopper_128_shared_bytes = forward_hopper_128_shared_bytes;
constexpr int dkv_hopper_threads = hopper_threads;
constexpr int dkv_hopper_shared_bytes = dkv_hopper_bytes<1>;
constexpr int dkv_hopper_128_threads = hopper_threads;
constexpr int dkv_hopper_128_shared_bytes = dkv_hopper_bytes<2>;
constexpr int dq_hopper_threads = hopper_threads;
constexpr int dq_hopper_shared_bytes = dq_hopper_bytes<1>;
constexpr int dq_hopper_128_threads = hopper_threads;
constexpr int dq_hopper_128_shared_bytes = dq_hopper_bytes<2>;

constexpr float log2_e = 1.44269504f;
constexpr float ln_2 = 0.69314718f;
constexpr float hidden = -__builtin_huge_valf();  // the score of a key that a query does not see

// Offsets are 64-bit: a cache or a batch of long sequences has more than 2^31 elements.

// Index of a token's query head in [T, N].
PRIMITIVE int64_t row_place(const SinkAttention& p, int token, int head) {
  return static_cast<int64_t>(token) * p.heads + head;
}

// The packed rows and the keys of one sequence for one key-value head.
struct Sequence {
  int index;
  int query_start;  // first token among all queries
  int rows;         // packed rows: query tokens * group; times group again below 2^31
  int group;        // query heads of the key-value head
  uint32_t inverse; // 2^31 / group, rounded up: division by multiplication, exact for rows * group < 2^31
  int kv_head;
  int key_start;    // first key row when packed
  int keys;
  int offset;       // position of the first query token
  int window;       // keys a query sees; at most all keys, so that sums with positions fit 32 bits

  PRIMITIVE Sequence(const SinkAttention& p, int sequence, int head)
      : index(sequence), query_start(p.cu_seqlens_q[sequence]), group(p.heads / p.kv_heads),
        inverse(0x7fffffffu / group + 1), kv_head(head), key_start(p.cu_seqlens_k[sequence]) {
    const int queries = p.cu_seqlens_q[sequence + 1] - query_start;
    rows = queries * group;
    keys = p.cu_seqlens_k[sequence + 1] - key_start;
    offset = keys - queries;
    window = p.window > 0 ? min(p.window, keys) : keys;
  }

  PRIMITIVE int token(int row) const { return static_cast<uint64_t>(row) * inverse >> 31; }
  PRIMITIVE int position(int row) const { return offset + token(row); }
  PRIMITIVE int head(int row) const { return kv_head * group + row - token(row) * group; }

  // Index of a packed row in [T, N].
  PRIMITIVE int64_t place(const SinkAttention& p, int row) const {
    return row_place(p, query_start + token(row), head(row));
  }

  // Index of a packed row's part of a chunk in [parts, N].
  PRIMITIVE int64_t part_place(const SinkAttention& p, int row, int chunk) const {
    const int chunks = (keys + chunk_keys - 1) / chunk_keys;
    return row_place(p, p.part_starts[index] + token(row) * chunks + chunk, head(row));
  }

  // Key row that holds the first key of block `block`.
  PRIMITIVE int block_row(const SinkAttention& p, int block) const {
    if (p.page_table == nullptr) return key_start + block * block_keys;
    return p.page_table[static_cast<int64_t>(index) * p.pages_max + block] * block_keys;
  }
};

// Elements from the start of a key row to the start of `kv_head`.
PRIMITIVE int64_t key_place(const SinkAttention& p, int key_row, int kv_head) {
  return static_cast<int64_t>(key_row) * p.kv_token_stride + static_cast<int64_t>(kv_head) * p.kv_head_stride;
}

// Half-open range of key blocks, or of packed rows.
struct Range {
  int first;
  int end;

  PRIMITIVE bool has(int i) const { return first <= i && i < end; }
};

// Key blocks that any query at positions `first` to `last` sees.
PRIMITIVE Range blocks_seen(const Sequence& s, int first, int last) {
  const int key_first = max(0, first + 1 - s.window);
  const int key_end = max(key_first, min(s.keys, last + 1));
  return {key_first / block_keys, (key_end + block_keys - 1) / block_keys};
}

// Key blocks of which all these queries see every key.
PRIMITIVE Range blocks_seen_whole(const Sequence& s, int first, int last) {
  return {(max(0, last + 1 - s.window) + block_keys - 1) / block_keys, (first + 1) / block_keys};
}

// Chunks that hold these key blocks.
PRIMITIVE Range chunks_of(Range blocks) {
  return {blocks.first / chunk_blocks, (blocks.end + chunk_blocks - 1) / chunk_blocks};
}

// Those of these key blocks that are in a chunk.
PRIMITIVE Range blocks_of(Range blocks, int chunk) {
  return {max(blocks.first, chunk * chunk_blocks), min(blocks.end, (chunk + 1) * chunk_blocks)};
}

// Keys that a query sees.
struct Seen {
  int first;
  int last;

  PRIMITIVE Seen(int first, int last) : first(first), last(last) {}
  PRIMITIVE Seen(const Sequence& s, int position) : first(position + 1 - s.window), last(position) {}
};

// True when all queries at positions `first` to `last` see all keys from `key_first` to `key_last`.
PRIMITIVE bool all_see(const Sequence& s, int first, int last, int key_first, int key_last) {
  return key_last <= first && key_first > last - s.window;
}

// True when at least one of the queries sees at least one of the keys.
PRIMITIVE bool any_sees(const Sequence& s, int first, int last, int key_first, int key_last) {
  return key_first <= last && key_last > first - s.window;
}

// Address of chunk `chunk` (16 bytes) of `row` in a panel: rows of 128 bytes, swizzled for wgmma.
PRIMITIVE unsigned char* chunk_at(unsigned char* tile, int row, int chunk) {
  return tile + swizzle_128(row * panel_row_bytes + chunk * 16);
}

// Starts the copy of a 64-key block of k, followed by v, by `threads` threads. Keys past the sequence's end
// are zeros, so that memory behind them has no effect (0 * Inf).
template <int panels, int threads>
PRIMITIVE void copy_keys(const SinkAttention& p, const Sequence& s, unsigned char* k_tile, int block, int thread) {
  static_assert(threads / 8 % 8 == 0, "rows eight apart are swizzled alike");
  const int first = thread / 8, chunk = thread % 8;
  const int keys = s.keys - first - block * block_keys;
  const int64_t start = key_place(p, first, s.kv_head) + chunk * 8 + key_place(p, s.block_row(p, block), 0);
  unsigned char* to = chunk_at(k_tile, first, chunk);
#pragma unroll
  for (int row = 0; row < block_keys; row += threads / 8) {
    const bool valid = row < keys;
    const int64_t place = start + key_place(p, row, 0);
#pragma unroll
    for (int panel = 0; panel < panels; panel++) {
      unsigned char* row_to = to + row * panel_row_bytes + panel * panel_bytes;
      copy_async_16(row_to, p.k + place + panel * panel_columns, valid);
      copy_async_16(row_to + block_bytes<panels>, p.v + place + panel * panel_columns, valid);
    }
  }
}

// Starts the copy of packed rows `first` to `first + count - 1` of q, and with `dout` of dout right behind.
// Rows past `end` are zeros.
template <int panels, int count, int threads, bool dout>
PRIMITIVE void copy_rows(const SinkAttention& p, const Sequence& s, unsigned char* q_tile, int first, int end,
                         int thread) {
#pragma unroll
  for (int i = 0; i < count * 8 / threads; i++) {
    const int row = thread / 8 + i * (threads / 8), chunk = thread % 8;
    const bool valid = first + row < end;
    const int64_t place = valid ? s.place(p, first + row) * head_dim<panels> + chunk * 8 : 0;
#pragma unroll
    for (int panel = 0; panel < panels; panel++) {
      unsigned char* to = chunk_at(q_tile, row, chunk) + panel * count * panel_row_bytes;
      copy_async_16(to, p.q + place + panel * panel_columns, valid);
      if (dout) copy_async_16(to + panels * count * panel_row_bytes, p.dout + place + panel * panel_columns, valid);
    }
  }
}

// Stores `count` rows of a tile as packed rows from `first` of a [T, N, D] tensor, except rows past `end`.
// Panels lie `panel_stride` bytes apart.
template <int panels, int count, int threads, int panel_stride>
PRIMITIVE void store_rows(const SinkAttention& p, const Sequence& s, unsigned char* tile, bf16* to, int first, int end,
                          int thread) {
#pragma unroll
  for (int i = 0; i < count * 8 / threads; i++) {
    const int row = thread / 8 + i * (threads / 8), chunk = thread % 8;
#pragma unroll
    for (int panel = 0; panel < panels; panel++)
      if (first + row < end)
        *reinterpret_cast<uint4*>(to + s.place(p, first + row) * head_dim<panels> + panel * panel_columns + chunk * 8) =
            *reinterpret_cast<const uint4*>(chunk_at(tile, row, chunk) + panel * panel_stride);
  }
}

PRIMITIVE float low_to_float(uint32_t packed) { return to_float(bf16{static_cast<uint16_t>(packed)}); }
PRIMITIVE float high_to_float(uint32_t packed) { return to_float(bf16{static_cast<uint16_t>(packed >> 16)}); }

// A 16x64 f32 result of a warp in the tensor cores' layout (mma.sync and wgmma). With g = lane / 4 and t =
// lane % 4, element 4j + e is in row g (e = 0, 1) or g + 8 (e = 2, 3), column 8j + 2t + e % 2. 16 rows of heads
// are an array, a fragment for each panel.
using Fragment = float[32];

PRIMITIVE constexpr int fragment_row(int element) { return element % 4 / 2; }  // 0: row g, 1: row g + 8
PRIMITIVE int fragment_column(int element, int lane) { return element / 4 * 8 + lane % 4 * 2 + element % 2; }

// A left operand: 16 rows from `row` of a tile, 16 columns per step. Panels lie `panel_stride` bytes apart.
template <int panel_stride, int steps>
PRIMITIVE void load_operand(uint32_t (&a)[steps][4], unsigned char* tile, int row, int lane) {
#pragma unroll
  for (int k = 0; k < steps; k++)
    ldmatrix_x4(a[k], chunk_at(tile + k / 4 * panel_stride, row + lane % 16, k % 4 * 2 + lane / 16));
}

// A fragment of probabilities or of their gradients, rounded to bf16, is already the left operand of the
// next product: 16 columns per step.
PRIMITIVE void to_operand(uint32_t (&operand)[4][4], const Fragment& x) {
#pragma unroll
  for (int i = 0; i < 16; i++) operand[i / 4][i % 4] = pack_bf16(x[2 * i], x[2 * i + 1]);
}

// Masks the keys that the fragment's rows g and g + 8 do not see; columns are keys from `key_first`.
PRIMITIVE void hide_keys(Fragment& scores, const Seen (&seen)[2], int key_first, int lane) {
#pragma unroll
  for (int row = 0; row < 2; row++) {
    const int first = seen[row].first - key_first - lane % 4 * 2, last = seen[row].last - key_first - lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const int column = fragment_column(i, 0);
      if (fragment_row(i) == row && (column < first || column > last)) scores[i] = hidden;
    }
  }
}

// Multiplies rows g and g + 8 by one factor each.
template <int panels>
PRIMITIVE void multiply_rows(Fragment (&x)[panels], const float (&factors)[2]) {
#pragma unroll
  for (int panel = 0; panel < panels; panel++)
#pragma unroll
    for (int i = 0; i < 32; i++) x[panel][i] = multiply(x[panel][i], factors[fragment_row(i)]);
}

template <int panels>
PRIMITIVE void clear(Fragment (&x)[panels]) {
#pragma unroll
  for (int panel = 0; panel < panels; panel++)
#pragma unroll
    for (int i = 0; i < 32; i++) x[panel][i] = 0.0f;
}

// Rounds 16 rows to bf16 and writes them to rows `row` to `row + 15` of a tile, whose panels lie `panel_stride`
// bytes apart. The warp then stores whole lines.
template <int panel_stride, int panels>
PRIMITIVE void put_rows(const Fragment (&x)[panels], unsigned char* tile, int row, int lane) {
#pragma unroll
  for (int panel = 0; panel < panels; panel++)
#pragma unroll
    for (int i = 0; i < 16; i++) {
      const int at = row + lane / 4 + i % 2 * 8;
      *reinterpret_cast<uint32_t*>(chunk_at(tile + panel * panel_stride, at, i / 2) + lane % 4 * 4) =
          pack_bf16(x[panel][2 * i], x[panel][2 * i + 1]);
    }
}

// Stores the LSE of a fragment's 16 rows from `first`; `lse` holds those of rows g and g + 8.
PRIMITIVE void store_lse(const SinkAttention& p, const Sequence& s, const float (&lse)[2], int first, int lane) {
  const float low = shuffle_index(lse[0], lane % 8 * 4), high = shuffle_index(lse[1], lane % 8 * 4);
  const int row = first + lane;
  if (lane < 16 && row < s.rows) p.lse[s.place(p, row)] = lane < 8 ? low : high;
}

}  // namespace sink_attention
