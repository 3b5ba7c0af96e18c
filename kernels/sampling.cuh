// Parameters of the sampling kernels over rows of logits. Semantics: src/ops/logits.rs.
#pragma once

#include "log_prob.cuh"

// A token and the bits of its log-probability.
struct Drawn {
  uint32_t token;
  uint32_t log_prob;
};

struct Draws {
  const float* z;            // [rows, vocabulary], divided by the temperature
  const float* log_sum_exp;  // [rows]
  const uint32_t* rows;      // [draws]
  const double* uniforms;    // [draws], in [0, 1); null for the most likely token
  Drawn* drawn;              // [draws]; NO_TOKEN if the row is not a distribution
  int32_t vocabulary;
};

struct LogProbs {
  const float* z;            // [rows, vocabulary], divided by the temperature
  const float* log_sum_exp;  // [rows]
  const uint32_t* rows;      // [count]
  const uint32_t* tokens;    // [count]
  float* log_probs;          // [count]
  int64_t count;
  int32_t vocabulary;
};

namespace sampling {

using log_prob::vector;

constexpr int draw_threads = 1024;  // per draw
constexpr int draw_groups = 32;     // groups of equal size
// The threads' sums with one element between groups, then the groups' sums and the total; or a value and an
// id per thread.
constexpr int draw_shared_bytes = (draw_threads + draw_groups + draw_groups + 1) * 8;
constexpr int log_probs_threads = 128;
constexpr uint32_t NO_TOKEN = 0xffffffffu;

}  // namespace sampling
