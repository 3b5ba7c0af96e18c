// Products of linear layers and experts, forward and backward.
#include "product_mxfp4.cuh"

using namespace product;

namespace {

PRIMITIVE void store_pair(bf16* to, bool two, float a, float b) {
  if (two && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = pack_bf16(a, b);
    return;
  }
  to[0] = to_bf16(a);
  if (two) to[1] = to_bf16(b);
}

PRIMITIVE void store_pair(float* to, bool two, float a, float b) {
  if (two && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    *reinterpret_cast<float2*>(to) = make_float2(a, b);
    return;
  }
  to[0] = a;
  if (two) to[1] = b;
}

PRIMITIVE float widened(bf16 x) { return to_float(x); }
PRIMITIVE float widened(float x) { return x; }

enum class Weight { bf16, mxfp4 };

PRIMITIVE Panels panels(const Product& p, int group) {
  const int panels = (p.n + panel_columns - 1) / panel_columns, blocks = (p.k + block_k - 1) / block_k;
  return {static_cast<const unsigned char*>(p.weight) + static_cast<int64_t>(group) * panels * blocks * block_bytes, panels, blocks};
}

// y = s · x · W + b + addend. Blocks: tiles of columns × the maximum number of row tiles.
template <class S, class Out, Weight held>
PRIMITIVE void forward(const Product& p) {
  const int down = row_tiles(p, S::rows);
  const Rows rows = row_tile(p, blockIdx.x % down, S::rows);
  const int column = blockIdx.x / down * S::columns;
  if (rows.first >= rows.end) return;
  const Operand x = {p.x + static_cast<int64_t>(rows.first) * p.k, p.k, rows.end - rows.first, p.k};
  Sums<S> sums;
  if constexpr (held == Weight::mxfp4) {
    multiply_mxfp4<S, Major::MN>(sums, x, panels(p, rows.group), column, p.k);
  } else {
    const bf16* first = static_cast<const bf16*>(p.weight) + static_cast<int64_t>(rows.group) * p.k * p.n + column;
    multiply_tile<S, Major::K, Major::MN>(sums, x, {first, p.n, p.n - column, p.k}, p.k);
  }
  const float* bias = p.bias ? p.bias + static_cast<int64_t>(rows.group) * p.n : nullptr;
  each_pair<S>(sums, [&](int row, int across, float a, float b) {
    const int at = column + across;
    if (rows.first + row >= rows.end || at >= p.n) return;
    const bool two = at + 1 < p.n;
    a = multiply(a, p.scale);
    b = multiply(b, p.scale);
    if (bias) {
      a = add(a, bias[at]);
      if (two) b = add(b, bias[at + 1]);
    }
    const int64_t place = static_cast<int64_t>(rows.first + row) * p.n + at;
    if (p.addend) {
      const Out* addend = static_cast<const Out*>(p.addend) + place;
      a = add(a, widened(addend[0]));
      if (two) b = add(b, widened(addend[1]));
    }
    store_pair(static_cast<Out*>(p.out) + place, two, a, b);
  });
}

// dx = s · dy · Wᵀ. Blocks: tiles of k × the maximum number of row tiles.
template <class S, Weight held>
PRIMITIVE void input_gradient(const Product& p) {
  const int down = row_tiles(p, S::rows);
  const Rows rows = row_tile(p, blockIdx.x % down, S::rows);
  const int column = blockIdx.x / down * S::columns;
  if (rows.first >= rows.end) return;
  const Operand dy = {p.dy + static_cast<int64_t>(rows.first) * p.n, p.n, rows.end - rows.first, p.n};
  Sums<S> sums;
  if constexpr (held == Weight::mxfp4) {
    multiply_mxfp4<S, Major::K>(sums, dy, panels(p, rows.group), column, p.n);
  } else {
    const bf16* first = static_cast<const bf16*>(p.weight) + (static_cast<int64_t>(rows.group) * p.k + column) * p.n;
    multiply_tile<S, Major::K, Major::K>(sums, dy, {first, p.n, p.k - column, p.n}, p.n);
  }
  each_pair<S>(sums, [&](int row, int across, float a, float b) {
    const int at = column + across;
    if (rows.first + row >= rows.end || at >= p.k) return;
    bf16* to = static_cast<bf16*>(p.out) + static_cast<int64_t>(rows.first + row) * p.k + at;
    store_pair(to, at + 1 < p.k, multiply(a, p.scale), multiply(b, p.scale));
  });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Wide::threads) product_forward(const __grid_constant__ Product p) {
  forward<Wide, bf16, Weight::bf16>(p);
}

extern "C" __global__ void __launch_bounds__(Wide::threads) product_forward_f32(const __grid_constant__ Product p) {
  forward<Wide, float, Weight::bf16>(p);
}

extern "C" __global__ void __launch_bounds__(Narrow::threads) product_forward_narrow(const __grid_constant__ Product p) {
  forward<Narrow, bf16, Weight::bf16>(p);
}

extern "C" __global__ void __launch_bounds__(Narrow::threads) product_forward_narrow_f32(const __grid_constant__ Product p) {
  forward<Narrow, float, Weight::bf16>(p);
}

extern "C" __global__ void __launch_bounds__(WideMxfp4::threads) product_forward_mxfp4(const __grid_constant__ Product p) {
  forward<WideMxfp4, bf16, Weight::mxfp4>(p);
}

extern "C" __global__ void __launch_bounds__(NarrowMxfp4::threads) product_forward_narrow_mxfp4(const __grid_constant__ Product p) {
  forward<NarrowMxfp4, bf16, Weight::mxfp4>(p);
}

extern "C" __global__ void __launch_bounds__(Wide::threads) product_input_gradient(const __grid_constant__ Product p) {
  input_gradient<Wide, Weight::bf16>(p);
}

extern "C" __global__ void __launch_bounds__(WideMxfp4::threads) product_input_gradient_mxfp4(const __grid_constant__ Product p) {
  input_gradient<WideMxfp4, Weight::mxfp4>(p);
}

// dW += xᵀ · dy, for each group over its rows in order. Blocks: groups × tiles of k × tiles of n.
extern "C" __global__ void __launch_bounds__(Wide::threads, 2) product_weight_gradient(const __grid_constant__ Product p) {
  const int across = (p.n + Wide::columns - 1) / Wide::columns, down = (p.k + Wide::rows - 1) / Wide::rows;
  const int first = blockIdx.x / across % down * Wide::rows, column = blockIdx.x % across * Wide::columns;
  const Rows rows = group_rows(p, blockIdx.x / across / down);
  if (rows.first >= rows.end) return;
  const int count = rows.end - rows.first;
  const Operand x = {p.x + static_cast<int64_t>(rows.first) * p.k + first, p.k, p.k - first, count};
  const Operand dy = {p.dy + static_cast<int64_t>(rows.first) * p.n + column, p.n, p.n - column, count};
  Sums<Wide> sums;
  multiply_tile<Wide, Major::MN, Major::MN>(sums, x, dy, count);
  each_pair<Wide>(sums, [&](int row, int to_right, float a, float b) {
    const int at = column + to_right;
    if (first + row >= p.k || at >= p.n) return;
    float* sum = static_cast<float*>(p.out) + (static_cast<int64_t>(rows.group) * p.k + first + row) * p.n + at;
    sum[0] = add(sum[0], a);
    if (at + 1 < p.n) sum[1] = add(sum[1], b);
  });
}

// db += Σ dy, for each group over its rows: each lane adds its rows in order, then the lanes are added in
// order. Blocks: groups × tiles of columns.
extern "C" __global__ void __launch_bounds__(column_sum_threads) product_bias_gradient(const __grid_constant__ Product p) {
  const int tiles = (p.n + column_sum_columns - 1) / column_sum_columns;
  const Rows rows = group_rows(p, blockIdx.x / tiles);
  if (rows.first >= rows.end) return;
  const int across = threadIdx.x % 32 * 2, lane = threadIdx.x / 32, column = blockIdx.x % tiles * column_sum_columns + across;
  float a = 0.0f, b = 0.0f;
  if (column < p.n)
    for (int row = rows.first + lane; row < rows.end; row += column_sum_lanes) {
      const bf16* dy = p.dy + static_cast<int64_t>(row) * p.n + column;
      a = add(a, to_float(dy[0]));
      if (column + 1 < p.n) b = add(b, to_float(dy[1]));
    }
  float* of_lanes = reinterpret_cast<float*>(dynamic_shared_memory());
  of_lanes[lane * column_sum_columns + across] = a;
  of_lanes[lane * column_sum_columns + across + 1] = b;
  block_barrier();
  const int own = blockIdx.x % tiles * column_sum_columns + threadIdx.x;
  if (threadIdx.x >= column_sum_columns || own >= p.n) return;
  float sum = of_lanes[threadIdx.x];
  for (int other = 1; other < column_sum_lanes; other++) sum = add(sum, of_lanes[other * column_sum_columns + threadIdx.x]);
  float* to = static_cast<float*>(p.out) + static_cast<int64_t>(rows.group) * p.n + own;
  *to = add(*to, sum);
}
