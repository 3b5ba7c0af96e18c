// Effects of single machine instructions, one small kernel each. The same source runs on a GPU and, by the
// host twins, on the CPU. tests/cuda_host/primitive_checks.cpp writes the twins' results to
// primitive_checks.txt; gpu_check compares.
//
// Matrix products here are of small integers, exact in any order. The last three kernels accept any operands:
// gpu_check tests with them what batch invariance relies on.

#include "primitives.cuh"

// The parameter of all checks. Reads past the end start over, writes past the end do nothing.
struct CheckBuffers {
  const uint32_t* input;
  uint32_t* output;
  int32_t input_words;
  int32_t output_words;
};

namespace {

PRIMITIVE uint32_t get(const CheckBuffers& b, int at) { return b.input[at % b.input_words]; }

PRIMITIVE void put(const CheckBuffers& b, int at, uint32_t word) {
  if (at < b.output_words) b.output[at] = word;
}

PRIMITIVE int thread_of_grid() { return blockIdx.x * blockDim.x + threadIdx.x; }

// A finite f32 of any sign, and of any size between 2^-63 and 2^64.
PRIMITIVE float any_float(uint32_t word) {
  return __uint_as_float((word & 0x807fffffu) | (64 + (word >> 23 & 127)) << 23);
}

// An f32 between -1 and 1, exact.
PRIMITIVE float unit_float(uint32_t word) { return static_cast<float>(static_cast<int32_t>(word) >> 8) * 0x1p-23f; }

// An integer between -4 and 4 in bf16.
PRIMITIVE bf16 small_integer(uint32_t word) { return to_bf16(static_cast<float>(static_cast<int>((word >> 9) % 9) - 4)); }

PRIMITIVE bf16 element_a(const CheckBuffers& b, int m, int k) { return small_integer(get(b, 64 * m + k)); }
PRIMITIVE bf16 element_b(const CheckBuffers& b, int k, int n) { return small_integer(get(b, 64 * k + n + 333)); }

PRIMITIVE uint32_t two(bf16 low, bf16 high) { return low.bits | static_cast<uint32_t>(high.bits) << 16; }

// Combines the bits of many numbers in one word. Both zeros count as one.
PRIMITIVE uint32_t fold(const float* x, int count) {
  uint32_t hash = 2166136261u;
  for (int i = 0; i < count; i++) hash = (hash ^ __float_as_uint(add(x[i], 0.0f))) * 16777619u;
  return hash;
}

PRIMITIVE uint32_t* shared_words() { return reinterpret_cast<uint32_t*>(dynamic_shared_memory()); }

}  // namespace

extern "C" __global__ void check_conversions(const __grid_constant__ CheckBuffers b) {
  const int i = thread_of_grid();
  const uint32_t word = get(b, i);
  // Every kind of number: unchanged, and with ties to even and carries forced.
  const uint32_t tie = (word & 0xffff0000u) | 0x8000u, carry = word | 0x00ffffffu;
  put(b, 5 * i, to_bf16(__uint_as_float(word)).bits);
  put(b, 5 * i + 1, to_bf16(__uint_as_float(tie)).bits);
  put(b, 5 * i + 2, to_bf16(__uint_as_float(carry)).bits);
  put(b, 5 * i + 3, pack_bf16(any_float(word), any_float(get(b, i + 1))));
  put(b, 5 * i + 4, __float_as_uint(to_float(bf16{static_cast<uint16_t>(word)})));
}

extern "C" __global__ void check_arithmetic(const __grid_constant__ CheckBuffers b) {
  const int i = thread_of_grid();
  const float x = any_float(get(b, i)), y = any_float(get(b, i + 1)), z = any_float(get(b, i + 2));
  const float near = unit_float(get(b, i + 3)), also = unit_float(get(b, i + 4)), third = unit_float(get(b, i + 5));
  put(b, 6 * i, __float_as_uint(multiply_add(x, y, z)));
  put(b, 6 * i + 1, __float_as_uint(multiply_add(near, also, third)));
  put(b, 6 * i + 2, __float_as_uint(multiply(x, y)));
  put(b, 6 * i + 3, __float_as_uint(add(x, y)));
  put(b, 6 * i + 4, __float_as_uint(add(multiply(near, also), third)));  // two roundings
  put(b, 6 * i + 5, __float_as_uint(add(near, -also)));
}

