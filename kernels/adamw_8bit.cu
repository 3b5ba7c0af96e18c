// AdamW with 8-bit moments. One warp per block of values that share a scale, eight values per lane.
#include "optimizer.cuh"

using namespace optimizer;

namespace {

constexpr int VALUES = code_block / 32;

// Returns the number of bounds that do not exceed `x`, by binary search: the code of the nearest value. 0
// for NaN.
PRIMITIVE uint32_t nearest(const CodeMap& map, float x) {
  uint32_t code = 0;
  for (int step = 128; step > 0; step /= 2)
    if (x >= map.bounds[code + step - 1]) code += step;
  return code;
}

// Writes the codes of a block held by the lanes and its scale, after all lanes have read the old scale. A
// value above 0 never gets a code for 0.
PRIMITIVE void encode(const CodeMap& map, const float x[VALUES], uint8_t* codes, float* scale, int count) {
  float highest = 0.0f;
  for (int k = 0; k < VALUES; k++) highest = max(highest, fabsf(x[k]));
  for (int mask = 16; mask > 0; mask /= 2) highest = max(highest, shuffle_xor(highest, mask));
  const int lane = threadIdx.x % 32;
  for (int k = 0; k < VALUES; k++) {
    const uint32_t code = nearest(map, x[k] / highest);
    if (lane + 32 * k < count) codes[lane + 32 * k] = static_cast<uint8_t>(code == 0 && x[k] > 0.0f ? 1 : code);
  }
  warp_barrier();
  if (lane == 0) *scale = highest;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(threads) adamw_8bit(const __grid_constant__ AdamW8Bit p) {
  CodeMap* maps = reinterpret_cast<CodeMap*>(dynamic_shared_memory());
  for (int i = threadIdx.x; i < 2 * 2 * 256; i += threads)
    reinterpret_cast<float*>(maps)[i] = reinterpret_cast<const float*>(p.maps)[i];
  block_barrier();
  const int lane = threadIdx.x % 32;
  for (int of_warp = 0; of_warp < code_blocks; of_warp++) {
    const int64_t block = (static_cast<int64_t>(blockIdx.x) * code_blocks + of_warp) * adamw_8bit_warps + threadIdx.x / 32;
    const int64_t first = block * code_block;
    if (first >= p.count) return;
    const int count = static_cast<int>(min(p.count - first, static_cast<int64_t>(code_block)));
    const float first_scale = p.first_scales[block], second_scale = p.second_scales[block];
    float m[VALUES], v[VALUES];
    for (int k = 0; k < VALUES; k++) {
      m[k] = v[k] = 0.0f;
      if (lane + 32 * k >= count) continue;
      const int64_t i = first + lane + 32 * k;
      m[k] = multiply(maps[0].values[p.first_codes[i]], first_scale);
      v[k] = multiply(maps[1].values[p.second_codes[i]], second_scale);
      float w = p.weights[i];
      update(p.step, w, m[k], v[k], p.gradient[i]);
      p.weights[i] = w;
    }
    encode(maps[0], m, p.first_codes + first, p.first_scales + block, count);
    encode(maps[1], v, p.second_codes + first, p.second_scales + block, count);
  }
}
