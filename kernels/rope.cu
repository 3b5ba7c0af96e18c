// Rotary position embedding, half-split. A thread rotates eight pairs of a head and copies values along.
#include "rope.cuh"

using namespace elements;

namespace {

// Loads eight f32 at `from`, 16-byte aligned.
PRIMITIVE Values load_floats(const float* from) {
  const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

PRIMITIVE void copy(bf16* to, const bf16* from) { *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from); }

}  // namespace

extern "C" __global__ void __launch_bounds__(rope_op::threads) rope(const __grid_constant__ Rope p) {
  const int of_head = p.half / vector, of_row = p.heads * of_head;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * rope_op::threads + threadIdx.x;
  const int64_t row = index / of_row;
  if (row >= p.rows) return;
  const int in_row = static_cast<int>(index - row * of_row);
  const int pair = in_row % of_head * vector;
  const int64_t angle = static_cast<int64_t>(p.positions[row]) * p.half + pair;
  const int column = in_row / of_head * 2 * p.half + pair;
  const int64_t from = row * p.x_stride + column, to = row * p.out_stride + column;

  const Values cosines = load_floats(p.cosines + angle), sines = load_floats(p.sines + angle);
  const Values a = load(p.x + from), b = load(p.x + from + p.half);
  Values first, second;
  for (int k = 0; k < vector; k++) {
    const float sine = multiply(p.direction, sines.v[k]);
    first.v[k] = add(multiply(a.v[k], cosines.v[k]), -multiply(b.v[k], sine));
    second.v[k] = add(multiply(b.v[k], cosines.v[k]), multiply(a.v[k], sine));
  }
  store(p.out + to, first);
  store(p.out + to + p.half, second);
  if (p.values != nullptr) {
    copy(p.values_out + to, p.values + from);
    copy(p.values_out + to + p.half, p.values + from + p.half);
  }
}
