// In-place updates of weights, value by value, and the sum of a gradient's squares.
#include "optimizer.cuh"

using namespace optimizer;

namespace {

// Calls `f` with the indices of this thread.
template <class F>
PRIMITIVE void for_each(int64_t count, F f) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * threads * values + threadIdx.x;
  for (int k = 0; k < values; k++)
    if (first + k * threads < count) f(first + k * threads);
}

// Adds `x` of all threads of the block in a fixed tree; the first thread gets the sum.
template <int block_threads>
PRIMITIVE double block_sum(double x) {
  double* sums = reinterpret_cast<double*>(dynamic_shared_memory());
  const int thread = threadIdx.x;
  sums[thread] = x;
  for (int half = block_threads / 2; half > 0; half /= 2) {
    block_barrier();
    if (thread < half) sums[thread] += sums[thread + half];
  }
  return thread == 0 ? sums[0] : 0.0;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(threads) optimizer_adamw(const __grid_constant__ AdamW p) {
  for_each(p.count, [&](int64_t i) {
    float w = p.weights[i], m = p.first[i], v = p.second[i];
    update(p.step, w, m, v, p.gradient[i]);
    p.weights[i] = w;
    p.first[i] = m;
    p.second[i] = v;
  });
}

extern "C" __global__ void __launch_bounds__(threads) optimizer_sgd(const __grid_constant__ Sgd p) {
  for_each(p.count, [&](int64_t i) {
    p.weights[i] = multiply_add(-p.rate, p.gradient[i], multiply(p.weights[i], p.shrink));
  });
}

extern "C" __global__ void __launch_bounds__(threads) optimizer_momentum(const __grid_constant__ Momentum p) {
  for_each(p.count, [&](int64_t i) { p.buffer[i] = add(multiply(p.buffer[i], p.momentum), p.gradient[i]); });
}

// A factor of 0 also clears NaN and infinite values.
extern "C" __global__ void __launch_bounds__(threads) optimizer_scale(const __grid_constant__ Scale p) {
  for_each(p.count, [&](int64_t i) { p.x[i] = p.factor == 0.0f ? 0.0f : multiply(p.x[i], p.factor); });
}

extern "C" __global__ void __launch_bounds__(threads) optimizer_round_to_bf16(const __grid_constant__ RoundToBf16 p) {
  for_each(p.count, [&](int64_t i) { p.out[i] = to_bf16(p.x[i]); });
}

// One block per chunk. The square of an f32 is exact in f64.
extern "C" __global__ void __launch_bounds__(threads) optimizer_squares(const __grid_constant__ SumOfSquares p) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * chunk;
  const int64_t end = min(first + chunk, p.count);
  double sum = 0;
  for (int64_t i = first + threadIdx.x; i < end; i += threads) {
    const double x = p.x[i];
    sum += x * x;
  }
  sum = block_sum<threads>(sum);
  if (threadIdx.x == 0) p.parts[blockIdx.x] = sum;
}

// One block adds the chunks.
extern "C" __global__ void __launch_bounds__(sum_threads) optimizer_sum(const __grid_constant__ SumOfSquares p) {
  const int64_t chunks = (p.count + chunk - 1) / chunk;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < chunks; i += sum_threads) sum += p.parts[i];
  sum = block_sum<sum_threads>(sum);
  if (threadIdx.x == 0) *p.sum = sum;
}
