// Muon around its products: the momentum, the direction as a bf16 matrix of norm 1, and the update. All sums
// have one order.
#include "muon.cuh"

using namespace muon;

namespace {

PRIMITIVE int64_t matrix_size(const Muon& p) { return static_cast<int64_t>(p.rows) * p.columns; }
PRIMITIVE int64_t chunks(const Muon& p) { return (matrix_size(p) + chunk - 1) / chunk; }

// Adds `x` of all threads in their order; the first thread gets the sum.
PRIMITIVE double block_sum(double x) {
  double* of_threads = reinterpret_cast<double*>(dynamic_shared_memory());
  of_threads[threadIdx.x] = x;
  block_barrier();
  double sum = 0.0;
  if (threadIdx.x == 0)
    for (int thread = 0; thread < threads; thread++) sum += of_threads[thread];
  return sum;
}

// A tile of a matrix [rows, columns], by its first row and column.
struct Tile {
  int64_t matrix;
  int row, column, rows, columns;
};

// The block's tile of the weights.
PRIMITIVE Tile tile_of_weights(const Muon& p) {
  const unsigned across = (p.columns + tile - 1) / tile, down = (p.rows + tile - 1) / tile;
  const int row = blockIdx.x / across % down * tile, column = blockIdx.x % across * tile;
  return {blockIdx.x / across / down, row, column, p.rows, p.columns};
}

// The same values in X.
PRIMITIVE Tile tile_of_x(const Tile& t) {
  if (t.rows <= t.columns) return t;
  return {t.matrix, t.column, t.row, t.columns, t.rows};
}

// Calls `use(index, row and column in the tile)` for this thread's values of a tile.
template <class Use>
PRIMITIVE void each_value(const Tile& t, const Use& use) {
  const int column = threadIdx.x % tile;
  for (int row = threadIdx.x / tile; row < tile; row += threads / tile)
    if (t.row + row < t.rows && t.column + column < t.columns)
      use((t.matrix * t.rows + t.row + row) * t.columns + t.column + column, row, column);
}

// Values of a tile in shared memory, by row and column in the tile of the weights.
struct Staged {
  float* values;
  bool tall;
  PRIMITIVE float& of_weights(int row, int column) const { return values[row * staged_row + column]; }
  PRIMITIVE float& of_x(int row, int column) const { return tall ? of_weights(column, row) : of_weights(row, column); }
};

PRIMITIVE Staged staged(const Muon& p) { return {reinterpret_cast<float*>(dynamic_shared_memory()), p.rows > p.columns}; }

}  // namespace

// m ← m + (1 - μ)·(g - m), then u = (1 - μ)·g + μ·m. Blocks of threads × values.
extern "C" __global__ void __launch_bounds__(threads) muon_momentum(const __grid_constant__ MuonMomentum p) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * threads * values;
  const int64_t end = min(first + threads * values, p.count);
  for (int64_t i = first + threadIdx.x; i < end; i += threads) {
    const float g = p.gradient[i], before = p.momentum[i];
    const float m = add(before, multiply(add(g, -before), p.one_minus_decay));
    p.momentum[i] = m;
    p.u[i] = add(g, multiply(add(m, -g), p.decay));
  }
}

// The sum of the squares of u in each chunk. Blocks: matrices × chunks. The square of an f32 is exact in f64.
extern "C" __global__ void __launch_bounds__(threads) muon_squares(const __grid_constant__ Muon p) {
  const int64_t matrix = blockIdx.x / chunks(p), first = blockIdx.x % chunks(p) * chunk;
  const int64_t end = min(first + chunk, matrix_size(p));
  double sum = 0.0;
  for (int64_t in_matrix = first + threadIdx.x; in_matrix < end; in_matrix += threads) {
    const double u = p.u[matrix * matrix_size(p) + in_matrix];
    sum += u * u;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) p.parts[blockIdx.x] = sum;
}

// The factor that gives u the norm 1. Blocks: matrices.
extern "C" __global__ void __launch_bounds__(threads) muon_norm(const __grid_constant__ Muon p) {
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < chunks(p); i += threads) sum += p.parts[blockIdx.x * chunks(p) + i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) p.factors[blockIdx.x] = static_cast<float>(1.0 / (sqrt(sum) + 1e-7));
}

// X = u / (|u| + 1e-7). Blocks: matrices × tiles.
extern "C" __global__ void __launch_bounds__(threads) muon_direction(const __grid_constant__ Muon p) {
  const Tile t = tile_of_weights(p);
  const Staged values = staged(p);
  const float factor = p.factors[t.matrix];
  each_value(t, [&](int64_t i, int row, int column) { values.of_weights(row, column) = multiply(p.u[i], factor); });
  block_barrier();
  each_value(tile_of_x(t), [&](int64_t i, int row, int column) { p.x[i] = to_bf16(values.of_x(row, column)); });
}

// w ← shrink·w - rate·X. Blocks: matrices × tiles.
extern "C" __global__ void __launch_bounds__(threads) muon_update(const __grid_constant__ Muon p) {
  const Tile t = tile_of_weights(p);
  const Staged values = staged(p);
  each_value(tile_of_x(t), [&](int64_t i, int row, int column) { values.of_x(row, column) = to_float(p.x[i]); });
  block_barrier();
  each_value(t, [&](int64_t i, int row, int column) {
    p.weights[i] = add(multiply(p.weights[i], p.shrink), -multiply(p.rate, values.of_weights(row, column)));
  });
}
