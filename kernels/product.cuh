// Products of bf16 matrices with f32 sums, whole or by groups of rows (experts). A block computes one tile
// of the result. Each element is one chain of tensor-core additions over ascending k, in any tile and
// beside any other rows.
#pragma once

#include "primitives.cuh"

// Parameters, src/ops/cuda/product.rs. Rows are sorted by group; group g has matrix g and rows starts[g] to
// starts[g + 1].
struct Product {
  const bf16* x;           // [rows, k]
  const void* weight;      // [groups, k, n], bf16; MXFP4 (product_mxfp4.cuh) for the mxfp4 kernels
  const float* bias;       // [groups, n]; null: none
  const void* addend;      // [rows, n], added to y, of its type; null: none
  const bf16* dy;          // [rows, n]; null in the forward
  void* out;               // y [rows, n], dx [rows, k], or sums dweight [groups, k, n], dbias [groups, n]
  const uint32_t* starts;  // [groups + 1]; null: one group
  int32_t rows;
  int32_t k;
  int32_t n;
  int32_t groups;
  float scale;           // factor of y and dx
  const bf16* residual;  // [rows, n], added to y rounded to bf16; null: none
};

// One of the matrices of a joined product.
struct JoinedMatrix {
  const bf16* weight;  // [k, n]
  const float* bias;   // [n]; null: none
  bf16* out;           // [rows, n]
  int32_t n;           // 0: no such matrix
  int32_t end;         // column tiles of the matrices up to this one
};

// Products of the same rows by up to three matrices.
struct JoinedProduct {
  const bf16* x;  // [rows, k]
  JoinedMatrix first;
  JoinedMatrix second;
  JoinedMatrix third;
  int32_t rows;
  int32_t k;
};

// The rows of tokens by the matrices of their experts, then SwiGLU (row_ops.cuh). Rows are sorted by expert.
struct ExpertSwiglu {
  const bf16* x;             // [tokens, k]
  const void* weight;        // [experts, k, n], bf16 or MXFP4; columns of gate and up alternate
  const float* bias;         // [experts, n]; null: none
  bf16* out;                 // [rows, n / 2]
  const uint32_t* token_of;  // [rows]
  const uint32_t* starts;    // [experts + 1]
  int32_t rows;
  int32_t k;
  int32_t n;
  int32_t experts;
  float limit;
  float alpha;
};

