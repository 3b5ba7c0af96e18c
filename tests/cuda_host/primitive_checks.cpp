// What the host twins say to kernels/primitive_checks.cu, as the file that gpu_check compares a GPU with.
//   primitive_checks FILE            the twins and FILE must agree
//   primitive_checks --write FILE    writes it anew
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "engine.h"

#include "../../kernels/primitive_checks.cu"

namespace {

constexpr int INPUT_WORDS = 1021;  // a prime: threads a power of two apart do not see the same words

struct Check {
  const char* name;
  void (*kernel)(const CheckBuffers);
  int blocks, threads, words;  // words a thread
  // exact: bit for bit. relative, absolute: within 2^-21 of the number, or of the larger of it and 1; so much may ex2
  // and lg2 be off.
  const char* rule;
};

#define CHECK(name, blocks, threads, words, rule) {#name, name, blocks, threads, words, rule}
const Check CHECKS[] = {
    CHECK(check_conversions, 2, 64, 5, "exact"),
    CHECK(check_arithmetic, 2, 64, 6, "exact"),
    CHECK(check_bf16_pairs, 2, 64, 4, "exact"),
    CHECK(check_exp2, 1, 128, 4, "relative"),
    CHECK(check_log2, 1, 128, 2, "absolute"),
    CHECK(check_shuffles, 1, 64, 9, "exact"),
    CHECK(check_barriers, 1, 128, 4, "exact"),
    CHECK(check_copies, 1, 96, 8, "exact"),
    CHECK(check_ldmatrix, 1, 64, 8, "exact"),
    CHECK(check_mma, 1, 128, 4, "exact"),
    CHECK(check_swizzle, 1, 256, 1, "exact"),
    CHECK(check_wgmma_k_k, 1, 256, 4, "exact"),
    CHECK(check_wgmma_k_mn, 1, 128, 4, "exact"),
    CHECK(check_wgmma_mn_k, 1, 128, 4, "exact"),
    CHECK(check_wgmma_mn_mn, 1, 128, 4, "exact"),
    CHECK(check_wgmma_registers_k, 1, 128, 4, "exact"),
    CHECK(check_wgmma_registers_mn, 1, 256, 4, "exact"),
    CHECK(check_mbarriers, 1, 96, 7, "exact"),
    CHECK(check_setmaxnreg, 1, 384, 1, "exact"),
    CHECK(check_shared_alignment, 1, 32, 1, "exact"),
};

void write_words(std::ostream& out, const std::vector<uint32_t>& words) {
  char text[16];
  for (size_t i = 0; i < words.size(); i++) {
    snprintf(text, sizeof text, "%08" PRIx32 "%c", words[i], i % 12 == 11 || i + 1 == words.size() ? '\n' : ' ');
    out << text;
  }
}

// The products of single instructions on whole numbers: the frame that gpu_check's facts rest on.
struct Products {
  void (*kernel)(const CheckBuffers);
  int rows, columns, threads, results;
};
const Products PRODUCTS[] = {
    {check_product_mma, 16, 8, 32, 1},
    {check_product_wgmma, 64, 64, 128, 1},
    {check_product_shapes, 64, 256, 128, 8},
};

bool products_are_right() {
  bool right = true;
  for (const auto& [kernel, rows, columns, threads, results] : PRODUCTS) {
    const int elements = rows * columns;
    std::vector<uint32_t> input(8 * rows + 8 * columns + elements), output(results * elements);
    const auto element = [&](int at) { return float(at * 7 % 11 - 5); };
    for (int at = 0; at < 8 * (rows + columns); at++)
      input[at] = pack_bf16(element(2 * at), element(2 * at + 1));
    for (int at = 0; at < elements; at++) input[8 * (rows + columns) + at] = __float_as_uint(float(at));
    const CheckBuffers buffers{input.data(), output.data(), int(input.size()), int(output.size())};
    cuda_host::launch({}, 1, threads, 48 << 10, [&, kernel = kernel] { kernel(buffers); });
    for (int at = 0; at < results * elements; at++) {
      const int row = at % elements / columns, column = at % columns;
      float expected = float(at % elements);
      for (int k = 0; k < 16; k++) expected += element(16 * row + k) * element(16 * (rows + column) + k);
      right &= output[at] == __float_as_uint(expected);
    }
  }
  return right;
}

}  // namespace

int main(int count, char** arguments) {
  const bool write = count == 3 && !strcmp(arguments[1], "--write");
  if (count != 2 && !write) {
    fprintf(stderr, "usage: primitive_checks [--write] FILE\n");
    return 2;
  }
  const char* path = arguments[count - 1];
  std::vector<uint32_t> input(INPUT_WORDS);
  for (int i = 0; i < INPUT_WORDS; i++) {
    uint32_t x = i * 0x9e3779b9u + 0x7f4a7c15u;
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    input[i] = x ^ x >> 16;
  }
  std::ostringstream text;
  text << "# What the host twins of primitives.cuh give for primitive_checks.cu. Written by tests/cuda_host/primitive_checks.\n"
          "# input WORDS, then: kernel, blocks, threads of a block, words written, rule of comparison\n"
       << "input " << INPUT_WORDS << "\n";
  write_words(text, input);
  for (const Check& check : CHECKS) {
    std::vector<uint32_t> output(check.blocks * check.threads * check.words, 0xffffffffu);
    const CheckBuffers buffers{input.data(), output.data(), INPUT_WORDS, int(output.size())};
    try {
      cuda_host::launch({}, check.blocks, check.threads, 48 << 10, [&] { check.kernel(buffers); });
    } catch (const cuda_host::KernelError& error) {
      printf("%s: %s\n", check.name, error.what());
      return 1;
    }
    text << check.name << ' ' << check.blocks << ' ' << check.threads << ' ' << output.size() << ' ' << check.rule << '\n';
    write_words(text, output);
  }
  if (!products_are_right()) {
    printf("a kernel check_product_...: wrong\n");
    return 1;
  }
  if (write) {
    std::ofstream(path) << text.str();
    return 0;
  }
  std::ifstream file(path);
  const std::string expected((std::istreambuf_iterator<char>(file)), {});
  if (expected != text.str()) {
    printf("%s is not what the host twins give: see the difference after primitive_checks --write %s\n", path, path);
    return 1;
  }
  printf("primitive checks: %zu kernels agree with %s\n", std::size(CHECKS), path);
  return 0;
}
