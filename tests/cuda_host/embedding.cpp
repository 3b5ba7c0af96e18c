// Rows and columns that ids name: exact copies; sums by id against f64, their bits, and whatever else is in the buffer.
#include "embedding.cuh"

#include <algorithm>
#include <map>

#include "op_checks.h"

extern "C" {
void take_rows(Taken);
void take_columns(Taken);
void add_rows(SumsById);
void add_columns(SumsById);
void sum_rows(SumsById);
}

namespace suite {

using cuda_host::Options;
namespace op = embedding_op;

namespace {

// Tokens sorted by id, as the host lists them.
struct ById {
  std::vector<uint32_t> order, starts, ids;
  explicit ById(const std::vector<uint32_t>& of_tokens) {
    std::map<uint32_t, std::vector<uint32_t>> tokens;
    for (uint32_t t = 0; t < of_tokens.size(); t++) tokens[of_tokens[t]].push_back(t);
    for (const auto& [id, own] : tokens) {
      ids.push_back(id);
      starts.push_back(uint32_t(order.size()));
      order.insert(order.end(), own.begin(), own.end());
    }
    starts.push_back(uint32_t(order.size()));
  }
};

void take(const Options& options, void (*kernel)(Taken), const Taken& p) {
  launch_over(options, kernel, p, size_t(p.tokens) * (p.width / elements::vector), op::take_threads, op::take_threads);
}

void sum(const Options& options, void (*kernel)(SumsById), const std::vector<bf16>& dy, const ById& by, float* table, bf16* out,
         int64_t columns, int width) {
  const SumsById p = {dy.data(), by.order.data(), by.starts.data(), by.ids.data(), table, out, columns, width};
  const unsigned blocks = unsigned(by.ids.size()) * unsigned((width + op::sum_columns - 1) / op::sum_columns);
  cuda_host::launch(options, blocks, op::sum_threads, op::sum_shared_bytes, [=] { kernel(p); });
}

std::string wrong_case(const Options& options, size_t tokens, int width, uint32_t vocabulary) {
  std::vector<uint32_t> ids(tokens);
  // The first id occurs half the time, others a few times or never.
  for (size_t t = 0; t < tokens; t++) ids[t] = t % 2 ? vocabulary - 1 : uint32_t(t * 7919 % vocabulary);
  const ById by(ids);
  const std::vector<bf16> table = numbers(size_t(vocabulary) * width, 1, 1), dy = numbers(tokens * width, 1, 2);
  std::vector<bf16> turned(table.size()), y(tokens * width), y_columns(y), dx(table.size(), bf16{0x7fc0}), expected(y);
  for (uint32_t id = 0; id < vocabulary; id++)
    for (int i = 0; i < width; i++) turned[size_t(i) * vocabulary + id] = table[size_t(id) * width + i];
  for (size_t t = 0; t < tokens; t++) std::copy_n(&table[size_t(ids[t]) * width], width, &expected[t * width]);
  take(options, take_rows, {table.data(), ids.data(), y.data(), int64_t(tokens), 0, width});
  take(options, take_columns, {turned.data(), ids.data(), y_columns.data(), int64_t(tokens), vocabulary, width});
  std::string wrong = bits("rows", y.data(), expected.data(), y.size());
  if (wrong.empty()) wrong = bits("columns", y_columns.data(), expected.data(), y.size());

  const std::vector<float> held = floats(table.size(), 1, 3);
  std::vector<float> rows = held, columns(held.size());
  for (uint32_t id = 0; id < vocabulary; id++)
    for (int i = 0; i < width; i++) columns[size_t(i) * vocabulary + id] = held[size_t(id) * width + i];
  sum(options, add_rows, dy, by, rows.data(), nullptr, 0, width);
  sum(options, add_columns, dy, by, columns.data(), nullptr, vocabulary, width);
  sum(options, sum_rows, dy, by, nullptr, dx.data(), 0, width);
  std::vector<double> exact(held.begin(), held.end()), terms(held.size()), sums(held.size());
  for (size_t i = 0; i < held.size(); i++) terms[i] = std::fabs(held[i]);
  for (size_t t = 0; t < tokens; t++)
    for (int i = 0; i < width; i++) {
      const double grad = to_float(dy[t * width + i]);
      const size_t at = size_t(ids[t]) * width + i;
      exact[at] += grad, sums[at] += grad, terms[at] += std::fabs(grad);
    }
  if (wrong.empty()) wrong = off_sum("the rows' gradient", rows, exact, terms);
  for (uint32_t id = 0; id < vocabulary && wrong.empty(); id++) {
    const bool named = std::find(ids.begin(), ids.end(), id) != ids.end();
    for (int i = 0; i < width && wrong.empty(); i++) {
      const size_t at = size_t(id) * width + i;
      // Both tables add the same sums.
      wrong = bits("the columns' gradient", &columns[size_t(i) * vocabulary + id], &rows[at], 1);
      if (!named && wrong.empty()) wrong = bits("a row that no token names", &rows[at], &held[at], 1);
      if (!named && dx[at].bits != 0x7fc0) wrong = "a row that no token names was written";
      if (named && wrong.empty()) wrong = off("the selected rows' gradient", {dx[at]}, {sums[at]}, 1e-5 * terms[at]);
    }
  }
  // An id's tokens alone, elsewhere in a batch, on another schedule: the same bits.
  if (!wrong.empty() || tokens == 1) return wrong;
  std::vector<uint32_t> few;
  std::vector<bf16> few_dy;
  for (size_t t = 0; t < tokens; t++)
    if (ids[t] == vocabulary - 1 || t == 0) few.push_back(ids[t]), few_dy.insert(few_dy.end(), &dy[t * width], &dy[t * width] + width);
  std::vector<float> alone = held;
  sum(newest_first(options), add_rows, few_dy, ById(few), alone.data(), nullptr, 0, width);
  const size_t at = size_t(vocabulary - 1) * width;
  return bits("an id alone", &alone[at], &rows[at], width);
}

// Ids whose rows and columns lie beyond 2^31 numbers.
std::string wrong_far(const Options& options) {
  constexpr int width = 8;
  constexpr uint32_t id = (1u << 29) + 5;
  constexpr size_t columns = (size_t(1) << 29) + 6;
  const std::vector<uint32_t> ids = {id};
  const std::vector<bf16> row = numbers(width, 1, 1);
  const FarArray<bf16> rows(columns * width), turned(columns * width);
  for (int i = 0; i < width; i++) rows.data[size_t(id) * width + i] = turned.data[i * columns + id] = row[i];
  std::vector<bf16> y(width);
  take(options, take_rows, {rows.data, ids.data(), y.data(), 1, 0, width});
  std::string wrong = bits("a far row", y.data(), row.data(), width);
  y.assign(width, {});
  take(options, take_columns, {turned.data, ids.data(), y.data(), 1, int64_t(columns), width});
  if (wrong.empty()) wrong = bits("a far column", y.data(), row.data(), width);
  const FarArray<float> table(columns * width);
  sum(options, add_rows, row, ById(ids), table.data, nullptr, 0, width);
  for (int i = 0; i < width; i++)
    if (wrong.empty() && table.data[size_t(id) * width + i] != to_float(row[i])) wrong = "a far row's gradient";
  const FarArray<float> table_turned(columns * width);
  sum(options, add_columns, row, ById(ids), table_turned.data, nullptr, int64_t(columns), width);
  for (int i = 0; i < width; i++)
    if (wrong.empty() && table_turned.data[i * columns + id] != to_float(row[i])) wrong = "a far column's gradient";
  return wrong;
}

// Tokens beyond 2^32 vectors, where what is counted in 32 bits begins anew.
std::string wrong_far_tokens(const Options& options) {
  constexpr int width = 1 << 11;
  constexpr size_t token = (size_t(1) << 32) / (width / elements::vector), blocks = (size_t(1) << 32) / op::take_threads + 1;
  const std::vector<bf16> row = numbers(width, 1, 2), turned = row;
  const FarArray<uint32_t> ids(token + 1);
  const FarArray<bf16> y((token + 1) * width);
  for (const auto kernel : {take_rows, take_columns}) {
    memset(y.data + token * width, 0, width * sizeof(bf16));
    const Taken p = {row.data(), ids.data, y.data, token + 1, 1, width};
    launch_last(options, blocks, op::take_threads, 0, [=] { kernel(p); });
    if (const std::string wrong = bits("a far token", y.data + token * width, row.data(), width); !wrong.empty()) return wrong;
  }
  // Its gradient, of the first columns; the id is far too.
  constexpr uint32_t far = 1 << 21;
  const uint32_t order = far, starts[] = {0, 1};
  memcpy(y.data + size_t(far) * width, row.data(), width * sizeof(bf16));
  const FarArray<bf16> sum(size_t(far + 1) * width);
  const SumsById p = {y.data, &order, starts, &far, nullptr, sum.data, 0, width};
  cuda_host::launch(options, 1, op::sum_threads, op::sum_shared_bytes, [=] { sum_rows(p); });
  return bits("a far token's gradient", sum.data + size_t(far) * width, row.data(), op::sum_columns);
}

}  // namespace

std::string wrong_embedding(const Options& options, bool small) {
  struct Case { size_t tokens; int width; uint32_t vocabulary; };
  for (const Case& c : std::vector<Case>{{1, 8, 1}, {3, 16, 5}, {40, 264, 11}, {33, 1032, 7}, {5, 512, 7}, {size_t(small ? 130 : 1001), 64, 50}})
    if (const std::string wrong = wrong_case(options, c.tokens, c.width, c.vocabulary); !wrong.empty()) return wrong;
  const std::string wrong = wrong_far(options);
  return wrong.empty() ? wrong_far_tokens(options) : wrong;
}

}  // namespace suite
