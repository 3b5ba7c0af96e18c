// The load-balancing auxiliary loss: counts per expert, loss per row, sum; and the gradient.
#include "load_balance.cuh"

using namespace elements;
using namespace load_balance_op;

namespace {

PRIMITIVE int64_t row_of_warp() { return static_cast<int64_t>(blockIdx.x) * (rows_threads / 32) + threadIdx.x / 32; }

// Number of tokens that a row counts for.
PRIMITIVE float weight(const LoadBalance& p, int64_t row) {
  return p.sequences_per_row == nullptr ? 1.0f : static_cast<float>(p.sequences_per_row[row]);
}

// Softmax of a row: largest logit, sum of e^(logit − highest), mean of the fractions.
struct Softmax {
  float highest, total, mean;
};

PRIMITIVE Softmax softmax(const LoadBalance& p, const float* logits) {
  const int lane = threadIdx.x % 32;
  float highest = -INFINITY;
  for (int e = lane; e < p.experts; e += 32) highest = max(highest, logits[e]);
  for (int mask = 16; mask > 0; mask /= 2) highest = max(highest, shuffle_xor(highest, mask));
  float total = 0.0f, weighted = 0.0f;
  for (int e = lane; e < p.experts; e += 32) {
    const float x = exp_approx(add(logits[e], -highest));
    total = add(total, x);
    weighted = multiply_add(x, p.fractions[e], weighted);
  }
  for (int mask = 16; mask > 0; mask /= 2) {
    total = add(total, shuffle_xor(total, mask));
    weighted = add(weighted, shuffle_xor(weighted, mask));
  }
  return {highest, total, weighted / total};
}

}  // namespace

// One block per expert. The sums are of integers, so any order is exact.
extern "C" __global__ void __launch_bounds__(fractions_threads)
    load_balance_fractions(const __grid_constant__ LoadBalance p) {
  const int64_t start = p.offsets[blockIdx.x], end = p.offsets[blockIdx.x + 1];
  int64_t count = 0;
  if (p.sequences_per_row == nullptr)
    count = threadIdx.x == 0 ? end - start : 0;
  else
    for (int64_t i = start + threadIdx.x; i < end; i += fractions_threads) count += p.sequences_per_row[p.token_of[i]];
  int64_t* counts = reinterpret_cast<int64_t*>(dynamic_shared_memory());
  counts[threadIdx.x] = count;
  block_barrier();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < fractions_threads; i++) count += counts[i];
  p.fractions[blockIdx.x] = static_cast<float>(count) / p.tokens;
}

extern "C" __global__ void __launch_bounds__(rows_threads) load_balance_rows(const __grid_constant__ LoadBalance p) {
  const int64_t row = row_of_warp();
  if (row >= p.rows) return;
  const Softmax of_row = softmax(p, p.logits + row * p.experts);
  if (threadIdx.x % 32 == 0) p.of_rows[row] = multiply(weight(p, row), of_row.mean);
}

// One block: a thread adds every 256th row; a tree adds the threads' sums.
extern "C" __global__ void __launch_bounds__(sum_threads) load_balance_sum(const __grid_constant__ LoadBalance p) {
  float* sums = reinterpret_cast<float*>(dynamic_shared_memory());
  float sum = 0.0f;
  for (int64_t row = threadIdx.x; row < p.rows; row += sum_threads) sum = add(sum, p.of_rows[row]);
  sums[threadIdx.x] = sum;
  for (int half = sum_threads / 2; half > 0; half /= 2) {
    block_barrier();
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] = add(sums[threadIdx.x], sums[threadIdx.x + half]);
  }
  if (threadIdx.x == 0) *p.loss = multiply(p.scale, sums[0]);
}

extern "C" __global__ void __launch_bounds__(rows_threads) load_balance_backward(const __grid_constant__ LoadBalance p) {
  const int64_t row = row_of_warp();
  if (row >= p.rows) return;
  const float* logits = p.logits + row * p.experts;
  const Softmax of_row = softmax(p, logits);
  const float scale = multiply(multiply(*p.dloss, p.scale), weight(p, row));
  for (int e = threadIdx.x % 32; e < p.experts; e += 32) {
    const float probability = exp_approx(add(logits[e], -of_row.highest)) / of_row.total;
    p.dlogits[row * p.experts + e] = multiply(multiply(scale, probability), add(p.fractions[e], -of_row.mean));
  }
}
