// Parameters of the selection by id, src/ops/embedding.rs. Widths are multiples of 8.
#pragma once

#include "elements.cuh"

struct Taken {
  const bf16* table;    // [vocabulary, width]; for columns [width, vocabulary]
  const uint32_t* ids;  // [tokens]
  bf16* out;            // [tokens, width]
  int64_t tokens;
  int64_t columns;  // vocabulary, for columns
  int32_t width;
};

// The gradient: rows of dy summed by id.
struct SumsById {
  const bf16* dy;          // [tokens, width]
  const uint32_t* order;   // [tokens]: tokens sorted by id, in order within an id
  const uint32_t* starts;  // [ids + 1]: start of each id in `order`
  const uint32_t* ids;     // [ids], each once
  float* table;            // sums, [vocabulary, width]; for columns [width, vocabulary]
  bf16* out;               // for select_rows: [rows, width], instead of `table`
  int64_t columns;         // as in Taken
  int32_t width;
};

namespace embedding_op {

constexpr int take_threads = 256;  // eight elements each
constexpr int sum_threads = 256;
constexpr int sum_warps = sum_threads / 32;
constexpr int sum_columns = 256;  // per block: eight per lane
constexpr int sum_shared_bytes = sum_warps * sum_columns * 4;

}  // namespace embedding_op