extern "C" __global__ void check_bf16_pairs(const __grid_constant__ CheckBuffers b) {
  const int i = thread_of_grid();
  const uint32_t word = get(b, i), other = get(b, i + 1);
  const uint32_t x = pack_bf16(any_float(word), any_float(other)), y = pack_bf16(unit_float(other), unit_float(word));
  put(b, 4 * i, multiply_bf16(x, y));
  put(b, 4 * i + 1, multiply_bf16(word & 0x81ff81ffu, 0x7e807e80u));  // subnormal or nearly
  put(b, 4 * i + 2, multiply_bf16(multiply_bf16(word & 0x81c081c0u, 0x7e807e80u), 0x00400100u));  // and again
  put(b, 4 * i + 3, permute_bytes(word, other, other & 0x7777u));
}

extern "C" __global__ void check_exp2(const __grid_constant__ CheckBuffers b) {
  const int i = thread_of_grid();
  const float x = unit_float(get(b, i));
  put(b, 4 * i, __float_as_uint(exp2_approx(x)));
  put(b, 4 * i + 1, __float_as_uint(exp2_approx(multiply(x, 100.0f))));
  put(b, 4 * i + 2, __float_as_uint(exp2_approx(-1e9f)));
  put(b, 4 * i + 3, __float_as_uint(exp2_approx(-__builtin_huge_valf())));
}

extern "C" __global__ void check_log2(const __grid_constant__ CheckBuffers b) {
  const int i = thread_of_grid();
  put(b, 2 * i, __float_as_uint(log2_approx(add(1.5f, unit_float(get(b, i))))));
  put(b, 2 * i + 1, __float_as_uint(log2_approx(fabsf(any_float(get(b, i))))));
}

extern "C" __global__ void check_shuffles(const __grid_constant__ CheckBuffers b) {
  const int i = thread_of_grid(), lane = threadIdx.x % 32;
  const float x = unit_float(get(b, i));
#pragma unroll
  for (int s = 0; s < 5; s++) put(b, 9 * i + s, __float_as_uint(shuffle_xor(x, 1 << s)));
  put(b, 9 * i + 5, __float_as_uint(shuffle_index(x, 0)));
  put(b, 9 * i + 6, __float_as_uint(shuffle_index(x, 31)));
  put(b, 9 * i + 7, __float_as_uint(shuffle_index(x, (lane * 7 + 3) % 32)));
  put(b, 9 * i + 8, any_lane(i == 37));  // in one warp of two
}

extern "C" __global__ void check_barriers(const __grid_constant__ CheckBuffers b) {
  const int i = threadIdx.x, threads = blockDim.x, half = threads / 2;
  uint32_t* shared = shared_words();
  shared[i] = get(b, i);
  warp_barrier();
  put(b, 4 * i, shared[i ^ 31]);
  block_barrier();
  put(b, 4 * i + 1, shared[threads - 1 - i]);
  block_barrier();
  // The first half of the threads passes words to the second half, which waits; then all meet.
  if (i < half) {
    shared[threads + i] = get(b, i + 7);
    named_barrier_arrive(1, threads);
  } else {
    named_barrier_sync(1, threads);
    put(b, 4 * i + 2, shared[threads + threads - 1 - i]);
  }
  named_barrier_sync(2, threads);
  put(b, 4 * i + 3, shared[threads + i % half]);
}

extern "C" __global__ void check_copies(const __grid_constant__ CheckBuffers b) {
  const int i = threadIdx.x, threads = blockDim.x;
  uint32_t* shared = shared_words();
  const uint32_t* from = b.input + 4 * i % (b.input_words / 4 * 4);
  for (int word = 0; word < 8; word++) shared[8 * i + word] = 0xdeadbeefu;
  block_barrier();
  copy_async_16(shared + 4 * i, from, i % 3 != 0);
  copy_async_commit();
  copy_async_16(shared + 4 * (threads + i), from, true);
  copy_async_commit();
  copy_async_wait<1>();
  block_barrier();
  const int other = threads - 1 - i;
  for (int word = 0; word < 4; word++) put(b, 8 * i + word, shared[4 * other + word]);
  copy_async_wait<0>();
  block_barrier();
  for (int word = 0; word < 4; word++) put(b, 8 * i + 4 + word, shared[4 * (threads + other) + word]);
}

