// Every machine instruction that the kernels use explicitly, one function each: PTX for nvcc, and a call of
// its host twin otherwise. Only this file depends on the compiler; kernels include nothing else. The twins
// are in tests/cuda_host, where kernels run on the CPU, thread by thread.
//
// Names follow the PTX instruction. `shared` pointers point into dynamic_shared_memory().
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define ON_DEVICE(...) __VA_ARGS__
#define ON_HOST(...)
#else
#define ON_DEVICE(...)
#define ON_HOST(...) __VA_ARGS__
#include "language.h"
#endif

#define PRIMITIVE __device__ __forceinline__

// A bf16 number as its bits; arithmetic is in f32.
struct bf16 {
  uint16_t bits;
};

// The map of a tensor for TMA loads, created on the host; layout of CUtensorMap.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// ---- Memory ---------------------------------------------------------------------------------------------------------

// The block's dynamic shared memory, 1024-byte aligned. Kernels use no other shared memory.
PRIMITIVE unsigned char* dynamic_shared_memory() {
  ON_DEVICE(extern __shared__ __align__(1024) unsigned char shared_memory[]; return shared_memory;)
  ON_HOST(return cuda_host::shared_memory();)
}

// The 32-bit shared-window address for instructions and descriptors.
PRIMITIVE uint32_t shared_address(const void* shared) {
  ON_DEVICE(return static_cast<uint32_t>(__cvta_generic_to_shared(shared));)
  ON_HOST(return cuda_host::shared_address(shared);)
}

// ---- Numbers --------------------------------------------------------------------------------------------------------

PRIMITIVE float to_float(bf16 x) {
  ON_DEVICE(return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);)
  ON_HOST(return cuda_host::bf16_to_float(x.bits);)
}

// Rounds to nearest even.
PRIMITIVE bf16 to_bf16(float x) {
  bf16 y;
  ON_DEVICE(asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));)
  ON_HOST(y.bits = cuda_host::float_to_bf16(x);)
  return y;
}

// Two bf16 in a register, `low` in the low half.
PRIMITIVE uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  ON_DEVICE(asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));)
  ON_HOST(packed = cuda_host::float_to_bf16(low) | static_cast<uint32_t>(cuda_host::float_to_bf16(high)) << 16;)
  return packed;
}

// Products of the low halves and of the high halves, each rounded to bf16; subnormals are kept.
PRIMITIVE uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t products;
  ON_DEVICE(asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(a), "r"(b));)
  ON_HOST(products = pack_bf16(cuda_host::bf16_to_float(a & 0xffff) * cuda_host::bf16_to_float(b & 0xffff),
                               cuda_host::bf16_to_float(a >> 16) * cuda_host::bf16_to_float(b >> 16));)
  return products;
}

// Selects four bytes of `low` (0 to 3) and `high` (4 to 7), lowest first. The low three bits of each hex
// digit of `selector` are an index.
PRIMITIVE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes = 0;
  ON_DEVICE(asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));)
  ON_HOST(const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
          for (int i = 0; i < 4; i++) bytes |= static_cast<uint32_t>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;)
  return bytes;
}

// 2^x, relative error below 2^-22; subnormal results are zero.
PRIMITIVE float exp2_approx(float x) {
  float y;
  ON_DEVICE(asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));)
  ON_HOST(y = cuda_host::exp2_approx(x);)
  return y;
}

PRIMITIVE float log2_approx(float x) {
  float y;
  ON_DEVICE(asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));)
  ON_HOST(y = cuda_host::log2_approx(x);)
  return y;
}

// a * b + c, rounded once.
PRIMITIVE float multiply_add(float a, float b, float c) {
  ON_DEVICE(return __fmaf_rn(a, b, c);)
  ON_HOST(return cuda_host::multiply_add(a, b, c);)
}

// a * b, never contracted into a following addition.
PRIMITIVE float multiply(float a, float b) {
  ON_DEVICE(return __fmul_rn(a, b);)
  ON_HOST(return a * b;)
}

// a + b, never contracted with a multiplication before it.
PRIMITIVE float add(float a, float b) {
  ON_DEVICE(return __fadd_rn(a, b);)
  ON_HOST(return a + b;)
}

// ---- Threads of a warp and of a block -------------------------------------------------------------------------------

// The value of lane (own lane ^ mask). All 32 lanes must call it.
PRIMITIVE float shuffle_xor(float x, int mask) {
  ON_DEVICE(return __shfl_xor_sync(0xffffffffu, x, mask);)
  ON_HOST(return cuda_host::shuffle_xor(x, mask);)
}

// The value of lane `lane`. All 32 lanes must call it.
PRIMITIVE float shuffle_index(float x, int lane) {
  ON_DEVICE(return __shfl_sync(0xffffffffu, x, lane);)
  ON_HOST(return cuda_host::shuffle_index(x, lane);)
}

