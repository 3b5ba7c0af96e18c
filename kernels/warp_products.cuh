// Products of 16x64 by 64x64 tiles by one warp (mma.sync), f32 sums over ascending k. Right operands are
// swizzled tiles of 64 rows of 64 bf16 in shared memory.
#pragma once

#include "sink_attention.cuh"

namespace sink_attention {

// d += a b^T for `count` fragments that share b.
template <int count>
PRIMITIVE void add_product_transposed(Fragment (&d)[count], const uint32_t (&a)[count][4][4], unsigned char* b,
                                      int lane) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
      uint32_t columns[4];
      ldmatrix_x4(columns, chunk_at(b, 16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < count; i++) {
        mma_bf16_16x8x16(d[i] + 8 * n, a[i][k], columns);
        mma_bf16_16x8x16(d[i] + 8 * n + 4, a[i][k], columns + 2);
      }
    }
  }
}

// d += a b.
template <int count>
PRIMITIVE void add_product(Fragment (&d)[count], const uint32_t (&a)[count][4][4], unsigned char* b, int lane) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
      uint32_t columns[4];
      ldmatrix_x4_transposed(columns, chunk_at(b, 16 * k + lane % 16, 2 * n + lane / 16));
#pragma unroll
      for (int i = 0; i < count; i++) {
        mma_bf16_16x8x16(d[i] + 8 * n, a[i][k], columns);
        mma_bf16_16x8x16(d[i] + 8 * n + 4, a[i][k], columns + 2);
      }
    }
  }
}

template <int count>
PRIMITIVE void clear(Fragment (&x)[count]) {
#pragma unroll
  for (int i = 0; i < count; i++)
#pragma unroll
    for (int j = 0; j < 32; j++) x[i][j] = 0.0f;
}

}  // namespace sink_attention