extern "C" __global__ void check_ldmatrix(const __grid_constant__ CheckBuffers b) {
  const int i = threadIdx.x, lane = i % 32;
  uint32_t* shared = shared_words() + i / 32 * 128;
  for (int word = 0; word < 4; word++) shared[4 * lane + word] = get(b, 4 * i + word);
  warp_barrier();
  const uint32_t* row = shared + lane * 5 % 32 * 4;  // rows in no particular order
  uint32_t plain[4], transposed[4];
  ldmatrix_x4(plain, row);
  ldmatrix_x4_transposed(transposed, row);
  for (int matrix = 0; matrix < 4; matrix++) {
    put(b, 8 * i + matrix, plain[matrix]);
    put(b, 8 * i + 4 + matrix, transposed[matrix]);
  }
}

extern "C" __global__ void check_mma(const __grid_constant__ CheckBuffers b) {
  const int i = threadIdx.x, g = i % 32 / 4, t = i % 4, m = 16 * (i / 32);
  const auto a_pair = [&](int row, int k) { return two(element_a(b, m + row, k), element_a(b, m + row, k + 1)); };
  const auto b_pair = [&](int k) { return two(element_b(b, k, g), element_b(b, k + 1, g)); };
  const uint32_t a[4] = {a_pair(g, 2 * t), a_pair(g + 8, 2 * t), a_pair(g, 2 * t + 8), a_pair(g + 8, 2 * t + 8)};
  const uint32_t columns[2] = {b_pair(2 * t), b_pair(2 * t + 8)};
  float d[4] = {1.0f * i, -2.0f, 3.0f, 0.0f};
  mma_bf16_16x8x16(d, a, columns);
  mma_bf16_16x8x16(d, a, columns);
  for (int e = 0; e < 4; e++) put(b, 4 * i + e, __float_as_uint(add(d[e], 0.0f)));
}

extern "C" __global__ void check_swizzle(const __grid_constant__ CheckBuffers b) {
  const int i = thread_of_grid();
  put(b, i, swizzle_128(i * 16));
}

