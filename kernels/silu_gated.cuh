// Parameters of SwiGLU without clamping, src/ops/silu_and_mul.rs.
#pragma once

#include "elements.cuh"

struct SiluGated {
  const bf16* gate;  // [elements]
  const bf16* up;    // [elements]
  const bf16* dy;    // [elements]; null in the forward
  bf16* out;         // y, or the gate's gradient, [elements]
  bf16* dup;         // [elements]; null in the forward
  int64_t elements;
};

namespace silu_gated_op {

constexpr int threads = 256;  // eight elements each

}  // namespace silu_gated_op
