// cuBLAS and cuBLASLt: what is right works in every mode, and each check fires once.
#include <algorithm>
#include <cmath>

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
    context();
    Device a = floats({1, 2, 3, 4, 5, 6}), b = floats({1, 0, 1, 0, 1, 0}), c = floats({0, 0, 0, 0});
    must(product(a, b, c, 2));
    expect(read(c, 4) == std::vector<float>{6, 8, 3, 4}, "its elements");
    clean({a, b, c}, load());
  });
  refused("a leading dimension too small", "leading dimensions 1, 3, 2", [] { product(floats({1}), floats({1}), floats({1}), 1); });
  refused("a product past the end", "cuBLAS product 2x2x3, batch 1, b, 24 bytes: ", [] {
    product(floats({1, 2, 3, 4, 5, 6}), floats({1, 0, 1, 0, 1}), floats({0, 0, 0, 0}), 2);
  });
}

namespace {

// The product that cuBLASLt is asked for: a weight of 2x3 by 3 numbers of each of so many rows, to bf16 or f32. Its sums are 0 in the
// order of k and 16 where they begin elsewhere, with 20 bits of each.
struct Light {
  struct Proposal {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
  };
  int rows;
  void *handle, *described, *of_weight, *of_x, *of_y, *preference;
  Device weight, x, y;
  Proposal proposals[8];

  explicit Light(int rows, int type = 14, int leading = 2, int k = 3) : rows(rows) {
    must(cublasLtCreate(&handle));
    must(cublasLtMatmulDescCreate(&described, 68, 0));
    must(cublasLtMatrixLayoutCreate(&of_weight, 14, 2, 3, leading));
    must(cublasLtMatrixLayoutCreate(&of_x, 14, k, rows, k));
    must(cublasLtMatrixLayoutCreate(&of_y, type, 2, rows, 2));
    must(cublasLtMatmulPreferenceCreate(&preference));
    const uint32_t alignment = 16;
    for (int key : {5, 6, 7, 8}) must(cublasLtMatmulPreferenceSetAttribute(preference, key, &alignment, sizeof alignment));
    std::vector<uint16_t> numbers;
    for (int i = 0; i < std::max(rows, 1); i++) numbers.insert(numbers.end(), {0x4580, 0x3f80, 0xc580});
    x = halves(numbers);
    weight = halves({0x4580, 0x4580, 0x3f80, 0x3f80, 0x4580, 0x4580});
    y = floats(std::vector<float>(2 * std::max(rows, 1)));
  }
  static Device halves(const std::vector<uint16_t>& values) {
    Device made;
    must(cuMemAlloc_v2(&made, values.size() * 2));
    must(cuMemcpyHtoD_v2(made, values.data(), values.size() * 2));
    return made;
  }
  int set(int attribute, const void* from, size_t bytes) { return cublasLtMatmulDescSetAttribute(described, attribute, from, bytes); }
  int add(Device bias) {
    const int epilogue = 4;
    set(7, &epilogue, sizeof epilogue);
    return set(8, &bias, sizeof bias);
  }
  int propose() {
    int count = 0;
    cublasLtMatmulAlgoGetHeuristic(handle, described, of_weight, of_x, of_y, of_y, preference, 8, proposals, &count);
    return count;
  }
  int multiply(const void* algorithm) {
    const float one = 1, zero = 0;
    return cublasLtMatmul(handle, described, &one, weight, of_weight, x, of_x, &zero, y, of_y, y, of_y, algorithm, nullptr, 0, nullptr);
  }
  // By the algorithm of this number.
  int multiply(int which) {
    must(propose() != 3);
    return multiply(proposals[which].algorithm);
  }
  void end() {
    must(cublasLtMatmulPreferenceDestroy(preference));
    for (void* layout : {of_weight, of_x, of_y}) must(cublasLtMatrixLayoutDestroy(layout));
    must(cublasLtMatmulDescDestroy(described));
    must(cublasLtDestroy(handle));
  }
};

}  // namespace