// True when the condition holds in at least one lane. All 32 lanes must call it.
PRIMITIVE bool any_lane(bool holds) {
  ON_DEVICE(return __any_sync(0xffffffffu, holds);)
  ON_HOST(return cuda_host::any_lane(holds);)
}

PRIMITIVE void warp_barrier() {
  ON_DEVICE(__syncwarp();)
  ON_HOST(cuda_host::warp_barrier();)
}

// Waits for all threads of the block.
PRIMITIVE void block_barrier(int line = ON_DEVICE(0) ON_HOST(__builtin_LINE())) {
  ON_DEVICE((void)line; __syncthreads();)
  ON_HOST(cuda_host::block_barrier(line);)
}

// Waits at barrier `id` (1 to 15; 0 is block_barrier's) for `threads` threads, a multiple of 32. Arrivals
// without waiting count.
PRIMITIVE void named_barrier_sync(int id, int threads) {
  ON_DEVICE(asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");)
  ON_HOST(cuda_host::named_barrier(id, threads, true);)
}

// Arrives at barrier `id` without waiting.
PRIMITIVE void named_barrier_arrive(int id, int threads) {
  ON_DEVICE(asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");)
  ON_HOST(cuda_host::named_barrier(id, threads, false);)
}

// ---- Asynchronous copies (Ampere) -----------------------------------------------------------------------------------

// Copies 16 bytes from global to shared memory, both 16-byte aligned. Writes zeros if not `valid`; `global`
// is then not read.
PRIMITIVE void copy_async_16(void* shared, const void* global, bool valid) {
  ON_DEVICE(const int bytes = valid ? 16 : 0;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                         "r"(bytes)
                         : "memory");)
  ON_HOST(cuda_host::copy_async_16(shared, global, valid);)
}

// Commits the copies issued since the last commit as a group.
PRIMITIVE void copy_async_commit() {
  ON_DEVICE(asm volatile("cp.async.commit_group;" ::: "memory");)
  ON_HOST(cuda_host::copy_async_commit();)
}

// Waits until at most the newest `groups` groups of this thread are in flight.
template <int groups>
PRIMITIVE void copy_async_wait() {
  ON_DEVICE(asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");)
  ON_HOST(cuda_host::copy_async_wait(groups);)
}

// ---- Tensor cores of a warp (Ampere) --------------------------------------------------------------------------------

// d += a b: a 16x16 row-major, b 16x8 column-major, d 16x8. With g = lane / 4 and t = lane % 4:
// a[0..4] rows g, g+8, g, g+8, columns 2t and 2t+1 (+8 in a[2], a[3]); b[0..2] rows 2t and 2t+1 (+8 in b[1]) of column
// g; d[0..2] row g, columns 2t and 2t+1; d[2..4] row g+8.
PRIMITIVE void mma_bf16_16x8x16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
  ON_DEVICE(asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                         "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                         : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));)
  ON_HOST(cuda_host::mma_bf16_16x8x16(d, a, b);)
}

// Four 8x8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned) and
// gets, of each matrix, elements 2t and 2t+1 of row g.
PRIMITIVE void ldmatrix_x4(uint32_t r[4], const void* shared) {
  ON_DEVICE(asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                         : "r"(shared_address(shared))
                         : "memory");)
  ON_HOST(cuda_host::ldmatrix_x4(r, shared, false);)
}

// Loads as above with each matrix transposed: the lane gets elements g of rows 2t and 2t+1.
PRIMITIVE void ldmatrix_x4_transposed(uint32_t r[4], const void* shared) {
  ON_DEVICE(asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                         : "r"(shared_address(shared))
                         : "memory");)
  ON_HOST(cuda_host::ldmatrix_x4(r, shared, true);)
}

// ---- Tensor cores of a warpgroup (Hopper) ---------------------------------------------------------------------------
// A warpgroup is four warps, the first a multiple of four. Operands in shared memory are tiles of 128-byte
// rows (64 bf16). Each 1024-byte aligned group of eight rows is swizzled: 16-byte chunk c of row r is at
// chunk c ^ (r % 8).

// Swizzled offset of byte `offset` of a 1024-byte aligned tile.
PRIMITIVE uint32_t swizzle_128(uint32_t offset) {
  return offset ^ ((offset >> 3) & 0x70);
}

// Layout of an operand in its tile. K: a row holds 64 consecutive k of one m or n. MN: a row holds 64
// consecutive m or n of one k.
enum class Major : int { K = 0, MN = 1 };

