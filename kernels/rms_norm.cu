// RMS normalisation, one block per row. A row's sums use fixed positions and a fixed tree, so its bits
// depend only on the row.
#include "row_ops.cuh"

using namespace row_ops;

namespace {

constexpr int WARPS = rms_norm_threads / 32;

// Adds `a` and `b` of all threads of the block; every thread gets both sums.
struct Sums {
  float a, b;
};

PRIMITIVE Sums block_sums(Sums s) {
  for (int mask = 16; mask > 0; mask /= 2) {
    s.a = add(s.a, shuffle_xor(s.a, mask));
    s.b = add(s.b, shuffle_xor(s.b, mask));
  }
  float* of_warps = reinterpret_cast<float*>(dynamic_shared_memory());
  if (threadIdx.x % 32 == 0) {
    of_warps[threadIdx.x / 32] = s.a;
    of_warps[WARPS + threadIdx.x / 32] = s.b;
  }
  block_barrier();
  Sums all = {of_warps[0], of_warps[WARPS]};
  for (int warp = 1; warp < WARPS; warp++) {
    all.a = add(all.a, of_warps[warp]);
    all.b = add(all.b, of_warps[WARPS + warp]);
  }
  return all;
}

template <class Params>
PRIMITIVE float inverse_rms(const Params& p, float squares) {
  return 1.0f / sqrtf(add(squares / p.width, p.eps));
}

PRIMITIVE float add_squares(const Values& x, float squares) {
  for (int k = 0; k < vector; k++) squares = multiply_add(x.v[k], x.v[k], squares);
  return squares;
}

// Eight values of a norm, from column `column` on.
PRIMITIVE Values normed(Values x, float r, const float* weight, int column) {
  for (int k = 0; k < vector; k++) x.v[k] = multiply(multiply(x.v[k], r), weight[column + k]);
  return x;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(rms_norm_threads) rms_norm_forward(const __grid_constant__ RmsNorm p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.width;
  Sums sums = {0.0f, 0.0f};
  for (int i = threadIdx.x * vector; i < p.width; i += rms_norm_threads * vector)
    sums.a = add_squares(load(p.x + row + i), sums.a);
  const float r = inverse_rms(p, block_sums(sums).a);
  for (int i = threadIdx.x * vector; i < p.width; i += rms_norm_threads * vector)
    store(p.out + row + i, normed(load(p.x + row + i), r, p.weight, i));
}

// The norm of x + y. The sum is rounded and stored first, so both results are those of two launches.
extern "C" __global__ void __launch_bounds__(rms_norm_threads) sum_norm(const __grid_constant__ SumNorm p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.width;
  Sums sums = {0.0f, 0.0f};
  for (int i = threadIdx.x * vector; i < p.width; i += rms_norm_threads * vector) {
    Values sum = load(p.x + row + i);
    const Values y = load(p.y + row + i);
    for (int k = 0; k < vector; k++) sum.v[k] = rounded(add(sum.v[k], y.v[k]));
    store(p.sum + row + i, sum);
    sums.a = add_squares(sum, sums.a);
  }
  const float r = inverse_rms(p, block_sums(sums).a);
  // A thread reads only what it stored itself.
  for (int i = threadIdx.x * vector; i < p.width; i += rms_norm_threads * vector)
    store(p.out + row + i, normed(load(p.sum + row + i), r, p.weight, i));
}

extern "C" __global__ void __launch_bounds__(rms_norm_threads) rms_norm_backward(const __grid_constant__ RmsNorm p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * p.width;
  Sums sums = {0.0f, 0.0f};
  for (int i = threadIdx.x * vector; i < p.width; i += rms_norm_threads * vector) {
    const Values x = load(p.x + row + i), dy = load(p.dy + row + i);
    for (int k = 0; k < vector; k++) {
      sums.a = multiply_add(x.v[k], x.v[k], sums.a);
      sums.b = multiply_add(multiply(dy.v[k], p.weight[i + k]), x.v[k], sums.b);
    }
  }
  sums = block_sums(sums);
  const float r = inverse_rms(p, sums.a);
  const float along = multiply(multiply(multiply(r, r), r), sums.b / p.width);
  for (int i = threadIdx.x * vector; i < p.width; i += rms_norm_threads * vector) {
    Values x = load(p.x + row + i);
    const Values dy = load(p.dy + row + i);
    for (int k = 0; k < vector; k++)
      x.v[k] = add(multiply(multiply(r, dy.v[k]), p.weight[i + k]), -multiply(x.v[k], along));
    store(p.out + row + i, x);
  }
  if (threadIdx.x == 0) p.inverse_rms[blockIdx.x] = r;
}

// A thread adds two columns over one chunk of rows, in row order.
extern "C" __global__ void __launch_bounds__(weight_threads) rms_norm_weight(const __grid_constant__ RmsNormWeight p) {
  const int blocks = (p.width / 2 + weight_threads - 1) / weight_threads;
  const int64_t chunk = blockIdx.x / blocks;
  const int column = 2 * ((blockIdx.x % blocks) * weight_threads + threadIdx.x);
  if (column >= p.width) return;
  const int64_t end = min((chunk + 1) * weight_rows, p.rows);
  float a = 0.0f, b = 0.0f;
  for (int64_t row = chunk * weight_rows; row < end; row++) {
    const uint32_t x = *reinterpret_cast<const uint32_t*>(p.x + row * p.width + column);
    const uint32_t dy = *reinterpret_cast<const uint32_t*>(p.dy + row * p.width + column);
    const float r = p.inverse_rms[row];
    a = multiply_add(multiply(low(dy), low(x)), r, a);
    b = multiply_add(multiply(high(dy), high(x)), r, b);
  }
  *reinterpret_cast<float2*>(p.parts + chunk * p.width + column) = make_float2(a, b);
}

// A thread adds one column over all chunks.
extern "C" __global__ void __launch_bounds__(weight_threads) rms_norm_weight_sum(const __grid_constant__ RmsNormWeight p) {
  const int column = blockIdx.x * weight_threads + threadIdx.x;
  if (column >= p.width) return;
  const int64_t chunks = (p.rows + weight_rows - 1) / weight_rows;
  float sum = 0.0f;
  for (int64_t chunk = 0; chunk < chunks; chunk++) sum = add(sum, p.parts[chunk * p.width + column]);
  p.dweight[column] = sum;
}
