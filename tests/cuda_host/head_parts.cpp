// Heads in a part for each rank, and back: every head at its place, shared heads added in rank order, rows beyond 2^31.
#include "head_parts.cuh"

#include "op_checks.h"

extern "C" {
void pack_heads(HeadParts);
void unpack_heads(HeadParts);
}

namespace suite {

using cuda_host::Options;
using elements::vector;

namespace {

struct Case { size_t rows; int groups, heads, ranks, vectors; };

int own_heads(const Case& c) { return std::max(c.heads / c.ranks, 1); }

unsigned blocks(size_t vectors) { return unsigned((vectors + head_parts_op::threads - 1) / head_parts_op::threads); }

// The index of an element of a rank's part in that part, and in the rows with all heads.
template <class Visit>
void each(const Case& c, int rank, Visit visit) {
  const int own = own_heads(c), head_dim = c.vectors * vector, first = rank * c.heads / c.ranks;
  size_t in_part = 0;
  for (size_t row = 0; row < c.rows; row++)
    for (int group = 0; group < c.groups; group++)
      for (int i = 0; i < own * head_dim; i++) visit(in_part++, ((row * c.groups + group) * c.heads + first) * head_dim + i);
}

std::string wrong_case(const Options& options, const Case& c) {
  const size_t width = size_t(c.groups) * c.vectors * vector, row_elements = c.rows * c.heads * width, part = c.rows * own_heads(c) * width;
  const std::vector<bf16> x = numbers(row_elements, 1, 1);
  std::vector<bf16> parts = numbers(part * c.ranks, 1, 2);
  // Where three ranks or more share a head, the first and the last have large values that cancel: the order shows.
  const int sharing = c.ranks / c.heads;
  for (int rank = 0; sharing > 2 && rank < c.ranks; rank += sharing)
    for (size_t i = rank * part; i < (rank + 1) * part; i++) {
      parts[i] = to_bf16(to_float(parts[i]) * 0x1p24f);
      parts[i + (sharing - 1) * part] = to_bf16(-to_float(parts[i]));
    }
  const bf16 nothing = to_bf16(7);
  // Some elements more, which nobody may write.
  std::vector<bf16> packed(part * c.ranks + vector, nothing), expected(packed), rows(row_elements + vector, nothing), expected_rows(rows);
  std::vector<float> sums(row_elements);
  std::vector<bool> written(row_elements);
  for (int rank = 0; rank < c.ranks; rank++)
    each(c, rank, [&](size_t in_part, size_t in_rows) {
      expected[rank * part + in_part] = x[in_rows];
      const float value = to_float(parts[rank * part + in_part]);
      sums[in_rows] = written[in_rows] ? sums[in_rows] + value : value;
      written[in_rows] = true;
    });
  for (size_t i = 0; i < row_elements; i++) expected_rows[i] = to_bf16(sums[i]);
  const HeadParts pack = {x.data(), packed.data(), int64_t(c.rows), c.groups, c.heads, c.ranks, c.vectors};
  cuda_host::launch(options, blocks(part * c.ranks / vector), head_parts_op::threads, 0, [=] { pack_heads(pack); });
  std::string wrong = bits("pack_heads", packed.data(), expected.data(), packed.size());
  if (!wrong.empty()) return wrong;
  const HeadParts unpack = {parts.data(), rows.data(), int64_t(c.rows), c.groups, c.heads, c.ranks, c.vectors};
  cuda_host::launch(options, blocks(row_elements / vector), head_parts_op::threads, 0, [=] { unpack_heads(unpack); });
  return bits("unpack_heads", rows.data(), expected_rows.data(), rows.size());
}

// The last row of more than 2^31, of the last rank.
std::string wrong_far(const Options& options) {
  constexpr size_t count = (size_t(1) << 31) + 3;
  const std::vector<bf16> x = numbers(vector, 1, 1);
  const FarArray<bf16> from(2 * count * vector), to(2 * count * vector);
  std::copy(x.begin(), x.end(), from.data + (2 * count - 1) * vector);
  const HeadParts pack = {from.data, to.data, int64_t(count), 1, 2, 2, 1};
  launch_last(options, blocks(2 * count), head_parts_op::threads, 0, [=] { pack_heads(pack); });
  std::string wrong = bits("pack_heads, a far row", to.data + (2 * count - 1) * vector, x.data(), vector);
  if (!wrong.empty()) return wrong;
  // One head that two ranks share.
  const FarArray<bf16> sum(count * vector);
  std::copy(x.begin(), x.end(), from.data + (count - 1) * vector);
  const HeadParts unpack = {from.data, sum.data, int64_t(count), 1, 1, 2, 1};
  launch_last(options, blocks(count), head_parts_op::threads, 0, [=] { unpack_heads(unpack); });
  std::vector<bf16> twice(vector);
  for (int i = 0; i < vector; i++) twice[i] = to_bf16(to_float(x[i]) + to_float(x[i]));
  return bits("unpack_heads, a far row", sum.data + (count - 1) * vector, twice.data(), vector);
}

}  // namespace

std::string wrong_head_parts(const Options& options, bool small) {
  const size_t many = small ? 9 : 67;
  for (const Case& c : std::vector<Case>{{1, 1, 1, 1, 1}, {5, 1, 4, 2, 8}, {7, 2, 6, 3, 2}, {3, 2, 2, 4, 8}, {4, 1, 1, 5, 1}, {2, 2, 1, 3, 16}, {many, 2, 8, 4, 8}})
    if (const std::string wrong = wrong_case(options, c); !wrong.empty()) return wrong;
  return wrong_far(options);
}

}  // namespace suite
