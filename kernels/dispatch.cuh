// Parameters of dispatch and combine. Formulas: src/ops/experts.rs.
#pragma once

#include "elements.cuh"

// A stable sort of routes by expert, chunk by chunk.
struct SortRoutes {
  const uint32_t* routes;  // [pairs]: the expert of each (token, slot)
  uint32_t* counts;        // [chunks, experts]: routes per expert; later the sorted row of the first
  uint32_t* row_of;        // [pairs]
  uint32_t* token_of;      // [pairs]
  uint32_t* starts;        // [experts + 1]
  int32_t pairs;
  int32_t experts;
  int32_t top_k;
};

// Rows of tokens to sorted rows and back; `width` is a multiple of 8.
struct Dispatch {
  const bf16* x;          // input: tokens [tokens, width] or sorted rows [tokens · top_k, width]
  const bf16* dy;         // [tokens, width]; only for combine's backward
  const float* weights;   // [tokens, top_k]; only for combine
  const uint32_t* rows;   // row_of, or token_of when each block writes a sorted row
  bf16* out;              // [tokens, width] or [tokens · top_k, width]
  float* dweights;        // [tokens, top_k]; only for combine's backward
  int32_t width;
  int32_t top_k;
  const bf16* residual;   // [tokens, width], added to the rounded sums of combine; null: none
};

namespace dispatch {

constexpr int chunk = 256;           // routes per block
constexpr int sort_threads = 128;    // one expert each, then the next 128
constexpr int sort_shared_bytes = chunk * 4;
constexpr int place_threads = 1024;  // of the one block that computes the first rows
constexpr int place_shared_bytes = place_threads * 4;
constexpr int row_threads = 128;
constexpr int row_shared_bytes = row_threads / 32 * 4;  // one sum per warp

}  // namespace dispatch
