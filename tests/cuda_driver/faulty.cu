// Kernels for the driver's own tests: right ones, and ones that break a rule.
#include "primitives.cuh"

struct Copy {
  const float* from;
  float* to;
  int count;
};

PRIMITIVE int position() { return blockIdx.x * blockDim.x + threadIdx.x; }

extern "C" __global__ void add_one(float* x, int count) {
  if (position() < count) x[position()] += 1;
}

extern "C" __global__ void copy(const __grid_constant__ Copy c) {
  if (position() < c.count) c.to[position()] = c.from[position()];
}

extern "C" __global__ void read_at(const float* x, float* out, int64_t index) {
  if (position() == 5) out[0] = x[index];
}

extern "C" __global__ void write_at(unsigned char* x, int64_t index) {
  if (position() == 37) x[index] = 1;
}

extern "C" __global__ void __launch_bounds__(64, 1) bounded() {}

extern "C" __global__ void read_shared(float* out) { out[threadIdx.x] = reinterpret_cast<float*>(dynamic_shared_memory())[threadIdx.x]; }

extern "C" __global__ void diverge() {
  if (threadIdx.x < 32) block_barrier();
}