// Descriptor of an operand in shared memory, 128-byte swizzle. `shared` is the unswizzled address of the
// operand's first element. For each 16 k it advances by 32 bytes (K-major) or 2048 bytes (MN-major).
// `groups_apart`: bytes from one group of eight rows to the next (1024 when packed). `columns_apart`: bytes
// from 64 columns to the next 64; only for MN-major wider than 64.
PRIMITIVE uint64_t wgmma_descriptor(const void* shared, uint32_t groups_apart = 1024, uint32_t columns_apart = 16) {
  const uint64_t start = (shared_address(shared) & 0x3ffff) >> 4;
  return start | static_cast<uint64_t>(columns_apart >> 4) << 16 | static_cast<uint64_t>(groups_apart >> 4) << 32 |
         1ull << 62;
}

// Orders register accesses before the following wgmma instructions: all threads, once before each batch.
PRIMITIVE void wgmma_fence() {
  ON_DEVICE(asm volatile("wgmma.fence.sync.aligned;" ::: "memory");)
  ON_HOST(cuda_host::wgmma_fence();)
}

PRIMITIVE void wgmma_commit() {
  ON_DEVICE(asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");)
  ON_HOST(cuda_host::wgmma_commit();)
}

// Waits until at most the newest `groups` groups are in flight. Until then the registers a and d of a wgmma
// must not be used. Call wgmma_hold(d) afterwards, so that nvcc moves no read before it.
template <int groups>
PRIMITIVE void wgmma_wait() {
  ON_DEVICE(asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");)
  ON_HOST(cuda_host::wgmma_wait(groups);)
}

// Pins registers at this point of the program; no instruction.
template <int count>
PRIMITIVE void wgmma_hold(float (&d)[count]) {
  ON_DEVICE(_Pragma("unroll") for (int i = 0; i < count; i++) asm volatile("" : "+f"(d[i])::"memory");)
  ON_HOST((void)d;)
}

#define WGMMA_D_64                                                                                                     \
  "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"    \
  "%30,%31}"
#define WGMMA_OUT_8(d, i)                                                                                              \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),          \
      "+f"(d[i + 7])
#define WGMMA_OUT_32(d) WGMMA_OUT_8(d, 0), WGMMA_OUT_8(d, 8), WGMMA_OUT_8(d, 16), WGMMA_OUT_8(d, 24)

// d = a b, plus d if `accumulate`; a 64x16 and b 16x64 are in shared memory. Warp w of the warpgroup holds
// rows 16w to 16w+15: d[4j..4j+2] row g, columns 8j+2t and 8j+2t+1; d[4j+2..4j+4] row g+8. Valid after
// wgmma_wait.
template <Major a_major, Major b_major>
PRIMITIVE void wgmma_m64n64k16_bf16(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  ON_DEVICE(asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                         "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_D_64
                         ", %32, %33, p, 1, 1, %35, %36;\n}"
                         : WGMMA_OUT_32(d)
                         : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(static_cast<int>(a_major)),
                           "n"(static_cast<int>(b_major)));)
  ON_HOST(cuda_host::wgmma(d, 64, nullptr, a, a_major == Major::MN, b, b_major == Major::MN, accumulate);)
}

// Multiplies as above with a in registers, in the layout of mma_bf16_16x8x16.
template <Major b_major>
PRIMITIVE void wgmma_m64n64k16_bf16(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  ON_DEVICE(asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                         "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_D_64
                         ", {%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}"
                         : WGMMA_OUT_32(d)
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)),
                           "n"(static_cast<int>(b_major)));)
  ON_HOST(cuda_host::wgmma(d, 64, a, 0, false, b, b_major == Major::MN, accumulate);)
}

#define WGMMA_D_8 "%0,%1,%2,%3"
#define WGMMA_D_16 WGMMA_D_8 ",%4,%5,%6,%7"
#define WGMMA_D_128                                                                                                    \
  WGMMA_D_16                                                                                                           \
  ",%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,"    \
  "%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_D_256                                                                                                    \
  WGMMA_D_128                                                                                                          \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,"  \
  "%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,"   \
  "%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WGMMA_OUT_4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA_OUT_32_FROM(d, i)                                                                                        \
  WGMMA_OUT_8(d, i), WGMMA_OUT_8(d, i + 8), WGMMA_OUT_8(d, i + 16), WGMMA_OUT_8(d, i + 24)
#define WGMMA_ADD(shape, registers, a, b, one, ...)                                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " one ", 0;\nwgmma.mma_async.sync.aligned." shape                    \
               ".f32.bf16.bf16 {" registers "}, " a ", " b ", p, 1, 1, 0, 0;\n}"                                       \
               : __VA_ARGS__                                                                                           \
               : "l"(a_operand), "l"(b_operand), "r"(1))

