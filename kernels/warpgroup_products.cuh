// Products of 64 rows by blocks of 64 keys or rows by one warpgroup (wgmma), f32 sums over ascending k: each warp
// has 16 rows. Right operands are swizzled tiles in shared memory, in panels. Results are valid after wgmma_wait.
#pragma once

#include "sink_attention.cuh"

namespace sink_attention {

// wgmma_hold of all panels.
template <int panels>
PRIMITIVE void hold(Fragment (&d)[panels]) {
#pragma unroll
  for (int panel = 0; panel < panels; panel++) wgmma_hold(d[panel]);
}

// d = a b^T, over all columns of the panels.
template <int steps>
PRIMITIVE void start_product_transposed(Fragment& d, const uint32_t (&a)[steps][4], unsigned char* b) {
  const uint64_t descriptor = wgmma_descriptor(b);  // counts in units of 16 bytes
#pragma unroll
  for (int k = 0; k < steps; k++)
    wgmma_m64n64k16_bf16<Major::K>(d, a[k], descriptor + (k / 4 * panel_bytes + k % 4 * 32) / 16, k > 0);
}

// d = a b, plus d where `accumulate`.
template <int panels>
PRIMITIVE void start_sum_of_product(Fragment (&d)[panels], const uint32_t (&a)[4][4], unsigned char* b,
                                    bool accumulate = true) {
  const uint64_t descriptor = wgmma_descriptor(b);
#pragma unroll
  for (int panel = 0; panel < panels; panel++)
#pragma unroll
    for (int k = 0; k < 4; k++)
      wgmma_m64n64k16_bf16<Major::MN>(d[panel], a[k], descriptor + (panel * panel_bytes + 2048 * k) / 16,
                                      k > 0 || accumulate);
}

}  // namespace sink_attention
