#include "tensor_core.h"

#include <cmath>

namespace cuda_host {

namespace {

constexpr int K = 16;  // products an element and instruction

// A product of two bf16 is exact in f32, so that an addition is a fused multiply-add.
void chain(const float* a, const float* b, float* d, int columns) {
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < K; k++) {
      const float x = a[row * K + k];
      for (int column = 0; column < columns; column++) d[row * columns + column] += x * b[k * columns + column];
    }
}

// What is known of Hopper's adder: the 17 terms, exact, are aligned to the largest exponent and cut two bits below
// f32's last place; their sum is rounded toward zero.
float hopper(const float* a, const float* b, int stride, float c) {
  double terms[K + 1];
  terms[K] = c;
  int exponent = -1000;
  for (int k = 0; k < K; k++) terms[k] = double(a[k]) * b[k * stride];
  for (double term : terms) {
    if (!std::isfinite(term)) return NAN;
    if (term != 0) exponent = std::max(exponent, std::ilogb(term));
  }
  if (exponent == -1000) return c;
  const int unit = exponent - 25;
  int64_t sum = 0;
  for (double term : terms) sum += int64_t(std::ldexp(term, -unit));
  int64_t magnitude = std::abs(sum);
  int shift = 0;
  while (magnitude >> shift >= 1 << 24) shift++;
  const double cut = std::ldexp(double(magnitude >> shift), unit + shift);
  return float(sum < 0 ? -cut : cut);
}

// A result near x whose last four bits depend on every non-zero product, its place, and the accumulator.
float hashed(const float* a, const float* b, int stride, float c, float x) {
  if (!std::isfinite(x)) return x;
  uint32_t hash = __float_as_uint(c) * 0x9e3779b1u;
  bool any = false;
  for (int k = 0; k < K; k++) {
    const float product = a[k] * b[k * stride];
    if (product == 0) continue;
    any = true;
    hash = (hash ^ (__float_as_uint(product) + k * 0x85ebca6bu)) * 0xc2b2ae35u;
    hash ^= hash >> 15;
  }
  return any ? __uint_as_float(__float_as_uint(x) ^ hash >> 28) : c;
}

}  // namespace

void tensor_core(TensorCore mode, const float* a, const float* b, float* d, int columns) {
  if (mode == TensorCore::chain) return chain(a, b, d, columns);
  float sum[16 * 128];
  memcpy(sum, d, sizeof(float) * 16 * columns);
  chain(a, b, sum, columns);
  for (int row = 0; row < 16; row++)
    for (int column = 0; column < columns; column++) {
      float& to = d[row * columns + column];
      const float by_chain = sum[row * columns + column];
      if (mode == TensorCore::hashed) to = hashed(a + row * K, b + column, columns, to, by_chain);
      // A sum that is no number has its kind from the chain.
      if (mode == TensorCore::hopper)
        to = std::isfinite(by_chain) ? hopper(a + row * K, b + column, columns, to) : by_chain;
    }
}

}  // namespace cuda_host
