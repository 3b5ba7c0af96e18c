// cuBLAS, as far as candle uses it.
#include <algorithm>
#include <cstdio>

#include "products.h"

using namespace cuda_driver;

namespace {

constexpr int COMPUTE_64F = 70;

struct Handle {
  void* stream = nullptr;
};

int start(Handle* handle, Product p) {
  p.by_m = all_by_m();
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
  enqueue_product(stream, text, p);
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
