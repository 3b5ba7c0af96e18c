// Products by an MXFP4 matrix (32 E2M1 numbers of four bits along k share one scale). It is decoded to bf16
// in shared memory, so the bits are those of the product by the decoded matrix.
//
// Storage as in PackedMatrix of src/ops/packed: panels of 64 columns, the last one padded with zeros. A
// panel holds blocks of 32 k in ascending order. A block is 1,088 bytes: the scales of 64 columns (E8M0),
// then 64 bytes for each two k, the earlier k in the low nibbles. A step of a forward uses two blocks of
// each panel of the tile; a step of an input gradient uses four blocks of one panel. Both are contiguous
// whole blocks, and rows of 64 columns in the tile.
#pragma once

#include "product.cuh"

namespace product {

constexpr int panel_columns = 64, block_k = 32;
constexpr int block_bytes = panel_columns * (1 + block_k / 2);

// The matrix of one group.
struct Panels {
  const unsigned char* first;
  int panels, blocks;  // blocks per panel
};

// Shape of such a tile: its blocks per step, and its shared memory. That holds two decoded tiles, then
// stages of left operands and blocks.
template <class S>
struct Mxfp4 {
  static constexpr int blocks = S::columns / panel_columns * (step / block_k);
  static constexpr int tile_bytes = S::columns * step * 2;
  static constexpr int left_bytes = S::rows * step * 2;
  static constexpr int stage_bytes = left_bytes + blocks * block_bytes;
  static constexpr int shared_bytes = 2 * tile_bytes + S::stages * stage_bytes;
};
// Two thread blocks use a multiprocessor's 228 KiB exactly.
using WideMxfp4 = Shape<128, 128, 2, 4, 4>;
using NarrowMxfp4 = Narrow;

// Starts the copy of `count` blocks: `of_panel` of each panel from `panel` on, starting at its `block`.
// Blocks past the ends are zeros.
template <int count, int of_panel, int threads>
PRIMITIVE void load_blocks(unsigned char* to, const Panels& from, int panel, int block) {
  constexpr int vectors = block_bytes / 16;
  for (int v = threadIdx.x; v < count * vectors; v += threads) {
    const int p = panel + v / vectors / of_panel, b = block + v / vectors % of_panel;
    const bool inside = p < from.panels && b < from.blocks;
    const int64_t at = inside ? (static_cast<int64_t>(p) * from.blocks + b) * block_bytes + v % vectors * 16 : 0;
    copy_async_16(to + v * 16, from.first + at, inside);
  }
}

// Bytes 2 `pair` and 2 `pair` + 1, each in one half.
PRIMITIVE uint32_t halves(const uint2& bytes, int pair) {
  return permute_bytes(pair < 2 ? bytes.x : bytes.y, 0, pair % 2 ? 0x4342 : 0x4140);
}

// 2^(e - 127) for two e, as bf16. 2^-127 is subnormal and 255 means NaN: both have a mantissa bit.
PRIMITIVE uint32_t scales_of(uint32_t exponents) {
  const uint32_t normal = ((exponents + 0x00010001) & 0x00fe00fe) + 0x00fe00fe;  // in bit 8 of a half
  return exponents << 7 | (~normal >> 2 & 0x00400040);
}

// Two E2M1 numbers in the low bits of the halves, times two scales, as bf16: exact, or infinite. Sign,
// exponent and mantissa move to their bits of bf16, which gives the number times 2^-126, subnormal or not.
PRIMITIVE uint32_t decode(uint32_t numbers, uint32_t scales) {
  const uint32_t placed = (numbers & 0x000f000f) * 0x1040 & 0x81c081c0;
  return multiply_bf16(multiply_bf16(placed, 0x7e807e80), scales);
}

// Decodes `count` blocks to rows of a tile, 32 rows per block. A thread decodes eight columns of two pairs
// of k of one block.
template <int count, int threads>
PRIMITIVE void decode_blocks(unsigned char* tile, const unsigned char* blocks) {
  static_assert(threads == count * 64, "64 threads a block");
  const int column = threadIdx.x % 8 * 8, block = threadIdx.x / 64;
  const unsigned char* from = blocks + block * block_bytes + column;
  const uint2 exponents = *reinterpret_cast<const uint2*>(from);
  uint32_t scales[4];
#pragma unroll
  for (int i = 0; i < 4; i++) scales[i] = scales_of(halves(exponents, i));
#pragma unroll
  for (int part = 0; part < 2; part++) {
    const int pair = threadIdx.x / 8 % 8 + 8 * part, row = block * block_k + 2 * pair;
    const uint2 numbers = *reinterpret_cast<const uint2*>(from + (1 + pair) * panel_columns);
    uint32_t early[4], late[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t two = halves(numbers, i);
      early[i] = decode(two, scales[i]);
      late[i] = decode(two >> 4, scales[i]);
    }
    *reinterpret_cast<uint4*>(place<Major::K>(tile, row, column)) = make_uint4(early[0], early[1], early[2], early[3]);
    *reinterpret_cast<uint4*>(place<Major::K>(tile, row + 1, column)) = make_uint4(late[0], late[1], late[2], late[3]);
  }
}

// multiply_tile with an MXFP4 right operand, from `column` of the result on. Major::MN is a forward,
// Major::K an input gradient. A step is decoded while the previous one is multiplied.
template <class S, Major b_major, class Left>
PRIMITIVE void multiply_mxfp4(Sums<S>& sums, const Left& a, const Panels& b, int column, int depth) {
  using M = Mxfp4<S>;
  unsigned char* shared = dynamic_shared_memory();
  const int steps = (depth + step - 1) / step;
  const auto tile = [&](int s) { return shared + s % 2 * M::tile_bytes; };
  const auto left = [&](int s) { return shared + 2 * M::tile_bytes + s % S::stages * M::stage_bytes; };
  const auto copies = tile_copies<Major::K, S::rows, S::threads>(a);
  const auto load = [&](int s) {
    if (s < steps) {
      load_tile(left(s), copies, s);
      unsigned char* to = left(s) + M::left_bytes;
      if constexpr (b_major == Major::MN)
        load_blocks<M::blocks, step / block_k, S::threads>(to, b, column / panel_columns, s * (step / block_k));
      else
        load_blocks<M::blocks, M::blocks, S::threads>(to, b, s, column / block_k);
    }
    copy_async_commit();  // an empty group keeps the count
  };
  const auto decode_step = [&](int s) {
    if (s < steps) decode_blocks<M::blocks, S::threads>(tile(s), left(s) + M::left_bytes);
  };
  clear(sums);
  for (int s = 0; s < S::stages - 1; s++) load(s);
  copy_async_wait<S::stages - 2>();
  block_barrier();
  decode_step(0);
  for (int s = 0; s < steps; s++) {
    copy_async_wait<S::stages - 3>();
    block_barrier();  // all have decoded step s and copied step s + 1, and are through with step s - 1
    load(s + S::stages - 1);
    decode_step(s + 1);
    multiply_step<S, Major::K, b_major>(sums, left(s), tile(s));
  }
  copy_async_wait<0>();
}

}  // namespace product
