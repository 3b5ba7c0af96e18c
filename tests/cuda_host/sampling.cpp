// Tokens drawn from rows of logits: against a walk through the row by one thread, at every edge, on every schedule.
#include "op_checks.h"
#include "sampling.cuh"

// The kernels, each compiled from its own .cu.
extern "C" {
void sampling_draw(Draws);
void sampling_likeliest(Draws);
void sampling_log_probs(LogProbs);
}

namespace suite {

using cuda_host::launch, cuda_host::Options;
namespace op = sampling;

namespace {

struct Rows {
  std::vector<float> z, log_sum_exp;
  int vocabulary;
  // The first row's index: above 0 the memory of those before it does not exist.
  uint32_t first = 0;

  const float* row(uint32_t index) const { return &z[size_t(index - first) * vocabulary]; }
  const float* row_zero() const { return z.data() - int64_t(first) * vocabulary; }
};

Rows of_values(std::vector<float> z, int vocabulary, uint32_t first = 0) {
  Rows rows = {std::move(z), {}, vocabulary, first};
  for (size_t at = 0; at < rows.z.size(); at += vocabulary) {
    double sum = 0;
    for (int i = 0; i < vocabulary; i++) sum += std::exp(double(rows.z[at + i]));
    rows.log_sum_exp.push_back(float(std::log(sum)));
  }
  return rows;
}

// Without uniforms: the likeliest.
std::vector<Drawn> draw(const Options& options, const Rows& rows, const std::vector<uint32_t>& asked, const std::vector<double>& uniforms) {
  std::vector<Drawn> drawn(asked.size());
  const Draws p = {rows.row_zero(), rows.log_sum_exp.data() - rows.first, asked.data(), uniforms.empty() ? nullptr : uniforms.data(),
                   drawn.data(), rows.vocabulary};
  void (*kernel)(Draws) = uniforms.empty() ? sampling_likeliest : sampling_draw;
  launch(options, unsigned(asked.size()), op::draw_threads, op::draw_shared_bytes, [=] { kernel(p); });
  return drawn;
}

// As src/ops/logits.rs walks, with the kernel's weights.
uint32_t walked(const Rows& rows, uint32_t row, double uniform) {
  std::vector<double> weights(rows.vocabulary);
  double total = 0, sum = 0;
  for (int i = 0; i < rows.vocabulary; i++) {
    weights[i] = elements::exp_approx(rows.row(row)[i] + -rows.log_sum_exp[row - rows.first]);
    total += weights[i];
  }
  for (int i = 0; i < rows.vocabulary; i++)
    if ((sum += weights[i]) > uniform * total && weights[i] > 0) return i;
  for (int i = rows.vocabulary; i-- > 0;)
    if (weights[i] > 0) return i;
  return op::NO_TOKEN;
}

std::string wrong_draws(const char* what, const Options& options, const Rows& rows, const std::vector<uint32_t>& asked,
                        const std::vector<double>& uniforms) {
  const std::vector<Drawn> drawn = draw(options, rows, asked, uniforms);
  std::vector<uint32_t> tokens;
  for (size_t i = 0; i < asked.size(); i++) {
    const uint32_t expected = walked(rows, asked[i], uniforms[i]);
    if (drawn[i].token != expected) return differs(what, i, drawn[i].token, expected);
    tokens.push_back(expected);
  }
  std::vector<float> log_probs(asked.size());
  const LogProbs p = {rows.row_zero(), rows.log_sum_exp.data() - rows.first, asked.data(), tokens.data(), log_probs.data(),
                      int64_t(asked.size()), rows.vocabulary};
  launch_over(options, sampling_log_probs, p, asked.size(), op::log_probs_threads, op::log_probs_threads);
  for (size_t i = 0; i < asked.size(); i++) {
    const float exact = rows.row(asked[i])[tokens[i]] - rows.log_sum_exp[asked[i] - rows.first];
    if (log_probs[i] != exact) return differs("sampling, log-probability of a token", i, log_probs[i], exact);
    if (__uint_as_float(drawn[i].log_prob) != exact) return differs("sampling, log-probability", i, __uint_as_float(drawn[i].log_prob), exact);
  }
  return "";
}

std::string wrong_random(const Options& options, size_t count, int vocabulary, uint32_t first) {
  const Rows rows = of_values(floats(count * vocabulary, 2, 1), vocabulary, first);
  std::vector<uint32_t> asked;
  std::vector<double> uniforms;
  for (uint32_t i = 0; i < 12; i++) {
    asked.push_back(first + (i * 7 + 1) % count);
    uniforms.push_back(std::fmod(0.618033988749895 * (i + 1), 1));
  }
  uniforms[0] = 0;
  uniforms[1] = 1 - 0x1p-53;
  return wrong_draws("sampling", options, rows, asked, uniforms);
}

// Weights of 1 and 0, whose sums are exact: a target on an edge takes the token after it.
std::string wrong_edges(const Options& options, int vocabulary) {
  Rows rows = {std::vector<float>(vocabulary, 0.0f), {0.0f}, vocabulary};
  int total = vocabulary;
  // None at both ends and in the middle, over several threads.
  for (int i = 0; i < vocabulary; i++)
    if (i < vocabulary / 20 || (i > vocabulary / 2 && i < vocabulary / 2 + vocabulary / 10) || i >= vocabulary - vocabulary / 20) {
      rows.z[i] = -INFINITY;
      total--;
    }
  std::vector<double> uniforms = {0, 1 - 0x1p-53, 1};
  for (const int at : {1, 7, 8, 9, 16, 255, 256, 257, 512, vocabulary / 2, total - 1})
    if (at < total) uniforms.push_back(double(at) / total);
  for (double& uniform : uniforms)
    if (uniform * total != std::round(uniform * total)) uniform = std::nextafter(uniform, 1);
  return wrong_draws("sampling, on an edge", options, rows, std::vector<uint32_t>(uniforms.size(), 0), uniforms);
}

std::string wrong_likeliest(const Options& options, int vocabulary) {
  struct Case { std::vector<int> highest; uint32_t expected; };
  const int last = vocabulary - 1;
  const std::vector<Case> cases = {{{0, last}, 0}, {{last}, uint32_t(last)}, {{last / 2, (last + 1) / 2, last}, uint32_t(last / 2)},
                                   {{last / 3, last}, uint32_t(last / 3)}};
  for (const Case& c : cases) {
    std::vector<float> z = floats(vocabulary, 1, 2);
    for (const int at : c.highest) z[at] = 9;
    const std::vector<Drawn> drawn = draw(options, of_values(z, vocabulary), {0}, {});
    if (drawn[0].token != c.expected || drawn[0].log_prob != 0) return differs("sampling, likeliest", 0, drawn[0].token, c.expected);
  }
  return "";
}

std::string wrong_numbers(const Options& options) {
  for (const float bad : {NAN, INFINITY}) {
    std::vector<float> z = floats(100, 1, 3);
    z[77] = bad;
    const Rows rows = of_values(z, 100);
    for (const std::vector<double>& uniforms : {std::vector<double>{0.5}, {}})
      if (const uint32_t token = draw(options, rows, {0}, uniforms)[0].token; token != op::NO_TOKEN)
        return differs("sampling of no numbers", 0, token, op::NO_TOKEN);
  }
  return "";
}

// More tokens asked for than 2^32, where what is counted in 32 bits begins anew.
std::string wrong_far_token(const Options& options) {
  constexpr size_t count = (size_t(1) << 32) + 1;
  const FarArray<uint32_t> rows(count), tokens(count);
  const FarArray<float> log_probs(count);
  rows.data[count - 1] = 1, tokens.data[count - 1] = 2;
  const std::vector<float> z = {0, 0, 0, 1, 2, 4}, log_sum_exp = {9, 7};
  const LogProbs p = {z.data(), log_sum_exp.data(), rows.data, tokens.data, log_probs.data, int64_t(count), 3};
  launch_last(options, (count - 1) / op::log_probs_threads + 1, op::log_probs_threads, 0, [=] { sampling_log_probs(p); });
  return log_probs.data[count - 1] == -3 ? "" : differs("the log-probability of a far token", count - 1, log_probs.data[count - 1], -3);
}

}  // namespace

std::string wrong_sampling(const Options& options, bool small) {
  std::string wrong = wrong_numbers(options);
  for (const int vocabulary : {1, 13, 3001, small ? 8193 : 70000}) {
    if (wrong.empty()) wrong = wrong_random(options, 3, vocabulary, 0);
    if (wrong.empty()) wrong = wrong_edges(options, vocabulary);
    if (wrong.empty()) wrong = wrong_likeliest(options, vocabulary);
  }
  // Beyond 2^31 values.
  if (wrong.empty()) wrong = wrong_random(options, 2, 3001, 1 << 20);
  return wrong.empty() ? wrong_far_token(options) : wrong;
}

}  // namespace suite
