// Products of 64x64 by 64x64 tiles by one warpgroup (wgmma), f32 sums over ascending k: each warp has 16
// rows. Right operands are swizzled tiles of 64 rows of 64 bf16 in shared memory. Results are valid after
// wgmma_wait.
#pragma once

#include "sink_attention.cuh"

namespace sink_attention {

// d = a b^T.
PRIMITIVE void start_product_transposed(Fragment& d, const uint32_t (&a)[4][4], unsigned char* b) {
  const uint64_t descriptor = wgmma_descriptor(b);  // counts in units of 16 bytes
#pragma unroll
  for (int k = 0; k < 4; k++) wgmma_m64n64k16_bf16<Major::K>(d, a[k], descriptor + 32 * k / 16, k > 0);
}

// d = a b, plus d where `accumulate`.
PRIMITIVE void start_sum_of_product(Fragment& d, const uint32_t (&a)[4][4], unsigned char* b, bool accumulate = true) {
  const uint64_t descriptor = wgmma_descriptor(b);
#pragma unroll
  for (int k = 0; k < 4; k++) wgmma_m64n64k16_bf16<Major::MN>(d, a[k], descriptor + 2048 * k / 16, k > 0 || accumulate);
}

}  // namespace sink_attention
