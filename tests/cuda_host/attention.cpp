#include "attention.h"

#include <memory>

#include "op_checks.h"
#include "sink_attention_gradients.cuh"

// The kernels, each compiled from its own .cu.
extern "C" {
void sink_attention_forward(SinkAttention);
void sink_attention_chunk(SinkAttention);
void sink_attention_merge(SinkAttention);
void sink_attention_delta(SinkAttention);
void sink_attention_dkv(SinkAttention);
void sink_attention_dq(SinkAttention);
void sink_attention_dsinks(SinkAttention);
void sink_attention_forward_hopper(SinkAttention);
void sink_attention_chunk_hopper(SinkAttention);
void sink_attention_dkv_hopper(SinkAttention);
void sink_attention_dq_hopper(SinkAttention);
void sink_attention_forward_128(SinkAttention);
void sink_attention_chunk_128(SinkAttention);
void sink_attention_merge_128(SinkAttention);
void sink_attention_delta_128(SinkAttention);
void sink_attention_dkv_128(SinkAttention);
void sink_attention_dq_128(SinkAttention);
void sink_attention_forward_hopper_128(SinkAttention);
void sink_attention_chunk_hopper_128(SinkAttention);
void sink_attention_dkv_hopper_128(SinkAttention);
void sink_attention_dq_hopper_128(SinkAttention);
}

namespace suite {

using cuda_host::KernelError, cuda_host::launch, cuda_host::Options;
namespace op = sink_attention;

const std::vector<Family>& families() {
  static const Kernel delta = {"delta", sink_attention_delta, op::delta_threads, 0};
  static const Kernel merge = {"merge", sink_attention_merge, op::merge_threads, 0};
  static const Kernel delta_128 = {"delta_128", sink_attention_delta_128, op::delta_128_threads, 0};
  static const Kernel merge_128 = {"merge_128", sink_attention_merge_128, op::merge_128_threads, 0};
  static const Kernel dsinks = {"dsinks", sink_attention_dsinks, op::dsinks_threads, op::dsinks_shared_bytes};
  static const std::vector<Family> all = {
      {"mma",
       64,
       {"forward", sink_attention_forward, op::forward_threads, op::forward_shared_bytes},
       {"chunk", sink_attention_chunk, op::chunk_threads, op::chunk_shared_bytes},
       merge,
       delta,
       {"dkv", sink_attention_dkv, op::dkv_threads, op::dkv_shared_bytes},
       op::block_keys,
       {"dq", sink_attention_dq, op::dq_threads, op::dq_shared_bytes},
       dsinks},
      {"hopper",
       64,
       {"forward_hopper", sink_attention_forward_hopper, op::forward_hopper_threads, op::forward_hopper_shared_bytes},
       {"chunk_hopper", sink_attention_chunk_hopper, op::chunk_hopper_threads, op::chunk_hopper_shared_bytes},
       merge,
       delta,
       {"dkv_hopper", sink_attention_dkv_hopper, op::dkv_hopper_threads, op::dkv_hopper_shared_bytes},
       op::dkv_hopper_tile_keys<1>,
       {"dq_hopper", sink_attention_dq_hopper, op::dq_hopper_threads, op::dq_hopper_shared_bytes},
       dsinks},
      {"mma_128",
       128,
       {"forward_128", sink_attention_forward_128, op::forward_128_threads, op::forward_128_shared_bytes},
       {"chunk_128", sink_attention_chunk_128, op::chunk_128_threads, op::chunk_128_shared_bytes},
       merge_128,
       delta_128,
       {"dkv_128", sink_attention_dkv_128, op::dkv_128_threads, op::dkv_128_shared_bytes},
       op::block_keys,
       {"dq_128", sink_attention_dq_128, op::dq_128_threads, op::dq_128_shared_bytes},
       dsinks},
      {"hopper_128",
       128,
       {"forward_hopper_128", sink_attention_forward_hopper_128, op::forward_hopper_128_threads,
        op::forward_hopper_128_shared_bytes},
       {"chunk_hopper_128", sink_attention_chunk_hopper_128, op::chunk_hopper_128_threads,
        op::chunk_hopper_128_shared_bytes},
       merge_128,
       delta_128,
       {"dkv_hopper_128", sink_attention_dkv_hopper_128, op::dkv_hopper_128_threads, op::dkv_hopper_128_shared_bytes},
       op::dkv_hopper_tile_keys<2>,
       {"dq_hopper_128", sink_attention_dq_hopper_128, op::dq_hopper_128_threads, op::dq_hopper_128_shared_bytes},
       dsinks},
  };
  return all;
}

namespace {

constexpr uint16_t NAN_BITS = 0xffff;

// The tiles of every sequence, those with the most keys before them first.
std::vector<Tile> tiles_of(const std::vector<int>& lengths, int step) {
  std::vector<Tile> tiles;
  for (size_t sequence = 0; sequence < lengths.size(); sequence++)
    for (int first = 0; first < lengths[sequence]; first += step) tiles.push_back({int(sequence), first});
  std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) { return a.first > b.first; });
  return tiles;
}

