// Parameters of rotary position embedding, src/ops/rope.rs.
#pragma once

#include "elements.cuh"

// Rows of heads are rotated; values that lie beside them are copied along.
struct Rope {
  const bf16* x;              // [rows, heads, 2 half], rows `x_stride` apart
  const bf16* values;         // as x lies; null: none
  bf16* out;                  // as x, rows `out_stride` apart
  bf16* values_out;           // as out lies
  const float* cosines;       // [positions of the table, half]
  const float* sines;         // the same
  const uint32_t* positions;  // [rows]
  int64_t rows;
  int32_t heads;
  int32_t half;        // a multiple of 8
  int32_t x_stride;    // elements, a multiple of 8
  int32_t out_stride;  // the same
  float direction;     // 1, or -1 for the gradient: the rotation back
};

namespace rope_op {

constexpr int threads = 256;  // of eight pairs each

}  // namespace rope_op
