// Adds a gradient to the buffer of its parameter.
#include "accumulate.cuh"

extern "C" __global__ void __launch_bounds__(accumulate_op::threads) accumulate(const __grid_constant__ Accumulate p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * accumulate_op::threads + threadIdx.x;
  if (i < p.elements) p.sum[i] = add(p.sum[i], p.x[i]);
}
