// Sums into a buffer: the plain sum, one rounding each.
#include "accumulate.cuh"
#include "op_checks.h"

extern "C" void accumulate(Accumulate);

namespace suite {

using cuda_host::Options;

namespace {

// Elements beyond 2^32, where what is counted in 32 bits begins anew.
std::string wrong_far(const Options& options) {
  constexpr size_t count = (size_t(1) << 32) + 1;
  const FarArray<float> x(count), sum(count);
  x.data[count - 1] = 2, sum.data[count - 1] = 3;
  const Accumulate p = {x.data, sum.data, int64_t(count)};
  launch_last(options, (count - 1) / accumulate_op::threads + 1, accumulate_op::threads, 0, [=] { accumulate(p); });
  return sum.data[count - 1] == 5 ? "" : differs("accumulate, far away", count - 1, sum.data[count - 1], 5);
}

}  // namespace

std::string wrong_accumulate(const Options& options, bool small) {
  for (const size_t count : {size_t(1), size_t(255), size_t(256), size_t(small ? 700 : 20001)}) {
    const std::vector<float> x = floats(count, 1, 1);
    std::vector<float> sum = floats(count, 3, 2), expected(count);
    for (size_t i = 0; i < count; i++) expected[i] = sum[i] + x[i];
    const Accumulate p = {x.data(), sum.data(), int64_t(count)};
    launch_over(options, accumulate, p, count, accumulate_op::threads, accumulate_op::threads);
    if (const std::string wrong = bits("accumulate", sum.data(), expected.data(), count); !wrong.empty()) return wrong;
  }
  return wrong_far(options);
}

}  // namespace suite
