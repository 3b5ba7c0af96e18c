// cuBLAS, as far as candle uses it: matrix products in stream order, each sum in the order of k. Not the library's bits.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "driver.h"
#include "include/device_language.h"

using namespace cuda_driver;

namespace {

enum { CUBLAS_SUCCESS = 0, CUBLAS_INVALID_VALUE = 7, CUBLAS_NOT_SUPPORTED = 15 };
enum Type { R_32F = 0, R_64F = 1, R_16F = 2, R_16BF = 14 };
constexpr int COMPUTE_64F = 70;

struct Handle {
  void* stream = nullptr;
};

size_t bytes_of_type(int type) { return type == R_64F ? 8 : type == R_32F ? 4 : type == R_16F || type == R_16BF ? 2 : 0; }

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

struct Product {
  bool a_transposed, b_transposed;
  int m, n, k, batch;
  double alpha, beta;
  Matrix a, b, c;
  int a_rows() const { return a_transposed ? k : m; }
  int b_rows() const { return b_transposed ? n : k; }
};

template <class Sum>
void multiply(const Product& p) {
  std::vector<Sum> a(size_t(p.m) * p.k), sums(p.m);
  for (int matrix = 0; matrix < p.batch; matrix++) {
    for (int l = 0; l < p.k; l++)
      for (int i = 0; i < p.m; i++)
        a[size_t(l) * p.m + i] = Sum(p.a_transposed ? p.a.get(matrix, l, i) : p.a.get(matrix, i, l));
    for (int j = 0; j < p.n; j++) {
      std::fill(sums.begin(), sums.end(), Sum(0));
      for (int l = 0; l < p.k; l++) {
        const Sum b = Sum(p.b_transposed ? p.b.get(matrix, j, l) : p.b.get(matrix, l, j));
        for (int i = 0; i < p.m; i++) sums[i] += a[size_t(l) * p.m + i] * b;
      }
      for (int i = 0; i < p.m; i++) {
        const Sum before = p.beta == 0 ? Sum(0) : Sum(p.beta) * Sum(p.c.get(matrix, i, j));
        p.c.put(matrix, i, j, Sum(p.alpha) * sums[i] + before);
      }
    }
  }
}

int start(Handle* handle, const Product& p) {
  for (const Matrix& matrix : {p.a, p.b, p.c})
    if (!bytes_of_type(matrix.type)) return complain(NOT_SUPPORTED, "cuBLAS: type %d is not emulated", matrix.type), CUBLAS_NOT_SUPPORTED;
  if (p.m < 0 || p.n < 0 || p.k < 0 || p.batch < 0 || p.a.column < std::max(1, p.a_rows()) ||
      p.b.column < std::max(1, p.b_rows()) || p.c.column < std::max(1, p.m)) {
    complain(INVALID_VALUE, "cuBLAS: a product of %dx%dx%d with leading dimensions %d, %d, %d", p.m, p.n, p.k,
             int(p.a.column), int(p.b.column), int(p.c.column));
    return CUBLAS_INVALID_VALUE;
  }
  if (!p.m || !p.n || !p.batch) return CUBLAS_SUCCESS;
  Locked lock;
  auto stream = stream_of(handle->stream, "cuBLAS");
  if (!stream) return CUBLAS_INVALID_VALUE;
  char text[96];
  snprintf(text, sizeof text, "cuBLAS product %dx%dx%d, batch %d", p.m, p.n, p.k, p.batch);
  enqueue(stream, text, [p, name = std::string(text)] {
    if (!p.a.check(name + ", a", p.batch, p.a_rows(), p.a_transposed ? p.m : p.k)) return;
    if (!p.b.check(name + ", b", p.batch, p.b_rows(), p.b_transposed ? p.k : p.n)) return;
    if (!p.c.check(name + ", c", p.batch, p.m, p.n)) return;
    p.c.type == R_64F ? multiply<double>(p) : multiply<float>(p);
  });
  return CUBLAS_SUCCESS;
}

CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

}  // namespace

API int cublasCreate_v2(Handle** handle) { return *handle = new Handle, CUBLAS_SUCCESS; }
API int cublasDestroy_v2(Handle* handle) { return delete handle, CUBLAS_SUCCESS; }
API int cublasSetStream_v2(Handle* handle, void* stream) { return handle->stream = stream, CUBLAS_SUCCESS; }

API int cublasGemmStridedBatchedEx(Handle* handle, int a_op, int b_op, int m, int n, int k, const void* alpha,
                                   const void* a, int a_type, int lda, int64_t a_stride, const void* b, int b_type,
                                   int ldb, int64_t b_stride, const void* beta, void* c, int c_type, int ldc,
                                   int64_t c_stride, int batch, int compute, int) {
  const auto scalar = [&](const void* from) { return compute == COMPUTE_64F ? read<double>(from) : read<float>(from); };
  return start(handle, {a_op != 0, b_op != 0, m, n, k, batch, scalar(alpha), scalar(beta),
                        {address_of(a), a_type, lda, a_stride},
                        {address_of(b), b_type, ldb, b_stride},
                        {address_of(c), c_type, ldc, c_stride}});
}

API int cublasDgemmStridedBatched(Handle* handle, int a_op, int b_op, int m, int n, int k, const double* alpha,
                                  const void* a, int lda, int64_t a_stride, const void* b, int ldb, int64_t b_stride,
                                  const double* beta, void* c, int ldc, int64_t c_stride, int batch) {
  return cublasGemmStridedBatchedEx(handle, a_op, b_op, m, n, k, alpha, a, R_64F, lda, a_stride, b, R_64F, ldb,
                                    b_stride, beta, c, R_64F, ldc, c_stride, batch, COMPUTE_64F, 0);
}
