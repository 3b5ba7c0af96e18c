// Selection of rows and columns by id, and the gradient. One block adds the tokens of one id, so no two
// blocks write one row.
#include "embedding.cuh"

using namespace elements;
using namespace embedding_op;

namespace {

// The token and the first of eight columns of a thread; past the last token there is none.
struct Place {
  int64_t token;
  int column;
};

PRIMITIVE Place place(const Taken& p) {
  const int of_row = p.width / vector;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * take_threads + threadIdx.x;
  const int64_t token = index / of_row;
  return {token, static_cast<int>(index - token * of_row) * vector};
}

// Calls `put` with the id, a column and its sum. Warp w adds tokens w, w + 8, ... of the id; then the
// warps' sums are added in warp order.
template <class Put>
PRIMITIVE void sum_tokens(const SumsById& p, Put put) {
  const int blocks = (p.width + sum_columns - 1) / sum_columns;
  const int64_t place = blockIdx.x / blocks;
  const int first = blockIdx.x % blocks * sum_columns;
  const int warp = threadIdx.x / 32, in_block = threadIdx.x % 32 * vector;
  const int64_t start = p.starts[place], tokens = p.starts[place + 1] - start;
  float* sums = reinterpret_cast<float*>(dynamic_shared_memory());
  if (first + in_block < p.width && warp < tokens) {
    Values sum = {};
    for (int64_t i = warp; i < tokens; i += sum_warps) {
      const Values dy = load(p.dy + static_cast<int64_t>(p.order[start + i]) * p.width + first + in_block);
      for (int k = 0; k < vector; k++) sum.v[k] = add(sum.v[k], dy.v[k]);
    }
    for (int k = 0; k < vector; k++) sums[warp * sum_columns + in_block + k] = sum.v[k];
  }
  block_barrier();
  const int column = threadIdx.x;
  if (first + column >= p.width) return;
  float sum = sums[column];
  for (int other = 1; other < sum_warps && other < tokens; other++) sum = add(sum, sums[other * sum_columns + column]);
  put(p.ids[place], first + column, sum);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(take_threads) take_rows(const __grid_constant__ Taken p) {
  const auto [token, column] = place(p);
  if (token >= p.tokens) return;
  const bf16* from = p.table + static_cast<int64_t>(p.ids[token]) * p.width + column;
  *reinterpret_cast<uint4*>(p.out + token * p.width + column) = *reinterpret_cast<const uint4*>(from);
}

extern "C" __global__ void __launch_bounds__(take_threads) take_columns(const __grid_constant__ Taken p) {
  const auto [token, column] = place(p);
  if (token >= p.tokens) return;
  const bf16* from = p.table + column * p.columns + p.ids[token];
  Values values;
  for (int k = 0; k < vector; k++) values.v[k] = to_float(from[k * p.columns]);
  store(p.out + token * p.width + column, values);
}

// Adds to rows of a table's gradient.
extern "C" __global__ void __launch_bounds__(sum_threads) add_rows(const __grid_constant__ SumsById p) {
  sum_tokens(p, [&](int64_t id, int column, float sum) {
    float& total = p.table[id * p.width + column];
    total = add(total, sum);
  });
}

// Adds to columns of a table's gradient.
extern "C" __global__ void __launch_bounds__(sum_threads) add_columns(const __grid_constant__ SumsById p) {
  sum_tokens(p, [&](int64_t id, int column, float sum) {
    float& total = p.table[column * p.columns + id];
    total = add(total, sum);
  });
}

// Writes rows of a gradient that has no previous contents.
extern "C" __global__ void __launch_bounds__(sum_threads) sum_rows(const __grid_constant__ SumsById p) {
  sum_tokens(p, [&](int64_t id, int column, float sum) { p.out[id * p.width + column] = to_bf16(sum); });
}
