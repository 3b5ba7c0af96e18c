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

// The experts of each token, their weights, and the plan that sorts the routes by expert (dispatch.cuh).
struct SelectExperts {
  const float* logits;  // [tokens, experts]
  uint32_t* routes;     // [tokens, top_k]
  float* weights;       // [tokens, top_k]
  uint32_t* row_of;     // [tokens · top_k]
  uint32_t* token_of;   // [tokens · top_k]
  uint32_t* starts;     // [experts + 1]
  int32_t tokens;
  int32_t experts;  // at most the threads of the block
  int32_t top_k;    // at most `experts`
};

namespace router_op {

constexpr int route_threads = 128;  // one warp per token
constexpr int softmax_threads = 128;  // one token each
constexpr int select_threads = 1024;  // of the one block that selects the experts of a few tokens
constexpr int select_lanes = 8;       // per token
// The routes, and one sum per thread.
constexpr int select_shared_bytes(int pairs) { return (pairs + select_threads) * 4; }

}  // namespace router_op