namespace product {

constexpr int step = 64;  // of k: a row of a panel, 128 bytes

// A tile of the result, its warps, and the number of steps whose operands are in shared memory.
template <int rows_, int columns_, int warps_down_, int warps_across_, int stages_>
struct Shape {
  static constexpr int rows = rows_, columns = columns_, warps_down = warps_down_, warps_across = warps_across_, stages = stages_;
  static constexpr int threads = 32 * warps_down * warps_across;
  static constexpr int warp_rows = rows / warps_down, warp_columns = columns / warps_across;
  static constexpr int stage_bytes = (rows + columns) * step * 2;
  static constexpr int shared_bytes = stages * stage_bytes;
};
using Wide = Shape<128, 128, 2, 4, 3>;
// For few rows: reading the weight takes all of the time.
using Narrow = Shape<16, 64, 1, 4, 6>;

constexpr int column_sum_threads = 512;  // 16 lanes of rows, 32 pairs of columns each
constexpr int column_sum_lanes = 16;
constexpr int column_sum_columns = 64;
constexpr int column_sum_shared_bytes = column_sum_lanes * column_sum_columns * 4;

// One operand of a tile: elements (i, k), where i is a row of the left or a column of the right operand.
// With Major::K k runs fastest. Values outside the limits count as 0.
struct Operand {
  const bf16* first;  // element (0, 0), 16-byte aligned where the stride is a multiple of 8
  int64_t stride;     // elements from one k (Major::MN) or i (Major::K) to the next
  int i_limit, k_limit;
};

// Address of the eight elements from (i, k) on in a tile of `extent` i; the index that runs fastest is a
// multiple of eight. Panels have swizzled rows of 128 bytes: K-major one panel of `extent` rows, else one
// of `step` rows for each 64 i.
template <Major major>
PRIMITIVE unsigned char* place(unsigned char* tile, int i, int k) {
  const int row = major == Major::K ? i : k, column = major == Major::K ? k : i % 64;
  const int panel = major == Major::K ? 0 : i / 64 * step * 128;
  return tile + panel + row * 128 + ((column / 8 ^ row % 8) * 16);
}

// A thread's share of the copies of an operand to tiles. Its vectors in a tile are a constant number of
// rows apart and advance by a constant per step, which saves address computations.
template <Major major, int extent, int threads>
struct TileCopies {
  static constexpr int across = major == Major::K ? step / 8 : extent / 8;  // vectors of a row
  static constexpr int count = extent * step / 8 / threads, apart = threads / across;
  static_assert(count * threads == extent * step / 8 && apart % 8 == 0, "whole rounds, and one place in the swizzle");
  const bf16* first;   // vector of the first step
  int stride, offset;  // from row to row; offset of the first vector in the tile
  int i_left, k_left;  // remaining from the first vector on, within the limits
};

template <Major major, int extent, int threads>
PRIMITIVE TileCopies<major, extent, threads> tile_copies(const Operand& from) {
  using Copies = TileCopies<major, extent, threads>;
  const int row = threadIdx.x / Copies::across, column = threadIdx.x % Copies::across * 8;
  const int i = major == Major::K ? row : column, k = major == Major::K ? column : row;
  unsigned char* shared = dynamic_shared_memory();
  const int offset = static_cast<int>(place<major>(shared, i, k) - shared);
  return {from.first + row * from.stride + column, static_cast<int>(from.stride), offset, from.i_limit - i, from.k_limit - k};
}

// Rows of the left operand at the places `rows` of a matrix: row i of the operand is row rows[i].
struct Gathered {
  const bf16* first;     // 16-byte aligned where the stride is a multiple of 8
  const uint32_t* rows;  // [i_limit]
  int64_t stride;
  int i_limit, k_limit;
};

// As TileCopies, of gathered rows.
template <int extent, int threads>
struct GatheredCopies {
  using Copies = TileCopies<Major::K, extent, threads>;
  const bf16* first;  // column of the first step
  uint32_t rows[Copies::count];
  int stride, offset;
  int i_left, k_left;
};

template <Major major, int extent, int threads>
PRIMITIVE GatheredCopies<extent, threads> tile_copies(const Gathered& from) {
  static_assert(major == Major::K, "rows are gathered");
  using Copies = TileCopies<Major::K, extent, threads>;
  const int i = threadIdx.x / Copies::across, k = threadIdx.x % Copies::across * 8;
  unsigned char* shared = dynamic_shared_memory();
  GatheredCopies<extent, threads> copies = {from.first + k, {}, static_cast<int>(from.stride), static_cast<int>(place<major>(shared, i, k) - shared),
                                            from.i_limit - i, from.k_limit - k};
#pragma unroll
  for (int v = 0; v < Copies::count; v++) copies.rows[v] = v * Copies::apart < copies.i_left ? from.rows[i + v * Copies::apart] : 0;
  return copies;
}

// Writes eight elements, of which the first `left` are at `source`, one by one.
PRIMITIVE void load_eight(unsigned char* to, const bf16* source, int left) {
  uint32_t pairs[4];
  for (int p = 0; p < 4; p++) {
    const uint32_t low = 2 * p < left ? source[2 * p].bits : 0, high = 2 * p + 1 < left ? source[2 * p + 1].bits : 0;
    pairs[p] = low | high << 16;
  }
  *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

template <int extent, int threads>
PRIMITIVE void load_tile(unsigned char* tile, const GatheredCopies<extent, threads>& from, int s) {
  using Copies = TileCopies<Major::K, extent, threads>;
  const int k_left = from.k_left - s * step;
  tile += from.offset;
  const auto source = [&](int v) { return from.first + static_cast<int64_t>(from.rows[v]) * from.stride + s * step; };
  if (from.stride % 8 == 0) {
#pragma unroll
    for (int v = 0; v < Copies::count; v++)
      copy_async_16(tile + v * Copies::apart * 128, source(v), k_left > 0 && v * Copies::apart < from.i_left);
  } else {
#pragma unroll
    for (int v = 0; v < Copies::count; v++)
      load_eight(tile + v * Copies::apart * 128, source(v), v * Copies::apart < from.i_left ? k_left : 0);
  }
}

// Starts the copy of step `s` into `tile`.
template <Major major, int extent, int threads>
PRIMITIVE void load_tile(unsigned char* tile, const TileCopies<major, extent, threads>& from, int s) {
  using Copies = TileCopies<major, extent, threads>;
  const int64_t stride = from.stride;
  const bf16* first = from.first + (major == Major::K ? s * step : stride * (s * step));
  const int k_left = from.k_left - s * step;
  const int rows = major == Major::K ? from.i_left : k_left, in_row = major == Major::K ? k_left : from.i_left;
  tile += from.offset;
  // All rows then start and end at multiples of 16 bytes, because the first element does.
  if (stride % 8 == 0) {
#pragma unroll
    for (int v = 0; v < Copies::count; v++)
      copy_async_16(tile + v * Copies::apart * 128, first + stride * (v * Copies::apart), in_row > 0 && v * Copies::apart < rows);
  } else {
#pragma unroll 1
    for (int v = 0; v < Copies::count; v++) {
      const bf16* source = first + stride * (v * Copies::apart);
      load_eight(tile + v * Copies::apart * 128, source, v * Copies::apart < rows ? in_row : 0);
    }
  }
}

// 16 i by 16 k of the left operand, in mma's layout.
template <Major major>
PRIMITIVE void load_left(uint32_t (&a)[4], unsigned char* tile, int i, int k, int lane) {
  if (major == Major::K)
    ldmatrix_x4(a, place<major>(tile, i + lane % 16, k + lane / 16 * 8));
  else
    ldmatrix_x4_transposed(a, place<major>(tile, i + lane / 8 % 2 * 8, k + lane / 16 * 8 + lane % 8));
}

// 16 k by 16 i of the right operand: two operands of mma.
template <Major major>
PRIMITIVE void load_right(uint32_t (&b)[4], unsigned char* tile, int i, int k, int lane) {
  if (major == Major::K)
    ldmatrix_x4(b, place<major>(tile, i + lane / 16 * 8 + lane % 8, k + lane / 8 % 2 * 8));
  else
    ldmatrix_x4_transposed(b, place<major>(tile, i + lane / 16 * 8, k + lane % 16));
}

// A warp's share of a tile: for each 16 rows by 8 columns, a lane's elements of mma.
template <class S>
struct Sums {
  float of[S::warp_rows / 16][S::warp_columns / 8][4];
};

template <class S>
PRIMITIVE void clear(Sums<S>& sums) {
#pragma unroll
  for (int i = 0; i < S::warp_rows / 16; i++)
#pragma unroll
    for (int j = 0; j < S::warp_columns / 8; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) sums.of[i][j][c] = 0.0f;
}

// Adds this warp's share of one step's product.
template <class S, Major a_major, Major b_major>
PRIMITIVE void multiply_step(Sums<S>& sums, unsigned char* left, unsigned char* right) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp / S::warps_across * S::warp_rows, column = warp % S::warps_across * S::warp_columns;
#pragma unroll
  for (int k = 0; k < step; k += 16) {
    uint32_t of_a[S::warp_rows / 16][4];
#pragma unroll
    for (int i = 0; i < S::warp_rows / 16; i++) load_left<a_major>(of_a[i], left, row + 16 * i, k, lane);
#pragma unroll
    for (int j = 0; j < S::warp_columns / 16; j++) {
      uint32_t of_b[4];
      load_right<b_major>(of_b, right, column + 16 * j, k, lane);
#pragma unroll
      for (int i = 0; i < S::warp_rows / 16; i++) {
        mma_bf16_16x8x16(sums.of[i][2 * j], of_a[i], of_b);
        mma_bf16_16x8x16(sums.of[i][2 * j + 1], of_a[i], of_b + 2);
      }
    }
  }
}

// Computes the sums over k from 0 to `depth` of this warp's share of the tile. The left operand may be gathered.
template <class S, Major a_major, Major b_major, class Left>
PRIMITIVE void multiply_tile(Sums<S>& sums, const Left& a, const Operand& b, int depth) {
  unsigned char* shared = dynamic_shared_memory();
  const int steps = (depth + step - 1) / step;
  const auto left = [&](int s) { return shared + s % S::stages * S::stage_bytes; };
  const auto right = [&](int s) { return left(s) + S::rows * step * 2; };
  const auto copies_a = tile_copies<a_major, S::rows, S::threads>(a);
  const auto copies_b = tile_copies<b_major, S::columns, S::threads>(b);
  const auto load = [&](int s) {
    if (s < steps) {
      load_tile(left(s), copies_a, s);
      load_tile(right(s), copies_b, s);
    }
    copy_async_commit();  // an empty group keeps the count
  };
  clear(sums);
  for (int s = 0; s < S::stages - 1; s++) load(s);
  for (int s = 0; s < steps; s++) {
    copy_async_wait<S::stages - 2>();
    block_barrier();  // all have copied step s, and are through with step s - 1
    load(s + S::stages - 1);
    multiply_step<S, a_major, b_major>(sums, left(s), right(s));
  }
  copy_async_wait<0>();
}

// Calls `use(row, column, sums of two neighbours)` for every pair of this thread; rows and columns are
// relative to the tile.
template <class S, class Use>
PRIMITIVE void each_pair(const Sums<S>& sums, const Use& use) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row = warp / S::warps_across * S::warp_rows + lane / 4;
  const int column = warp % S::warps_across * S::warp_columns + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < S::warp_rows / 16; i++)
