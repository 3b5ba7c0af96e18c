// Parameters of top-k routing, src/ops/router.rs.
#pragma once

#include "elements.cuh"

struct Route {
  const float* logits;  // [tokens, experts]
  uint32_t* routes;     // [tokens, top_k]
  int64_t tokens;
  int32_t experts;  // at most 65,535
  int32_t top_k;    // at most `experts`
};

struct TopKSoftmax {
  const float* logits;     // [tokens, experts]; null in the backward
  const uint32_t* routes;  // [tokens, top_k]
  const float* dweights;   // [tokens, top_k]; null in the forward
  float* weights;          // [tokens, top_k], written by the forward, read by the backward
  float* dlogits;          // [tokens, experts], zeros at first; null in the forward
  int64_t tokens;
  int32_t experts;
  int32_t top_k;
};

namespace router_op {

constexpr int route_threads = 128;  // one warp per token
constexpr int softmax_threads = 128;  // one token each

}  // namespace router_op
