// More of CUDA C++ than the project's own kernels may use: what candle's kernels need, for a C++ compiler.
#pragma once

#include <cassert>
#include <climits>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "language.h"

// A block's threads are fibres of one OS thread, and only one block runs there at a time.
#define __shared__ static thread_local
#define __align__(n) alignas(n)

namespace device_language {

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(static_cast<void*>(&to), &from, sizeof to);
  return to;
}

template <class T>
uint64_t to_bits(T x) {
  static_assert(sizeof x <= 8);
  uint64_t bits = 0;
  memcpy(&bits, &x, sizeof x);
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T x;
  memcpy(static_cast<void*>(&x), &bits, sizeof x);
  return x;
}

// Held while an atomic runs: blocks may run on several OS threads.
struct AtomicLock {
  AtomicLock();
  ~AtomicLock();
};

// ---- Numbers shorter than 32 bits -----------------------------------------------------------------------------------

struct F16 {
  using Bits = uint16_t;
  static float widen(Bits bits) { return bits_as<_Float16>(bits); }
  static Bits round(float x) { return bits_as<Bits>(static_cast<_Float16>(x)); }
};

struct Bf16 {
  using Bits = uint16_t;
  static float widen(Bits bits) { return cuda_host::bf16_to_float(bits); }
  static Bits round(float x) { return cuda_host::float_to_bf16(x); }
};

// 4 bits of exponent (bias 7), 3 of fraction, no infinity; what is too large becomes the largest, 448.
struct E4m3 {
  using Bits = uint8_t;
  static float widen(Bits bits) {
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    if ((bits & 0x7f) == 0x7f) return NAN;
    const float size = exponent == 0 ? ldexpf(fraction, -9) : ldexpf(8 + fraction, exponent - 10);
    return bits & 0x80 ? -size : size;
  }
  static Bits round(float x) {
    const Bits sign = signbit(x) ? 0x80 : 0;
    if (x != x) return sign | 0x7f;
    const float size = fabsf(x);
    if (size >= 448) return sign | 0x7e;
    int exponent;
    frexpf(size, &exponent);
    // The step between neighbours here; nearbyintf rounds to even.
    const int step = size < 0x1p-6f ? -9 : exponent - 4;
    const float rounded = ldexpf(nearbyintf(ldexpf(size, -step)), step);
    Bits bits = 0;
    while (widen(bits) < rounded) bits++;
    return sign | bits;
  }
};

// Arithmetic in f32, every result rounded: for + - * / that is the correctly rounded one.
template <class Format>
struct Short {
  typename Format::Bits __x;

  Short() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  Short(T x) : __x(Format::round(static_cast<float>(x))) {}
  operator float() const { return Format::widen(__x); }

  Short operator+() const { return *this; }
  Short operator-() const { return -float(*this); }
  Short& operator+=(Short y) { return *this = *this + y; }
  Short& operator-=(Short y) { return *this = *this - y; }
  Short& operator*=(Short y) { return *this = *this * y; }
  Short& operator/=(Short y) { return *this = *this / y; }
  friend Short operator+(Short x, Short y) { return float(x) + float(y); }
  friend Short operator-(Short x, Short y) { return float(x) - float(y); }
  friend Short operator*(Short x, Short y) { return float(x) * float(y); }
  friend Short operator/(Short x, Short y) { return float(x) / float(y); }
  friend bool operator==(Short x, Short y) { return float(x) == float(y); }
  friend bool operator!=(Short x, Short y) { return float(x) != float(y); }
  friend bool operator<(Short x, Short y) { return float(x) < float(y); }
  friend bool operator>(Short x, Short y) { return float(x) > float(y); }
  friend bool operator<=(Short x, Short y) { return float(x) <= float(y); }
  friend bool operator>=(Short x, Short y) { return float(x) >= float(y); }
};

template <class Format, class Function>
Short<Format> through_float(Short<Format> x, Function function) {
  return function(float(x));
}

}  // namespace device_language

using __half = device_language::Short<device_language::F16>;
using __nv_bfloat16 = device_language::Short<device_language::Bf16>;
using __nv_fp8_e4m3 = device_language::Short<device_language::E4m3>;
using half = __half;
using nv_bfloat16 = __nv_bfloat16;

// As the library's: a `__half` in all but name.
struct __half_raw {
  uint16_t x;
  operator __half() const { return device_language::bits_as<__half>(x); }
};
enum __nv_fp8_interpretation_t { __NV_E4M3 };
inline __half_raw __nv_cvt_fp8_to_halfraw(uint8_t bits, __nv_fp8_interpretation_t) {
  return {__half(device_language::E4m3::widen(bits)).__x};
}

