// Parameters of the exchange of attention heads between GPUs, src/ops/head_parts.rs.
#pragma once

#include "elements.cuh"

// Rows with all heads, and parts with the heads of one rank each. `heads` divides `ranks` or `ranks` divides `heads`; a rank
// has `own` = max(heads / ranks, 1) heads of each group, from head rank · heads / ranks on. Several ranks may share a head.
struct HeadParts {
  const bf16* from;
  bf16* to;
  int64_t rows;
  int32_t groups;   // 1 for queries, 2 for keys with values
  int32_t heads;    // of a group
  int32_t ranks;
  int32_t vectors;  // of 8 elements in a head
};

namespace head_parts_op {

constexpr int threads = 256;  // eight elements each

}  // namespace head_parts_op
