// Attention with a learnable sink a query head: what its kernels and their callers share. docs/KERNELS.md explains it.
//
// T tokens, N query heads, M key-value heads, N / M = `group` query heads a key-value head, head dimension 64.
// The queries of a sequence and one key-value head are packed into rows: row = token * group + head of the group.
// Keys are visited in blocks of 64 at absolute positions, in ascending order, so a row's bits depend on nothing else.
#pragma once

#include "primitives.cuh"

// A block's part of the work: 128 packed rows of a sequence from `first`, or 64 keys from `first` (multiples of these).
struct Tile {
  int32_t sequence;
  int32_t first;
};

// The one parameter of every kernel here. All pointers but the small arrays' are 16-byte aligned. A kernel reads only
// what its comment names.
struct SinkAttention {
  const bf16* q;                // [T, N, 64]
  const bf16* k;                // key head m of key row r: k + r * kv_token_stride + m * kv_head_stride
  const bf16* v;                // the same strides
  const float* sinks;           // [N]; -1e9 for none
  const int32_t* cu_seqlens_q;  // [sequences + 1] first query token of each sequence, then T
  const int32_t* cu_seqlens_k;  // [sequences + 1] running sum of the keys' numbers
  const int32_t* page_table;    // [sequences, pages_max]: keys 64p to 64p + 63 are key rows 64 * page ...; null: packed
  const Tile* tiles;            // [blocks / M], those with the most work first
  bf16* out;                    // [T, N, 64]
  float* lse;                   // [T, N] natural logarithm of the softmax's sum, the sink inside
  const bf16* dout;             // [T, N, 64]
  float* delta;                 // [T, N] rowsum(dout * out)
  bf16* dq;                     // [T, N, 64]
  bf16* dk;                     // strides of k
  bf16* dv;                     // strides of v
  float* dsinks;                // [N]
  int32_t tokens;               // T
  int32_t heads;                // N
  int32_t kv_heads;             // M
  int32_t kv_token_stride;      // elements, a multiple of 8
  int32_t kv_head_stride;       // elements, a multiple of 8
  int32_t pages_max;
  int32_t window;               // keys a query sees, itself included; 0 for all before it
  float scale;                  // of the scores, above 0
};

namespace sink_attention {

constexpr int head_dim = 64;
constexpr int tile_rows = 128;   // packed rows of a block of the forward and of dq
constexpr int block_keys = 64;   // keys a step; keys of a page; keys of a block of dkv
constexpr int block_bytes = block_keys * head_dim * sizeof(bf16);
constexpr int tile_bytes = tile_rows * head_dim * sizeof(bf16);

// Threads of a block and bytes of dynamic shared memory, kernel by kernel. Blocks: tiles * kv_heads, but for delta
// (tokens * heads / delta_rows, rounded up) and dsinks (heads).
constexpr int forward_threads = 128;
constexpr int forward_shared_bytes = tile_bytes + 4 * block_bytes;
constexpr int delta_threads = 256;
constexpr int delta_rows = 32;
constexpr int dkv_threads = 128;
constexpr int dkv_shared_bytes = 6 * block_bytes + 2 * 3 * 64 * sizeof(float);
constexpr int dq_threads = 256;
constexpr int dq_shared_bytes = 2 * tile_bytes + 4 * block_bytes;
constexpr int dsinks_threads = 256;
constexpr int dsinks_shared_bytes = dsinks_threads * sizeof(float);

}  // namespace sink_attention
