// The checks of the ops other than attention, by family, and what they share.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <sys/mman.h>

#include "engine.h"
#include "primitives.cuh"

namespace suite {

// Kernels that are checked together: the suite's argument, and what bug.sh takes a kernel's file for.
struct OpFamily {
  const char* name;
  // What is wrong first, or nothing.
  std::string (*wrong)(const cuda_host::Options& options, bool small);
};
extern const std::vector<OpFamily> OP_FAMILIES;

// Times the largest error that rounding to bf16 makes of a value; in f32 sums some roundings of f32.
constexpr double WORSE_THAN_BF16_MAX = 2, SUM_ERROR_MAX = 2e-6;
constexpr double BF16_ROUNDING = 1.0 / 256;

// Normal numbers of this size, as bf16 holds them; the same ones in f32.
std::vector<bf16> numbers(size_t count, double size, unsigned seed);
std::vector<float> floats(size_t count, double size, unsigned seed);

// An array of which only what is touched is in memory: for indices beyond 2^31.
template <class T>
struct FarArray {
  size_t bytes;
  T* data;
  explicit FarArray(size_t count)
      : bytes(count * sizeof(T)),
        data(static_cast<T*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
    if (data == MAP_FAILED) throw cuda_host::KernelError("no address space for " + std::to_string(bytes) + " bytes");
  }
  ~FarArray() { munmap(data, bytes); }
  FarArray(const FarArray&) = delete;
};

// The same on another schedule.
cuda_host::Options newest_first(cuda_host::Options options);

// Launches a kernel over `count` elements, of which a block takes `each`.
template <class P>
void launch_over(const cuda_host::Options& options, void (*kernel)(P), const P& p, size_t count, size_t each, unsigned threads) {
  cuda_host::launch(options, unsigned((count + each - 1) / each), threads, 0, [=] { kernel(p); });
}

// Runs a grid's last block alone: for indices that only millions of blocks reach.
void launch_last(cuda_host::Options options, uint64_t blocks, unsigned threads, size_t shared_bytes, const std::function<void()>& body);

std::string differs(const char* what, size_t at, double got, double exact);

// `got` is `exact` rounded to bf16, give or take; `floor`: what the terms of a sum may leave, of their size.
std::string off(const char* what, const std::vector<bf16>& got, const std::vector<double>& exact, double floor = 1e-6);

// `got` is `exact` up to `error` of `terms`, the sum of its terms' sizes.
std::string off_sum(const char* what, const std::vector<float>& got, const std::vector<double>& exact,
                    const std::vector<double>& terms, double error = SUM_ERROR_MAX);

template <class T>
std::string bits(const char* what, const T* got, const T* expected, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (memcmp(&got[i], &expected[i], sizeof(T))) return std::string(what) + ": element " + std::to_string(i) + " has other bits";
  return "";
}

}  // namespace suite
