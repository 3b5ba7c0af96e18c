// The auxiliary loss and its gradient against f64, with rows that several sequences hold; bits of rows and schedules.
#include "load_balance.cuh"

#include "op_checks.h"

extern "C" {
void load_balance_fractions(LoadBalance);
void load_balance_rows(LoadBalance);
void load_balance_sum(LoadBalance);
void load_balance_backward(LoadBalance);
}

namespace suite {

using cuda_host::Options;
namespace op = load_balance_op;

namespace {

struct Problem {
  int experts;
  std::vector<float> logits;
  std::vector<uint32_t> token_of, offsets, holders;  // no holders: one each
  double tokens;
  float dloss;
};

struct Balance {
  float loss;
  std::vector<float> fractions, of_rows, dlogits;
};

Balance balance(const Options& options, const Problem& x) {
  const int64_t rows = int64_t(x.logits.size() / x.experts);
  Balance got = {0, std::vector<float>(x.experts), std::vector<float>(rows), std::vector<float>(x.logits.size())};
  const LoadBalance p = {x.logits.data(),         x.token_of.data(),  x.offsets.data(), x.holders.empty() ? nullptr : x.holders.data(),
                         got.fractions.data(),  got.of_rows.data(), &got.loss,      &x.dloss,
                         got.dlogits.data(),    rows,               x.experts,      float(x.tokens),
                         float(x.experts / x.tokens)};
  const unsigned of_rows = unsigned((rows + op::rows_threads / 32 - 1) / (op::rows_threads / 32));
  cuda_host::launch(options, unsigned(x.experts), op::fractions_threads, op::fractions_shared_bytes, [=] { load_balance_fractions(p); });
  cuda_host::launch(options, of_rows, op::rows_threads, 0, [=] { load_balance_rows(p); });
  cuda_host::launch(options, 1, op::sum_threads, op::sum_shared_bytes, [=] { load_balance_sum(p); });
  cuda_host::launch(options, of_rows, op::rows_threads, 0, [=] { load_balance_backward(p); });
  return got;
}

Problem problem(size_t rows, int experts, int top_k, bool held) {
  Problem x = {experts, floats(rows * experts, 4, 1), {}, {0}, {}, double(rows), 0.75f};
  // Expert e takes row t where e is one of k in a row from a place that leans to the first experts.
  for (int e = 0; e < experts; e++) {
    for (size_t t = 0; t < rows; t++)
      for (int k = 0; k < top_k; k++)
        if (int((t * t / 3 % experts + k) % experts) == e) x.token_of.push_back(uint32_t(t));
    x.offsets.push_back(uint32_t(x.token_of.size()));
  }
  if (held) {
    x.tokens = 0;
    for (size_t t = 0; t < rows; t++) x.holders.push_back(1 + t % 5), x.tokens += x.holders.back();
  }
  return x;
}

std::string wrong_case(const Options& options, size_t rows, int experts, int top_k, bool held) {
  const Problem x = problem(rows, experts, top_k, held);
  const Balance got = balance(options, x);
  const auto weight = [&](size_t row) { return held ? double(x.holders[row]) : 1.0; };
  std::vector<double> f(experts), dlogits(x.logits.size()), terms(x.logits.size());
  for (int e = 0; e < experts; e++)
    for (uint32_t i = x.offsets[e]; i < x.offsets[e + 1]; i++) f[e] += weight(x.token_of[i]) / x.tokens;
  double loss = 0;
  for (size_t t = 0; t < rows; t++) {
    const float* z = &x.logits[t * experts];
    double highest = -INFINITY, total = 0, mean = 0;
    for (int e = 0; e < experts; e++) highest = std::fmax(highest, z[e]);
    for (int e = 0; e < experts; e++) total += std::exp(z[e] - highest);
    for (int e = 0; e < experts; e++) mean += std::exp(z[e] - highest) / total * f[e];
    loss += weight(t) * mean * experts / x.tokens;
    for (int e = 0; e < experts; e++) {
      const double scaled = x.dloss * experts / x.tokens * weight(t) * std::exp(z[e] - highest) / total;
      dlogits[t * experts + e] = scaled * (f[e] - mean);
      terms[t * experts + e] = scaled * (f[e] + mean) * (1 + highest - z[e]);
    }
  }
  std::string wrong = off_sum("load_balance, fractions", got.fractions, f, f);
  if (wrong.empty()) wrong = off_sum("load_balance", {got.loss}, {loss}, {loss});
  if (wrong.empty()) wrong = off_sum("load_balance, dlogits", got.dlogits, dlogits, terms);
  // Another schedule: the same bits.
  if (!wrong.empty()) return wrong;
  const Balance again = balance(newest_first(options), x);
  wrong = bits("load_balance on another schedule", &again.loss, &got.loss, 1);
  return wrong.empty() ? bits("load_balance on another schedule, dlogits", again.dlogits.data(), got.dlogits.data(), x.logits.size()) : wrong;
}

// A row beyond 2^32, where what is counted in 32 bits begins anew.
std::string wrong_far(const Options& options) {
  constexpr size_t rows = (size_t(1) << 32) + 1, last = rows - 1;
  const FarArray<float> logits(2 * rows), of_rows(rows), dlogits(2 * rows);
  const FarArray<uint32_t> holders(rows);
  std::vector<float> fractions = {0.5f, 1.5f};
  float loss = 0, dloss = 4;
  holders.data[last] = 3;
  const LoadBalance p = {logits.data, nullptr, nullptr, holders.data, fractions.data(), of_rows.data, &loss, &dloss, dlogits.data, rows, 2, 8, 0.25f};
  constexpr uint64_t blocks = last / (op::rows_threads / 32) + 1;
  launch_last(options, blocks, op::rows_threads, 0, [=] { load_balance_rows(p); });
  // Equal logits: the mean of the fractions is 1.
  if (of_rows.data[last] != 3) return differs("load_balance, a far row", last, of_rows.data[last], 3);
  launch_last(options, blocks, op::rows_threads, 0, [=] { load_balance_backward(p); });
  return dlogits.data[2 * last] == -0.75f ? "" : differs("load_balance, a far row's dlogits", last, dlogits.data[2 * last], -0.75);
}

}  // namespace

std::string wrong_load_balance(const Options& options, bool small) {
  struct Case { size_t rows; int experts, top_k; };
  for (const Case& c : std::vector<Case>{{1, 1, 1}, {3, 4, 2}, {19, 32, 4}, {9, 33, 5}, {7, 128, 4}, {size_t(small ? 520 : 3001), 8, 2}})
    for (const bool held : {false, true})
      if (const std::string wrong = wrong_case(options, c.rows, c.experts, c.top_k, held); !wrong.empty()) return wrong;
  return wrong_far(options);
}

}  // namespace suite
