// Parameters of the head's kernels over rows of logits, and how they read a row. The formulas are in src/ops/log_prob.rs.
#pragma once

#include "elements.cuh"

struct RowStats {
  float* z;                 // [rows, vocabulary]: logits, then those over the temperature
  const uint32_t* targets;  // [rows]; null where none are asked for
  float* log_sum_exp;       // [rows]
  float* entropy;           // [rows]
  float* log_prob;          // [rows], the targets'; null without them
  int32_t vocabulary;
  float inverse_temperature;
};

struct LogitsGradient {
  const float* z;            // [rows, vocabulary], over the temperature
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

constexpr int stats_threads = 1024;  // a row
constexpr int stats_warps = stats_threads / 32;
constexpr int stats_shared_bytes = 3 * stats_warps * 4;  // three numbers a warp
constexpr int gradient_threads = 256;                    // of eight values each

constexpr float LN2 = 0.69314718055994531f;

using elements::exp_approx, elements::Values, elements::vector;

// A row of an odd vocabulary may begin anywhere: then, and at its end, values are taken one by one.
PRIMITIVE bool whole(const float* row, int at, int width) {
  return at + vector <= width && reinterpret_cast<uintptr_t>(row) % 16 == 0;
}

// Eight values of a row from a place that is a multiple of eight; −∞ past the row's end, which counts for nothing.
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
