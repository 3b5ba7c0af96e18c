// The part of CUDA C++ that the kernels use, for a C++ compiler, and the host twins of kernels/primitives.cuh.
// Atomics, __shared__ variables and everything else not named here do not compile: that is meant.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };

inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

#define threadIdx (cuda_host::here().thread)
#define blockIdx (cuda_host::here().block)
#define blockDim (cuda_host::here().block_size)
#define gridDim (cuda_host::here().grid_size)

namespace cuda_host {

struct Coordinates {
  dim3 thread, block, block_size, grid_size;
};
const Coordinates& here();

unsigned char* shared_memory();
uint32_t shared_address(const void* shared);

inline float bf16_to_float(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float flush_denormal(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x; }
inline float exp2_approx(float x) { return flush_denormal(exp2f(flush_denormal(x))); }
inline float log2_approx(float x) { return log2f(flush_denormal(x)); }
inline float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }

float shuffle_xor(float x, int mask);
float shuffle_index(float x, int lane);
bool any_lane(bool holds);
// Any bits, in part warps too: for kernels that are not ours.
uint64_t shuffle_bits_xor(uint64_t x, int mask);
uint64_t shuffle_bits_down(uint64_t x, int lanes);
void warp_barrier();
void block_barrier(int line);
void named_barrier(int id, int threads, bool waits);

void copy_async_16(void* shared, const void* global, bool valid);
void copy_async_commit();
void copy_async_wait(int groups);

void mma_bf16_16x8x16(float* d, const uint32_t* a, const uint32_t* b);
void ldmatrix_x4(uint32_t* r, const void* shared, bool transposed);

void wgmma(float* d, int columns, const uint32_t* a_registers, uint64_t a, bool a_transposed, uint64_t b,
           bool b_transposed, bool accumulate);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int groups);

void fence_proxy_async();
void mbarrier_init(uint64_t* barrier, int arrivals);
void mbarrier_arrive(uint64_t* barrier, int bytes);
void mbarrier_arrive_copies(uint64_t* barrier);
void mbarrier_wait(uint64_t* barrier, int parity);
void tma_load(void* shared, const uint64_t* map, uint64_t* barrier, int rank, const int* at);
void setmaxnreg(int registers);

}  // namespace cuda_host
