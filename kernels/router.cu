// Top-k routing, and the softmax over the chosen logits.
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

}  // namespace

// One warp per token. The next expert is the first in order after the previous one.
extern "C" __global__ void __launch_bounds__(route_threads) route(const __grid_constant__ Route p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (route_threads / 32) + threadIdx.x / 32;
  if (token >= p.tokens) return;
  const int lane = threadIdx.x % 32;
  const float* logits = p.logits + token * p.experts;
  const float least = -INFINITY;
  Choice last = {INFINITY, -1.0f};
  for (int slot = 0; slot < p.top_k; slot++) {
    Choice best = {least, static_cast<float>(p.experts)};
    for (int expert = lane; expert < p.experts; expert += 32) {
      const float logit = logits[expert];
      // NaN counts as the smallest value: all lanes agree on the order, and no expert is chosen twice.
      const Choice choice = {logit == logit ? logit : least, static_cast<float>(expert)};
      if (before(last, choice) && before(choice, best)) best = choice;
    }
    for (int mask = 16; mask > 0; mask /= 2) {
      const Choice other = {shuffle_xor(best.logit, mask), shuffle_xor(best.expert, mask)};
      if (before(other, best)) best = other;
    }
    if (lane == 0) p.routes[token * p.top_k + slot] = static_cast<uint32_t>(best.expert);
    last = best;
  }
}

// One thread per token. If an expert does not exist, the token's weights become NaN and nothing is read.
extern "C" __global__ void __launch_bounds__(softmax_threads)
    top_k_softmax_forward(const __grid_constant__ TopKSoftmax p) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * softmax_threads + threadIdx.x;
  if (token >= p.tokens) return;
  const uint32_t* routes = p.routes + token * p.top_k;
  float* weights = p.weights + token * p.top_k;
  float highest = -INFINITY;
  for (int slot = 0; slot < p.top_k; slot++) {
    const uint32_t expert = routes[slot];
    const float logit = expert < static_cast<uint32_t>(p.experts) ? p.logits[token * p.experts + expert] : NAN;
    highest = max(highest, logit);
    weights[slot] = logit;
  }
  float total = 0.0f;
  for (int slot = 0; slot < p.top_k; slot++) {
    weights[slot] = exp_approx(add(weights[slot], -highest));
    total = add(total, weights[slot]);
  }
  for (int slot = 0; slot < p.top_k; slot++) weights[slot] = weights[slot] / total;
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
