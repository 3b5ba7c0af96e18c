// Parameters of the load-balancing auxiliary loss, src/ops/load_balance.rs.
#pragma once

#include "elements.cuh"

// Parameters of all kernels, in the order of the kernels.
struct LoadBalance {
  const float* logits;       // [rows, experts]
  const uint32_t* token_of;  // the row of each (row, slot) sorted by expert
  const uint32_t* offsets;   // [experts + 1]: first row of each expert
  const uint32_t* sequences_per_row;  // [rows]: number of tokens that a row counts for; null: one each
  float* fractions;          // [experts]: (token, slot) pairs of each expert, divided by `tokens`
  float* of_rows;            // [rows]: each row's term of the sum
  float* loss;               // [1]
  const float* dloss;        // [1]
  float* dlogits;            // [rows, experts]
  int64_t rows;
  int32_t experts;
  float tokens;
  float scale;  // experts / tokens
};

namespace load_balance_op {

constexpr int fractions_threads = 128;  // per expert
constexpr int rows_threads = 128;       // one warp per row
constexpr int sum_threads = 256;
constexpr int fractions_shared_bytes = fractions_threads * 8;
constexpr int sum_shared_bytes = sum_threads * 4;

}  // namespace load_balance_op
