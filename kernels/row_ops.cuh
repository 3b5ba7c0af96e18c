// Parameters and helpers of row-wise ops. Formulas: src/ops.
#pragma once

#include "elements.cuh"

// src/ops/swiglu.rs.
struct Swiglu {
  const bf16* x;   // [pairs, 2]: gate, up
  const bf16* dy;  // [pairs]; null in the forward
  bf16* out;       // y [pairs], or dx [pairs, 2]
  int64_t pairs;
  float limit;
  float alpha;
};

// src/ops/rms_norm.rs; `width` is a multiple of 8.
struct RmsNorm {
  const bf16* x;        // [rows, width]
  const float* weight;  // [width]
  const bf16* dy;       // [rows, width]; null in the forward
  bf16* out;            // y or dx, [rows, width]
  float* inverse_rms;   // [rows], for the weight's gradient; null in the forward
  int32_t width;
  float eps;
};

// A sum of two rows, rounded to bf16, and its norm; `width` is a multiple of 8.
struct SumNorm {
  const bf16* x;        // [rows, width]
  const bf16* y;        // [rows, width]
  const float* weight;  // [width]
  bf16* sum;            // x + y, [rows, width]
  bf16* out;            // the norm of `sum`, [rows, width]
  int32_t width;
  float eps;
};

// The weight's gradient: first sums over chunks of rows, then over the chunks.
struct RmsNormWeight {
  const bf16* x;             // [rows, width]
  const bf16* dy;            // [rows, width]
  const float* inverse_rms;  // [rows]
  float* parts;              // [chunks, width]
  float* dweight;            // [width]
  int64_t rows;
  int32_t width;
};

namespace row_ops {

using namespace elements;

// The clamped values of one pair of SwiGLU and its sigmoid.
struct Unit {
  float gate, up, sigmoid;
};

PRIMITIVE Unit swiglu_unit(float limit, float alpha, float gate, float up) {
  Unit u;
  u.gate = min(gate, limit);
  // NaN stays NaN.
  u.up = up > limit ? limit : up < -limit ? -limit : up;
  const float log2e = 1.4426950408889634f;
  u.sigmoid = 1.0f / add(1.0f, exp2_approx(multiply(multiply(alpha, u.gate), -log2e)));
  return u;
}

PRIMITIVE float swiglu_value(float limit, float alpha, float gate, float up) {
  const Unit u = swiglu_unit(limit, alpha, gate, up);
  return multiply(add(u.up, 1.0f), multiply(u.gate, u.sigmoid));
}

constexpr int swiglu_threads = 256;      // eight pairs each
constexpr int rms_norm_threads = 128;    // per row
constexpr int rms_norm_shared_bytes = 2 * rms_norm_threads / 32 * 4;  // two sums per warp
constexpr int weight_threads = 128;      // two columns each
constexpr int weight_rows = 64;          // per chunk

}  // namespace row_ops
