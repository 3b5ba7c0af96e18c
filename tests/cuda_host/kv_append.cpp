// Rows into a cache: every row at its place, nothing beside it, places and rows beyond 2^31 vectors.
#include "kv_append.cuh"

#include "op_checks.h"

extern "C" void kv_append(KvAppend);

namespace suite {

using cuda_host::Options;

namespace {

void append(const Options& options, const KvAppend& p, size_t tokens) {
  cuda_host::launch(options, unsigned(tokens), kv_append_op::threads, 0, [=] { kv_append(p); });
}

std::vector<uint4> vectors(size_t count) {
  std::vector<uint4> x(count);
  for (size_t i = 0; i < count; i++) x[i] = make_uint4(unsigned(i), unsigned(i >> 32), 7, ~unsigned(i));
  return x;
}

std::string wrong_case(const Options& options, size_t tokens, size_t width) {
  const std::vector<uint4> rows = vectors(tokens * width);
  std::vector<int32_t> places(tokens);
  // From the back, every other one.
  for (size_t t = 0; t < tokens; t++) places[t] = int32_t(2 * (tokens - t) - 1);
  std::vector<uint4> cache(2 * tokens * width, make_uint4(1, 2, 3, 4)), expected = cache;
  for (size_t i = 0; i < rows.size(); i++) expected[places[i / width] * width + i % width] = rows[i];
  append(options, {rows.data(), cache.data(), places.data(), int32_t(width)}, tokens);
  return bits("kv_append", cache.data(), expected.data(), cache.size());
}

std::string wrong_far(const Options& options) {
  constexpr size_t width = 1 << 11, token = (1 << 20) + 1;
  const std::vector<uint4> row = vectors(width);
  const FarArray<uint4> far((token + 1) * width);
  std::vector<uint4> near(width);
  const int32_t place = token;
  append(options, {row.data(), far.data, &place, width}, 1);
  if (const std::string wrong = bits("kv_append, a far place", far.data + token * width, row.data(), width); !wrong.empty()) return wrong;
  const FarArray<int32_t> places(token + 1);
  const KvAppend p = {far.data, near.data(), places.data, width};
  launch_last(options, token + 1, kv_append_op::threads, 0, [=] { kv_append(p); });
  return bits("kv_append, a far row", near.data(), row.data(), width);
}

}  // namespace

std::string wrong_kv_append(const Options& options, bool) {
  for (const auto& [tokens, width] : std::vector<std::pair<size_t, size_t>>{{1, 1}, {5, 128}, {3, 129}, {4, 300}})
    if (const std::string wrong = wrong_case(options, tokens, width); !wrong.empty()) return wrong;
  return wrong_far(options);
}

}  // namespace suite
