// Parameters of additions to a buffer, src/ops/parameter.rs.
#pragma once

#include "primitives.cuh"

// sum += x.
struct Accumulate {
  const float* x;  // [elements]
  float* sum;      // [elements]
  int64_t elements;
};

namespace accumulate_op {

constexpr int threads = 256;  // one element each

}  // namespace accumulate_op
