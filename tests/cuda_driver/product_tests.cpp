// cuBLAS: what is right works in every mode, and each check fires once.
#include "driver_test.h"

namespace {

// 2x3 by 3x2, column by column.
int product(Device a, Device b, Device c, int lda) {
  void* blas;
  must(cublasCreate_v2(&blas));
  const float one = 1, zero = 0;
  return cublasGemmStridedBatchedEx(blas, 0, 0, 2, 2, 3, &one, reinterpret_cast<void*>(a), 0, lda, 0, reinterpret_cast<void*>(b), 0,
                                    3, 0, &zero, reinterpret_cast<void*>(c), 0, 2, 0, 1, 68, 0);
}

}  // namespace

void test_products() {
  accepted("a product", [] {
    Session s(NO_MODULE);
    Device a = s.floats({1, 2, 3, 4, 5, 6}), b = s.floats({1, 0, 1, 0, 1, 0}), c = s.floats({0, 0, 0, 0});
    must(product(a, b, c, 2));
    expect(read(c, 4) == std::vector<float>{6, 8, 3, 4}, "its elements");
  });
  refused("a leading dimension too small", "leading dimensions 1, 3, 2", [] { product(floats({1}), floats({1}), floats({1}), 1); });
  refused("a product past the end", "cuBLAS product 2x2x3, batch 1, b, 24 bytes: ", [] {
    product(floats({1, 2, 3, 4, 5, 6}), floats({1, 0, 1, 0, 1}), floats({0, 0, 0, 0}), 2);
  });
}
