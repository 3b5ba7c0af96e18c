// The ops whose rows do not meet: errors against f64, row bits, bits whatever the schedule.
#include "op_checks.h"
#include "row_ops.cuh"

// The kernels, each compiled from its own .cu.
extern "C" {
void swiglu_forward(Swiglu);
void swiglu_backward(Swiglu);
void rms_norm_forward(RmsNorm);
void sum_norm(SumNorm);
void rms_norm_backward(RmsNorm);
void rms_norm_weight(RmsNormWeight);
void rms_norm_weight_sum(RmsNormWeight);
}

namespace suite {

using cuda_host::launch, cuda_host::Options;
namespace op = row_ops;

namespace {

// `got` is what `exact` is rounded to, or would be were it off by a little of `terms`: sums in f32 before the one rounding.
std::string off_rounding(const char* what, const std::vector<bf16>& got, const std::vector<double>& exact, const std::vector<double>& terms) {
  for (size_t i = 0; i < exact.size(); i++) {
    const double off = 4 * SUM_ERROR_MAX * terms[i] + 1e-30, least = to_float(to_bf16(float(exact[i] - off)));
    if (!(to_float(got[i]) >= least && to_float(got[i]) <= to_float(to_bf16(float(exact[i] + off)))))
      return differs(what, i, to_float(got[i]), exact[i]);
  }
  return "";
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct Gated {
  std::vector<bf16> y, dx;
};

Gated swiglu(const Options& options, const std::vector<bf16>& x, const std::vector<bf16>& dy, float limit, float alpha) {
  const size_t pairs = dy.size();
  Gated got = {std::vector<bf16>(pairs), std::vector<bf16>(2 * pairs)};
  const auto run = [&](void (*kernel)(Swiglu), const bf16* dy, bf16* out) {
    const Swiglu p = {x.data(), dy, out, int64_t(pairs), limit, alpha};
    launch_over(options, kernel, p, pairs, op::swiglu_threads * op::vector, op::swiglu_threads);
  };
  run(swiglu_forward, nullptr, got.y.data());
  run(swiglu_backward, dy.data(), got.dx.data());
  return got;
}

std::string wrong_swiglu(const Options& options, size_t pairs, double size) {
  const float limit = 7, alpha = 1.702f;
  std::vector<bf16> x = numbers(2 * pairs, size, 1), dy = numbers(pairs, 1, 2);
  // On and beside the clamp, and far beyond it.
  const float edges[] = {7, -7, 7.03125f, -7.03125f, 0, 100, -100, 3e38f, -3e38f};
  for (size_t i = 0; i < 9 && i < pairs; i++) x[2 * i] = to_bf16(edges[i]), x[2 * (pairs - 1 - i) + 1] = to_bf16(edges[i]);
  const Gated got = swiglu(options, x, dy, limit, alpha);
  std::vector<double> y(pairs), dx(2 * pairs);
  for (size_t i = 0; i < pairs; i++) {
    const double gate = to_float(x[2 * i]), up = to_float(x[2 * i + 1]), grad = to_float(dy[i]);
    const double g = std::fmin(gate, limit), u = std::fmax(std::fmin(up, limit), -limit), s = sigmoid(double(alpha) * g);
    y[i] = (u + 1) * g * s;
    dx[2 * i] = gate <= limit ? grad * (u + 1) * (s + alpha * g * s * (1 - s)) : 0;
    dx[2 * i + 1] = std::fabs(up) <= limit ? grad * g * s : 0;
  }
  std::string wrong = off("swiglu, y", got.y, y);
  if (wrong.empty()) wrong = off("swiglu, dx", got.dx, dx);
  for (size_t i = 0; i < 2 * pairs && wrong.empty(); i++)
    if (dx[i] == 0 && to_float(got.dx[i]) != 0) wrong = differs("swiglu, a clamped dx", i, to_float(got.dx[i]), 0);
  // A part alone: other threads, the same bits.
  if (wrong.empty() && pairs > 3) {
    const Gated part = swiglu(options, {x.begin() + 6, x.end()}, {dy.begin() + 3, dy.end()}, limit, alpha);
    wrong = bits("swiglu alone, y", part.y.data(), got.y.data() + 3, pairs - 3);
    if (wrong.empty()) wrong = bits("swiglu alone, dx", part.dx.data(), got.dx.data() + 6, 2 * pairs - 6);
  }
  return wrong;
}

struct Normed {
  std::vector<bf16> y, dx;
  std::vector<float> dweight;
};

Normed rms_norm(const Options& options, const std::vector<bf16>& x, const std::vector<float>& weight,
                const std::vector<bf16>& dy, float eps) {
  const int width = int(weight.size());
  const size_t rows = x.size() / width, chunks = (rows + op::weight_rows - 1) / op::weight_rows;
  Normed got = {std::vector<bf16>(x.size()), std::vector<bf16>(x.size()), std::vector<float>(width)};
  std::vector<float> inverse_rms(rows), parts(chunks * width);
  const auto run = [&](void (*kernel)(RmsNorm), const bf16* dy, bf16* out, float* inverse) {
    const RmsNorm p = {x.data(), weight.data(), dy, out, inverse, width, eps};
    launch(options, unsigned(rows), op::rms_norm_threads, op::rms_norm_shared_bytes, [=] { kernel(p); });
  };
  run(rms_norm_forward, nullptr, got.y.data(), nullptr);
  run(rms_norm_backward, dy.data(), got.dx.data(), inverse_rms.data());
  const RmsNormWeight p = {x.data(), dy.data(), inverse_rms.data(), parts.data(), got.dweight.data(), int64_t(rows), width};
  const unsigned columns = unsigned((width / 2 + op::weight_threads - 1) / op::weight_threads);
  launch(options, unsigned(chunks) * columns, op::weight_threads, 0, [=] { rms_norm_weight(p); });
  launch_over(options, rms_norm_weight_sum, p, size_t(width), op::weight_threads, op::weight_threads);
  return got;
}

// A sum and its norm, in one launch and in two.
std::string wrong_sum_norm(const Options& options, const std::vector<bf16>& x, const std::vector<float>& weight, float eps) {
  const int width = int(weight.size());
  const std::vector<bf16> y = numbers(x.size(), 1, 11);
  std::vector<bf16> sum(x.size()), out(x.size()), expected(x.size());
  for (size_t i = 0; i < x.size(); i++) expected[i] = to_bf16(to_float(x[i]) + to_float(y[i]));
  const SumNorm p = {x.data(), y.data(), weight.data(), sum.data(), out.data(), width, eps};
  launch(options, unsigned(x.size() / width), op::rms_norm_threads, op::rms_norm_shared_bytes, [=] { sum_norm(p); });
  const std::string wrong = bits("sum_norm, the sum", sum.data(), expected.data(), sum.size());
  return wrong.empty() ? bits("sum_norm, the norm", out.data(), rms_norm(options, expected, weight, y, eps).y.data(), out.size()) : wrong;
}

std::string wrong_rms_norm(const Options& options, size_t rows, int width, double size, float eps) {
  const std::vector<bf16> x = numbers(rows * width, size, 3), dy = numbers(rows * width, 1, 4);
  std::vector<float> weight(width);
  for (int i = 0; i < width; i++) weight[i] = 0.5f + to_float(numbers(1, 1, 5 + i)[0]);
  const Normed got = rms_norm(options, x, weight, dy, eps);
  std::vector<double> y(x.size()), y_terms(x.size()), dx(x.size()), dx_terms(x.size()), dweight(width), terms(width);
  for (size_t row = 0; row < rows; row++) {
    double squares = 0, dot = 0, dot_terms = 0;
    for (int i = 0; i < width; i++) {
      const double v = to_float(x[row * width + i]), term = to_float(dy[row * width + i]) * weight[i] * v;
      squares += v * v;
      dot += term, dot_terms += std::fabs(term);
    }
    const double r = 1 / std::sqrt(squares / width + eps);
    for (int i = 0; i < width; i++) {
      const size_t at = row * width + i;
      const double v = to_float(x[at]), grad = to_float(dy[at]);
      y[at] = v * r * weight[i];
      y_terms[at] = std::fabs(y[at]);
      dx[at] = r * grad * weight[i] - v * r * r * r * dot / width;
      dx_terms[at] = std::fabs(r * grad * weight[i]) + std::fabs(v * r * r * r * dot_terms / width);
      dweight[i] += grad * v * r;
      terms[i] += std::fabs(grad * v * r);
    }
  }
  std::string wrong = off_rounding("rms_norm, y", got.y, y, y_terms);
  if (wrong.empty()) wrong = wrong_sum_norm(options, x, weight, eps);
  if (wrong.empty()) wrong = off_rounding("rms_norm, dx", got.dx, dx, dx_terms);
  if (wrong.empty()) wrong = off_sum("rms_norm, dweight", got.dweight, dweight, terms);
  // The last row alone.
  if (wrong.empty() && rows > 1) {
    const size_t at = (rows - 1) * width;
    const Normed one = rms_norm(options, {x.begin() + at, x.end()}, weight, {dy.begin() + at, dy.end()}, eps);
    wrong = bits("rms_norm alone, y", one.y.data(), got.y.data() + at, width);
    if (wrong.empty()) wrong = bits("rms_norm alone, dx", one.dx.data(), got.dx.data() + at, width);
  }
  // Another schedule: the same bits.
  if (!wrong.empty()) return wrong;
  const Normed again = rms_norm(newest_first(options), x, weight, dy, eps);
  return bits("rms_norm on another schedule, dweight", again.dweight.data(), got.dweight.data(), width);
}

// Pairs beyond 2^32, where what is counted in 32 bits begins anew: eight and what is left over.
std::string wrong_far_swiglu(const Options& options) {
  constexpr size_t first = size_t(1) << 32, here = 11;
  const std::vector<bf16> x = numbers(2 * here, 1, 6), dy = numbers(here, 1, 7);
  const Gated near = swiglu(options, x, dy, 7, 1.702f);
  const FarArray<bf16> xs(2 * (first + here)), dys(first + here), y(first + here), dx(2 * (first + here));
  for (size_t i = 0; i < 2 * here; i++) xs.data[2 * first + i] = x[i];
  for (size_t i = 0; i < here; i++) dys.data[first + i] = dy[i];
  constexpr uint64_t blocks = first / (op::swiglu_threads * op::vector) + 1;
  const Swiglu forward = {xs.data, nullptr, y.data, first + here, 7, 1.702f}, backward = {xs.data, dys.data, dx.data, first + here, 7, 1.702f};
  launch_last(options, blocks, op::swiglu_threads, 0, [=] { swiglu_forward(forward); });
  launch_last(options, blocks, op::swiglu_threads, 0, [=] { swiglu_backward(backward); });
  const std::string wrong = bits("swiglu far away, y", y.data + first, near.y.data(), here);
  return wrong.empty() ? bits("swiglu far away, dx", dx.data + 2 * first, near.dx.data(), 2 * here) : wrong;
}

// A row beyond 2^31 numbers, and the parts of a chunk of such rows.
std::string wrong_far_rms_norm(const Options& options) {
  constexpr int width = 1 << 17;
  constexpr size_t chunk = 1 << 14, row = chunk * op::weight_rows;
  const std::vector<bf16> x = numbers(width, 1, 8), dy = numbers(width, 1, 9);
  const std::vector<float> weight = floats(width, 1, 10);
  const Normed near = rms_norm(options, x, weight, dy, 1e-5f);
  const FarArray<bf16> xs((row + 1) * width), dys((row + 1) * width), out((row + 1) * width);
  const FarArray<float> inverse_rms(row + 1), parts((chunk + 1) * width);
  memcpy(xs.data + row * width, x.data(), width * sizeof(bf16));
  memcpy(dys.data + row * width, dy.data(), width * sizeof(bf16));
  const RmsNorm p = {xs.data, weight.data(), dys.data, out.data, inverse_rms.data, width, 1e-5f};
  launch_last(options, row + 1, op::rms_norm_threads, op::rms_norm_shared_bytes, [=] { rms_norm_forward(p); });
  std::string wrong = bits("rms_norm far away, y", out.data + row * width, near.y.data(), width);
  launch_last(options, row + 1, op::rms_norm_threads, op::rms_norm_shared_bytes, [=] { rms_norm_backward(p); });
  if (wrong.empty()) wrong = bits("rms_norm far away, dx", out.data + row * width, near.dx.data(), width);
  // x + x, whose norm is that of 2 x.
  const FarArray<bf16> sum((row + 1) * width);
  std::vector<bf16> doubled(width);
  for (int i = 0; i < width; i++) doubled[i] = to_bf16(2 * to_float(x[i]));
  const SumNorm s = {xs.data, xs.data, weight.data(), sum.data, out.data, width, 1e-5f};
  launch_last(options, row + 1, op::rms_norm_threads, op::rms_norm_shared_bytes, [=] { sum_norm(s); });
  if (wrong.empty()) wrong = bits("sum_norm far away, the sum", sum.data + row * width, doubled.data(), width);
  if (wrong.empty()) wrong = bits("sum_norm far away", out.data + row * width, rms_norm(options, doubled, weight, dy, 1e-5f).y.data(), width);
  // The first columns of the last chunk, and their sum over all chunks.
  std::vector<float> dweight(width);
  const RmsNormWeight w = {xs.data, dys.data, inverse_rms.data, parts.data, dweight.data(), row + 1, width};
  launch_last(options, chunk * (width / 2 / op::weight_threads) + 1, op::weight_threads, 0, [=] { rms_norm_weight(w); });
  launch(options, 1, op::weight_threads, 0, [=] { rms_norm_weight_sum(w); });
  if (wrong.empty()) wrong = bits("rms_norm far away, dweight", dweight.data(), near.dweight.data(), op::weight_threads);
  return wrong;
}

}  // namespace

std::string wrong_row_ops(const Options& options, bool small) {
  std::string wrong;
  for (const size_t pairs : {size_t(1), size_t(7), size_t(32), size_t(1003), size_t(small ? 2049 : 30000)})
    for (const double size : {1.0, 6.0})
      if (wrong.empty()) wrong = wrong_swiglu(options, pairs, size);
  struct Case { size_t rows; int width; double size; float eps; };
  const std::vector<Case> cases = {{1, 8, 1, 1e-5f},   {3, 64, 1, 1e-5f},      {67, 200, 1e-3, 1e-5f},
                                   {130, 264, 10, 0},  {2, small ? 1032 : 2880, 1, 1e-6f}};
  for (const Case& c : cases)
    if (wrong.empty()) wrong = wrong_rms_norm(options, c.rows, c.width, c.size, c.eps);
  if (wrong.empty()) wrong = wrong_far_swiglu(options);
  return wrong.empty() ? wrong_far_rms_norm(options) : wrong;
}

}  // namespace suite