// d += a b as above for other widths: a 64x16 and b 16x`n`, both K-major in shared memory. gpu_check asks
// whether an element's bits depend on the width.
template <int n>
PRIMITIVE void wgmma_add_bf16(float (&d)[n / 2], uint64_t a_operand, uint64_t b_operand) {
  static_assert(n == 8 || n == 16 || n == 128 || n == 256);
  if constexpr (n == 8) {
    ON_DEVICE(WGMMA_ADD("m64n8k16", WGMMA_D_8, "%4", "%5", "%6", WGMMA_OUT_4(d));)
  } else if constexpr (n == 16) {
    ON_DEVICE(WGMMA_ADD("m64n16k16", WGMMA_D_16, "%8", "%9", "%10", WGMMA_OUT_8(d, 0));)
  } else if constexpr (n == 128) {
    ON_DEVICE(WGMMA_ADD("m64n128k16", WGMMA_D_128, "%64", "%65", "%66", WGMMA_OUT_32_FROM(d, 0), WGMMA_OUT_32_FROM(d, 32));)
  } else {
    ON_DEVICE(WGMMA_ADD("m64n256k16", WGMMA_D_256, "%128", "%129", "%130", WGMMA_OUT_32_FROM(d, 0),
                        WGMMA_OUT_32_FROM(d, 32), WGMMA_OUT_32_FROM(d, 64), WGMMA_OUT_32_FROM(d, 96));)
  }
  ON_HOST(cuda_host::wgmma(d, n, nullptr, a_operand, false, b_operand, false, true);)
}

// ---- mbarriers, TMA, register budgets (Hopper) ----------------------------------------------------------------------

// Makes this thread's shared-memory writes, including completed cp.async copies, visible to wgmma and TMA.
PRIMITIVE void fence_proxy_async() {
  ON_DEVICE(asm volatile("fence.proxy.async.shared::cta;" ::: "memory");)
  ON_HOST(cuda_host::fence_proxy_async();)
}

// Initialises a barrier of `arrivals` arrivals per phase, 8 bytes in shared memory; one thread.
// fence_proxy_async and a block_barrier must precede its first use.
PRIMITIVE void mbarrier_init(uint64_t* barrier, int arrivals) {
  ON_DEVICE(asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
                         : "memory");)
  ON_HOST(cuda_host::mbarrier_init(barrier, arrivals);)
}

PRIMITIVE void mbarrier_arrive(uint64_t* barrier) {
  ON_DEVICE(asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");)
  ON_HOST(cuda_host::mbarrier_arrive(barrier, 0);)
}

// Arrives; the phase also waits for `bytes` bytes of TMA loads.
PRIMITIVE void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
  ON_DEVICE(asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
                         "r"(bytes)
                         : "memory");)
  ON_HOST(cuda_host::mbarrier_arrive(barrier, bytes);)
}

// One of the expected arrivals, made when all earlier copy_async_16 of this thread are complete.
PRIMITIVE void mbarrier_arrive_copies(uint64_t* barrier) {
  ON_DEVICE(asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
                         : "memory");)
  ON_HOST(cuda_host::mbarrier_arrive_copies(barrier);)
}

// Waits for the end of the phase of this parity: 0 for the first, then 1, 0, ...
PRIMITIVE void mbarrier_wait(uint64_t* barrier, int parity) {
  ON_DEVICE(uint32_t done = 0; while (!done) {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  })
  ON_HOST(cuda_host::mbarrier_wait(barrier, parity);)
}

// Loads the box of a tensor at (x, y, z), x the fastest, to 128-byte swizzled shared memory. Bytes are
// counted on `barrier`; values outside the tensor are zero. One thread.
PRIMITIVE void tma_load_3d(void* shared, const TensorMap* map, uint64_t* barrier, int x, int y, int z) {
  ON_DEVICE(asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                         "[%0], [%1, {%3,%4,%5}], [%2];" ::"r"(shared_address(shared)),
                         "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
                         : "memory");)
  ON_HOST(const int at[4] = {x, y, z, 0}; cuda_host::tma_load(shared, map->opaque, barrier, 3, at);)
}

PRIMITIVE void tma_load_4d(void* shared, const TensorMap* map, uint64_t* barrier, int x, int y, int z, int w) {
  ON_DEVICE(asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                         "[%0], [%1, {%3,%4,%5,%6}], [%2];" ::"r"(shared_address(shared)),
                         "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
                         : "memory");)
  ON_HOST(const int at[4] = {x, y, z, w}; cuda_host::tma_load(shared, map->opaque, barrier, 4, at);)
}

// Sets the registers per thread of the warpgroup from here on; a multiple of 8. All its warps must call it.
template <int registers>
PRIMITIVE void setmaxnreg_increase() {
  ON_DEVICE(asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));)
  ON_HOST(cuda_host::setmaxnreg(registers);)
}

template <int registers>
PRIMITIVE void setmaxnreg_decrease() {
  ON_DEVICE(asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));)
  ON_HOST(cuda_host::setmaxnreg(registers);)
}
