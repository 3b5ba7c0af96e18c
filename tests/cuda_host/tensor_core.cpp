#include "tensor_core.h"

#include <algorithm>
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

// The exponent field of a double; 0 for zero.
int exponent_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  return int(bits >> 52 & 0x7ff);
}

double power_of_two(int exponent) {
  const uint64_t bits = uint64_t(exponent + 1023) << 52;
  double x;
  memcpy(&x, &bits, 8);
  return x;
}

// What is known of Hopper's adder: the 17 terms, exact, are aligned to the largest exponent and cut two bits below
// f32's last place; their sum is rounded toward zero.
float hopper(const float* a, const float* b, int stride, float c) {
  double terms[K + 1];
  int largest = exponent_of(terms[K] = c);
  for (int k = 0; k < K; k++) {
    terms[k] = double(a[k]) * b[k * stride];
    largest = std::max(largest, exponent_of(terms[k]));
  }
  if (largest == 0) return c;
  const int unit = largest - 1023 - 25;
  const double scale = power_of_two(-unit);
  int64_t sum = 0;
  for (double term : terms) sum += int64_t(term * scale);
  const uint64_t magnitude = uint64_t(std::abs(sum));
  int shift = 0;
  while (magnitude >> shift >= 1 << 24) shift++;
  const double cut = double(magnitude >> shift << shift) * power_of_two(unit);
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
