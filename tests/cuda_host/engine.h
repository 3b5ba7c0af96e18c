// Runs a kernel on the CPU, thread for thread: every CUDA thread is a fibre, blocks are shared out over OS threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>

#include "language.h"

namespace cuda_host {

// Which of the threads that can run goes next.
enum class Schedule {
  up,            // in the order in which they became able to
  shuffled,      // drawn from `seed`
  newest_first,  // the last that became able to: each warp runs as far ahead of the others as it can
};

// How a tensor core adds products to an accumulator.
enum class TensorCore {
  chain,   // one fused multiply-add after the other
  hopper,  // exact products and accumulator aligned to the largest exponent, truncated, summed, rounded toward zero
  hashed,  // the chain's result with its last bits drawn from the non-zero products, their places and the accumulator
};

struct Options {
  Schedule schedule = Schedule::up;
  TensorCore tensor_core = TensorCore::chain;
  uint64_t seed = 1;
  int workers = 2;  // OS threads
};

constexpr size_t SHARED_BYTES_MAX = 227 << 10;  // a block's, on sm_90

// A rule of the machine was broken; names the block and the thread.
struct KernelError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs `body` once a thread. Throws the first block's KernelError.
void launch(const Options& options, dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body);

// A map for tma_load: `rank` 3 or 4, first dimension fastest and packed, 2-byte elements.
void tensor_map(uint64_t opaque[16], int rank, const void* base, const uint32_t* sizes, const uint64_t* strides_bytes,
                const uint32_t* box);

}  // namespace cuda_host