void test_light_products() {
  const auto sum = [](int rows, int which) {
    Light light(rows, 0);
    must(light.multiply(which));
    const float seen = read(light.y, 1)[0];
    light.end();
    clean({light.weight, light.x, light.y}, load());
    return seen;
  };
  accepted("an algorithm with the order of k at every M", [&] {
    context();
    expect(sum(1, 2) == 0, "one row");
    context();
    expect(sum(1025, 2) == 0, "many rows");
  });
  accepted("an algorithm whose order M chooses", [&] {
    context();
    expect(sum(1, 1) == 16, "one row");
    context();
    expect(sum(3, 1) == 0, "three rows");
  });
  accepted("an algorithm whose order M chooses where it is large", [&] {
    context();
    expect(sum(1, 0) == 0, "one row");
    context();
    expect(sum(1025, 0) == 16, "many rows");
  });
  accepted("every order chosen by M", [&] {
    setenv("CUDA_EMULATOR_CUBLAS", "by-m", 1);
    context();
    expect(sum(1, 2) == 16, "one row of cuBLASLt's");
    context();
    Device a = floats({4096, 4096, 1, 1, 4096, 4096}), b = floats({4096, 1, -4096, 4096, 1, -4096}), c = floats({0, 0, 0, 0});
    must(product(a, b, c, 2));
    expect(read(c, 1)[0] == 1, "two of cuBLAS's");
    clean({a, b, c}, load());
  });
  accepted("a bias, and layouts that end before the launch does", [] {
    context();
    Light light(3, 0);
    Device bias = floats({0.5, -2});
    must(light.add(bias));
    must(light.multiply(2));
    light.end();
    expect(read(light.y, 6) == std::vector<float>{0.5, -2, 0.5, -2, 0.5, -2}, "its elements");
    clean({light.weight, light.x, light.y, bias}, load());
  });
  accepted("no algorithm for operands of which nothing is known", [] {
    context();
    Light light(1);
    void* unknown;
    must(cublasLtMatmulPreferenceCreate(&unknown));
    std::swap(unknown, light.preference);
    const uint32_t little = 2;
    must(cublasLtMatmulPreferenceSetAttribute(light.preference, 5, &little, sizeof little));
    expect(light.propose() == 0, "none");
    must(cublasLtMatmulPreferenceDestroy(unknown));
    light.end();
    clean({light.weight, light.x, light.y}, load());
  });
  refused("an algorithm of no heuristic", "cublasLtMatmul: no algorithm of its heuristic", [] {
    Light light(1);
    const uint64_t other[8] = {};
    light.multiply(other);
  });
  refused("no algorithm", "cublasLtMatmul: no algorithm of its heuristic", [] { Light(1).multiply(nullptr); });
  refused("a weight past the end", "cuBLASLt product 2x1x3 by algorithm 2, a, 12 bytes: ", [] {
    Light light(1);
    light.weight += 16;
    light.multiply(2);
  });
  refused("rows past the end", "cuBLASLt product 2x8x3 by algorithm 2, b, 48 bytes: ", [] {
    Light light(8);
    light.x = Light(1).x;
    light.multiply(2);
  });
  refused("a result past the end", "cuBLASLt product 2x8x3 by algorithm 2, c, 32 bytes: ", [] {
    Light light(8);
    light.y = Light(1).y;
    light.multiply(2);
  });
  refused("a bias past the end", "cuBLASLt product 2x1x3 by algorithm 2, bias, 8 bytes: ", [] {
    Light light(1, 0);
    light.add(floats({1}));
    light.multiply(2);
  });
  refused("a bias that is not there", "cublasLtMatmul: no bias", [] {
    Light light(1, 0);
    light.add(0);
    light.multiply(2);
  });
  refused("a bias to bf16", "types 14, 14, 14, 14 with epilogue 4 are not emulated", [] {
    Light light(1);
    light.add(floats({1, 2}));
    light.propose();
  });
  refused("a misaligned operand", "cublasLtMatmul: an address that is no multiple of 16", [] {
    Light light(8);
    light.x += 6;
    light.multiply(2);
  });
  refused("another type", "types 14, 14, 1, 1 with epilogue 1 are not emulated", [] { Light(1, 1).propose(); });
  refused("a leading dimension too small, of cuBLASLt", "a matrix of 2x3 with leading dimension 1", [] { Light(1, 14, 1).propose(); });
  refused("sizes that do not meet", "2x3 by 4x1 to 2x1", [] { Light(1, 14, 2, 4).propose(); });
  refused("no rows", "a matrix of 3x0 with leading dimension 3", [] { Light(0).propose(); });
  refused("a destroyed layout", "cublasLtMatmulAlgoGetHeuristic: no such object, or it was destroyed", [] {
    Light light(1);
    must(cublasLtMatrixLayoutDestroy(light.of_x));
    light.propose();
  });
  refused("a layout destroyed twice", "cublasLtMatrixLayoutDestroy: no such object, or it was destroyed", [] {
    Light light(1);
    must(cublasLtMatrixLayoutDestroy(light.of_x));
    cublasLtMatrixLayoutDestroy(light.of_x);
  });
  refused("an attribute of a product that is not emulated", "cublasLtMatmulDescSetAttribute: attribute 3 is not emulated", [] {
    const int transposed = 1;
    Light(1).set(3, &transposed, sizeof transposed);
  });
  refused("an attribute of another size", "cublasLtMatmulDescSetAttribute: attribute 7 of 8 bytes, not 4", [] {
    const uint64_t epilogue = 1;
    Light(1).set(7, &epilogue, sizeof epilogue);
  });
  refused("a preference that is not emulated", "cublasLtMatmulPreferenceSetAttribute: attribute 0 is not emulated", [] {
    const int mode = 0;
    cublasLtMatmulPreferenceSetAttribute(Light(1).preference, 0, &mode, sizeof mode);
  });
  refused("sums of another type", "cublasLtMatmulDescCreate: compute type 64, scale type 0 are not emulated", [] {
    void* described;
    cublasLtMatmulDescCreate(&described, 64, 0);
  });
  refused("a call of cuBLASLt that is not emulated", "cublasLtMatrixTransform is not emulated", [] { cublasLtMatrixTransform(); });
}
