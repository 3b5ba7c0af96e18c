// The head's rows of logits: errors against f64, row bits, bits whatever the schedule.
#include "op_checks.h"
#include "log_prob.cuh"

// The kernels, each compiled from its own .cu.
extern "C" {
void log_prob_row_stats(RowStats);
void log_prob_gradient(LogitsGradient);
}

namespace suite {

using cuda_host::launch, cuda_host::Options;
namespace op = log_prob;

namespace {

struct Stats {
  std::vector<float> z, log_sum_exp, entropy, log_prob;
};

// Without targets no log-probabilities.
Stats row_stats(const Options& options, std::vector<float> z, const std::vector<uint32_t>& targets, size_t rows, float inverse) {
  const int vocabulary = int(z.size() / rows);
  Stats got = {std::move(z), std::vector<float>(rows), std::vector<float>(rows), std::vector<float>(targets.size())};
  const RowStats p = {got.z.data(),       targets.empty() ? nullptr : targets.data(),
                      got.log_sum_exp.data(), got.entropy.data(),
                      targets.empty() ? nullptr : got.log_prob.data(), vocabulary, inverse};
  launch(options, unsigned(rows), op::stats_threads, op::stats_shared_bytes, [=] { log_prob_row_stats(p); });
  return got;
}

std::vector<bf16> gradient(const Options& options, const Stats& stats, const std::vector<uint32_t>& targets,
                           const std::vector<float>& d_log_prob, const std::vector<float>& d_entropy, float inverse) {
  const size_t rows = targets.size();
  const int vocabulary = int(stats.z.size() / rows);
  std::vector<bf16> dz(stats.z.size());
  const LogitsGradient p = {stats.z.data(), targets.data(), stats.log_sum_exp.data(), stats.entropy.data(), d_log_prob.data(),
                            d_entropy.data(), dz.data(), vocabulary, inverse};
  const int values = op::gradient_threads * op::vector;
  launch(options, unsigned(rows) * unsigned((vocabulary + values - 1) / values), op::gradient_threads, 0,
         [=] { log_prob_gradient(p); });
  return dz;
}

std::string near(const char* what, size_t at, double got, double exact, double tolerance) {
  return std::fabs(got - exact) <= tolerance ? "" : differs(what, at, got, exact);
}

struct Case {
  size_t rows;
  int vocabulary;
  double size;
  float inverse;
  // Every third value is −∞, and the highest come last.
  bool hidden_and_rising = false;
};

std::string wrong_case(const Options& options, const Case& c) {
  const size_t rows = c.rows, width = size_t(c.vocabulary);
  std::vector<float> z = floats(rows * width, c.size, 1);
  if (c.hidden_and_rising)
    for (size_t i = 0; i < z.size(); i++) z[i] = i % 3 == 1 ? -INFINITY : float(i % width) * 0.25f;
  std::vector<uint32_t> targets(rows);
  for (size_t row = 0; row < rows; row++) targets[row] = uint32_t((row * 7919 + (row % 2 ? 0 : width - 1)) % width);
  if (c.hidden_and_rising)
    for (size_t row = 0; row < rows; row++) targets[row] = targets[row] / 3 * 3 % uint32_t(width);
  const Stats got = row_stats(options, z, targets, rows, c.inverse);
  const std::vector<float> d_log_prob = floats(rows, 1, 2), d_entropy = floats(rows, 0.3, 3);
  const std::vector<bf16> dz = gradient(options, got, targets, d_log_prob, d_entropy, c.inverse);
  std::string wrong;
  for (size_t row = 0; row < rows && wrong.empty(); row++) {
    const float* of_row = &got.z[row * width];
    double highest = -INFINITY, sum = 0, moment = 0;
    for (size_t i = 0; i < width && wrong.empty(); i++) {
      const float over = z[row * width + i] * c.inverse;
      wrong = bits("log_prob, z", &of_row[i], &over, 1);
      highest = std::fmax(highest, over);
    }
    for (size_t i = 0; i < width; i++) sum += std::exp(of_row[i] - highest);
    const double log_sum_exp = highest + std::log(sum);
    for (size_t i = 0; i < width; i++)
      if (of_row[i] > -INFINITY) moment += std::exp(of_row[i] - log_sum_exp) * (of_row[i] - log_sum_exp);
    const double size = 1 + std::fabs(highest) + std::log(double(width));
    if (wrong.empty()) wrong = near("log_prob, log-sum-exp", row, got.log_sum_exp[row], log_sum_exp, 4e-7 * size);
    if (wrong.empty()) wrong = near("log_prob, entropy", row, got.entropy[row], -moment, 2e-6 * (1 + std::log(double(width))));
    const double target = of_row[targets[row]];
    if (wrong.empty())
      wrong = near("log_prob", row, got.log_prob[row], target - log_sum_exp, 4e-7 * (size + std::fabs(target)));
    for (size_t i = 0; i < width && wrong.empty(); i++) {
      const double log_p = of_row[i] - double(got.log_sum_exp[row]), probability = std::exp(log_p);
      const double of_entropy = d_entropy[row] * (std::fmax(log_p, -1e4) + got.entropy[row]);
      const double of_target = i == targets[row] ? d_log_prob[row] * c.inverse : 0;
      const double exact = -c.inverse * probability * (d_log_prob[row] + of_entropy) + of_target;
      const double terms = c.inverse * probability * (std::fabs(d_log_prob[row]) + std::fabs(of_entropy)) + std::fabs(of_target);
      const double rounding = WORSE_THAN_BF16_MAX * BF16_ROUNDING * std::fabs(exact) + 1e-5 * terms + 1e-36;
      wrong = near("log_prob, dz", row * width + i, to_float(dz[row * width + i]), exact, rounding);
    }
  }
  // Another schedule, and the last row alone, which begins elsewhere: the same bits.
  const Stats again = row_stats(newest_first(options), z, {}, rows, c.inverse);
  const size_t at = (rows - 1) * width;
  const Stats one = row_stats(options, {z.begin() + at, z.end()}, {targets.back()}, 1, c.inverse);
  const std::vector<bf16> one_dz = gradient(options, one, {targets.back()}, {d_log_prob.back()}, {d_entropy.back()}, c.inverse);
  if (wrong.empty()) wrong = bits("log_prob on another schedule, log-sum-exp", again.log_sum_exp.data(), got.log_sum_exp.data(), rows);
  if (wrong.empty()) wrong = bits("log_prob on another schedule, entropy", again.entropy.data(), got.entropy.data(), rows);
  if (wrong.empty()) wrong = bits("log_prob alone, log-sum-exp", one.log_sum_exp.data(), &got.log_sum_exp[rows - 1], 1);
  if (wrong.empty()) wrong = bits("log_prob alone, entropy", one.entropy.data(), &got.entropy[rows - 1], 1);
  if (wrong.empty()) wrong = bits("log_prob alone", one.log_prob.data(), &got.log_prob[rows - 1], 1);
  if (wrong.empty()) wrong = bits("log_prob alone, dz", one_dz.data(), &dz[at], width);
  return wrong;
}

// What is no distribution shows, wherever it is; a target that is no token gives no number.
std::string wrong_numbers(const Options& options) {
  const size_t width = 9001;
  for (const float bad : {NAN, INFINITY})
    for (const size_t at : {size_t(0), size_t(4097), width - 1}) {
      std::vector<float> z = floats(width, 1, 4);
      z[at] = bad;
      const Stats got = row_stats(options, z, {0}, 1, 1);
      if (std::isfinite(got.log_sum_exp[0]) || std::isfinite(got.entropy[0])) return differs("log_prob of no number", at, got.log_sum_exp[0], bad);
    }
  const Stats got = row_stats(options, floats(2 * 100, 1, 5), {100, 0xffffffffu}, 2, 1);
  for (size_t row = 0; row < 2; row++)
    if (!std::isnan(got.log_prob[row])) return differs("log_prob of no token", row, got.log_prob[row], NAN);
  return "";
}

// A row beyond 2^31 values has the bits it has as the first.
std::string wrong_far(const Options& options) {
  constexpr int width = 1 << 17;
  constexpr size_t row = (1 << 14) + 1;
  const std::vector<float> z = floats(width, 1, 6);
  const Stats near = row_stats(options, z, {77}, 1, 1.25f);
  const std::vector<bf16> near_dz = gradient(options, near, {77}, {0.5f}, {-0.25f}, 1.25f);
  const FarArray<float> far((row + 1) * width);
  const FarArray<bf16> dz((row + 1) * width);
  memcpy(far.data + row * width, z.data(), width * sizeof(float));
  const std::vector<uint32_t> targets(row + 1, 77);
  std::vector<float> log_sum_exp(row + 1), entropy(row + 1), log_prob(row + 1), of_log_prob(row + 1, 0.5f), of_entropy(row + 1, -0.25f);
  const RowStats p = {far.data, targets.data(), log_sum_exp.data(), entropy.data(), log_prob.data(), width, 1.25f};
  launch_last(options, row + 1, op::stats_threads, op::stats_shared_bytes, [=] { log_prob_row_stats(p); });
  const LogitsGradient g = {far.data, targets.data(), log_sum_exp.data(), entropy.data(), of_log_prob.data(), of_entropy.data(), dz.data, width, 1.25f};
  constexpr uint64_t of_row = width / (op::gradient_threads * op::vector);
  // The row's first block.
  launch_last(options, row * of_row + 1, op::gradient_threads, 0, [=] { log_prob_gradient(g); });
  std::string wrong = bits("log_prob, a far row", far.data + row * width, near.z.data(), width);
  if (wrong.empty()) wrong = bits("log_prob, a far row's log-sum-exp", &log_sum_exp[row], &near.log_sum_exp[0], 1);
  if (wrong.empty()) wrong = bits("log_prob, a far row's entropy", &entropy[row], &near.entropy[0], 1);
  if (wrong.empty()) wrong = bits("log_prob, a far row's target", &log_prob[row], &near.log_prob[0], 1);
  if (wrong.empty()) wrong = bits("log_prob, a far row's dz", dz.data + row * width, near_dz.data(), op::gradient_threads * op::vector);
  return wrong;
}

}  // namespace

std::string wrong_log_prob(const Options& options, bool small) {
  const std::vector<Case> cases = {
      {1, 1, 1, 1},           {3, 13, 2, 0.5f},         {2, 64, 30, 1},   {2, 999, 1, 1 / 0.7f, true},
      {3, 8193, 3, 1.25f},    {1, small ? 8200 : 50000, 1, 1},
  };
  std::string wrong = wrong_numbers(options);
  for (const Case& c : cases)
    if (wrong.empty()) wrong = wrong_case(options, c);
  return wrong.empty() ? wrong_far(options) : wrong;
}

}  // namespace suite