namespace {

// 64 x 64 elements as a wgmma operand: rows of one m (or n), or rows of one k.
template <typename Element>
PRIMITIVE void fill_tile(unsigned char* tile, Major major, const Element& element) {
  for (int at = threadIdx.x; at < 64 * 64; at += blockDim.x) {
    const int row = at / 64, column = at % 64;
    const bf16 x = major == Major::K ? element(row, column) : element(column, row);
    *reinterpret_cast<bf16*>(tile + swizzle_128(row * 128 + column * 2)) = x;
  }
}

PRIMITIVE const unsigned char* step_of(const unsigned char* tile, Major major, int step) {
  return tile + step * (major == Major::K ? 32 : 2048);
}

// d = a b over 64 k, then once more added to that, by `products`.
template <typename Products>
PRIMITIVE void multiply_twice(const CheckBuffers& b, float (&d)[32], const Products& product) {
  for (int e = 0; e < 32; e++) d[e] = 1e9f;  // not to be read
  wgmma_fence();
  for (int step = 0; step < 4; step++) product(step, step > 0);
  wgmma_commit();
  wgmma_fence();
  for (int step = 0; step < 4; step++) product(step, true);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_hold(d);
  for (int part = 0; part < 4; part++) put(b, 4 * thread_of_grid() + part, fold(d + 8 * part, 8));
}

template <Major a_major, Major b_major>
PRIMITIVE void wgmma_from_shared(const CheckBuffers& b) {
  unsigned char* a_tile = dynamic_shared_memory();
  unsigned char* b_tile = a_tile + 8192;
  fill_tile(a_tile, a_major, [&](int m, int k) { return element_a(b, m, k); });
  fill_tile(b_tile, b_major, [&](int n, int k) { return element_b(b, k, n); });
  fence_proxy_async();
  block_barrier();
  float d[32];
  multiply_twice(b, d, [&](int step, bool accumulate) {
    wgmma_m64n64k16_bf16<a_major, b_major>(d, wgmma_descriptor(step_of(a_tile, a_major, step)),
                                           wgmma_descriptor(step_of(b_tile, b_major, step)), accumulate);
  });
}

template <Major b_major>
PRIMITIVE void wgmma_from_registers(const CheckBuffers& b) {
  unsigned char* b_tile = dynamic_shared_memory();
  fill_tile(b_tile, b_major, [&](int n, int k) { return element_b(b, k, n); });
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, m = threadIdx.x % 128 / 32 * 16;
  const auto pair = [&](int row, int k) { return two(element_a(b, m + row, k), element_a(b, m + row, k + 1)); };
  uint32_t a[4][4];
#pragma unroll
  for (int step = 0; step < 4; step++) {
    const int k = 16 * step + 2 * t;
    a[step][0] = pair(g, k);
    a[step][1] = pair(g + 8, k);
    a[step][2] = pair(g, k + 8);
    a[step][3] = pair(g + 8, k + 8);
  }
  fence_proxy_async();
  block_barrier();
  float d[32];
  for (int e = 0; e < 32; e++) d[e] = 1e9f;  // not to be read
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; step++)
    wgmma_m64n64k16_bf16<b_major>(d, a[step], wgmma_descriptor(step_of(b_tile, b_major, step)), step > 0);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_hold(d);
  for (int part = 0; part < 4; part++) put(b, 4 * thread_of_grid() + part, fold(d + 8 * part, 8));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) check_wgmma_k_k(const __grid_constant__ CheckBuffers b) {
  wgmma_from_shared<Major::K, Major::K>(b);
}
extern "C" __global__ void __launch_bounds__(256) check_wgmma_k_mn(const __grid_constant__ CheckBuffers b) {
  wgmma_from_shared<Major::K, Major::MN>(b);
}
extern "C" __global__ void __launch_bounds__(256) check_wgmma_mn_k(const __grid_constant__ CheckBuffers b) {
  wgmma_from_shared<Major::MN, Major::K>(b);
}
extern "C" __global__ void __launch_bounds__(256) check_wgmma_mn_mn(const __grid_constant__ CheckBuffers b) {
  wgmma_from_shared<Major::MN, Major::MN>(b);
}
extern "C" __global__ void __launch_bounds__(256) check_wgmma_registers_k(const __grid_constant__ CheckBuffers b) {
  wgmma_from_registers<Major::K>(b);
}
extern "C" __global__ void __launch_bounds__(256) check_wgmma_registers_mn(const __grid_constant__ CheckBuffers b) {
  wgmma_from_registers<Major::MN>(b);
}

extern "C" __global__ void check_mbarriers(const __grid_constant__ CheckBuffers b) {
  const int i = threadIdx.x, threads = blockDim.x, other = threads - 1 - i;
  uint64_t* barriers = reinterpret_cast<uint64_t*>(dynamic_shared_memory());
  uint32_t* shared = shared_words() + 64;
  if (i == 0) {
    mbarrier_init(barriers, threads);
    mbarrier_init(barriers + 1, threads);
  }
  fence_proxy_async();
  block_barrier();
  for (int phase = 0; phase < 3; phase++) {
    shared[i] = get(b, i + phase);
    mbarrier_arrive(barriers);
    mbarrier_wait(barriers, phase % 2);
    put(b, 7 * i + phase, shared[other]);
    block_barrier();
  }
  copy_async_16(shared + 4 * i, b.input + 4 * i % (b.input_words / 4 * 4), true);
  mbarrier_arrive_copies(barriers + 1);
  mbarrier_wait(barriers + 1, 0);
  for (int word = 0; word < 4; word++) put(b, 7 * i + 3 + word, shared[4 * other + word]);
}

