// Parameters of the kernels over rows of logits, and loads of rows. Formulas: src/ops/log_prob.rs.
#pragma once

#include "elements.cuh"

struct RowStats {
  float* z;                 // [rows, vocabulary]: logits, later divided by the temperature
  const uint32_t* targets;  // [rows]; null if none are given
  float* log_sum_exp;       // [rows]
  float* entropy;           // [rows]
  float* log_prob;          // [rows] of the targets; null without them
  int32_t vocabulary;
  float inverse_temperature;
};

struct LogitsGradient {
  const float* z;            // [rows, vocabulary], divided by the temperature
  const uint32_t* targets;   // [rows]
  const float* log_sum_exp;  // [rows]
  const float* entropy;      // [rows]
  const float* d_log_prob;   // [rows]
  const float* d_entropy;    // [rows]
  bf16* dz;                  // [rows, vocabulary], of the logits before the temperature
  int32_t vocabulary;
  float inverse_temperature;
};

namespace log_prob {

constexpr int stats_threads = 1024;  // per row
constexpr int stats_warps = stats_threads / 32;
constexpr int stats_shared_bytes = 3 * stats_warps * 4;  // three numbers per warp
constexpr int gradient_threads = 256;                    // eight values each

constexpr float LN2 = 0.69314718055994531f;

using elements::exp_approx, elements::Values, elements::vector;

// With an odd vocabulary size a row may start unaligned. Then, and at a row's end, values are read one by
// one.
PRIMITIVE bool whole(const float* row, int at, int width) {
  return at + vector <= width && reinterpret_cast<uintptr_t>(row) % 16 == 0;
}

// Loads eight values of a row from an index that is a multiple of eight; −∞ past the row's end.
PRIMITIVE Values load(const float* row, int at, int width) {
  Values x;
  if (whole(row, at, width)) {
    const float4 a = *reinterpret_cast<const float4*>(row + at), b = *reinterpret_cast<const float4*>(row + at + 4);
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }
  for (int k = 0; k < vector; k++) x.v[k] = at + k < width ? row[at + k] : -INFINITY;
  return x;
}

}  // namespace log_prob
