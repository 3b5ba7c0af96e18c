// Parameters of the rows and columns that ids name, src/ops/embedding.rs. Widths are multiples of 8.
#pragma once

#include "elements.cuh"

struct Taken {
  const bf16* table;    // [ids below, width]; of columns [width, ids below]
  const uint32_t* ids;  // [tokens]
  bf16* out;            // [tokens, width]
  int64_t tokens;
  int64_t columns;  // ids below, of columns
  int32_t width;
};

// The gradient: rows of dy summed by id.
struct SumsById {
  const bf16* dy;          // [tokens, width]
  const uint32_t* order;   // [tokens]: an id's tokens in their order, id after id
  const uint32_t* starts;  // [ids + 1]: where those of each begin in `order`
  const uint32_t* ids;     // [ids], each once
  float* table;            // what is added to, [ids below, width]; of columns [width, ids below]
  bf16* out;               // of select_rows: [rows, width], in place of `table`
  int64_t columns;         // as in Taken
  int32_t width;
};

namespace embedding_op {

constexpr int take_threads = 256;  // of eight elements each
constexpr int sum_threads = 256;
constexpr int sum_warps = sum_threads / 32;
constexpr int sum_columns = 256;  // of a block: eight a lane
constexpr int sum_shared_bytes = sum_warps * sum_columns * 4;

}  // namespace embedding_op