// Three warpgroups exchange registers and continue.
extern "C" __global__ void __launch_bounds__(384, 1) check_setmaxnreg(const __grid_constant__ CheckBuffers b) {
  const int i = threadIdx.x;
  float x = unit_float(get(b, i));
  if (i / 128 == 0) {
    setmaxnreg_decrease<40>();
    x = multiply(x, 3.0f);
  } else {
    setmaxnreg_increase<232>();
    x = multiply(x, 5.0f);
  }
  put(b, i, __float_as_uint(x));
}

// Tiles and descriptors rely on this: the distance of dynamic shared memory from a multiple of 1024 bytes.
extern "C" __global__ void check_shared_alignment(const __grid_constant__ CheckBuffers b) {
  put(b, thread_of_grid(), shared_address(dynamic_shared_memory()) % 1024);
}

// One product per warp: a 16x16, b transposed 8x16 in bf16, the accumulator 16x8 in f32, row-major; 320
// words in, 128 words out.
extern "C" __global__ void check_product_mma(const __grid_constant__ CheckBuffers b) {
  const int problem = thread_of_grid() / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int from = problem * 320, to = problem * 128;
  const uint32_t a[4] = {get(b, from + 8 * g + t), get(b, from + 8 * (g + 8) + t), get(b, from + 8 * g + t + 4),
                         get(b, from + 8 * (g + 8) + t + 4)};
  const uint32_t columns[2] = {get(b, from + 128 + 8 * g + t), get(b, from + 128 + 8 * g + t + 4)};
  const int places[4] = {8 * g + 2 * t, 8 * g + 2 * t + 1, 8 * (g + 8) + 2 * t, 8 * (g + 8) + 2 * t + 1};
  float d[4];
  for (int e = 0; e < 4; e++) d[e] = __uint_as_float(get(b, from + 192 + places[e]));
  mma_bf16_16x8x16(d, a, columns);
  for (int e = 0; e < 4; e++) put(b, to + places[e], __float_as_uint(d[e]));
}

// One product per block of one warpgroup: a 64x16, b transposed 64x16 in bf16, the accumulator 64x64 in
// f32, row-major; 5120 words in, 4096 words out.
extern "C" __global__ void __launch_bounds__(128) check_product_wgmma(const __grid_constant__ CheckBuffers b) {
  const int from = blockIdx.x * 5120, to = blockIdx.x * 4096;
  unsigned char* a_tile = dynamic_shared_memory();
  unsigned char* b_tile = a_tile + 8192;
  for (int at = threadIdx.x; at < 512; at += 128) {
    const uint32_t place = swizzle_128(at / 8 * 128 + at % 8 * 4);
    *reinterpret_cast<uint32_t*>(a_tile + place) = get(b, from + at);
    *reinterpret_cast<uint32_t*>(b_tile + place) = get(b, from + 512 + at);
  }
  fence_proxy_async();
  block_barrier();
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, m = threadIdx.x / 32 * 16;
  const auto place = [&](int e) { return 64 * (m + g + e % 4 / 2 * 8) + e / 4 * 8 + 2 * t + e % 2; };
  float d[32];
#pragma unroll
  for (int e = 0; e < 32; e++) d[e] = __uint_as_float(get(b, from + 1024 + place(e)));
  wgmma_fence();
  wgmma_m64n64k16_bf16<Major::K, Major::K>(d, wgmma_descriptor(a_tile), wgmma_descriptor(b_tile), true);
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_hold(d);
#pragma unroll
  for (int e = 0; e < 32; e++) put(b, to + place(e), __float_as_uint(d[e]));
}

