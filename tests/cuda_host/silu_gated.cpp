// The plain gated unit: errors against f64, bits of a part alone.
#include "silu_gated.cuh"

#include "op_checks.h"

extern "C" {
void silu_gated_forward(SiluGated);
void silu_gated_backward(SiluGated);
}

namespace suite {

using cuda_host::Options;

namespace {

struct Gated {
  std::vector<bf16> y, dgate, dup;
};

Gated silu_gated(const Options& options, const std::vector<bf16>& gate, const std::vector<bf16>& up, const std::vector<bf16>& dy) {
  const size_t count = gate.size();
  Gated got = {std::vector<bf16>(count), std::vector<bf16>(count), std::vector<bf16>(count)};
  const auto run = [&](void (*kernel)(SiluGated), const bf16* dy, bf16* out, bf16* dup) {
    const SiluGated p = {gate.data(), up.data(), dy, out, dup, int64_t(count)};
    launch_over(options, kernel, p, count, silu_gated_op::threads * elements::vector, silu_gated_op::threads);
  };
  run(silu_gated_forward, nullptr, got.y.data(), nullptr);
  run(silu_gated_backward, dy.data(), got.dgate.data(), got.dup.data());
  return got;
}

std::string wrong_case(const Options& options, size_t count, double size) {
  std::vector<bf16> gate = numbers(count, size, 1);
  const std::vector<bf16> up = numbers(count, 1, 2), dy = numbers(count, 1, 3);
  // So far out that e^x is 0 or infinite.
  const float edges[] = {0, 100, -100, 3e38f, -3e38f};
  for (size_t i = 0; i < 5 && i < count; i++) gate[i * 7 % count] = to_bf16(edges[i]);
  const Gated got = silu_gated(options, gate, up, dy);
  std::vector<double> y(count), dgate(count), dup(count);
  for (size_t i = 0; i < count; i++) {
    const double g = to_float(gate[i]), u = to_float(up[i]), grad = to_float(dy[i]), s = 1 / (1 + std::exp(-g));
    y[i] = g * s * u;
    dgate[i] = grad * u * (s + g * s * (1 - s));
    dup[i] = grad * g * s;
    // Beyond bf16's largest number: rounded to infinity here and there.
    if (std::fabs(y[i]) > 3.38e38) y[i] = to_float(got.y[i]);
    if (std::fabs(dup[i]) > 3.38e38) dup[i] = to_float(got.dup[i]);
  }
  std::string wrong = off("silu_gated, y", got.y, y);
  if (wrong.empty()) wrong = off("silu_gated, dgate", got.dgate, dgate);
  if (wrong.empty()) wrong = off("silu_gated, dup", got.dup, dup);
  // A part alone: other threads, the same bits.
  if (wrong.empty() && count > 3) {
    const Gated part = silu_gated(options, {gate.begin() + 3, gate.end()}, {up.begin() + 3, up.end()}, {dy.begin() + 3, dy.end()});
    wrong = bits("silu_gated alone, y", part.y.data(), got.y.data() + 3, count - 3);
    if (wrong.empty()) wrong = bits("silu_gated alone, dgate", part.dgate.data(), got.dgate.data() + 3, count - 3);
    if (wrong.empty()) wrong = bits("silu_gated alone, dup", part.dup.data(), got.dup.data() + 3, count - 3);
  }
  return wrong;
}

// Elements beyond 2^32, where what is counted in 32 bits begins anew: eight and what is left over.
std::string wrong_far(const Options& options) {
  constexpr size_t first = size_t(1) << 32, here = 11;
  const std::vector<bf16> gate = numbers(here, 1, 4), up = numbers(here, 1, 5), dy = numbers(here, 1, 6);
  const Gated near = silu_gated(options, gate, up, dy);
  const FarArray<bf16> gates(first + here), ups(first + here), dys(first + here), out(first + here), dup(first + here);
  for (size_t i = 0; i < here; i++) gates.data[first + i] = gate[i], ups.data[first + i] = up[i], dys.data[first + i] = dy[i];
  const SiluGated p = {gates.data, ups.data, dys.data, out.data, dup.data, first + here};
  constexpr uint64_t blocks = first / (silu_gated_op::threads * elements::vector) + 1;
  launch_last(options, blocks, silu_gated_op::threads, 0, [=] { silu_gated_forward(p); });
  std::string wrong = bits("silu_gated far away, y", out.data + first, near.y.data(), here);
  launch_last(options, blocks, silu_gated_op::threads, 0, [=] { silu_gated_backward(p); });
  if (wrong.empty()) wrong = bits("silu_gated far away, dgate", out.data + first, near.dgate.data(), here);
  if (wrong.empty()) wrong = bits("silu_gated far away, dup", dup.data + first, near.dup.data(), here);
  return wrong;
}

}  // namespace

std::string wrong_silu_gated(const Options& options, bool small) {
  std::string wrong;
  for (const size_t count : {size_t(1), size_t(7), size_t(32), size_t(1003), size_t(small ? 2049 : 30000)})
    for (const double size : {1.0, 6.0})
      if (wrong.empty()) wrong = wrong_case(options, count, size);
  return wrong.empty() ? wrong_far(options) : wrong;
}

}  // namespace suite
