// Dispatch of tokens to experts and their combination. One thread adds an element over the slots, in slot
// order.
#include "dispatch.cuh"

using namespace dispatch;
using namespace elements;

namespace {

// Copies this block's routes to shared memory.
PRIMITIVE int load_chunk(const SortRoutes& p, uint32_t* routes) {
  const int first = blockIdx.x * chunk, count = min(chunk, p.pairs - first);
  for (int i = threadIdx.x; i < count; i += sort_threads) routes[i] = p.routes[first + i];
  block_barrier();
  return count;
}

// Weighted sum of a token's rows over its slots, in slot order.
template <bool weighed>
PRIMITIVE void sum_slots(const Dispatch& p) {
  const int64_t token = blockIdx.x;
  const uint32_t* rows = p.rows + token * p.top_k;
  for (int i = threadIdx.x * vector; i < p.width; i += row_threads * vector) {
    Values sum = {};
    for (int slot = 0; slot < p.top_k; slot++) {
      const Values x = load(p.x + static_cast<int64_t>(rows[slot]) * p.width + i);
      const float weight = weighed ? p.weights[token * p.top_k + slot] : 1.0f;
      for (int k = 0; k < vector; k++) sum.v[k] = multiply_add(weight, x.v[k], sum.v[k]);
    }
    if (weighed && p.residual) {
      const Values residual = load(p.residual + token * p.width + i);
      for (int k = 0; k < vector; k++) sum.v[k] = add(residual.v[k], rounded(sum.v[k]));
    }
    store(p.out + token * p.width + i, sum);
  }
}

}  // namespace

// Counts each chunk's routes per expert. Blocks: chunks.
extern "C" __global__ void __launch_bounds__(sort_threads) sort_count(const __grid_constant__ SortRoutes p) {
  uint32_t* routes = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  const int count = load_chunk(p, routes);
  for (int expert = threadIdx.x; expert < p.experts; expert += sort_threads) {
    uint32_t found = 0;
    for (int i = 0; i < count; i++) found += routes[i] == static_cast<uint32_t>(expert);
    p.counts[static_cast<int64_t>(blockIdx.x) * p.experts + expert] = found;
  }
}

// Computes the first row of each expert, and of each chunk within an expert. One block.
extern "C" __global__ void __launch_bounds__(place_threads) sort_place(const __grid_constant__ SortRoutes p) {
  uint32_t* totals = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  const int chunks = (p.pairs + chunk - 1) / chunk;
  uint32_t before = 0;  // rows of all earlier experts
  for (int first = 0; first < p.experts; first += place_threads) {
    const int expert = first + threadIdx.x, here = min(place_threads, p.experts - first);
    uint32_t total = 0;
    if (expert < p.experts)
      for (int c = 0; c < chunks; c++) total += p.counts[static_cast<int64_t>(c) * p.experts + expert];
    totals[threadIdx.x] = total;
    block_barrier();
    uint32_t row = before;
    for (int other = 0; other < min(static_cast<int>(threadIdx.x), here); other++) row += totals[other];
    if (expert < p.experts) {
      p.starts[expert] = row;
      for (int c = 0; c < chunks; c++) {
        uint32_t* at = p.counts + static_cast<int64_t>(c) * p.experts + expert;
        const uint32_t found = *at;
        *at = row;
        row += found;
      }
    }
    for (int other = 0; other < here; other++) before += totals[other];
    block_barrier();
  }
  if (threadIdx.x == 0) p.starts[p.experts] = before;
}

// Computes the row of every route, in route order within an expert. Blocks: chunks.
extern "C" __global__ void __launch_bounds__(sort_threads) sort_scatter(const __grid_constant__ SortRoutes p) {
  uint32_t* routes = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  const int count = load_chunk(p, routes), first = blockIdx.x * chunk;
  for (int expert = threadIdx.x; expert < p.experts; expert += sort_threads) {
    uint32_t row = p.counts[static_cast<int64_t>(blockIdx.x) * p.experts + expert];
    for (int i = 0; i < count; i++) {
      if (routes[i] != static_cast<uint32_t>(expert)) continue;
      p.row_of[first + i] = row;
      p.token_of[row] = (first + i) / p.top_k;
      row++;
    }
  }
}

// Copies each token's row to its sorted rows. Blocks: sorted rows.
extern "C" __global__ void __launch_bounds__(row_threads) dispatch_forward(const __grid_constant__ Dispatch p) {
  const bf16* from = p.x + static_cast<int64_t>(p.rows[blockIdx.x]) * p.width;
  bf16* to = p.out + static_cast<int64_t>(blockIdx.x) * p.width;
  for (int i = threadIdx.x * vector; i < p.width; i += row_threads * vector)
    *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
}

// Blocks: tokens.
extern "C" __global__ void __launch_bounds__(row_threads) dispatch_backward(const __grid_constant__ Dispatch p) {
  sum_slots<false>(p);
}

// Blocks: tokens.
extern "C" __global__ void __launch_bounds__(row_threads) combine_forward(const __grid_constant__ Dispatch p) {
  sum_slots<true>(p);
}

// Gradients of a slot: its row gets the weight times the token's gradient; its weight gets the dot product
// of both rows. Blocks: (token, slot).
extern "C" __global__ void __launch_bounds__(row_threads) combine_backward(const __grid_constant__ Dispatch p) {
  const int64_t row = static_cast<int64_t>(p.rows[blockIdx.x]) * p.width;
  const bf16* dy = p.dy + static_cast<int64_t>(blockIdx.x / p.top_k) * p.width;
  const float weight = p.weights[blockIdx.x];
  float dot = 0.0f;
  for (int i = threadIdx.x * vector; i < p.width; i += row_threads * vector) {
    const Values x = load(p.x + row + i), g = load(dy + i);
    Values dx;
    for (int k = 0; k < vector; k++) {
      dot = multiply_add(x.v[k], g.v[k], dot);
      dx.v[k] = multiply(weight, g.v[k]);
    }
    store(p.out + row + i, dx);
  }
  for (int mask = 16; mask > 0; mask /= 2) dot = add(dot, shuffle_xor(dot, mask));
  float* of_warps = reinterpret_cast<float*>(dynamic_shared_memory());
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = dot;
  block_barrier();
  if (threadIdx.x > 0) return;
  for (int warp = 1; warp < row_threads / 32; warp++) dot = add(dot, of_warps[warp]);
  p.dweights[blockIdx.x] = dot;
}