namespace {

constexpr int shapes_columns = 256;

// One product by wgmma, in parts of `n` columns. `exchanged`: b's columns are the rows of the instruction and a's
// rows its columns, `n` at a time.
template <int n, bool exchanged>
PRIMITIVE void product_of_width(const CheckBuffers& b, int from, int to, const unsigned char* a_tile,
                                const unsigned char* b_tile) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, m = threadIdx.x / 32 * 16;
  const unsigned char* left = exchanged ? b_tile : a_tile;
  const unsigned char* right = exchanged ? a_tile : b_tile;
  const int rows = exchanged ? shapes_columns : 64, columns = exchanged ? 64 : shapes_columns;
#pragma unroll 1
  for (int part = 0; part < rows / 64 * (columns / n); part++) {
    const int row = part / (columns / n) * 64, column = part % (columns / n) * n;
    const auto place = [&](int e) {
      const int i = row + m + g + e % 4 / 2 * 8, j = column + e / 4 * 8 + 2 * t + e % 2;
      return exchanged ? j * shapes_columns + i : i * shapes_columns + j;
    };
    float d[n / 2];
#pragma unroll
    for (int e = 0; e < n / 2; e++) d[e] = __uint_as_float(get(b, from + 512 + 8 * shapes_columns + place(e)));
    wgmma_fence();
    const uint64_t a = wgmma_descriptor(left + row * 128), other = wgmma_descriptor(right + column * 128);
    if constexpr (n == 64)
      wgmma_m64n64k16_bf16<Major::K, Major::K>(d, a, other, true);
    else
      wgmma_add_bf16<n>(d, a, other);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(d);
#pragma unroll
    for (int e = 0; e < n / 2; e++) put(b, to + place(e), __float_as_uint(d[e]));
  }
}

// The same product by mma.
PRIMITIVE void product_of_warps(const CheckBuffers& b, int from, int to) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, m = threadIdx.x / 32 * 16;
  const auto a_pair = [&](int row, int k) { return get(b, from + 8 * row + k); };
  const uint32_t a[4] = {a_pair(m + g, t), a_pair(m + g + 8, t), a_pair(m + g, t + 4), a_pair(m + g + 8, t + 4)};
  for (int column = 0; column < shapes_columns; column += 8) {
    const uint32_t pair[2] = {get(b, from + 512 + 8 * (column + g) + t), get(b, from + 512 + 8 * (column + g) + t + 4)};
    const auto place = [&](int e) { return (m + g + e / 2 * 8) * shapes_columns + column + 2 * t + e % 2; };
    float d[4];
    for (int e = 0; e < 4; e++) d[e] = __uint_as_float(get(b, from + 512 + 8 * shapes_columns + place(e)));
    mma_bf16_16x8x16(d, a, pair);
    for (int e = 0; e < 4; e++) put(b, to + place(e), __float_as_uint(d[e]));
  }
}

}  // namespace

// One product per block of one warpgroup, computed in eight ways: a 64x16, b transposed 256x16 in bf16, the
// accumulator 64x256 in f32, row-major; 18,944 words in. Out 16,384 words for each of wgmma with n = 8, 16, 64,
// 128, 256, wgmma with a and b exchanged with n = 8, 64, and mma.
extern "C" __global__ void __launch_bounds__(128) check_product_shapes(const __grid_constant__ CheckBuffers b) {
  constexpr int words = 64 * shapes_columns;
  const int from = blockIdx.x * (512 + 8 * shapes_columns + words), to = blockIdx.x * 8 * words;
  unsigned char* a_tile = dynamic_shared_memory();
  unsigned char* b_tile = a_tile + 8192;
  for (int at = threadIdx.x; at < 512; at += 128)
    *reinterpret_cast<uint32_t*>(a_tile + swizzle_128(at / 8 * 128 + at % 8 * 4)) = get(b, from + at);
  for (int at = threadIdx.x; at < 8 * shapes_columns; at += 128)
    *reinterpret_cast<uint32_t*>(b_tile + swizzle_128(at / 8 * 128 + at % 8 * 4)) = get(b, from + 512 + at);
  fence_proxy_async();
  block_barrier();
  product_of_width<8, false>(b, from, to, a_tile, b_tile);
  product_of_width<16, false>(b, from, to + words, a_tile, b_tile);
  product_of_width<64, false>(b, from, to + 2 * words, a_tile, b_tile);
  product_of_width<128, false>(b, from, to + 3 * words, a_tile, b_tile);
  product_of_width<256, false>(b, from, to + 4 * words, a_tile, b_tile);
  product_of_width<8, true>(b, from, to + 5 * words, a_tile, b_tile);
  product_of_width<64, true>(b, from, to + 6 * words, a_tile, b_tile);
  product_of_warps(b, from, to + 7 * words);
}
