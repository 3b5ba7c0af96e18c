// The router's choice against a plain sort, ties and NaN; its softmax against f64, forward and backward; all in one launch.
#include "router.cuh"

#include <algorithm>
#include <numeric>

#include "op_checks.h"

extern "C" {
void route(Route);
void top_k_softmax_forward(TopKSoftmax);
void top_k_softmax_backward(TopKSoftmax);
void select_experts(SelectExperts);
}

namespace suite {

using cuda_host::Options;

namespace {

std::vector<uint32_t> choose(const Options& options, const std::vector<float>& logits, int experts, int top_k) {
  const size_t tokens = logits.size() / experts;
  std::vector<uint32_t> routes(tokens * top_k, ~0u);
  const Route p = {logits.data(), routes.data(), int64_t(tokens), experts, top_k};
  launch_over(options, route, p, tokens, router_op::route_threads / 32, router_op::route_threads);
  return routes;
}

std::vector<uint32_t> sorted(const std::vector<float>& logits, int experts, int top_k) {
  std::vector<uint32_t> routes;
  for (size_t at = 0; at < logits.size(); at += experts) {
    std::vector<uint32_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    const auto key = [&](uint32_t e) { return std::isnan(logits[at + e]) ? -INFINITY : logits[at + e]; };
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return key(a) > key(b); });
    routes.insert(routes.end(), order.begin(), order.begin() + top_k);
  }
  return routes;
}

void softmax(const Options& options, void (*kernel)(TopKSoftmax), const TopKSoftmax& p) {
  launch_over(options, kernel, p, size_t(p.tokens), router_op::softmax_threads, router_op::softmax_threads);
}

std::string wrong_softmax(const Options& options, const std::vector<float>& logits, const std::vector<uint32_t>& routes, int experts,
                          int top_k) {
  const size_t tokens = logits.size() / experts;
  std::vector<float> weights(tokens * top_k), dweights = floats(tokens * top_k, 1, 2), dlogits(logits.size());
  const TopKSoftmax forward = {logits.data(), routes.data(), nullptr, weights.data(), nullptr, int64_t(tokens), experts, top_k};
  softmax(options, top_k_softmax_forward, forward);
  TopKSoftmax backward = forward;
  backward.logits = nullptr, backward.dweights = dweights.data(), backward.dlogits = dlogits.data();
  softmax(options, top_k_softmax_backward, backward);
  std::vector<double> exact(weights.size()), dexact(logits.size()), terms(weights.size()), dterms(logits.size());
  for (size_t t = 0; t < tokens; t++) {
    const uint32_t* own = &routes[t * top_k];
    double highest = -INFINITY, total = 0, mean = 0, size = 0;
    for (int k = 0; k < top_k; k++) highest = std::max(highest, double(logits[t * experts + own[k]]));
    for (int k = 0; k < top_k; k++) total += exact[t * top_k + k] = std::exp(logits[t * experts + own[k]] - highest);
    for (int k = 0; k < top_k; k++) {
      double& weight = exact[t * top_k + k];
      weight /= total;
      // Of e^x the error grows with x.
      terms[t * top_k + k] = weight * (1 + highest - logits[t * experts + own[k]]);
      mean += weight * dweights[t * top_k + k];
      size += std::fabs(weight * dweights[t * top_k + k]);
    }
    for (int k = 0; k < top_k; k++) {
      dexact[t * experts + own[k]] += exact[t * top_k + k] * (dweights[t * top_k + k] - mean);
      dterms[t * experts + own[k]] += terms[t * top_k + k] * (std::fabs(dweights[t * top_k + k]) + size);
    }
  }
  std::string wrong = off_sum("top_k_softmax", weights, exact, terms);
  if (wrong.empty()) wrong = off_sum("top_k_softmax, dlogits", dlogits, dexact, dterms);
  // The last token alone.
  if (wrong.empty()) {
    std::vector<float> one(top_k), done(experts);
    const size_t last = tokens - 1;
    softmax(options, top_k_softmax_forward, {&logits[last * experts], &routes[last * top_k], nullptr, one.data(), nullptr, 1, experts, top_k});
    softmax(options, top_k_softmax_backward, {nullptr, &routes[last * top_k], &dweights[last * top_k], one.data(), done.data(), 1, experts, top_k});
    wrong = bits("top_k_softmax alone", one.data(), &weights[last * top_k], top_k);
    if (wrong.empty()) wrong = bits("top_k_softmax alone, dlogits", done.data(), &dlogits[last * experts], experts);
  }
  return wrong;
}

// Route, softmax and sort, in one launch and one after the other.
std::string wrong_selection(const Options& options, const std::vector<float>& logits, const std::vector<uint32_t>& routes, int experts,
                            int top_k) {
  const size_t pairs = routes.size(), tokens = pairs / top_k;
  std::vector<float> weights(pairs), expected(pairs);
  const TopKSoftmax separate = {logits.data(), routes.data(), nullptr, expected.data(), nullptr, int64_t(tokens), experts, top_k};
  softmax(options, top_k_softmax_forward, separate);
  std::vector<uint32_t> got(pairs, ~0u), row_of(got), token_of(got), starts(experts + 1, ~0u);
  const SelectExperts p = {logits.data(), got.data(), weights.data(), row_of.data(), token_of.data(), starts.data(), int(tokens), experts, top_k};
  cuda_host::launch(options, 1, router_op::select_threads, router_op::select_shared_bytes(int(pairs)), [=] { select_experts(p); });
  std::string wrong = bits("select_experts, routes", got.data(), routes.data(), pairs);
  if (wrong.empty()) wrong = bits("select_experts, weights", weights.data(), expected.data(), pairs);
  std::vector<uint32_t> order(pairs), rows(pairs), tokens_of(pairs), first(experts + 1);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return routes[a] < routes[b]; });
  for (size_t row = 0; row < pairs; row++) rows[order[row]] = uint32_t(row), tokens_of[row] = order[row] / top_k;
  for (uint32_t route : routes) first[route + 1]++;
  for (int e = 0; e < experts; e++) first[e + 1] += first[e];
  if (wrong.empty()) wrong = bits("select_experts, row_of", row_of.data(), rows.data(), pairs);
  if (wrong.empty()) wrong = bits("select_experts, token_of", token_of.data(), tokens_of.data(), pairs);
  return wrong.empty() ? bits("select_experts, starts", starts.data(), first.data(), first.size()) : wrong;
}

