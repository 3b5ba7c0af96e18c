#include "op_checks.h"

#include <random>

namespace suite {

using cuda_host::Options;

std::string wrong_dispatch(const Options& options, bool small);
std::string wrong_product(const Options& options, bool small);
std::string wrong_accumulate(const Options& options, bool small);
std::string wrong_embedding(const Options& options, bool small);
std::string wrong_head_parts(const Options& options, bool small);
std::string wrong_kv_append(const Options& options, bool small);
std::string wrong_load_balance(const Options& options, bool small);
std::string wrong_rope(const Options& options, bool small);
std::string wrong_router(const Options& options, bool small);
std::string wrong_row_ops(const Options& options, bool small);
std::string wrong_silu_gated(const Options& options, bool small);
std::string wrong_log_prob(const Options& options, bool small);
std::string wrong_sampling(const Options& options, bool small);
std::string wrong_optimizer(const Options& options, bool small);
std::string wrong_muon(const Options& options, bool small);

const std::vector<OpFamily> OP_FAMILIES = {
    {"dispatch", wrong_dispatch},
    {"product", wrong_product},
    {"accumulate", wrong_accumulate},
    {"embedding", wrong_embedding},
    {"head_parts", wrong_head_parts},
    {"kv_append", wrong_kv_append},
    {"load_balance", wrong_load_balance},
    {"rope", wrong_rope},
    {"router", wrong_router},
    {"row_ops", wrong_row_ops},
    {"silu_gated", wrong_silu_gated},
    {"log_prob", wrong_log_prob},
    {"sampling", wrong_sampling},
    {"optimizer", wrong_optimizer},
    {"muon", wrong_muon},
};

std::vector<float> floats(size_t count, double size, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal(0, size);
  std::vector<float> x(count);
  for (float& v : x) v = float(normal(random));
  return x;
}

std::vector<bf16> numbers(size_t count, double size, unsigned seed) {
  const std::vector<float> wide = floats(count, size, seed);
  std::vector<bf16> x(count);
  for (size_t i = 0; i < count; i++) x[i] = to_bf16(wide[i]);
  return x;
}

Options newest_first(Options options) {
  options.schedule = cuda_host::Schedule::newest_first;
  return options;
}

void launch_last(Options options, uint64_t blocks, unsigned threads, size_t shared_bytes, const std::function<void()>& body) {
  options.first_block = blocks - 1;
  cuda_host::launch(options, unsigned(blocks), threads, shared_bytes, body);
}

std::string differs(const char* what, size_t at, double got, double exact) {
  char text[160];
  snprintf(text, sizeof text, "%s: element %zu is %.9g, exactly %.9g", what, at, got, exact);
  return text;
}

std::string off(const char* what, const std::vector<bf16>& got, const std::vector<double>& exact, double floor) {
  for (size_t i = 0; i < exact.size(); i++) {
    const double error = std::fabs(to_float(got[i]) - exact[i]);
    if (!(error <= WORSE_THAN_BF16_MAX * BF16_ROUNDING * std::fabs(exact[i]) + floor)) return differs(what, i, to_float(got[i]), exact[i]);
  }
  return "";
}

std::string off_sum(const char* what, const std::vector<float>& got, const std::vector<double>& exact,
                    const std::vector<double>& terms, double error) {
  for (size_t i = 0; i < exact.size(); i++)
    if (!(std::fabs(got[i] - exact[i]) <= error * terms[i] + 1e-30)) return differs(what, i, got[i], exact[i]);
  return "";
}

}  // namespace suite
