// Products of linear layers and experts, forward and backward.
#include "product_mxfp4.cuh"
#include "row_ops.cuh"

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

PRIMITIVE Panels panels(const void* weight, int k, int n, int group) {
  const int panels = (n + panel_columns - 1) / panel_columns, blocks = (k + block_k - 1) / block_k;
  return {static_cast<const unsigned char*>(weight) + static_cast<int64_t>(group) * panels * blocks * block_bytes, panels, blocks};
}

// The sums of x · W from `column` on, by matrix `group` of matrices [k, n].
template <class S, Weight held, class Left>
PRIMITIVE void multiply_by(Sums<S>& sums, const Left& x, const void* weight, int k, int n, int group, int column) {
  if constexpr (held == Weight::mxfp4) {
    multiply_mxfp4<S, Major::MN>(sums, x, panels(weight, k, n, group), column, k);
  } else {
    const bf16* first = static_cast<const bf16*>(weight) + static_cast<int64_t>(group) * k * n + column;
    multiply_tile<S, Major::K, Major::MN>(sums, x, Operand{first, n, n - column, k}, k);
  }
}

// y = s · x · W + b + addend, rounded, + residual for one tile.
template <class S, class Out, Weight held>
PRIMITIVE void forward_tile(const Product& p, const Rows& rows, int column) {
  if (rows.first >= rows.end) return;
  const Operand x = {p.x + static_cast<int64_t>(rows.first) * p.k, p.k, rows.end - rows.first, p.k};
  Sums<S> sums;
  multiply_by<S, held>(sums, x, p.weight, p.k, p.n, rows.group, column);
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
    if (p.residual) {
      a = add(to_float(p.residual[place]), elements::rounded(a));
      if (two) b = add(to_float(p.residual[place + 1]), elements::rounded(b));
    }
    store_pair(static_cast<Out*>(p.out) + place, two, a, b);
  });
}

// Blocks: tiles of columns × the maximum number of row tiles.
template <class S, class Out, Weight held>
PRIMITIVE void forward(const Product& p) {
  const int down = row_tiles(p.starts, p.rows, p.groups, S::rows);
  const Rows rows = row_tile(p.starts, p.rows, p.groups, blockIdx.x % down, S::rows);
  forward_tile<S, Out, held>(p, rows, blockIdx.x / down * S::columns);
}

// y = x · W + b for each of the matrices. Blocks: tiles of columns of all matrices × row tiles.
template <class S>
PRIMITIVE void forward_joined(const JoinedProduct& p) {
  const int down = (p.rows + S::rows - 1) / S::rows;
  const int tile = blockIdx.x / down, before = tile < p.first.end ? 0 : tile < p.second.end ? p.first.end : p.second.end;
  const JoinedMatrix& matrix = tile < p.first.end ? p.first : tile < p.second.end ? p.second : p.third;
  const Product own = {p.x, matrix.weight, matrix.bias, nullptr, nullptr, matrix.out, nullptr, p.rows, p.k, matrix.n, 1, 1.0f, nullptr};
  const Rows rows = {0, static_cast<int>(blockIdx.x % down) * S::rows, p.rows};
  forward_tile<S, bf16, Weight::bf16>(own, rows, (tile - before) * S::columns);
}

// The SwiGLU of x · W + b, whose gate and up are rounded to bf16 first. Blocks: as forward.
template <class S, Weight held>
PRIMITIVE void expert_swiglu_tile(const ExpertSwiglu& p) {
  const int down = row_tiles(p.starts, p.rows, p.experts, S::rows);
  const Rows rows = row_tile(p.starts, p.rows, p.experts, blockIdx.x % down, S::rows);
  const int column = blockIdx.x / down * S::columns;
  if (rows.first >= rows.end) return;
  const Gathered x = {p.x, p.token_of + rows.first, p.k, rows.end - rows.first, p.k};
  Sums<S> sums;
  multiply_by<S, held>(sums, x, p.weight, p.k, p.n, rows.group, column);
  const float* bias = p.bias ? p.bias + static_cast<int64_t>(rows.group) * p.n : nullptr;
  each_pair<S>(sums, [&](int row, int across, float gate, float up) {
    const int at = column + across;
    if (rows.first + row >= rows.end || at >= p.n) return;
    if (bias) {
      gate = add(gate, bias[at]);
      up = add(up, bias[at + 1]);
    }
    const float y = row_ops::swiglu_value(p.limit, p.alpha, elements::rounded(gate), elements::rounded(up));
    p.out[static_cast<int64_t>(rows.first + row) * (p.n / 2) + at / 2] = to_bf16(y);
  });
}

// dx = s · dy · Wᵀ. Blocks: tiles of k × the maximum number of row tiles.
template <class S, Weight held>
PRIMITIVE void input_gradient(const Product& p) {
  const int down = row_tiles(p.starts, p.rows, p.groups, S::rows);
  const Rows rows = row_tile(p.starts, p.rows, p.groups, blockIdx.x % down, S::rows);
  const int column = blockIdx.x / down * S::columns;
  if (rows.first >= rows.end) return;
  const Operand dy = {p.dy + static_cast<int64_t>(rows.first) * p.n, p.n, rows.end - rows.first, p.n};
  Sums<S> sums;
  if constexpr (held == Weight::mxfp4) {
    multiply_mxfp4<S, Major::K>(sums, dy, panels(p.weight, p.k, p.n, rows.group), column, p.n);
  } else {
    const bf16* first = static_cast<const bf16*>(p.weight) + (static_cast<int64_t>(rows.group) * p.k + column) * p.n;
    multiply_tile<S, Major::K, Major::K>(sums, dy, Operand{first, p.n, p.k - column, p.n}, p.n);
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

extern "C" __global__ void __launch_bounds__(Wide::threads) product_joined(const __grid_constant__ JoinedProduct p) {
  forward_joined<Wide>(p);
}

extern "C" __global__ void __launch_bounds__(Narrow::threads) product_joined_narrow(const __grid_constant__ JoinedProduct p) {
  forward_joined<Narrow>(p);
}

extern "C" __global__ void __launch_bounds__(Wide::threads) expert_swiglu(const __grid_constant__ ExpertSwiglu p) {
  expert_swiglu_tile<Wide, Weight::bf16>(p);
}

extern "C" __global__ void __launch_bounds__(Narrow::threads) expert_swiglu_narrow(const __grid_constant__ ExpertSwiglu p) {
  expert_swiglu_tile<Narrow, Weight::bf16>(p);
}

extern "C" __global__ void __launch_bounds__(WideMxfp4::threads) expert_swiglu_mxfp4(const __grid_constant__ ExpertSwiglu p) {
  expert_swiglu_tile<WideMxfp4, Weight::mxfp4>(p);
}

extern "C" __global__ void __launch_bounds__(NarrowMxfp4::threads) expert_swiglu_narrow_mxfp4(const __grid_constant__ ExpertSwiglu p) {
  expert_swiglu_tile<NarrowMxfp4, Weight::mxfp4>(p);
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
  const Rows rows = group_rows(p.starts, p.rows, blockIdx.x / across / down);
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
  const Rows rows = group_rows(p.starts, p.rows, blockIdx.x / tiles);
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
