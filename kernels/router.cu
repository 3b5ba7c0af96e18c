// Top-k routing, the softmax over the chosen logits, and both with the sort by expert for a few tokens.
#include "router.cuh"

using namespace elements;
using namespace router_op;

namespace {

// An expert with its order: larger logits first, ties by lower index. Indices are exact f32, so that a warp
// can exchange them.
struct Choice {
  float logit, expert;
};

PRIMITIVE bool before(const Choice& a, const Choice& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.expert < b.expert);
}

// The first expert in order after `last`, found by `lanes` neighbouring lanes together.
template <int lanes>
PRIMITIVE Choice next_choice(const float* logits, int experts, const Choice& last) {
  const float least = -INFINITY;
  Choice best = {least, static_cast<float>(experts)};
  for (int expert = threadIdx.x % lanes; expert < experts; expert += lanes) {
    const float logit = logits[expert];
    // NaN counts as the smallest value: all lanes agree on the order, and no expert is chosen twice.
    const Choice choice = {logit == logit ? logit : least, static_cast<float>(expert)};
    if (before(last, choice) && before(choice, best)) best = choice;
  }
  for (int mask = lanes / 2; mask > 0; mask /= 2) {
    const Choice other = {shuffle_xor(best.logit, mask), shuffle_xor(best.expert, mask)};
    if (before(other, best)) best = other;
  }
  return best;
}

// The weights of one token. If an expert does not exist, they become NaN and nothing is read.
PRIMITIVE void softmax(float* weights, const float* logits, const uint32_t* routes, int experts, int top_k) {
  float highest = -INFINITY;
  for (int slot = 0; slot < top_k; slot++) {
    const uint32_t expert = routes[slot];
    const float logit = expert < static_cast<uint32_t>(experts) ? logits[expert] : NAN;
    highest = max(highest, logit);
    weights[slot] = logit;
  }
  float total = 0.0f;
  for (int slot = 0; slot < top_k; slot++) {
    weights[slot] = exp_approx(add(weights[slot], -highest));
    total = add(total, weights[slot]);
  }
  for (int slot = 0; slot < top_k; slot++) weights[slot] = weights[slot] / total;
}

// Selects the experts of all tokens, 128 at a time.
PRIMITIVE void route_all(const SelectExperts& p, uint32_t* routes) {
  for (int first = 0; first < p.tokens; first += select_threads / select_lanes) {
    const int token = first + threadIdx.x / select_lanes;
    // Lanes without a token repeat the last one, because shuffles need all lanes.
    const float* logits = p.logits + static_cast<int64_t>(min(token, p.tokens - 1)) * p.experts;
    Choice last = {INFINITY, -1.0f};
    for (int slot = 0; slot < p.top_k; slot++) {
      last = next_choice<select_lanes>(logits, p.experts, last);
      if (token < p.tokens && threadIdx.x % select_lanes == 0)
        routes[token * p.top_k + slot] = static_cast<uint32_t>(last.expert);
    }
  }
}

// Replaces each number by the sum of the numbers up to it.
PRIMITIVE void running_sums(uint32_t* sums) {
  const int own = threadIdx.x;
  for (int apart = 1; apart < select_threads; apart *= 2) {
    const uint32_t sum = sums[own] + (own >= apart ? sums[own - apart] : 0);
    block_barrier();
    sums[own] = sum;
    block_barrier();
  }
}

}  // namespace

// One warp per token.
extern "C" __global__ void __launch_bounds__(route_threads) route(const __grid_constant__ Route p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (route_threads / 32) + threadIdx.x / 32;
  if (token >= p.tokens) return;
  Choice last = {INFINITY, -1.0f};
  for (int slot = 0; slot < p.top_k; slot++) {
    last = next_choice<32>(p.logits + token * p.experts, p.experts, last);
    if (threadIdx.x % 32 == 0) p.routes[token * p.top_k + slot] = static_cast<uint32_t>(last.expert);
  }
}

// One thread per token.
extern "C" __global__ void __launch_bounds__(softmax_threads)
    top_k_softmax_forward(const __grid_constant__ TopKSoftmax p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * softmax_threads + threadIdx.x;
  if (token >= p.tokens) return;
  const int64_t first = token * p.top_k;
  softmax(p.weights + first, p.logits + token * p.experts, p.routes + first, p.experts, p.top_k);
}

// Route, softmax and sort of a few tokens. One block. A thread counts, then places, the routes of one expert
// in one part of all routes: the rows of an expert are in route order.
extern "C" __global__ void __launch_bounds__(select_threads) select_experts(const __grid_constant__ SelectExperts p) {
  uint32_t* routes = reinterpret_cast<uint32_t*>(dynamic_shared_memory());
  const int pairs = p.tokens * p.top_k, thread = threadIdx.x;
  uint32_t* sums = routes + pairs;
  route_all(p, routes);
  block_barrier();
  for (int i = thread; i < pairs; i += select_threads) p.routes[i] = routes[i];
  for (int token = thread; token < p.tokens; token += select_threads)
    softmax(p.weights + token * p.top_k, p.logits + static_cast<int64_t>(token) * p.experts, routes + token * p.top_k, p.experts, p.top_k);

  const int parts = select_threads / p.experts, length = (pairs + parts - 1) / parts;
  const uint32_t expert = thread % p.experts;
  const int part = thread / p.experts, first = part * length, end = min(first + length, pairs);
  const bool counts = part < parts;
  // The sums run over the parts of the first expert, then over those of the next.
  const int own = counts ? static_cast<int>(expert) * parts + part : thread;
  uint32_t found = 0;
  for (int i = first; counts && i < end; i++) found += routes[i] == expert;
  sums[own] = found;
  block_barrier();
  running_sums(sums);
  if (thread == 0) p.starts[p.experts] = pairs;
  if (!counts) return;
  uint32_t row = sums[own] - found;
  if (part == 0) p.starts[expert] = row;
  for (int i = first; i < end; i++) {
    if (routes[i] != expert) continue;
    p.row_of[i] = row;
    p.token_of[row] = i / p.top_k;
    row++;
  }
}

extern "C" __global__ void __launch_bounds__(softmax_threads)
    top_k_softmax_backward(const __grid_constant__ TopKSoftmax p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * softmax_threads + threadIdx.x;
  if (token >= p.tokens) return;
  const int64_t first = token * p.top_k;
  float mean = 0.0f;
  for (int slot = 0; slot < p.top_k; slot++)
    mean = add(mean, multiply(p.weights[first + slot], p.dweights[first + slot]));
  for (int slot = 0; slot < p.top_k; slot++) {
    const uint32_t expert = p.routes[first + slot];
    if (expert >= static_cast<uint32_t>(p.experts)) continue;
    float& dlogit = p.dlogits[token * p.experts + expert];
    dlogit = add(dlogit, multiply(p.weights[first + slot], add(p.dweights[first + slot], -mean)));
  }
}
