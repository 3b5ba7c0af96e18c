// Muon's kernels around its products: values have the bits of the formulas as plain C++ has them, norms are f64's.
#include "muon.cuh"
#include "op_checks.h"

#include <algorithm>

// The kernels, each compiled from its own .cu.
extern "C" {
void muon_momentum(MuonMomentum);
void muon_squares(Muon);
void muon_norm(Muon);
void muon_direction(Muon);
void muon_update(Muon);
}

namespace suite {

using cuda_host::launch, cuda_host::Options;
namespace op = muon;

namespace {

constexpr float SHRINK = 0.98f, RATE = 0.0123f, DECAY = 0.9f, ONE_MINUS_DECAY = 0.1f;

struct Shape {
  size_t matrices, rows, columns;
  size_t size() const { return rows * columns; }
  size_t count() const { return matrices * size(); }
  size_t chunks() const { return (size() + op::chunk - 1) / op::chunk; }
  uint64_t tiles() const { return matrices * ((rows + op::tile - 1) / op::tile) * ((columns + op::tile - 1) / op::tile); }
  // Where a value of the weights is in X.
  size_t in_x(size_t i) const {
    if (rows <= columns) return i;
    const size_t matrix = i / size(), row = i % size() / columns, column = i % columns;
    return (matrix * columns + column) * rows + row;
  }
};

struct Tensors {
  std::vector<float> weights, momentum, gradient, u;
  std::vector<bf16> x;
  std::vector<double> parts;
  std::vector<float> factors;
  MuonMomentum of_momentum;
  Muon p;
  Tensors(const Shape& s, bool with_zeros)
      : weights(floats(s.count(), 1, 1)), momentum(floats(s.count(), 0.1, 2)), gradient(floats(s.count(), 0.1, 3)), u(s.count()), x(s.count()),
        parts(s.matrices * s.chunks()), factors(s.matrices) {
    // The last matrix never had a gradient.
    for (size_t i = s.count() - s.size(); with_zeros && i < s.count(); i++) momentum[i] = gradient[i] = 0;
    of_momentum = {momentum.data(), gradient.data(), u.data(), int64_t(s.count()), DECAY, ONE_MINUS_DECAY};
    p = {weights.data(), u.data(), x.data(), parts.data(), factors.data(), int32_t(s.rows), int32_t(s.columns), SHRINK, RATE};
  }
};

unsigned momentum_blocks(size_t count) { return unsigned((count + op::threads * op::values - 1) / (op::threads * op::values)); }

// Line for line as src/ops/muon.rs.
float update_momentum(float& m, float g) {
  m += (g - m) * ONE_MINUS_DECAY;
  return g + (m - g) * DECAY;
}

std::string wrong_update(const Options& options, const Shape& s) {
  Tensors t(s, s.matrices > 1);
  const Muon p = t.p;
  const MuonMomentum of_momentum = t.of_momentum;
  std::vector<float> exact_m = t.momentum, exact_w = t.weights, u(s.count());
  launch(options, momentum_blocks(s.count()), op::threads, 0, [=] { muon_momentum(of_momentum); });
  launch(options, unsigned(s.matrices * s.chunks()), op::threads, op::sum_shared_bytes, [=] { muon_squares(p); });
  launch(options, unsigned(s.matrices), op::threads, op::sum_shared_bytes, [=] { muon_norm(p); });
  launch(options, unsigned(s.tiles()), op::threads, op::tile_shared_bytes, [=] { muon_direction(p); });
  for (size_t i = 0; i < s.count(); i++) u[i] = update_momentum(exact_m[i], t.gradient[i]);
  std::string wrong = bits("muon, momentum", t.momentum.data(), exact_m.data(), s.count());
  if (wrong.empty()) wrong = bits("muon, u", t.u.data(), u.data(), s.count());
  std::vector<bf16> exact_x(s.count());
  for (size_t matrix = 0; matrix < s.matrices; matrix++) {
    long double squares = 0;
    for (size_t i = matrix * s.size(); i < (matrix + 1) * s.size(); i++) squares += static_cast<long double>(u[i]) * u[i];
    const double exact = double(1 / (std::sqrt(squares) + 1e-7L)), got = t.factors[matrix];
    if (wrong.empty() && !(std::fabs(got - exact) <= 1e-7 * exact)) wrong = differs("muon, factor", matrix, got, exact);
    for (size_t i = matrix * s.size(); i < (matrix + 1) * s.size(); i++) exact_x[s.in_x(i)] = to_bf16(u[i] * t.factors[matrix]);
  }
  if (wrong.empty()) wrong = bits("muon, direction", t.x.data(), exact_x.data(), s.count());

  const std::vector<bf16> results = numbers(s.count(), 1, 4);
  std::copy(results.begin(), results.end(), t.x.begin());
  launch(options, unsigned(s.tiles()), op::threads, op::tile_shared_bytes, [=] { muon_update(p); });
  for (size_t i = 0; i < s.count(); i++) exact_w[i] = exact_w[i] * SHRINK - RATE * to_float(t.x[s.in_x(i)]);
  return wrong.empty() ? bits("muon, weights", t.weights.data(), exact_w.data(), s.count()) : wrong;
}

// Every matrix has the sum of its own squares, in the order of the threads, whatever the schedule. Whole numbers make it exact.
std::string wrong_parts(const Options& options) {
  const Shape s = {3, 130, 190};
  Tensors t(s, false);
  std::vector<double> exact(s.matrices * s.chunks());
  for (size_t i = 0; i < s.count(); i++) {
    t.u[i] = float(i * 7919 % 1000);
    exact[i / s.size() * s.chunks() + i % s.size() / op::chunk] += double(t.u[i]) * t.u[i];
  }
  const Muon p = t.p;
  launch(options, unsigned(s.matrices * s.chunks()), op::threads, op::sum_shared_bytes, [=] { muon_squares(p); });
  std::string wrong = bits("muon, squares", t.parts.data(), exact.data(), exact.size());

  // More chunks than a block has threads.
  const Shape large = {2, 2048, 4 * (op::threads + 3)};
  std::vector<double> parts(large.matrices * large.chunks());
  std::vector<float> factors(large.matrices);
  Muon q = p;
  q.rows = int32_t(large.rows), q.columns = int32_t(large.columns), q.parts = parts.data(), q.factors = factors.data();
  for (size_t i = 0; i < parts.size(); i++) parts[i] = double(i * i);
  launch(options, unsigned(large.matrices), op::threads, op::sum_shared_bytes, [=] { muon_norm(q); });
  for (size_t matrix = 0; matrix < large.matrices && wrong.empty(); matrix++) {
    double sum = 0;
    for (size_t i = 0; i < large.chunks(); i++) sum += parts[matrix * large.chunks() + i];
    const float factor = float(1 / (std::sqrt(sum) + 1e-7));
    if (factors[matrix] != factor) wrong = differs("muon, norm of many chunks", matrix, factors[matrix], factor);
  }
  return wrong;
}

// Values beyond 2^32, where what is counted in 32 bits begins anew; the last tile and the last chunk.
std::string wrong_far(const Options& options, const Shape& s) {
  const FarArray<float> w(s.count()), m(s.count()), g(s.count()), direction(s.count());
  const FarArray<bf16> x(s.count());
  std::vector<double> parts(s.matrices * s.chunks());
  std::vector<float> factors(s.matrices, 4);
  const size_t at = s.count() - 1;
  w.data[at] = 1, m.data[at] = 0.5f, g.data[at] = -2;
  const MuonMomentum of_momentum = {m.data, g.data, direction.data, int64_t(s.count()), DECAY, ONE_MINUS_DECAY};
  const Muon p = {w.data, direction.data, x.data, parts.data(), factors.data(), int32_t(s.rows), int32_t(s.columns), SHRINK, RATE};
  float exact_m = 0.5f;
  const float u = update_momentum(exact_m, -2);
  launch_last(options, momentum_blocks(s.count()), op::threads, 0, [=] { muon_momentum(of_momentum); });
  if (m.data[at] != exact_m) return differs("muon, far momentum", at, m.data[at], exact_m);
  if (direction.data[at] != u) return differs("muon, far u", at, direction.data[at], u);
  launch_last(options, parts.size(), op::threads, op::sum_shared_bytes, [=] { muon_squares(p); });
  if (parts.back() != double(u) * u) return differs("muon, far squares", at, parts.back(), double(u) * u);
  launch_last(options, s.tiles(), op::threads, op::tile_shared_bytes, [=] { muon_direction(p); });
  if (to_float(x.data[at]) != to_float(to_bf16(4 * u))) return differs("muon, far direction", at, to_float(x.data[at]), 4 * u);
  launch_last(options, s.tiles(), op::threads, op::tile_shared_bytes, [=] { muon_update(p); });
  const float exact_w = 1 * SHRINK - RATE * to_float(x.data[at]);
  return w.data[at] == exact_w ? "" : differs("muon, far weights", at, w.data[at], exact_w);
}

}  // namespace

std::string wrong_muon(const Options& options, bool small) {
  std::string wrong;
  const size_t large = small ? 100 : 300;
  for (const Shape& s : {Shape{1, 1, 1}, Shape{1, 3, 40}, Shape{1, 40, 3}, Shape{3, 33, 65}, Shape{3, 65, 33}, Shape{2, 64, 64},
                         Shape{2, large, large + 1}, Shape{2, large + 1, large}})
    if (wrong.empty()) wrong = wrong_update(options, s);
  if (wrong.empty()) wrong = wrong_parts(options);
  for (const Shape& s : {Shape{1, 65537, 65539}, Shape{1, 65539, 65537}, Shape{65537, 255, 258}})
    if (wrong.empty()) wrong = wrong_far(options, s);
  return wrong;
}

}  // namespace suite
