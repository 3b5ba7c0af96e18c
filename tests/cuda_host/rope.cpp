// Rotary position embedding: errors against f64, the rotation back, values copied, bits of a row alone, far places.
#include "rope.cuh"

#include "op_checks.h"

extern "C" {
void rope(Rope);
void rope_append(RopeAppend);
}

namespace suite {

using cuda_host::Options;

namespace {

struct Table {
  int half, positions;
  std::vector<float> cosines, sines;
  Table(int half, int positions) : half(half), positions(positions), cosines(size_t(half) * positions), sines(cosines) {
    for (int at = 0; at < positions; at++)
      for (int i = 0; i < half; i++) {
        // Cosine and sine times a factor, as YaRN has them.
        const double angle = at * std::pow(0.3, double(i) / half);
        cosines[at * half + i] = float(1.25 * std::cos(angle));
        sines[at * half + i] = float(1.25 * std::sin(angle));
      }
  }
};

void run(const Options& options, const Rope& p) {
  const size_t vectors = p.rows * p.heads * (p.half / elements::vector);
  launch_over(options, rope, p, vectors, rope_op::threads, rope_op::threads);
}

void append(const Options& options, const RopeAppend& p) {
  const size_t vectors = p.rows * (p.heads + p.kv_heads) * (p.half / elements::vector);
  launch_over(options, rope_append, p, vectors, rope_op::threads, rope_op::threads);
}

std::vector<double> exact(const Table& table, const std::vector<bf16>& x, const std::vector<uint32_t>& positions, int heads,
                          double direction) {
  const int half = table.half;
  std::vector<double> y(x.size());
  for (size_t row = 0; row < positions.size(); row++)
    for (int head = 0; head < heads; head++)
      for (int i = 0; i < half; i++) {
        const size_t a = (row * heads + head) * 2 * half + i, b = a + half;
        const double c = table.cosines[positions[row] * half + i], s = direction * table.sines[positions[row] * half + i];
        y[a] = to_float(x[a]) * c - to_float(x[b]) * s;
        y[b] = to_float(x[b]) * c + to_float(x[a]) * s;
      }
  return y;
}

// Rows of two kinds one beside the other, `which` 0 or 1.
std::vector<bf16> part(const std::vector<bf16>& pairs, size_t width, size_t which) {
  std::vector<bf16> own;
  for (size_t at = which * width; at < pairs.size(); at += 2 * width) own.insert(own.end(), &pairs[at], &pairs[at] + width);
  return own;
}

std::string wrong_case(const Options& options, size_t rows, int heads, int half) {
  const Table table(half, 61);
  const int width = heads * 2 * half;
  std::vector<uint32_t> positions(rows);
  for (size_t row = 0; row < rows; row++) positions[row] = row * 37 % 61;
  const std::vector<bf16> x = numbers(rows * width, 1, 1), v = numbers(rows * width, 1, 2);
  std::vector<bf16> y(x.size()), both(2 * x.size()), dk(x.size()), dv(x.size());
  const Rope queries = {x.data(),        nullptr, y.data(),  nullptr, table.cosines.data(), table.sines.data(), positions.data(),
                        int64_t(rows), heads,   half,      width,   width,                1};
  run(options, queries);
  std::string wrong = off("rope, y", y, exact(table, x, positions, heads, 1));
  // Keys beside values.
  Rope keys = queries;
  keys.values = v.data(), keys.out = both.data(), keys.values_out = both.data() + width, keys.out_stride = 2 * width;
  run(options, keys);
  if (wrong.empty()) wrong = bits("rope, keys", part(both, width, 0).data(), y.data(), y.size());
  if (wrong.empty()) wrong = bits("rope, values", part(both, width, 1).data(), v.data(), v.size());
  // Back: what the two gradients are.
  Rope back = queries;
  back.x = both.data(), back.values = both.data() + width, back.x_stride = 2 * width;
  back.out = dk.data(), back.values_out = dv.data(), back.direction = -1;
  run(options, back);
  if (wrong.empty()) wrong = off("rope, dk", dk, exact(table, y, positions, heads, -1));
  if (wrong.empty()) wrong = bits("rope, dv", dv.data(), v.data(), v.size());
  // The last row alone.
  if (wrong.empty() && rows > 1) {
    std::vector<bf16> one(width);
    Rope alone = queries;
    alone.x += (rows - 1) * width, alone.out = one.data(), alone.positions += rows - 1, alone.rows = 1;
    run(options, alone);
    wrong = bits("rope alone", one.data(), y.data() + (rows - 1) * width, width);
  }
  return wrong;
}

// Queries, keys and the cache in one launch, and in two with the rows put in place here.
std::string wrong_append(const Options& options, size_t rows, int heads, int kv_heads, int half) {
  const Table table(half, 61);
  const int q_width = heads * 2 * half, width = kv_heads * 2 * half;
  std::vector<uint32_t> positions(rows);
  std::vector<int32_t> slots(rows);
  for (size_t row = 0; row < rows; row++) positions[row] = row * 37 % 61, slots[row] = int32_t(2 * (rows - row) - 1);
  const std::vector<bf16> q = numbers(rows * q_width, 1, 1), k = numbers(rows * width, 1, 2), v = numbers(rows * width, 1, 3);
  std::vector<bf16> turned(q.size()), both(2 * k.size()), got(q.size()), cache(2 * rows * 2 * width, to_bf16(7)), expected(cache);
  Rope separate = {q.data(),      nullptr, turned.data(), nullptr, table.cosines.data(), table.sines.data(), positions.data(),
                   int64_t(rows), heads,   half,          q_width, q_width,              1};
  run(options, separate);
  separate.x = k.data(), separate.values = v.data(), separate.out = both.data(), separate.values_out = both.data() + width;
  separate.heads = kv_heads, separate.x_stride = width, separate.out_stride = 2 * width;
  run(options, separate);
  for (size_t row = 0; row < rows; row++) std::copy_n(&both[row * 2 * width], 2 * width, &expected[size_t(slots[row]) * 2 * width]);
  append(options, {q.data(), k.data(), v.data(), got.data(), cache.data(), table.cosines.data(), table.sines.data(), positions.data(),
                   slots.data(), int64_t(rows), heads, kv_heads, half});
  const std::string wrong = bits("rope_append, queries", got.data(), turned.data(), got.size());
  return wrong.empty() ? bits("rope_append, cache", cache.data(), expected.data(), cache.size()) : wrong;
}

// A row beyond 2^31 numbers, at a place and a position that are too.
std::string wrong_far_append(const Options& options) {
  constexpr int half = 8, width = 2 * half;
  constexpr uint32_t position = (1u << 28) + 3;
  constexpr size_t last = size_t(1) << 27, slot = (1 << 27) + 5;
  const FarArray<float> cosines(size_t(position + 1) * half), sines(size_t(position + 1) * half);
  for (int i = 0; i < half; i++) cosines.data[size_t(position) * half + i] = 0, sines.data[size_t(position) * half + i] = 1;
  const FarArray<bf16> q((last + 1) * width), k((last + 1) * width), v((last + 1) * width), out((last + 1) * width), cache((slot + 1) * 2 * width);
  const FarArray<uint32_t> positions(last + 1);
  const FarArray<int32_t> slots(last + 1);
  positions.data[last] = position, slots.data[last] = slot;
  const std::vector<bf16> row = numbers(width, 1, 1);
  for (bf16* at : {q.data, k.data, v.data}) std::copy(row.begin(), row.end(), at + last * width);
  const RopeAppend p = {q.data, k.data, v.data, out.data, cache.data, cosines.data, sines.data, positions.data, slots.data, last + 1, 1, 1, half};
  launch_last(options, 2 * last / rope_op::threads + 1, rope_op::threads, 0, [=] { rope_append(p); });
  std::vector<double> turned(width);
  for (int i = 0; i < half; i++) turned[i] = -to_float(row[half + i]), turned[half + i] = to_float(row[i]);
  const bf16 *const query = out.data + last * width, *const key = cache.data + slot * 2 * width;
  std::string wrong = off("rope_append, a far query", {query, query + width}, turned);
  if (wrong.empty()) wrong = off("rope_append, a far key", {key, key + width}, turned);
  return wrong.empty() ? bits("rope_append, a far value", key + width, row.data(), width) : wrong;
}

// Positions whose angles lie beyond 2^31 numbers, and rows too.
std::string wrong_far(const Options& options) {
  constexpr int half = 8, width = 2 * half;
  constexpr uint32_t position = (1u << 28) + 3;
  const FarArray<float> cosines(size_t(position + 1) * half), sines(size_t(position + 1) * half);
  for (int i = 0; i < half; i++) cosines.data[size_t(position) * half + i] = 0, sines.data[size_t(position) * half + i] = 1;
  constexpr int stride = 1 << 30;
  const FarArray<bf16> x(size_t(3) * stride + width);
  const std::vector<uint32_t> positions(4, position);
  std::vector<bf16> y(4 * width), row = numbers(width, 1, 1);
  for (int i = 0; i < width; i++) x.data[size_t(3) * stride + i] = row[i];
  run(options, {x.data, nullptr, y.data(), nullptr, cosines.data, sines.data, positions.data(), 4, 1, half, stride, width, 1});
  std::vector<double> turned(width);
  for (int i = 0; i < half; i++) turned[i] = -to_float(row[half + i]), turned[half + i] = to_float(row[i]);
  if (const std::string wrong = off("rope, far away", {y.end() - width, y.end()}, turned); !wrong.empty()) return wrong;
  // A row beyond 2^32, all in one place.
  constexpr size_t rows = (size_t(1) << 32) + 1;
  const FarArray<uint32_t> of_rows(rows);
  of_rows.data[rows - 1] = position;
  y.assign(width, {});
  const Rope p = {row.data(), nullptr, y.data(), nullptr, cosines.data, sines.data, of_rows.data, rows, 1, half, 0, 0, 1};
  launch_last(options, (rows - 1) / rope_op::threads + 1, rope_op::threads, 0, [=] { rope(p); });
  y.resize(width);
  return off("rope, a far row", y, turned);
}

}  // namespace

std::string wrong_rope(const Options& options, bool small) {
  struct Case { size_t rows; int heads, half; };
  for (const Case& c : std::vector<Case>{{1, 1, 8}, {3, 5, 8}, {7, 8, 32}, {2, 3, 64}, {size_t(small ? 9 : 67), 16, 32}})
    for (int kv_heads : {1, c.heads}) {
      std::string wrong = wrong_case(options, c.rows, c.heads, c.half);
      if (wrong.empty()) wrong = wrong_append(options, c.rows, c.heads, kv_heads, c.half);
      if (!wrong.empty()) return wrong;
    }
  const std::string wrong = wrong_far(options);
  return wrong.empty() ? wrong_far_append(options) : wrong;
}

}  // namespace suite