std::string wrong_case(const Options& options, size_t tokens, int experts, int top_k) {
  std::vector<float> logits = floats(tokens * experts, 3, 1);
  // Ties: whole numbers in every other row; and rows of one number.
  for (size_t i = 0; i < logits.size(); i++) {
    if (i / experts % 3 == 1) logits[i] = std::round(logits[i]);
    if (i / experts % 6 == 5) logits[i] = -2;
  }
  const std::vector<uint32_t> routes = choose(options, logits, experts, top_k), expected = sorted(logits, experts, top_k);
  std::string wrong = bits("route", routes.data(), expected.data(), expected.size());
  if (wrong.empty()) wrong = wrong_softmax(options, logits, routes, experts, top_k);
  if (wrong.empty()) wrong = wrong_selection(options, logits, routes, experts, top_k);
  // So far apart that e^x without the largest taken off is infinite.
  if (wrong.empty()) {
    std::vector<float> apart = logits;
    for (float& logit : apart) logit *= 60;
    wrong = wrong_softmax(options, apart, routes, experts, top_k);
  }
  // Infinities, zeros of both signs and NaN are in order too.
  if (wrong.empty()) {
    const float odd[] = {NAN, -INFINITY, INFINITY, 0.0f, -0.0f};
    for (size_t i = 0; i < logits.size(); i++)
      if (i % 4 != 3) logits[i] = odd[i * 7919 % 5];
    const std::vector<uint32_t> routes = choose(options, logits, experts, top_k), expected = sorted(logits, experts, top_k);
    wrong = bits("route of odd numbers", routes.data(), expected.data(), expected.size());
    if (wrong.empty()) wrong = wrong_selection(options, logits, routes, experts, top_k);
  }
  return wrong;
}

// Replayed routes may name an expert that is not there; an expert named twice gets both gradients.
std::string wrong_routes_are_seen(const Options& options) {
  const std::vector<float> logits = {1, 2, 3, 4}, dweights = {1, 3, 1, 3};
  const std::vector<uint32_t> routes = {0, 2, 1, 1};
  std::vector<float> weights(4), dlogits(4);
  softmax(options, top_k_softmax_forward, {logits.data(), routes.data(), nullptr, weights.data(), nullptr, 2, 2, 2});
  if (!std::isnan(weights[0]) || !std::isnan(weights[1])) return "an expert that does not exist has a weight";
  if (weights[2] != 0.5f || weights[3] != 0.5f) return "an expert named twice";
  softmax(options, top_k_softmax_backward, {nullptr, routes.data(), dweights.data(), weights.data(), dlogits.data(), 2, 2, 2});
  // Beyond the row nothing is written: 2 would be the next token's first.
  return dlogits[2] == 0 && dlogits[3] == 0 ? "" : "the gradient of experts that do not exist";
}

// Tokens beyond 2^32, where what is counted in 32 bits begins anew.
std::string wrong_far(const Options& options) {
  constexpr size_t tokens = (size_t(1) << 32) + 1, last = tokens - 1;
  const FarArray<float> logits(2 * tokens), weights(tokens), dweights(tokens), dlogits(2 * tokens);
  const FarArray<uint32_t> routes(tokens);
  logits.data[2 * last + 1] = 3;
  const Route r = {logits.data, routes.data, tokens, 2, 1};
  launch_last(options, last / (router_op::route_threads / 32) + 1, router_op::route_threads, 0, [=] { route(r); });
  if (routes.data[last] != 1) return "the route of a far token";
  const TopKSoftmax forward = {logits.data, routes.data, nullptr, weights.data, nullptr, tokens, 2, 1};
  constexpr uint64_t blocks = last / router_op::softmax_threads + 1;
  launch_last(options, blocks, router_op::softmax_threads, 0, [=] { top_k_softmax_forward(forward); });
  if (weights.data[last] != 1) return "the weight of a far token";
  // A weight that is not one, so that a gradient is left.
  weights.data[last] = 0.5f, dweights.data[last] = 4;
  const TopKSoftmax backward = {nullptr, routes.data, dweights.data, weights.data, dlogits.data, tokens, 2, 1};
  launch_last(options, blocks, router_op::softmax_threads, 0, [=] { top_k_softmax_backward(backward); });
  return dlogits.data[2 * last + 1] == 1 ? "" : differs("the gradient of a far token", last, dlogits.data[2 * last + 1], 1);
}

}  // namespace

std::string wrong_router(const Options& options, bool small) {
  struct Case { size_t tokens; int experts, top_k; };
  for (const Case& c : std::vector<Case>{{1, 1, 1}, {7, 4, 2}, {5, 32, 4}, {9, 33, 33}, {13, 128, 4}, {size_t(small ? 130 : 1001), 40, 8}, {2, 1000, 5}, {3, 1024, 2}})
    if (const std::string wrong = wrong_case(options, c.tokens, c.experts, c.top_k); !wrong.empty()) return wrong;
  const std::string wrong = wrong_routes_are_seen(options);
  return wrong.empty() ? wrong_far(options) : wrong;
}

}  // namespace suite
