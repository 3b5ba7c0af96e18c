// The rows of tokens sorted by expert, and taken together again. The formulas are in src/ops/experts.rs.
#pragma once

#include "elements.cuh"

// A stable sort of the routes by expert, over chunks of them.
struct SortRoutes {
  const uint32_t* routes;  // [pairs]: the expert of each (token, slot)
  uint32_t* counts;        // [chunks, experts]: how many of a chunk's go to each; then the sorted row of the first
  uint32_t* row_of;        // [pairs]
  uint32_t* token_of;      // [pairs]
  uint32_t* starts;        // [experts + 1]
  int32_t pairs;
  int32_t experts;
  int32_t top_k;
};

// Rows of tokens to sorted rows and back; `width` is a multiple of 8.
struct Dispatch {
  const bf16* x;          // what is read: [tokens, width] of tokens, [tokens · top_k, width] of sorted rows
  const bf16* dy;         // [tokens, width]; of combine's backward alone
  const float* weights;   // [tokens, top_k]; of combine alone
  const uint32_t* rows;   // row_of, or token_of where each block makes a sorted row
  bf16* out;              // [tokens, width] or [tokens · top_k, width]
  float* dweights;        // [tokens, top_k]; of combine's backward alone
  int32_t width;
  int32_t top_k;
};

namespace dispatch {

constexpr int chunk = 256;           // routes of a block
constexpr int sort_threads = 128;    // an expert each, and the next 128
constexpr int sort_shared_bytes = chunk * 4;
constexpr int place_threads = 1024;  // of the one block that places chunks and experts
constexpr int place_shared_bytes = place_threads * 4;
constexpr int row_threads = 128;
constexpr int row_shared_bytes = row_threads / 32 * 4;  // a sum a warp

}  // namespace dispatch
