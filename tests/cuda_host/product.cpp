// Products of matrices, whole and by groups of rows: errors against f64, a row's bits whatever the batch, the tile and the
// schedule.
#include "product_mxfp4.cuh"
#include "row_ops.cuh"

#include <random>
#include <tuple>

#include "op_checks.h"

// The kernels, compiled from product.cu.
extern "C" {
void product_forward(Product);
void product_forward_f32(Product);
void product_forward_narrow(Product);
void product_forward_narrow_f32(Product);
void product_forward_mxfp4(Product);
void product_forward_narrow_mxfp4(Product);
void product_input_gradient(Product);
void product_input_gradient_mxfp4(Product);
void product_weight_gradient(Product);
void product_bias_gradient(Product);
void product_joined(JoinedProduct);
void product_joined_narrow(JoinedProduct);
void expert_swiglu(ExpertSwiglu);
void expert_swiglu_narrow(ExpertSwiglu);
void expert_swiglu_mxfp4(ExpertSwiglu);
void expert_swiglu_narrow_mxfp4(ExpertSwiglu);
void swiglu_forward(Swiglu);
}

namespace suite {

using cuda_host::launch, cuda_host::Options;
using product::Mxfp4, product::Narrow, product::NarrowMxfp4, product::Wide, product::WideMxfp4;

namespace {

// A tensor core of Hopper's cuts what is far below the largest of sixteen products and the sum so far.
constexpr double TENSOR_CORE_ERROR_MAX = 2e-6;

struct Shape {
  const char* name;
  int k, n;
  std::vector<uint32_t> starts;  // of groups; two of them: one group, told without starts
  bool bias;
  float scale = 1;
  bool addend = false;
  int rows() const { return int(starts.back()); }
  int groups() const { return int(starts.size()) - 1; }
  // Whether its matrices are MXFP4's, and multiplied packed too.
  bool packed() const { return k % 32 == 0; }
};

struct Inputs {
  std::vector<bf16> x, weight, dy;
  std::vector<float> bias, dweight, dbias;  // gradients so far
  std::vector<bf16> addend;
  std::vector<float> addend_f32;
  std::vector<uint8_t> packed;  // the weight
};

struct Results {
  std::vector<bf16> y, y_narrow, dx;
  std::vector<bf16> y_packed, y_narrow_packed, dx_packed;
  std::vector<float> y_f32, y_narrow_f32, dweight, dbias;
};

int tiles(int count, int size) { return (count + size - 1) / size; }

// What a block computes of a result, and what it is launched with.
struct Tiling {
  int rows, columns, threads, shared_bytes;
  // Blocks of so many rows, in groups or in one, by so many columns.
  int blocks(int count, int groups, int across) const { return count ? (tiles(count, rows) + groups) * tiles(across, columns) : 0; }
  template <class P>
  void run(const Options& options, void (*kernel)(P), const P& p, int blocks) const {
    if (blocks > 0) launch(options, unsigned(blocks), unsigned(threads), size_t(shared_bytes), [=] { kernel(p); });
  }
};
constexpr Tiling WIDE = {Wide::rows, Wide::columns, Wide::threads, Wide::shared_bytes};
constexpr Tiling NARROW = {Narrow::rows, Narrow::columns, Narrow::threads, Narrow::shared_bytes};
constexpr Tiling WIDE_PACKED = {Wide::rows, Wide::columns, WideMxfp4::threads, Mxfp4<WideMxfp4>::shared_bytes};
constexpr Tiling NARROW_PACKED = {Narrow::rows, Narrow::columns, NarrowMxfp4::threads, Mxfp4<NarrowMxfp4>::shared_bytes};
constexpr Tiling COLUMN_SUMS = {1, product::column_sum_columns, product::column_sum_threads, product::column_sum_shared_bytes};

// Matrices in MXFP4: their bytes, and their numbers by the format's own words.
struct Packing {
  int k, n;
  std::vector<bf16> weight;
  std::vector<uint8_t> bytes;
  Packing(int groups, int k, int n)
      : k(k), n(n), weight(size_t(groups) * k * n), bytes(size_t(groups) * tiles(n, 64) * (k / 32) * 64 * 17) {}
  // Of 32 k from 32 `block` on in a column: one scale, and a number each.
  template <class Number>
  void put(int group, int block, int column, int exponent, const Number& number) {
    const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    uint8_t* to = &bytes[((size_t(group) * tiles(n, 64) + column / 64) * (k / 32) + block) * 64 * 17];
    to[column % 64] = uint8_t(exponent);
    for (int i = 0; i < 32; i++) {
      const int four = number(i);
      to[64 + i / 2 * 64 + column % 64] |= uint8_t(four << i % 2 * 4);
      const double value = (four < 8 ? 1 : -1) * magnitudes[four % 8] * std::ldexp(1.0, exponent - 127);
      weight[(size_t(group) * k + 32 * block + i) * n + column] = to_bf16(exponent == 255 ? NAN : float(value));
    }
  }
};

Packing mxfp4(const Shape& s, unsigned seed) {
  std::mt19937 random(seed);
  Packing packing(s.groups(), s.k, s.n);
  for (int group = 0; group < s.groups(); group++)
    for (int block = 0; block < s.k / 32; block++)
      for (int column = 0; column < s.n; column++)
        packing.put(group, block, column, 122 + int(random() % 6), [&](int) { return int(random() % 16); });
  return packing;
}

Inputs inputs(const Shape& s, unsigned seed) {
  const size_t matrix = size_t(s.k) * s.n;
  std::vector<bf16> dy = numbers(size_t(s.rows()) * s.n, 1, seed + 2);
  // Rows far apart in size: else their sums are exact in f32, in any order.
  for (size_t i = 0; i < dy.size(); i++) dy[i] = to_bf16(std::ldexp(to_float(dy[i]), -int(i / s.n * 7 % 20)));
  Inputs in = {numbers(size_t(s.rows()) * s.k, 1, seed),
               numbers(s.groups() * matrix, 0.5, seed + 1),
               std::move(dy),
               floats(s.bias ? s.groups() * s.n : 0, 1, seed + 3),
               floats(s.groups() * matrix, 1, seed + 4),
               floats(s.groups() * s.n, 1, seed + 5),
               numbers(s.addend ? size_t(s.rows()) * s.n : 0, 1, seed + 6),
               {},
               {}};
  for (bf16 x : in.addend) in.addend_f32.push_back(to_float(x));
  if (s.packed()) {
    Packing packing = mxfp4(s, seed + 7);
    in.weight = packing.weight, in.packed = packing.bytes;
  }
  return in;
}

Results run(const Options& options, const Shape& s, const Inputs& in) {
  const int rows = s.rows(), groups = s.groups();
  Results got;
  got.y.resize(size_t(rows) * s.n), got.y_narrow.resize(got.y.size()), got.dx.resize(in.x.size());
  got.y_f32.resize(got.y.size()), got.y_narrow_f32.resize(got.y.size());
  got.dweight = in.dweight, got.dbias = in.dbias;
  const void *weight = in.weight.data(), *packed = in.packed.data(), *addend = in.addend.data();
  const int parts = groups > 1 ? groups : 0;
  const auto start = [&](void (*kernel)(Product), const Tiling& tiling, int blocks, const void* weight, const void* addend, void* out,
                         bool backward) {
    const Product p = {in.x.data(), weight, s.bias ? in.bias.data() : nullptr, s.addend ? addend : nullptr,
                       backward ? in.dy.data() : nullptr, out, groups > 1 ? s.starts.data() : nullptr, rows, s.k, s.n, groups, s.scale, nullptr};
    tiling.run(options, kernel, p, blocks);
  };
  const auto forward = [&](void (*kernel)(Product), const Tiling& tiling, const void* weight, const void* addend, void* out) {
    start(kernel, tiling, tiling.blocks(rows, parts, s.n), weight, addend, out, false);
  };
  const auto input_gradient = [&](void (*kernel)(Product), const Tiling& tiling, const void* weight, void* out) {
    start(kernel, tiling, tiling.blocks(rows, parts, s.k), weight, addend, out, true);
  };
  forward(product_forward, WIDE, weight, addend, got.y.data());
  forward(product_forward_f32, WIDE, weight, in.addend_f32.data(), got.y_f32.data());
  forward(product_forward_narrow, NARROW, weight, addend, got.y_narrow.data());
  forward(product_forward_narrow_f32, NARROW, weight, in.addend_f32.data(), got.y_narrow_f32.data());
  input_gradient(product_input_gradient, WIDE, weight, got.dx.data());
  if (s.packed()) {
    got.y_packed.resize(got.y.size()), got.y_narrow_packed.resize(got.y.size()), got.dx_packed.resize(got.dx.size());
    forward(product_forward_mxfp4, WIDE_PACKED, packed, addend, got.y_packed.data());
    forward(product_forward_narrow_mxfp4, NARROW_PACKED, packed, addend, got.y_narrow_packed.data());
    input_gradient(product_input_gradient_mxfp4, WIDE_PACKED, packed, got.dx_packed.data());
  }
  const int matrices = groups * tiles(s.k, WIDE.rows) * tiles(s.n, WIDE.columns);
  start(product_weight_gradient, WIDE, matrices, weight, addend, got.dweight.data(), true);
  start(product_bias_gradient, COLUMN_SUMS, groups * tiles(s.n, COLUMN_SUMS.columns), weight, addend, got.dbias.data(), true);
  return got;
}

// What all of it is exactly, and the sizes of each sum's terms.
struct Exact {
  std::vector<double> y, y_terms, dx, dx_terms, dweight, dweight_terms, dbias, dbias_terms;
};

Exact exact(const Shape& s, const Inputs& in) {
  const size_t k = s.k, n = s.n;
  Exact e;
  for (auto* v : {&e.y, &e.y_terms}) v->resize(s.rows() * n);
  for (auto* v : {&e.dx, &e.dx_terms}) v->resize(s.rows() * k);
  e.dweight = {in.dweight.begin(), in.dweight.end()}, e.dbias = {in.dbias.begin(), in.dbias.end()};
  for (double v : e.dweight) e.dweight_terms.push_back(std::fabs(v));
  for (double v : e.dbias) e.dbias_terms.push_back(std::fabs(v));
  const auto take = [](double& sum, double& terms, double term) { sum += term, terms += std::fabs(term); };
  for (int g = 0; g < s.groups(); g++)
    for (size_t row = s.starts[g]; row < s.starts[g + 1]; row++)
      for (size_t j = 0; j < n; j++) {
        const double dy = to_float(in.dy[row * n + j]);
        if (s.bias) take(e.y[row * n + j], e.y_terms[row * n + j], in.bias[g * n + j]);
        if (s.addend) take(e.y[row * n + j], e.y_terms[row * n + j], to_float(in.addend[row * n + j]));
        take(e.dbias[g * n + j], e.dbias_terms[g * n + j], dy);
        for (size_t i = 0; i < k; i++) {
          const double x = to_float(in.x[row * k + i]), w = to_float(in.weight[(g * k + i) * n + j]);
          take(e.y[row * n + j], e.y_terms[row * n + j], s.scale * x * w);
          take(e.dx[row * k + i], e.dx_terms[row * k + i], s.scale * dy * w);
          take(e.dweight[(g * k + i) * n + j], e.dweight_terms[(g * k + i) * n + j], x * dy);
        }
      }
  return e;
}

// As product.cuh says: each lane's rows in order, then the lanes, each addition with one rounding.
std::vector<float> dbias_in_order(const Shape& s, const Inputs& in) {
  std::vector<float> sums = in.dbias;
  for (int g = 0; g < s.groups(); g++)
    for (int j = 0; j < s.n && s.starts[g] < s.starts[g + 1]; j++) {
      float total = 0;
      for (uint32_t lane = 0; lane < product::column_sum_lanes; lane++) {
        float sum = 0;
        for (size_t row = s.starts[g] + lane; row < s.starts[g + 1]; row += product::column_sum_lanes) sum += to_float(in.dy[row * s.n + j]);
        total = lane == 0 ? sum : total + sum;
      }
      sums[size_t(g) * s.n + j] += total;
    }
  return sums;
}

std::string off_rounded(const char* what, const std::vector<bf16>& got, const std::vector<double>& exact,
                        const std::vector<double>& terms, double error) {
  for (size_t i = 0; i < exact.size(); i++)
    if (!(std::fabs(to_float(got[i]) - exact[i]) <= BF16_ROUNDING * std::fabs(exact[i]) + error * terms[i]))
      return differs(what, i, to_float(got[i]), exact[i]);
  return "";
}

// Packed or decoded, wide or narrow: the same bits.
std::string wrong_packed(const Results& got) {
  std::string wrong = bits("y by a packed weight", got.y_packed.data(), got.y.data(), got.y_packed.size());
  if (wrong.empty()) wrong = bits("y by a packed weight, narrow", got.y_narrow_packed.data(), got.y.data(), got.y_packed.size());
  if (wrong.empty()) wrong = bits("dx by a packed weight", got.dx_packed.data(), got.dx.data(), got.dx_packed.size());
  return wrong;
}

// y plus a residual, in one launch and in two.
std::string wrong_residual(const Options& options, const Shape& s, const Inputs& in, const Results& separate) {
  std::vector<bf16> expected(separate.y.size()), got(expected);
  for (size_t i = 0; i < expected.size(); i++) expected[i] = to_bf16(to_float(in.dy[i]) + to_float(separate.y[i]));
  const auto run = [&](void (*kernel)(Product), const Tiling& tiling, const void* weight) {
    const Product p = {in.x.data(), weight, s.bias ? in.bias.data() : nullptr, s.addend ? in.addend.data() : nullptr, nullptr, got.data(),
                       s.groups() > 1 ? s.starts.data() : nullptr, s.rows(), s.k, s.n, s.groups(), s.scale, in.dy.data()};
    got.assign(got.size(), {});
    tiling.run(options, kernel, p, tiling.blocks(s.rows(), s.groups() > 1 ? s.groups() : 0, s.n));
    return bits("y and a residual", got.data(), expected.data(), got.size());
  };
  std::string wrong = run(product_forward, WIDE, in.weight.data());
  if (wrong.empty()) wrong = run(product_forward_narrow, NARROW, in.weight.data());
  return wrong.empty() && s.packed() ? run(product_forward_mxfp4, WIDE_PACKED, in.packed.data()) : wrong;
}

constexpr float LIMIT = 1.5f, ALPHA = 1.702f;

std::vector<bf16> swiglu(const Options& options, const std::vector<bf16>& x) {
  std::vector<bf16> y(x.size() / 2);
  const Swiglu p = {x.data(), nullptr, y.data(), int64_t(y.size()), LIMIT, ALPHA};
  const int in_block = row_ops::swiglu_threads * row_ops::vector;
  launch(options, unsigned(tiles(int(y.size()), in_block)), row_ops::swiglu_threads, 0, [=] { swiglu_forward(p); });
  return y;
}

// Dispatch, product and SwiGLU, in one launch and in three. The rows are scattered among tokens of NaN.
std::string wrong_experts(const Options& options, const Shape& s, const Inputs& in, const Results& separate) {
  const size_t rows = s.rows(), k = s.k;
  std::vector<bf16> tokens((2 * rows + 1) * k, to_bf16(NAN)), got(rows * s.n / 2);
  std::vector<uint32_t> token_of(rows);
  for (size_t row = 0; row < rows; row++) {
    token_of[row] = uint32_t(2 * (rows - row) - 1);
    std::copy_n(&in.x[row * k], k, &tokens[token_of[row] * k]);
  }
  const std::vector<bf16> expected = swiglu(options, separate.y);
  const auto run = [&](void (*kernel)(ExpertSwiglu), const Tiling& tiling, const void* weight) {
    const ExpertSwiglu p = {tokens.data(), weight, s.bias ? in.bias.data() : nullptr, got.data(), token_of.data(), s.starts.data(),
                            s.rows(), s.k, s.n, s.groups(), LIMIT, ALPHA};
    got.assign(got.size(), {});
    tiling.run(options, kernel, p, tiling.blocks(s.rows(), s.groups(), s.n));
    return bits("experts' first half", got.data(), expected.data(), got.size());
  };
  std::string wrong = run(expert_swiglu, WIDE, in.weight.data());
  if (wrong.empty()) wrong = run(expert_swiglu_narrow, NARROW, in.weight.data());
  if (wrong.empty() && s.packed()) wrong = run(expert_swiglu_mxfp4, WIDE_PACKED, in.packed.data());
  return wrong.empty() && s.packed() ? run(expert_swiglu_narrow_mxfp4, NARROW_PACKED, in.packed.data()) : wrong;
}

// Products by up to three matrices, in one launch and in one each. The second has no bias.
std::string wrong_joined(const Options& options, int rows, int k, const std::vector<int>& widths) {
  std::vector<Inputs> in;
  std::vector<Results> separate;
  for (size_t i = 0; i < widths.size(); i++) {
    const Shape s = {"joined", k, widths[i], {0, uint32_t(rows)}, i != 1};
    in.push_back(inputs(s, 7));
    in.back().weight = numbers(size_t(k) * widths[i], 0.5, 20 + i);
    separate.push_back(run(options, s, in.back()));
  }
  const auto run = [&](void (*kernel)(JoinedProduct), const Tiling& tiling) {
    JoinedMatrix matrices[3] = {};
    std::vector<std::vector<bf16>> got;
    for (int width : widths) got.emplace_back(size_t(rows) * width);
    int end = 0;
    for (size_t i = 0; i < widths.size(); i++) {
      end += tiles(widths[i], tiling.columns);
      matrices[i] = {in[i].weight.data(), i == 1 ? nullptr : in[i].bias.data(), got[i].data(), widths[i], end};
    }
    const JoinedProduct p = {in[0].x.data(), matrices[0], matrices[1], matrices[2], rows, k};
    tiling.run(options, kernel, p, tiles(rows, tiling.rows) * end);
    std::string wrong;
    for (size_t i = 0; i < widths.size() && wrong.empty(); i++)
      wrong = bits("y of joined matrices", got[i].data(), separate[i].y.data(), got[i].size());
    return wrong;
  };
  const std::string wrong = run(product_joined, WIDE);
  return wrong.empty() ? run(product_joined_narrow, NARROW) : wrong;
}

// Every number at every scale, a column a scale; of rows of the identity, so that what is finite stands in y.
std::string wrong_scales(const Options& options) {
  const Shape s = {"every scale", 32, 256, {0, 32}, false};
  Inputs in = inputs(s, 11);
  Packing packing(1, s.k, s.n);
  for (int column = 0; column < s.n; column++) packing.put(0, 0, column, column, [&](int i) { return (i + column) % 16; });
  in.weight = packing.weight, in.packed = packing.bytes;
  for (int i = 0; i < 32 * 32; i++) in.x[i] = to_bf16(i % 33 == 0);
  const Results got = run(options, s, in);
  std::string wrong = wrong_packed(got);
  for (int i = 0; i < 32 * 256 && wrong.empty(); i++)
    if (i % 256 < 253 && to_float(got.y_packed[i]) != to_float(packing.weight[i]))
      wrong = differs("y by the identity", i, to_float(got.y_packed[i]), to_float(packing.weight[i]));
  return wrong.empty() ? wrong : std::string(s.name) + ": " + wrong;
}

std::string wrong_shape(const Options& options, const Shape& s) {
  // Hashed sums have other last bits after each sixteen terms.
  const double error = TENSOR_CORE_ERROR_MAX * (options.tensor_core == cuda_host::TensorCore::hashed ? 50 : 1);
  const Inputs in = inputs(s, 7);
  const Results got = run(options, s, in);
  const Exact e = exact(s, in);
  std::string wrong = off_rounded("y", got.y, e.y, e.y_terms, error);
  if (wrong.empty()) wrong = off_sum("y in f32", got.y_f32, e.y, e.y_terms, error);
  if (wrong.empty()) wrong = bits("y of narrow tiles", got.y_narrow.data(), got.y.data(), got.y.size());
  if (wrong.empty()) wrong = bits("y in f32 of narrow tiles", got.y_narrow_f32.data(), got.y_f32.data(), got.y.size());
  for (size_t i = 0; i < got.y.size() && wrong.empty(); i++)
    if (to_bf16(got.y_f32[i]).bits != got.y[i].bits) wrong = differs("y, not that in f32 rounded", i, to_float(got.y[i]), got.y_f32[i]);
  if (wrong.empty()) wrong = wrong_packed(got);
  if (wrong.empty()) wrong = wrong_residual(options, s, in, got);
  if (wrong.empty() && s.n % 2 == 0 && s.scale == 1 && !s.addend) wrong = wrong_experts(options, s, in, got);
  if (wrong.empty()) wrong = off_rounded("dx", got.dx, e.dx, e.dx_terms, error);
  if (wrong.empty()) wrong = off_sum("dweight", got.dweight, e.dweight, e.dweight_terms, error);
  if (wrong.empty()) wrong = off_sum("dbias", got.dbias, e.dbias, e.dbias_terms, SUM_ERROR_MAX);
  if (wrong.empty()) wrong = bits("dbias in its lanes' order", got.dbias.data(), dbias_in_order(s, in).data(), got.dbias.size());
  // Each group's rows from its second on, alone and told without groups.
  for (int g = 0; g < s.groups() && wrong.empty(); g++) {
    const size_t first = s.starts[g] + 1, end = s.starts[g + 1], matrix = size_t(s.k) * s.n;
    if (first >= end) continue;
    const Shape alone = {s.name, s.k, s.n, {0, uint32_t(end - first)}, s.bias, s.scale, s.addend};
    const auto part = [](const auto& of, size_t from, size_t to) {
      return of.empty() ? of : std::decay_t<decltype(of)>(of.begin() + from, of.begin() + to);
    };
    const size_t packed = in.packed.size() / s.groups();
    const Inputs own = {part(in.x, first * s.k, end * s.k), part(in.weight, g * matrix, (g + 1) * matrix),
                        part(in.dy, first * s.n, end * s.n), part(in.bias, g * s.n, (g + 1) * s.n),
                        std::vector<float>(matrix), std::vector<float>(s.n),
                        part(in.addend, first * s.n, end * s.n), part(in.addend_f32, first * s.n, end * s.n),
                        part(in.packed, g * packed, (g + 1) * packed)};
    const Results one = run(options, alone, own);
    wrong = bits("y alone", one.y_f32.data(), &got.y_f32[first * s.n], one.y_f32.size());
    if (wrong.empty()) wrong = bits("dx alone", one.dx.data(), &got.dx[first * s.k], one.dx.size());
    if (wrong.empty()) wrong = wrong_packed(one);
  }
  if (wrong.empty()) {
    const Results again = run(newest_first(options), s, in);
    wrong = bits("dweight on another schedule", again.dweight.data(), got.dweight.data(), got.dweight.size());
    if (wrong.empty()) wrong = bits("dbias on another schedule", again.dbias.data(), got.dbias.data(), got.dbias.size());
  }
  return wrong.empty() ? wrong : std::string(s.name) + ": " + wrong;
}

// Rows, matrices and results beyond 2^31 numbers: one row of the last of many groups, after a first of many rows.
std::string wrong_far(const Options& options) {
  constexpr int width = 256, groups = (1 << 15) + 1, many = 1 << 23, rows = many + 1;
  constexpr size_t matrix = size_t(width) * width;
  // As a problem of its own, whose bits all must have.
  const Shape alone = {"far away", width, width, {0, 1}, true};
  Inputs in = inputs(alone, 9);
  in.dweight.assign(matrix, 0), in.dbias.assign(width, 0);
  const Results near = run(options, alone, in);
  const FarArray<bf16> x(size_t(rows) * width), dy(size_t(rows) * width), weight(groups * matrix);
  // Results of every kind.
  const FarArray<float> out(std::max(groups * matrix, size_t(rows) * width));
  std::vector<float> bias(size_t(groups) * width);
  memcpy(x.data + size_t(many) * width, in.x.data(), width * sizeof(bf16));
  memcpy(dy.data + size_t(many) * width, in.dy.data(), width * sizeof(bf16));
  memcpy(weight.data + (groups - 1) * matrix, in.weight.data(), matrix * sizeof(bf16));
  std::copy(in.bias.begin(), in.bias.end(), bias.end() - width);
  std::vector<uint32_t> starts(groups + 1, many);
  starts[0] = 0, starts[groups] = rows;
  const Product p = {x.data, weight.data, bias.data(), nullptr, dy.data, out.data, starts.data(), rows, width, width, groups, 1, nullptr};
  const auto last = [&](const auto& kernel, const auto& p, const Tiling& tiling, uint64_t block) {
    launch_last(options, block + 1, unsigned(tiling.threads), size_t(tiling.shared_bytes), [=] { kernel(p); });
  };
  // Each kernel's first columns.
  const bf16* halves = reinterpret_cast<const bf16*>(out.data) + size_t(many) * width;
  const float* sums = out.data + size_t(many) * width;
  std::string wrong;
  last(product_forward_f32, p, WIDE, many / WIDE.rows);
  if (wrong.empty()) wrong = bits("y in f32 far away", sums, near.y_f32.data(), WIDE.columns);
  last(product_forward_narrow_f32, p, NARROW, many / NARROW.rows);
  if (wrong.empty()) wrong = bits("y in f32 of narrow tiles far away", sums, near.y_f32.data(), NARROW.columns);
  last(product_forward, p, WIDE, many / WIDE.rows);
  if (wrong.empty()) wrong = bits("y far away", halves, near.y.data(), WIDE.columns);
  last(product_forward_narrow, p, NARROW, many / NARROW.rows);
  if (wrong.empty()) wrong = bits("y of narrow tiles far away", halves, near.y.data(), NARROW.columns);
  // A far token, and its row.
  const FarArray<uint32_t> token_of(rows);
  token_of.data[many] = many;
  const std::vector<bf16> units = swiglu(options, near.y);
  bf16* const unit = reinterpret_cast<bf16*>(out.data) + size_t(many) * width / 2;
  const ExpertSwiglu own = {x.data, weight.data, bias.data(), reinterpret_cast<bf16*>(out.data), token_of.data, starts.data(), rows,
                            width, width, groups, LIMIT, ALPHA};
  last(expert_swiglu_narrow, own, NARROW, many / NARROW.rows);
  if (wrong.empty()) wrong = bits("experts' first half far away", unit, units.data(), NARROW.columns / 2);
  last(product_input_gradient, p, WIDE, many / WIDE.rows);
  if (wrong.empty()) wrong = bits("dx far away", halves, near.dx.data(), WIDE.columns);
  // Sums of gradients, which held nothing.
  float* const dweight = out.data + (groups - 1) * matrix;
  memset(dweight, 0, matrix * sizeof(float));
  last(product_weight_gradient, p, WIDE, uint64_t(groups - 1) * tiles(width, WIDE.rows) * tiles(width, WIDE.columns));
  if (wrong.empty()) wrong = bits("dweight far away", dweight, near.dweight.data(), WIDE.columns);
  float* const dbias = out.data + size_t(groups - 1) * width;
  memset(dbias, 0, width * sizeof(float));
  last(product_bias_gradient, p, COLUMN_SUMS, uint64_t(groups - 1) * tiles(width, COLUMN_SUMS.columns));
  if (wrong.empty()) wrong = bits("dbias far away", dbias, near.dbias.data(), COLUMN_SUMS.columns);
  return wrong;
}

}  // namespace

std::string wrong_product(const Options& options, bool small) {
  std::vector<Shape> shapes = {
      {"a row", 8, 8, {0, 1}, true},
      {"no multiples of eight", 67, 13, {0, 19}, false},
      {"a value head", 72, 1, {0, 21}, true},
      {"two row tiles, ends amid tiles", 136, 72, {0, 131}, true},
      {"groups with none, one and several rows", 40, 24, {0, 0, 1, 18, 18, 21}, true},
      {"experts of odd width", 67, 14, {0, 0, 5, 19}, true},
      {"half a step of MXFP4", 32, 13, {0, 19}, true},
      {"MXFP4 in several steps, ends amid panels", 352, 72, {0, 17}, false},
      {"MXFP4 by groups", 160, 200, {0, 0, 1, 18, 18, 21}, true},
      {"the first factor of an adapter", 72, 1, {0, 5, 21}, false, 0.37f},
      {"the second factor, with a bias", 3, 71, {0, 19}, true, 1.5f, true},
  };
  if (!small) {
    shapes.push_back({"many steps", 1000, 200, {0, 33}, true});
    shapes.push_back({"groups of several tiles", 72, 136, {0, 3, 140, 140, 300, 301}, false});
    shapes.push_back({"MXFP4 in many steps", 1056, 136, {0, 33}, true});
    shapes.push_back({"MXFP4 by groups of several tiles", 96, 264, {0, 3, 140, 140, 300, 301}, false});
    shapes.push_back({"factors of several tiles", 16, 200, {0, 130, 261}, false, -2.5f, true});
  }
  std::string wrong = wrong_scales(options);
  for (const Shape& shape : shapes)
    if (wrong.empty()) wrong = wrong_shape(options, shape);
  for (const auto& [rows, k, widths] : std::vector<std::tuple<int, int, std::vector<int>>>{
           {1, 8, {8}}, {19, 67, {13, 5}}, {21, 72, {136, 64, 64}}, {131, 40, {130, 1, 200}}, {70, 64, {64, 128, 24}}})
    if (wrong.empty()) wrong = wrong_joined(options, rows, k, widths);
  return wrong.empty() ? wrong_far(options) : wrong;
}

}  // namespace suite
