// Products of 16 rows by blocks of 64 keys or rows by one warp (mma.sync), f32 sums over ascending k. Right
// operands are swizzled tiles in shared memory, in panels.
#pragma once

#include "sink_attention.cuh"

namespace sink_attention {

// d += a b^T for `count` fragments that share b, over all columns of its panels.
template <int count, int steps>
PRIMITIVE void add_product_transposed(Fragment (&d)[count], const uint32_t (&a)[count][steps][4], unsigned char* b,
                                      int lane) {
#pragma unroll
  for (int k = 0; k < steps; k++) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
      uint32_t columns[4];
      ldmatrix_x4(columns, chunk_at(b + k / 4 * panel_bytes, 16 * n + lane / 16 * 8 + lane % 8, k % 4 * 2 + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < count; i++) {
        mma_bf16_16x8x16(d[i] + 8 * n, a[i][k], columns);
        mma_bf16_16x8x16(d[i] + 8 * n + 4, a[i][k], columns + 2);
      }
    }
  }
}

// d += a b for `count` times 16 rows that share b.
template <int count, int panels>
PRIMITIVE void add_product(Fragment (&d)[count][panels], const uint32_t (&a)[count][4][4], unsigned char* b, int lane) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
#pragma unroll
    for (int n = 0; n < 4 * panels; n++) {
      uint32_t columns[4];
      ldmatrix_x4_transposed(columns, chunk_at(b + n / 4 * panel_bytes, 16 * k + lane % 16, n % 4 * 2 + lane / 16));
#pragma unroll
      for (int i = 0; i < count; i++) {
        mma_bf16_16x8x16(d[i][n / 4] + n % 4 * 8, a[i][k], columns);
        mma_bf16_16x8x16(d[i][n / 4] + n % 4 * 8 + 4, a[i][k], columns + 2);
      }
    }
  }
}

}  // namespace sink_attention