std::vector<int32_t> running_sum(int first, const std::vector<int>& lengths) {
  std::vector<int32_t> sums{first};
  for (int length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

// A problem's key rows, far apart.
struct FarKeys {
  size_t rows, width, stride;
  FarArray<bf16> k, v, dk, dv;

  FarKeys(const Problem& problem, size_t stride)
      : rows(problem.keys()), width(problem.kv_stride()), stride(stride), k(rows * stride), v(rows * stride),
        dk(rows * stride), dv(rows * stride) {
    for (size_t row = 0; row < rows; row++) {
      std::copy_n(&problem.k[row * width], width, k.data + row * stride);
      std::copy_n(&problem.v[row * width], width, v.data + row * stride);
    }
  }
  void copy_back(const Problem& problem, Results& results) const {
    for (size_t row = 0; row < rows; row++) {
      std::copy_n(dk.data + row * stride, problem.kv_heads * problem.head_dim, &results.dk[row * width]);
      std::copy_n(dv.data + row * stride, problem.kv_heads * problem.head_dim, &results.dv[row * width]);
    }
  }
};

// A problem's buffers behind the kernels' one parameter.
struct Call {
  const Options& options;
  const Problem& problem;
  std::vector<int32_t> cu_q, cu_k;
  std::vector<int32_t> pages;
  std::vector<Tile> row_tiles, key_tiles;
  std::unique_ptr<FarKeys> far;
  SinkAttention p{};

  Call(const Options& options, const Family& family, const Problem& problem, Results& results, Far far)
      : options(options), problem(problem), cu_q(running_sum(far.tokens, problem.q_lengths)),
        cu_k(running_sum(far.keys, problem.k_lengths)), pages(problem.page_table) {
    // The first of the far rows is the first that a buffer holds.
    const int64_t q_rows = int64_t(far.tokens) * problem.heads();
    const int64_t kv_stride = far.kv_token_stride ? far.kv_token_stride : problem.kv_stride();
    const int64_t kv_start = far.keys * kv_stride;
    for (int32_t& page : pages)
      if (page >= 0) page += far.keys / 64;
    std::vector<int> rows = problem.q_lengths;
    for (int& length : rows) length *= problem.group;
    row_tiles = tiles_of(rows, op::tile_rows);
    key_tiles = tiles_of(problem.k_lengths, family.dkv_keys);
    p.q = problem.q.data() - q_rows * problem.head_dim;
    p.k = problem.k.data() - kv_start;
    p.v = problem.v.data() - kv_start;
    p.sinks = problem.sinks.data();
    p.cu_seqlens_q = cu_q.data();
    p.cu_seqlens_k = cu_k.data();
    p.page_table = pages.empty() ? nullptr : pages.data();
    p.out = results.out.data() - q_rows * problem.head_dim;
    p.lse = results.lse.data() - q_rows;
    p.dout = problem.dout.data() - q_rows * problem.head_dim;
    p.delta = results.delta.data() - q_rows;
    p.dq = results.dq.data() - q_rows * problem.head_dim;
    p.dk = results.dk.data() - kv_start;
    p.dv = results.dv.data() - kv_start;
    p.dsinks = results.dsinks.data();
    p.tokens = problem.tokens();
    p.heads = problem.heads();
    p.kv_heads = problem.kv_heads;
    if (far.kv_token_stride) {
      this->far = std::make_unique<FarKeys>(problem, kv_stride);
      p.k = this->far->k.data - kv_start;
      p.v = this->far->v.data - kv_start;
      p.dk = this->far->dk.data - kv_start;
      p.dv = this->far->dv.data - kv_start;
    }
    p.kv_token_stride = int32_t(kv_stride);
    p.kv_head_stride = problem.head_dim;
    p.pages_max = problem.pages_max;
    p.window = problem.window;
    p.scale = problem.scale;
    p.scale_log2 = problem.scale * op::log2_e;
  }

  void run(const Kernel& kernel, size_t blocks, const std::vector<Tile>* tiles) {
    if (blocks == 0) return;
    SinkAttention parameter = p;
    parameter.tiles = tiles ? tiles->data() : nullptr;
    try {
      launch(options, unsigned(blocks), kernel.threads, kernel.shared_bytes, [&] { kernel.run(parameter); });
    } catch (const KernelError& error) {
      throw KernelError(std::string(kernel.name) + ": " + error.what());
    }
  }
};

void clear(const Problem& problem, Results& results) {
  results = Results();
  results.out.assign(problem.q.size(), bf16{NAN_BITS});
  results.lse.assign(size_t(problem.tokens()) * problem.heads(), NAN);
}

}  // namespace

std::string wrong_place() {
  std::string wrong;
  const auto expect = [&](int64_t got, int64_t expected, const char* what, int64_t at) {
    if (got != expected && wrong.empty())
      wrong = std::string(what) + " " + std::to_string(at) + " is " + std::to_string(got) + ", not " +
              std::to_string(expected);
  };
  for (int group = 1; group <= 16; group++) {
    const int tokens = int((int64_t(1) << 31) / (group * group)) - 1;
    // The last of all tokens that a 32-bit count holds.
    const int first = 0x7fffffff - tokens;
    const int32_t cu_q[] = {first, 0x7fffffff}, cu_k[] = {first, 0x7fffffff};
    SinkAttention p{};
    p.heads = 4 * group;
    p.kv_heads = 4;
    p.cu_seqlens_q = cu_q;
    p.cu_seqlens_k = cu_k;
    p.kv_token_stride = 1 << 20;
    p.kv_head_stride = 1 << 30;
    const op::Sequence s(p, 0, 3);
    for (int start : {0, 32767 / group, 65535 / group, tokens / 3, tokens - 3})
      for (int token = start; token < start + 3; token++)
        for (int member = 0; member < group; member++) {
          const int row = token * group + member;
          expect(s.token(row), token, "the token of row", row);
          expect(s.head(row), 3 * group + member, "the head of row", row);
          expect(s.place(p, row), (int64_t(first) + token) * p.heads + 3 * group + member, "the place of row", row);
        }
    expect(op::key_place(p, 1 << 26, 3), (int64_t(1) << 46) + (int64_t(3) << 30), "the place of key", 1 << 26);
  }
  const int block = 1 << 27;
  expect(op::delta_row<1>(block, 255), int64_t(block) * op::delta_rows + 31, "the last row of delta's block", block);
  expect(op::delta_row<2>(block, 511), int64_t(block) * op::delta_rows + 31, "the last row of delta_128's block", block);
  return wrong;
}

void forward(const Options& options, const Family& family, const Problem& problem, Results& results, Far far) {
  clear(problem, results);
  Call call(options, family, problem, results, far);
  call.run(family.forward, call.row_tiles.size() * problem.kv_heads, &call.row_tiles);
}

void forward_spread(const Options& options, const Family& family, const Problem& problem, Results& results,
                    int together) {
  clear(problem, results);
  Call call(options, family, problem, results, {});
  std::vector<ChunkTile> chunk_tiles;
  for (const Tile& tile : call.row_tiles) {
    const int queries = problem.q_lengths[tile.sequence], keys = problem.k_lengths[tile.sequence];
    const int last_row = std::min(tile.first + op::tile_rows, queries * problem.group) - 1;
    const int first = keys - queries + tile.first / problem.group, last = keys - queries + last_row / problem.group;
    const int key_first = problem.window ? std::max(0, first + 1 - problem.window) : 0;
    for (int chunk = key_first / op::chunk_keys; chunk * op::chunk_keys <= last; chunk++)
      chunk_tiles.push_back({tile, chunk});
  }
  std::reverse(chunk_tiles.begin(), chunk_tiles.end());
  std::vector<int32_t> part_starts{0};
  for (int i = 0; i < problem.sequences(); i++) {
    const int chunks = (problem.k_lengths[i] + op::chunk_keys - 1) / op::chunk_keys;
    part_starts.push_back(part_starts.back() + problem.q_lengths[i] * chunks);
  }
  const size_t parts = size_t(part_starts.back()) * problem.heads();
  std::vector<float4> part_out(parts * problem.head_dim / 4, float4{NAN, NAN, NAN, NAN});
  std::vector<float2> part_sums(parts * 4, float2{NAN, NAN});
  call.p.part_starts = part_starts.data();
  call.p.part_out = reinterpret_cast<float*>(part_out.data());
  call.p.part_sums = part_sums.data();
  for (size_t i = 0; i < chunk_tiles.size(); i += together) {
    call.p.chunk_tiles = chunk_tiles.data() + i;
    call.run(family.chunk, std::min<size_t>(together, chunk_tiles.size() - i) * problem.kv_heads, nullptr);
  }
  call.run(family.merge, call.row_tiles.size() * problem.kv_heads, &call.row_tiles);
}

void backward(const Options& options, const Family& family, const Problem& problem, Results& results, Far far) {
  if (far.tokens == 0) results.delta.assign(results.lse.size(), NAN);
  results.dq.assign(problem.q.size(), bf16{NAN_BITS});
  results.dk.assign(problem.k.size(), bf16{NAN_BITS});
  results.dv.assign(problem.v.size(), bf16{NAN_BITS});
  results.dsinks.assign(problem.heads(), NAN);
  Call call(options, family, problem, results, far);
  if (far.tokens == 0) {
    call.run(family.delta, (results.delta.size() + op::delta_rows - 1) / op::delta_rows, nullptr);
    call.run(family.dsinks, problem.heads(), nullptr);
  }
  call.run(family.dkv, call.key_tiles.size() * problem.kv_heads, &call.key_tiles);
  call.run(family.dq, call.row_tiles.size() * problem.kv_heads, &call.row_tiles);
  if (call.far) call.far->copy_back(problem, results);
}

}  // namespace suite
