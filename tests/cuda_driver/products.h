// Matrix products for the libraries that have them: in stream order, sums in the order of k or in one chosen by M. Not those
// libraries' bits.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "driver.h"
#include "include/device_language.h"

namespace cuda_driver {

enum CublasStatus : int { CUBLAS_SUCCESS = 0, CUBLAS_INVALID_VALUE = 7, CUBLAS_NOT_SUPPORTED = 15 };
enum Type : int { R_32F = 0, R_64F = 1, R_16F = 2, R_16BF = 14 };

inline size_t bytes_of_type(int type) { return type == R_64F ? 8 : type == R_32F ? 4 : type == R_16F || type == R_16BF ? 2 : 0; }

// Column by column, `stride` elements between the matrices of a batch.
struct Matrix {
  CUdeviceptr address;
  int type;
  int64_t column, stride;

  char* at(int64_t matrix, int64_t row, int64_t of_column) const {
    return reinterpret_cast<char*>(address) + (matrix * stride + of_column * column + row) * int64_t(bytes_of_type(type));
  }
  double get(int64_t matrix, int64_t row, int64_t of_column) const {
    const char* from = at(matrix, row, of_column);
    switch (type) {
      case R_64F: return read<double>(from);
      case R_32F: return read<float>(from);
      case R_16F: return device_language::F16::widen(read<uint16_t>(from));
      default: return device_language::Bf16::widen(read<uint16_t>(from));
    }
  }
  void put(int64_t matrix, int64_t row, int64_t of_column, double value) const {
    const float single = float(value);
    const uint16_t half = type == R_16F ? device_language::F16::round(single) : device_language::Bf16::round(single);
    const void* from = type == R_64F ? static_cast<const void*>(&value) : type == R_32F ? static_cast<const void*>(&single) : &half;
    memcpy(at(matrix, row, of_column), from, bytes_of_type(type));
  }
  bool check(const std::string& what, int batch, int rows, int columns) const {
    const int64_t elements = (batch - 1) * stride + (columns - 1) * column + rows;
    return !rows || !columns || check_range(what, address, size_t(elements) * bytes_of_type(type));
  }
};

// CUDA_EMULATOR_CUBLAS=by-m: every product adds in an order that M chooses, as these libraries may.
inline bool all_by_m() {
  const char* text = getenv("CUDA_EMULATOR_CUBLAS");
  return text && !strcmp(text, "by-m");
}

struct Product {
  bool a_transposed, b_transposed;
  int m, n, k, batch;
  double alpha, beta;
  Matrix a, b, c;
  bool by_m = false;     // the order of additions is chosen by M
  CUdeviceptr bias = 0;  // f32, one a row of c
  int a_rows() const { return a_transposed ? k : m; }
  int b_rows() const { return b_transposed ? n : k; }
  // The term with which sums over k begin, to go on round to the one before. M, the rows of a caller whose matrices lie row by row,
  // is the columns here.
  int first_term() const { return by_m && k ? n % 61 % k : 0; }
};

// 20 bits of a sum whose order M chooses, so that the order shows in more than a few rows.
inline float shortened(float sum) {
  uint32_t bits;
  memcpy(&bits, &sum, sizeof bits);
  bits &= ~0xfu;
  memcpy(&sum, &bits, sizeof bits);
  return sum;
}
inline double shortened(double sum) { return sum; }

template <class Sum>
void multiply(const Product& p) {
  std::vector<Sum> a(size_t(p.m) * p.k), sums(p.m);
  for (int matrix = 0; matrix < p.batch; matrix++) {
    for (int l = 0; l < p.k; l++)
      for (int i = 0; i < p.m; i++)
        a[size_t(l) * p.m + i] = Sum(p.a_transposed ? p.a.get(matrix, l, i) : p.a.get(matrix, i, l));
    for (int j = 0; j < p.n; j++) {
      std::fill(sums.begin(), sums.end(), Sum(0));
      for (int step = 0; step < p.k; step++) {
        const int l = (p.first_term() + step) % p.k;
        const Sum b = Sum(p.b_transposed ? p.b.get(matrix, j, l) : p.b.get(matrix, l, j));
        for (int i = 0; i < p.m; i++) sums[i] += a[size_t(l) * p.m + i] * b;
        if (p.by_m) std::transform(sums.begin(), sums.end(), sums.begin(), [](Sum sum) { return shortened(sum); });
      }
      for (int i = 0; i < p.m; i++) {
        const Sum before = p.beta == 0 ? Sum(0) : Sum(p.beta) * Sum(p.c.get(matrix, i, j));
        const Sum bias = p.bias ? Sum(read<float>(reinterpret_cast<const char*>(p.bias) + 4 * size_t(i))) : Sum(0);
        p.c.put(matrix, i, j, Sum(p.alpha) * sums[i] + before + bias);
      }
    }
  }
}

// Enqueues the product once its sizes are known to make sense.
inline void enqueue_product(const std::shared_ptr<Stream>& stream, const std::string& name, const Product& p) {
  enqueue(stream, name, [p, name] {
    if (!p.a.check(name + ", a", p.batch, p.a_rows(), p.a_transposed ? p.m : p.k)) return;
    if (!p.b.check(name + ", b", p.batch, p.b_rows(), p.b_transposed ? p.k : p.n)) return;
    if (!p.c.check(name + ", c", p.batch, p.m, p.n)) return;
    if (p.bias && !check_range(name + ", bias", p.bias, 4 * size_t(p.m))) return;
    p.c.type == R_64F ? multiply<double>(p) : multiply<float>(p);
  });
}

}  // namespace cuda_driver
