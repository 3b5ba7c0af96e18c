// The optimizer's kernels: values have the bits of the formulas as plain C++ has them, sums are f64's on any schedule.
#include "op_checks.h"
#include "optimizer.cuh"

// The kernels, each compiled from its own .cu.
extern "C" {
void optimizer_adamw(AdamW);
void optimizer_sgd(Sgd);
void optimizer_momentum(Momentum);
void optimizer_scale(Scale);
void optimizer_round_to_bf16(RoundToBf16);
void optimizer_squares(SumOfSquares);
void optimizer_sum(SumOfSquares);
void adamw_8bit(AdamW8Bit);
}

namespace suite {

using cuda_host::launch, cuda_host::Options;
namespace op = optimizer;

namespace {

const AdamWStep STEP = {0.999f, 0.1f, 0.95f, 0.05f, 0.0123f, 0.7f, 1e-8f};

unsigned blocks(size_t count, size_t each) { return unsigned((count + each - 1) / each); }

template <class P>
void run(const Options& options, void (*kernel)(P), const P& p) {
  launch_over(options, kernel, p, size_t(p.count), op::threads * op::values, op::threads);
}

// One value's update, line for line as src/ops/optimizer.rs.
void update(float& w, float& m, float& v, float g) {
  m += (g - m) * STEP.one_minus_beta1;
  v = v * STEP.beta2 + g * g * STEP.one_minus_beta2;
  w = w * STEP.shrink - STEP.rate * m / (std::sqrt(v) / STEP.root_correction + STEP.eps);
}

std::vector<float> squares(std::vector<float> x) {
  for (float& v : x) v *= v;
  return x;
}

std::string wrong_updates(const Options& options, size_t count) {
  const std::vector<float> gradient = floats(count, 0.1, 1);
  std::vector<float> w = floats(count, 1, 2), m = floats(count, 0.1, 3), v = squares(floats(count, 0.1, 4));
  // A value that never had a gradient.
  if (count > 5) m[5] = v[5] = 0;
  std::vector<float> exact_w = w, exact_m = m, exact_v = v;
  run(options, optimizer_adamw, AdamW{w.data(), m.data(), v.data(), gradient.data(), int64_t(count), STEP});
  for (size_t i = 0; i < count; i++) update(exact_w[i], exact_m[i], exact_v[i], gradient[i]);
  std::string wrong = bits("adamw, weights", w.data(), exact_w.data(), count);
  if (wrong.empty()) wrong = bits("adamw, first moment", m.data(), exact_m.data(), count);
  if (wrong.empty()) wrong = bits("adamw, second moment", v.data(), exact_v.data(), count);

  run(options, optimizer_sgd, Sgd{w.data(), gradient.data(), int64_t(count), 0.99f, 0.3f});
  run(options, optimizer_momentum, Momentum{m.data(), gradient.data(), int64_t(count), 0.9f});
  for (size_t i = 0; i < count; i++) {
    exact_w[i] = std::fmaf(-0.3f, gradient[i], exact_w[i] * 0.99f);
    exact_m[i] = exact_m[i] * 0.9f + gradient[i];
  }
  if (wrong.empty()) wrong = bits("sgd", w.data(), exact_w.data(), count);
  if (wrong.empty()) wrong = bits("momentum", m.data(), exact_m.data(), count);

  std::vector<bf16> rounded(count), exact_rounded(count);
  w[0] = INFINITY;
  // Halfway between two of bf16's.
  if (count > 2) w[1] = 1.00390625f, w[2] = 1.01171875f;
  run(options, optimizer_round_to_bf16, RoundToBf16{w.data(), rounded.data(), int64_t(count)});
  for (size_t i = 0; i < count; i++) exact_rounded[i] = to_bf16(w[i]);
  if (wrong.empty()) wrong = bits("rounded to bf16", rounded.data(), exact_rounded.data(), count);

  exact_v = v;
  for (float& x : exact_v) x *= 0.37f;
  run(options, optimizer_scale, Scale{v.data(), int64_t(count), 0.37f});
  if (wrong.empty()) wrong = bits("scaled", v.data(), exact_v.data(), count);
  v[count - 1] = NAN, v[0] = -1;
  run(options, optimizer_scale, Scale{v.data(), int64_t(count), 0});
  const std::vector<float> zeros(count);
  return wrong.empty() ? bits("cleared", v.data(), zeros.data(), count) : wrong;
}

double sum_of_squares(const Options& options, const std::vector<float>& x) {
  std::vector<double> parts(blocks(x.size(), op::chunk));
  double sum;
  const SumOfSquares p = {x.data(), parts.data(), &sum, int64_t(x.size())};
  launch(options, unsigned(parts.size()), op::threads, op::threads * sizeof(double), [=] { optimizer_squares(p); });
  launch(options, 1, op::sum_threads, op::sum_shared_bytes, [=] { optimizer_sum(p); });
  return sum;
}

std::string wrong_sum(const Options& options, size_t count) {
  const std::vector<float> x = floats(count, 3, 5);
  long double exact = 0;
  for (const float v : x) exact += static_cast<long double>(v) * v;
  const double got = sum_of_squares(options, x);
  if (!(std::fabs(got - double(exact)) <= 1e-14 * double(exact))) return differs("sum of squares", count, got, double(exact));
  const double again = sum_of_squares(newest_first(options), x);
  return bits("sum of squares on another schedule", &again, &got, 1);
}

// More chunks than the second sum has threads; whole numbers, whose sum is exact.
std::string wrong_sum_of_parts(const Options& options) {
  const size_t chunks = 2 * op::sum_threads + 3;
  std::vector<double> parts(chunks);
  double sum, exact = 0;
  for (size_t i = 0; i < chunks; i++) exact += parts[i] = double(i * i);
  const SumOfSquares p = {nullptr, parts.data(), &sum, int64_t(chunks - 1) * op::chunk + 1};
  launch(options, 1, op::sum_threads, op::sum_shared_bytes, [=] { optimizer_sum(p); });
  return sum == exact ? "" : differs("sum of the chunks' squares", chunks, sum, exact);
}

// As src/ops/adamw_8bit.rs makes it.
CodeMap code_map(bool has_sign) {
  CodeMap map = {};
  const int zero = has_sign ? 127 : 0;
  int code = zero;
  for (int d = 6; d >= 0; d--) {
    const int parts = (has_sign ? 1 : 2) << (6 - d);
    for (int part = 0; part < parts; part++) {
      map.values[++code] = float(std::pow(10.0, -d) * (0.1 + 0.9 * (part + 0.5) / parts));
      if (has_sign) map.values[2 * zero - code] = -map.values[code];
    }
  }
  map.values[255] = 1;
  for (int i = 0; i < 255; i++) map.bounds[i] = float((double(map.values[i]) + map.values[i + 1]) / 2);
  map.bounds[255] = INFINITY;
  return map;
}

struct Moment {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

// Codes of all kinds; the last block's are of zeros.
Moment moment(size_t count, unsigned seed) {
  Moment x = {std::vector<uint8_t>(count), squares(floats((count + op::code_block - 1) / op::code_block, 1, seed))};
  for (size_t i = 0; i < count; i++) x.codes[i] = uint8_t((i * 7919 + seed) >> 3);
  x.scales.back() = 0;
  return x;
}

// A block's values to codes, one after the other.
void encode(const CodeMap& map, const std::vector<float>& values, uint8_t* codes, float& scale) {
  scale = 0;
  for (const float x : values) scale = std::fmax(scale, std::fabs(x));
  for (size_t i = 0; i < values.size(); i++) {
    int code = 0;
    while (code < 255 && values[i] / scale >= map.bounds[code]) code++;
    codes[i] = uint8_t(code == 0 && values[i] > 0 ? 1 : code);
  }
}

std::string wrong_8bit(const Options& options, size_t count) {
  const CodeMap maps[2] = {code_map(true), code_map(false)};
  std::vector<float> gradient = floats(count, 0.1, 6), w = floats(count, 1, 7);
  // A block without gradients or moments, one whose values are far apart, and one with what is no number.
  for (size_t i = 0; i < count; i++) {
    if (i >= (count - 1) / op::code_block * op::code_block) gradient[i] = 0;
    if (i / op::code_block == 1) gradient[i] *= float(std::pow(10.0, -double(i % 20)));
  }
  if (count > 800) gradient[700] = NAN, gradient[701] = INFINITY;
  Moment first = moment(count, 8), second = moment(count, 9);
  if (first.scales.size() > 1) first.scales[1] = second.scales[1] = 0;
  std::vector<float> exact_w = w;
  Moment exact_first = first, exact_second = second;
  const AdamW8Bit p = {maps, w.data(), first.codes.data(), first.scales.data(), second.codes.data(), second.scales.data(),
                       gradient.data(), int64_t(count), STEP};
  const int values = op::code_block * op::code_blocks * op::adamw_8bit_warps;
  launch(options, blocks(count, values), op::threads, op::adamw_8bit_shared_bytes, [=] { adamw_8bit(p); });
  for (size_t block = 0; block < first.scales.size(); block++) {
    const size_t at = block * op::code_block, here = std::min(count - at, size_t(op::code_block));
    std::vector<float> m(here), v(here);
    for (size_t i = 0; i < here; i++) {
      m[i] = maps[0].values[exact_first.codes[at + i]] * exact_first.scales[block];
      v[i] = maps[1].values[exact_second.codes[at + i]] * exact_second.scales[block];
      update(exact_w[at + i], m[i], v[i], gradient[at + i]);
    }
    encode(maps[0], m, &exact_first.codes[at], exact_first.scales[block]);
    encode(maps[1], v, &exact_second.codes[at], exact_second.scales[block]);
  }
  std::string wrong;
  for (size_t i = 0; i < count && wrong.empty(); i++)
    if (!std::isnan(exact_w[i]) || !std::isnan(w[i])) wrong = bits("adamw_8bit, weights", &w[i], &exact_w[i], 1);
  if (wrong.empty()) wrong = bits("adamw_8bit, first codes", first.codes.data(), exact_first.codes.data(), count);
  if (wrong.empty()) wrong = bits("adamw_8bit, second codes", second.codes.data(), exact_second.codes.data(), count);
  if (wrong.empty()) wrong = bits("adamw_8bit, first scales", first.scales.data(), exact_first.scales.data(), first.scales.size());
  if (wrong.empty()) wrong = bits("adamw_8bit, second scales", second.scales.data(), exact_second.scales.data(), second.scales.size());
  return wrong;
}

// Values beyond 2^32, where what is counted in 32 bits begins anew.
std::string wrong_far(const Options& options) {
  constexpr size_t count = (size_t(1) << 32) + 1, at = count - 1;
  const FarArray<float> w(count), m(count), v(count), gradient(count);
  const FarArray<bf16> rounded(count);
  const auto last = [&](const auto& kernel, const auto& p) {
    launch_last(options, at / (op::threads * op::values) + 1, op::threads, 0, [=] { kernel(p); });
  };
  w.data[at] = 1, m.data[at] = 0.5f, v.data[at] = 0.25f, gradient.data[at] = -2;
  float exact_w = 1, exact_m = 0.5f, exact_v = 0.25f;
  last(optimizer_adamw, AdamW{w.data, m.data, v.data, gradient.data, count, STEP});
  update(exact_w, exact_m, exact_v, -2);
  if (w.data[at] != exact_w || m.data[at] != exact_m || v.data[at] != exact_v) return "adamw, far away";
  last(optimizer_sgd, Sgd{w.data, gradient.data, count, 0.5f, 0.25f});
  if (w.data[at] != std::fmaf(-0.25f, -2, exact_w * 0.5f)) return "sgd, far away";
  last(optimizer_momentum, Momentum{m.data, gradient.data, count, 0.5f});
  if (m.data[at] != exact_m * 0.5f - 2) return "momentum, far away";
  last(optimizer_scale, Scale{v.data, count, 0.5f});
  if (v.data[at] != exact_v * 0.5f) return "scaled, far away";
  last(optimizer_round_to_bf16, RoundToBf16{gradient.data, rounded.data, count});
  if (to_float(rounded.data[at]) != -2) return "rounded, far away";
  std::vector<double> parts(at / op::chunk + 1);
  const SumOfSquares p = {gradient.data, parts.data(), nullptr, count};
  launch_last(options, parts.size(), op::threads, op::threads * sizeof(double), [=] { optimizer_squares(p); });
  return parts.back() == 4 ? "" : differs("squares, far away", at, parts.back(), 4);
}

// Codes beyond 2^32: the first of what a far block takes are as those of the first.
std::string wrong_far_8bit(const Options& options) {
  constexpr size_t each = op::code_block * op::code_blocks * op::adamw_8bit_warps, first = size_t(1) << 32, here = 300;
  const CodeMap maps[2] = {code_map(true), code_map(false)};
  const FarArray<float> w(first + here), gradient(first + here);
  const FarArray<uint8_t> codes(first + here), second_codes(first + here);
  const FarArray<float> scales(first / op::code_block + 2), second_scales(first / op::code_block + 2);
  std::vector<float> near_w = floats(here, 1, 11), near_gradient = floats(here, 0.1, 12), near_scales(2), near_second_scales(2);
  std::vector<uint8_t> near_codes(here), near_second_codes(here);
  memcpy(w.data + first, near_w.data(), here * sizeof(float));
  memcpy(gradient.data + first, near_gradient.data(), here * sizeof(float));
  const AdamW8Bit near = {maps, near_w.data(), near_codes.data(), near_scales.data(), near_second_codes.data(), near_second_scales.data(),
                          near_gradient.data(), here, STEP};
  const AdamW8Bit far = {maps, w.data, codes.data, scales.data, second_codes.data, second_scales.data, gradient.data, first + here, STEP};
  launch(options, 1, op::threads, op::adamw_8bit_shared_bytes, [=] { adamw_8bit(near); });
  launch_last(options, first / each + 1, op::threads, op::adamw_8bit_shared_bytes, [=] { adamw_8bit(far); });
  std::string wrong = bits("adamw_8bit, far weights", w.data + first, near_w.data(), here);
  if (wrong.empty()) wrong = bits("adamw_8bit, far first codes", codes.data + first, near_codes.data(), here);
  if (wrong.empty()) wrong = bits("adamw_8bit, far second codes", second_codes.data + first, near_second_codes.data(), here);
  if (wrong.empty()) wrong = bits("adamw_8bit, far first scales", scales.data + first / op::code_block, near_scales.data(), 2);
  if (wrong.empty()) wrong = bits("adamw_8bit, far second scales", second_scales.data + first / op::code_block, near_second_scales.data(), 2);
  return wrong;
}

}  // namespace

std::string wrong_optimizer(const Options& options, bool small) {
  std::string wrong;
  for (const size_t count : {size_t(1), size_t(255), size_t(1025), size_t(small ? 8193 : 70001)}) {
    if (wrong.empty()) wrong = wrong_updates(options, count);
    if (wrong.empty()) wrong = wrong_8bit(options, count);
    if (wrong.empty()) wrong = wrong_sum(options, count);
  }
  if (wrong.empty()) wrong = wrong_sum_of_parts(options);
  if (wrong.empty()) wrong = wrong_far(options);
  return wrong.empty() ? wrong_far_8bit(options) : wrong;
}

}  // namespace suite
