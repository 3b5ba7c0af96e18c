// Parameters of rotary position embedding, src/ops/rope.rs.
#pragma once

#include "elements.cuh"

// Rows of heads to rotate, and values to copy along with them.
struct Rope {
  const bf16* x;              // [rows, heads, 2 half], rows `x_stride` apart
  const bf16* values;         // layout of x; null: none
  bf16* out;                  // like x, rows `out_stride` apart
  bf16* values_out;           // layout of out
  const float* cosines;       // [positions of the table, half]
  const float* sines;         // like cosines
  const uint32_t* positions;  // [rows]
  int64_t rows;
  int32_t heads;
  int32_t half;        // a multiple of 8
  int32_t x_stride;    // elements, a multiple of 8
  int32_t out_stride;  // like x_stride
  float direction;     // 1, or -1 for the gradient (inverse rotation)
};

// Rows of one new token each: queries to rotate, keys to rotate and values to copy into a cache.
struct RopeAppend {
  const bf16* q;              // [rows, heads, 2 half]
  const bf16* k;              // [rows, kv_heads, 2 half]
  const bf16* v;              // like k
  bf16* q_out;                // like q
  bf16* cache;                // [cache rows, 2, kv_heads, 2 half]: keys, then values
  const float* cosines;       // [positions of the table, half]
  const float* sines;         // like cosines
  const uint32_t* positions;  // [rows]
  const int32_t* slots;       // [rows]: each row's index in the cache
  int64_t rows;
  int32_t heads;
  int32_t kv_heads;
  int32_t half;  // a multiple of 8
};

namespace rope_op {

constexpr int threads = 256;  // eight pairs each

}  // namespace rope_op
