// Parameters of the append to a key-value cache, src/ops/cuda/paged_attention.rs.
#pragma once

#include "primitives.cuh"

struct KvAppend {
  const uint4* rows;     // [tokens, row_vectors]
  uint4* cache;          // [cache rows, row_vectors]
  const int32_t* slots;  // [tokens]: each row's index in the cache
  int32_t row_vectors;   // 16 bytes each
};

namespace kv_append_op {

constexpr int threads = 128;  // per row

}  // namespace kv_append_op
