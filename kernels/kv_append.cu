// Appends rows of keys and values to a cache: one launch per layer for all sequences.
#include "kv_append.cuh"

// One block per row.
extern "C" __global__ void __launch_bounds__(kv_append_op::threads) kv_append(const __grid_constant__ KvAppend p) {
  const uint4* from = p.rows + static_cast<int64_t>(blockIdx.x) * p.row_vectors;
  uint4* to = p.cache + static_cast<int64_t>(p.slots[blockIdx.x]) * p.row_vectors;
  for (int i = threadIdx.x; i < p.row_vectors; i += blockDim.x) to[i] = from[i];
}