#pragma unroll
    for (int j = 0; j < S::warp_columns / 8; j++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        use(row + 16 * i + 8 * half, column + 8 * j, sums.of[i][j][2 * half], sums.of[i][j][2 * half + 1]);
}

// Rows of one group; empty if `first` is `end`.
struct Rows {
  int group, first, end;
};

PRIMITIVE Rows group_rows(const uint32_t* starts, int rows, int group) {
  if (!starts) return {group, 0, rows};
  return {group, static_cast<int>(starts[group]), static_cast<int>(starts[group + 1])};
}

// Tile `tile` of `tile_rows` rows, counted over all groups; `end` is the end of its group.
PRIMITIVE Rows row_tile(const uint32_t* starts, int rows, int groups, int tile, int tile_rows) {
  for (int group = 0; group < groups; group++) {
    const Rows all = group_rows(starts, rows, group);
    const int tiles = (all.end - all.first + tile_rows - 1) / tile_rows;
    if (tile < tiles) return {group, all.first + tile * tile_rows, all.end};
    tile -= tiles;
  }
  return {0, rows, rows};
}

// Maximum number of tiles over all divisions of the rows into groups.
PRIMITIVE int row_tiles(const uint32_t* starts, int rows, int groups, int tile_rows) {
  return (rows + tile_rows - 1) / tile_rows + (starts ? groups : 0);
}

}  // namespace product
