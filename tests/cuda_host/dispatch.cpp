// Tokens to experts and back: the stable sort, sums in slot order against f64, rows' bits.
#include "dispatch.cuh"

#include <random>

#include "op_checks.h"

// The kernels, compiled from dispatch.cu.
extern "C" {
void sort_count(SortRoutes);
void sort_place(SortRoutes);
void sort_scatter(SortRoutes);
void dispatch_forward(Dispatch);
void dispatch_backward(Dispatch);
void combine_forward(Dispatch);
void combine_backward(Dispatch);
}

namespace suite {

using cuda_host::launch, cuda_host::Options;
namespace op = dispatch;

namespace {

struct Plan {
  std::vector<uint32_t> row_of, token_of, starts;
};

std::vector<uint32_t> routes(int tokens, int experts, int top_k, bool crowded) {
  std::mt19937 random(11);
  std::vector<uint32_t> all;
  for (int t = 0; t < tokens; t++)
    for (int slot = 0; slot < top_k; slot++) {
      // Distinct within a token; crowded: the last experts alone.
      const int span = crowded ? top_k : experts;
      all.push_back(uint32_t(experts - 1 - (int(random() % span) / top_k * top_k + slot) % span));
    }
  return all;
}

Plan sorted(const Options& options, const std::vector<uint32_t>& routes, int experts, int top_k) {
  const int pairs = int(routes.size()), chunks = (pairs + op::chunk - 1) / op::chunk;
  Plan plan = {std::vector<uint32_t>(pairs), std::vector<uint32_t>(pairs), std::vector<uint32_t>(experts + 1)};
  std::vector<uint32_t> counts(size_t(chunks) * experts);
  const SortRoutes p = {routes.data(), counts.data(), plan.row_of.data(), plan.token_of.data(), plan.starts.data(), pairs, experts, top_k};
  launch(options, unsigned(chunks), op::sort_threads, op::sort_shared_bytes, [=] { sort_count(p); });
  launch(options, 1, op::place_threads, op::place_shared_bytes, [=] { sort_place(p); });
  launch(options, unsigned(chunks), op::sort_threads, op::sort_shared_bytes, [=] { sort_scatter(p); });
  return plan;
}

std::string wrong_sort(const Options& options, int tokens, int experts, int top_k, bool crowded) {
  const std::vector<uint32_t> of = routes(tokens, experts, top_k, crowded);
  const Plan got = sorted(options, of, experts, top_k);
  uint32_t row = 0;
  for (int e = 0; e < experts; e++) {
    if (got.starts[e] != row) return differs("starts", e, got.starts[e], row);
    for (size_t i = 0; i < of.size(); i++) {
      if (int(of[i]) != e) continue;
      if (got.row_of[i] != row) return differs("row of a route", i, got.row_of[i], row);
      if (got.token_of[row] != i / top_k) return differs("token of a row", row, got.token_of[row], double(i / top_k));
      row++;
    }
  }
  return got.starts[experts] == of.size() ? "" : differs("the last of starts", experts, got.starts[experts], double(of.size()));
}

// The combined rows plus a residual, in one launch and in two.
std::string wrong_residual(const Options& options, const Plan& plan, int width, int top_k, const std::vector<bf16>& of_rows,
                           const std::vector<float>& weights, const std::vector<bf16>& combined) {
  const std::vector<bf16> residual = numbers(combined.size(), 1, 24);
  std::vector<bf16> got(combined.size()), expected(combined.size());
  for (size_t i = 0; i < got.size(); i++) expected[i] = to_bf16(to_float(residual[i]) + to_float(combined[i]));
  const Dispatch p = {of_rows.data(), nullptr, weights.data(), plan.row_of.data(), got.data(), nullptr, width, top_k, residual.data()};
  launch(options, unsigned(got.size() / width), op::row_threads, op::row_shared_bytes, [=] { combine_forward(p); });
  return bits("combine and a residual", got.data(), expected.data(), got.size());
}

struct Rows {
  std::vector<bf16> sorted, dtokens, combined, dsorted;
  std::vector<float> dweights;
};

Rows rows(const Options& options, const Plan& plan, int width, int top_k, const std::vector<bf16>& of_tokens,
          const std::vector<bf16>& of_rows, const std::vector<float>& weights) {
  const size_t pairs = plan.row_of.size(), tokens = pairs / top_k;
  Rows got = {std::vector<bf16>(pairs * width), std::vector<bf16>(tokens * width), std::vector<bf16>(tokens * width),
              std::vector<bf16>(pairs * width), std::vector<float>(pairs)};
  const auto run = [&](void (*kernel)(Dispatch), size_t blocks, const bf16* x, const bf16* dy, const std::vector<uint32_t>& rows,
                       bf16* out) {
    const Dispatch p = {x, dy, weights.data(), rows.data(), out, got.dweights.data(), width, top_k, nullptr};
    launch(options, unsigned(blocks), op::row_threads, op::row_shared_bytes, [=] { kernel(p); });
  };
  run(dispatch_forward, pairs, of_tokens.data(), nullptr, plan.token_of, got.sorted.data());
  run(dispatch_backward, tokens, of_rows.data(), nullptr, plan.row_of, got.dtokens.data());
  run(combine_forward, tokens, of_rows.data(), nullptr, plan.row_of, got.combined.data());
  run(combine_backward, pairs, of_rows.data(), of_tokens.data(), plan.row_of, got.dsorted.data());
  return got;
}

std::string wrong_rows(const Options& options, int tokens, int experts, int top_k, int width) {
  const Plan plan = sorted(options, routes(tokens, experts, top_k, false), experts, top_k);
  const size_t pairs = size_t(tokens) * top_k;
  const std::vector<bf16> of_tokens = numbers(size_t(tokens) * width, 1, 21), of_rows = numbers(pairs * width, 1, 22);
  const std::vector<float> weights = floats(pairs, 1, 23);
  const Rows got = rows(options, plan, width, top_k, of_tokens, of_rows, weights);
  if (const std::string wrong = wrong_residual(options, plan, width, top_k, of_rows, weights, got.combined); !wrong.empty()) return wrong;
  // A token's slots are added in their order, each with one rounding.
  for (size_t i = 0; i < got.combined.size(); i++) {
    float plain = 0, weighed = 0;
    for (int slot = 0; slot < top_k; slot++) {
      const size_t pair = i / width * top_k + slot;
      const float x = to_float(of_rows[plan.row_of[pair] * width + i % width]);
      plain += x, weighed = std::fmaf(weights[pair], x, weighed);
    }
    if (to_bf16(plain).bits != got.dtokens[i].bits) return differs("dispatch, dx in slot order", i, to_float(got.dtokens[i]), plain);
    if (to_bf16(weighed).bits != got.combined[i].bits) return differs("combine, y in slot order", i, to_float(got.combined[i]), weighed);
  }
  std::vector<double> dtokens(got.dtokens.size()), combined(got.combined.size()), dsorted(got.dsorted.size()), dweights(pairs), terms(pairs);
  for (size_t pair = 0; pair < pairs; pair++) {
    const size_t token = pair / top_k, row = plan.row_of[pair];
    for (int i = 0; i < width; i++) {
      const double x = to_float(of_rows[row * width + i]), g = to_float(of_tokens[token * width + i]);
      if (got.sorted[row * width + i].bits != of_tokens[token * width + i].bits) return differs("a sorted row", row * width + i, to_float(got.sorted[row * width + i]), g);
      dtokens[token * width + i] += x;
      combined[token * width + i] += weights[pair] * x;
      dsorted[row * width + i] = weights[pair] * g;
      dweights[pair] += g * x;
      terms[pair] += std::fabs(g * x);
    }
  }
  std::string wrong = off("dispatch, dx", got.dtokens, dtokens);
  if (wrong.empty()) wrong = off("combine, y", got.combined, combined);
  if (wrong.empty()) wrong = off("combine, dx", got.dsorted, dsorted);
  if (wrong.empty()) wrong = off_sum("combine, dweights", got.dweights, dweights, terms);
  return wrong;
}

// The same rows in another place and batch have the same bits: the last token alone.
std::string wrong_alone(const Options& options) {
  const int tokens = 5, experts = 8, top_k = 3, width = 136;
  const Plan plan = sorted(options, routes(tokens, experts, top_k, false), experts, top_k);
  const std::vector<bf16> of_tokens = numbers(tokens * width, 1, 31), of_rows = numbers(tokens * top_k * width, 1, 32);
  const std::vector<float> weights = floats(tokens * top_k, 1, 33);
  const Rows all = rows(options, plan, width, top_k, of_tokens, of_rows, weights);
  // Its slots' rows from the first on, in slot order.
  const Plan own = {{0, 1, 2}, {0, 0, 0}, {}};
  std::vector<bf16> own_rows;
  const size_t first = (tokens - 1) * top_k;
  for (int slot = 0; slot < top_k; slot++) {
    const auto at = of_rows.begin() + plan.row_of[first + slot] * width;
    own_rows.insert(own_rows.end(), at, at + width);
  }
  const Rows one = rows(options, own, width, top_k, {of_tokens.end() - width, of_tokens.end()}, own_rows,
                        {weights.begin() + first, weights.end()});
  std::string wrong = bits("combine alone, y", one.combined.data(), &all.combined[(tokens - 1) * width], width);
  if (wrong.empty()) wrong = bits("dispatch alone, dx", one.dtokens.data(), &all.dtokens[(tokens - 1) * width], width);
  if (wrong.empty()) wrong = bits("combine alone, dweights", one.dweights.data(), &all.dweights[first], top_k);
  return wrong;
}

// A row beyond 2^31 numbers, as token and as sorted row.
std::string wrong_far_row(const Options& options) {
  constexpr int width = 1 << 17;
  constexpr uint32_t far = (1 << 14) + 1;
  const FarArray<bf16> x(size_t(far + 1) * width), dy(size_t(far + 1) * width), out(size_t(far + 1) * width);
  const std::vector<bf16> of_x = numbers(width, 1, 41), of_dy = numbers(width, 1, 42);
  bf16 *const at = out.data + size_t(far) * width;
  memcpy(x.data + size_t(far) * width, of_x.data(), width * sizeof(bf16));
  memcpy(dy.data + size_t(far) * width, of_dy.data(), width * sizeof(bf16));
  const std::vector<float> weights(far + 1, 0.5f);
  std::vector<float> dweights(far + 1);
  std::vector<uint32_t> rows(far + 1, far);
  const Dispatch p = {x.data, dy.data, weights.data(), rows.data(), out.data, dweights.data(), width, 1, nullptr};
  std::vector<bf16> halves(width), half_dy(width), added(width);
  double dot = 0, terms = 0;
  for (int i = 0; i < width; i++) {
    halves[i] = to_bf16(0.5f * to_float(of_x[i])), half_dy[i] = to_bf16(0.5f * to_float(of_dy[i]));
    const double term = double(to_float(of_x[i])) * to_float(of_dy[i]);
    dot += term, terms += std::fabs(term);
    added[i] = to_bf16(to_float(of_dy[i]) + to_float(halves[i]));
  }
  struct Pass { const char* what; void (*kernel)(Dispatch); const std::vector<bf16>& expected; };
  for (const Pass& pass : {Pass{"a far row, dispatch", dispatch_forward, of_x}, Pass{"a far row, dispatch, dx", dispatch_backward, of_x},
                           Pass{"a far row, combine", combine_forward, halves}, Pass{"a far row, combine, dx", combine_backward, half_dy}}) {
    memset(at, 0, width * sizeof(bf16));
    launch_last(options, far + 1, op::row_threads, op::row_shared_bytes, [=] { pass.kernel(p); });
    if (const std::string wrong = bits(pass.what, at, pass.expected.data(), width); !wrong.empty()) return wrong;
  }
  Dispatch with_residual = p;
  with_residual.residual = dy.data;
  launch_last(options, far + 1, op::row_threads, op::row_shared_bytes, [=] { combine_forward(with_residual); });
  if (const std::string wrong = bits("a far row, combine and a residual", at, added.data(), width); !wrong.empty()) return wrong;
  return off_sum("a far row, combine, dweights", {dweights[far]}, {dot}, {terms});
}

// A chunk of routes whose counts lie beyond 2^31 numbers.
std::string wrong_far_chunk(const Options& options) {
  constexpr int experts = 1024, chunk = (1 << 21) + 1, first = chunk * op::chunk, pairs = first + 3;
  const FarArray<uint32_t> routes(pairs), counts(size_t(chunk + 1) * experts), row_of(pairs);
  routes.data[first] = routes.data[first + 2] = 7, routes.data[first + 1] = 1023;
  std::vector<uint32_t> token_of(8);
  const SortRoutes p = {routes.data, counts.data, row_of.data, token_of.data(), nullptr, pairs, experts, 4};
  launch_last(options, chunk + 1, op::sort_threads, op::sort_shared_bytes, [=] { sort_count(p); });
  uint32_t* const own = counts.data + size_t(chunk) * experts;
  if (own[7] != 2 || own[1023] != 1 || own[8] != 0) return "the counts of a far chunk";
  own[7] = 5, own[1023] = 2;
  launch_last(options, chunk + 1, op::sort_threads, op::sort_shared_bytes, [=] { sort_scatter(p); });
  const uint32_t* rows = row_of.data + first;
  if (rows[0] != 5 || rows[1] != 2 || rows[2] != 6) return "the rows of a far chunk";
  return token_of[5] == first / 4 && token_of[2] == (first + 1) / 4 ? "" : "the tokens of a far chunk";
}

}  // namespace

std::string wrong_dispatch(const Options& options, bool small) {
  std::string wrong;
  struct Case { int tokens, experts, top_k, width; bool crowded; };
  const std::vector<Case> cases = {{1, 1, 1, 8, false},   {3, 4, 4, 64, false},    {130, 32, 4, 8, false}, {257, 200, 1, 24, true},
                                   {40, 32, 4, 1032, false}, {small ? 66 : 700, 1030, 4, 16, false}};
  for (const Case& c : cases) {
    if (wrong.empty()) wrong = wrong_sort(options, c.tokens, c.experts, c.top_k, c.crowded);
    if (wrong.empty()) wrong = wrong_rows(options, c.tokens, c.experts, c.top_k, c.width);
  }
  if (wrong.empty()) wrong = wrong_alone(options);
  if (wrong.empty()) wrong = wrong_far_row(options);
  return wrong.empty() ? wrong_far_chunk(options) : wrong;
}

}  // namespace suite
