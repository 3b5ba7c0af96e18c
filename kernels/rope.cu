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

// Rotates eight pairs of a head: those at `from` with those `half` further on.
PRIMITIVE void rotate(bf16* to, const bf16* from, const float* cosines_at, const float* sines_at, int half,
                      float direction) {
  const Values cosines = load_floats(cosines_at), sines = load_floats(sines_at);
  const Values a = load(from), b = load(from + half);
  Values first, second;
  for (int k = 0; k < vector; k++) {
    const float sine = multiply(direction, sines.v[k]);
    first.v[k] = add(multiply(a.v[k], cosines.v[k]), -multiply(b.v[k], sine));
    second.v[k] = add(multiply(b.v[k], cosines.v[k]), multiply(a.v[k], sine));
  }
  store(to, first);
  store(to + half, second);
}

PRIMITIVE void copy_pairs(bf16* to, const bf16* from, int half) {
  copy(to, from);
  copy(to + half, from + half);
}

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

  rotate(p.out + to, p.x + from, p.cosines + angle, p.sines + angle, p.half, p.direction);
  if (p.values != nullptr) copy_pairs(p.values_out + to, p.values + from, p.half);
}

// A thread rotates eight pairs of a query head, or of a key head and copies the values along.
extern "C" __global__ void __launch_bounds__(rope_op::threads) rope_append(const __grid_constant__ RopeAppend p) {
  const int of_head = p.half / vector, of_row = (p.heads + p.kv_heads) * of_head;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * rope_op::threads + threadIdx.x;
  const int64_t row = index / of_row;
  if (row >= p.rows) return;
  const int in_row = static_cast<int>(index - row * of_row);
  const int pair = in_row % of_head * vector, head = in_row / of_head, head_dim = 2 * p.half;
  const int64_t angle = static_cast<int64_t>(p.positions[row]) * p.half + pair;
  if (head < p.heads) {
    const int64_t at = (row * p.heads + head) * head_dim + pair;
    rotate(p.q_out + at, p.q + at, p.cosines + angle, p.sines + angle, p.half, 1.0f);
    return;
  }
  const int width = p.kv_heads * head_dim, column = (head - p.heads) * head_dim + pair;
  const int64_t from = row * width + column;
  bf16* key = p.cache + static_cast<int64_t>(p.slots[row]) * 2 * width + column;
  rotate(key, p.k + from, p.cosines + angle, p.sines + angle, p.half, 1.0f);
  copy_pairs(key + width, p.v + from, p.half);
}