inline float __half2float(__half x) { return x; }
inline float __bfloat162float(__nv_bfloat16 x) { return x; }
inline __half __float2half(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16(float x) { return x; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
inline unsigned short __half_as_ushort(__half x) { return x.__x; }
inline __half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.__x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return device_language::bits_as<__nv_bfloat16>(bits); }

struct alignas(4) __half2 { __half x, y; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x + b.x, a.y + b.y}; }
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x - b.x, a.y - b.y}; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x * b.x, a.y * b.y}; }
inline __nv_bfloat162 __h2div(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x / b.x, a.y / b.y}; }

template <class F> bool __hisnan(device_language::Short<F> x) { return x != x; }
template <class F> bool isnan(device_language::Short<F> x) { return x != x; }
template <class F>
device_language::Short<F> __hmax_nan(device_language::Short<F> x, device_language::Short<F> y) {
  return x != x || x > y ? x : y;
}
template <class F>
device_language::Short<F> __hmin_nan(device_language::Short<F> x, device_language::Short<F> y) {
  return x != x || x < y ? x : y;
}
template <class F> device_language::Short<F> __habs(device_language::Short<F> x) { return through_float(x, fabsf); }
template <class F> device_language::Short<F> hsqrt(device_language::Short<F> x) { return through_float(x, sqrtf); }
template <class F> device_language::Short<F> hcos(device_language::Short<F> x) { return through_float(x, cosf); }
template <class F> device_language::Short<F> hsin(device_language::Short<F> x) { return through_float(x, sinf); }
template <class F> device_language::Short<F> hlog(device_language::Short<F> x) { return through_float(x, logf); }
template <class F> device_language::Short<F> hexp(device_language::Short<F> x) { return through_float(x, expf); }

// ---- Functions ------------------------------------------------------------------------------------------------------

inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float normcdff(float x) { return erfcf(-x * float(M_SQRT1_2)) / 2; }
inline double normcdf(double x) { return erfc(-x * M_SQRT1_2) / 2; }
inline float __expf(float x) { return expf(x); }

inline int __float_as_int(float x) { return device_language::bits_as<int>(x); }
inline float __int_as_float(int bits) { return device_language::bits_as<float>(bits); }
inline long long __double_as_longlong(double x) { return device_language::bits_as<long long>(x); }
inline double __longlong_as_double(long long bits) { return device_language::bits_as<double>(bits); }

inline uint8_t min(uint8_t a, uint8_t b) { return a < b ? a : b; }
inline uint8_t max(uint8_t a, uint8_t b) { return a > b ? a : b; }
inline size_t min(size_t a, size_t b) { return a < b ? a : b; }
inline size_t max(size_t a, size_t b) { return a > b ? a : b; }
// Of two types: in the one to which C++ converts both.
template <class A, class B, class = std::enable_if_t<std::is_integral_v<A> && std::is_integral_v<B> && !std::is_same_v<A, B>>>
std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(a) : T(b);
}
template <class A, class B, class = std::enable_if_t<std::is_integral_v<A> && std::is_integral_v<B> && !std::is_same_v<A, B>>>
std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) > T(b) ? T(a) : T(b);
}
namespace cuda::std {
using ::std::numeric_limits;
}

// ---- Threads --------------------------------------------------------------------------------------------------------

#define __syncthreads() cuda_host::block_barrier(__LINE__)
inline void __syncwarp(unsigned = ~0u) { cuda_host::warp_barrier(); }

template <class T>
T __shfl_xor_sync(unsigned, T x, int mask, int = 32) {
  return device_language::from_bits<T>(cuda_host::shuffle_bits_xor(device_language::to_bits(x), mask));
}
template <class T>
T __shfl_down_sync(unsigned, T x, int lanes, int = 32) {
  return device_language::from_bits<T>(cuda_host::shuffle_bits_down(device_language::to_bits(x), lanes));
}

template <class T, class New>
T atomic_change(T* place, New changed) {
  device_language::AtomicLock lock;
  const T old = *place;
  *place = changed(old);
  return old;
}
template <class T>
T atomicAdd(T* place, std::common_type_t<T> x) {
  return atomic_change(place, [&](T old) { return old + x; });
}
template <class T>
T atomicMax(T* place, std::common_type_t<T> x) {
  return atomic_change(place, [&](T old) { return old > x ? old : x; });
}
template <class T>
T atomicMin(T* place, std::common_type_t<T> x) {
  return atomic_change(place, [&](T old) { return old < x ? old : x; });
}
template <class T>
T atomicCAS(T* place, std::common_type_t<T> expected, std::common_type_t<T> x) {
  return atomic_change(place, [&](T old) { return old == expected ? x : old; });
}
