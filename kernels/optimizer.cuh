// Parameters of the optimizer's kernels, which process a tensor's values in order. Formulas:
// src/ops/optimizer.rs and src/ops/adamw_8bit.rs. Results without a sum have the CPU's bits.
#pragma once

#include "primitives.cuh"

// Constants of one AdamW update.
struct AdamWStep {
  float shrink;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float rate;
  float root_correction;
  float eps;
};

struct AdamW {
  float* weights;  // all four [count]
  float* first;
  float* second;
  const float* gradient;
  int64_t count;
  AdamWStep step;
};

// weights ← decay · weights, and the gradient times a rate.
struct Sgd {
  float* weights;         // [count]
  const float* gradient;  // [count]
  int64_t count;
  float shrink;
  float rate;
};

// buffer ← momentum · buffer + gradient.
struct Momentum {
  float* buffer;          // [count]
  const float* gradient;  // [count]
  int64_t count;
  float momentum;
};

struct Scale {
  float* x;  // [count]
  int64_t count;
  float factor;
};

struct RoundToBf16 {
  const float* x;  // [count]
  bf16* out;       // [count]
  int64_t count;
};

struct SumOfSquares {
  const float* x;  // [count]
  double* parts;   // [chunks]
  double* sum;     // [1]
  int64_t count;
};

// 8-bit codes and their scales: src/ops/adamw_8bit.rs.
struct CodeMap {
  float values[256];
  float bounds[256];
};

struct AdamW8Bit {
  const CodeMap* maps;     // [2]: of the first moment, of the second
  float* weights;          // [count]
  uint8_t* first_codes;    // [count]
  float* first_scales;     // [blocks]
  uint8_t* second_codes;   // [count]
  float* second_scales;    // [blocks]
  const float* gradient;   // [count]
  int64_t count;
  AdamWStep step;
};

namespace optimizer {

constexpr int threads = 256;
constexpr int values = 4;  // per thread, `threads` apart
constexpr int chunk = 8192;  // values whose squares one block adds
constexpr int sum_threads = 1024;
constexpr int sum_shared_bytes = sum_threads * 8;

constexpr int code_block = 256;  // values that share a scale, one warp each
constexpr int code_blocks = 4;   // per warp, one after the other
constexpr int adamw_8bit_warps = threads / 32;
constexpr int adamw_8bit_shared_bytes = 2 * 2 * 256 * 4;  // both maps

PRIMITIVE void update(const AdamWStep& s, float& w, float& m, float& v, float g) {
  m = add(m, multiply(add(g, -m), s.one_minus_beta1));
  v = add(multiply(v, s.beta2), multiply(multiply(g, g), s.one_minus_beta2));
  w = add(multiply(w, s.shrink), -(multiply(s.rate, m) / add(sqrtf(v) / s.root_correction, s.eps)));
}

}  // namespace optimizer
