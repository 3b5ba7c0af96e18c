// New rows of keys and values into a cache: one launch a layer, whatever the sequences.
#include "primitives.cuh"

struct KvAppend {
  const uint4* rows;      // [tokens, row_vectors]
  uint4* cache;           // [cache rows, row_vectors]
  const int32_t* places;  // [tokens]: each row's place in the cache
  int32_t row_vectors;    // 16 bytes each
};

// A block a row.
extern "C" __global__ void __launch_bounds__(128) kv_append(const __grid_constant__ KvAppend p) {
  const uint4* from = p.rows + static_cast<int64_t>(blockIdx.x) * p.row_vectors;
  uint4* to = p.cache + static_cast<int64_t>(p.places[blockIdx.x]) * p.row_vectors;
  for (int i = threadIdx.x; i < p.row_vectors; i += blockDim.x) to[i] = from[i];
}
