#include "attention.h"

// The kernels, each compiled from its own .cu.
extern "C" {
void sink_attention_forward(SinkAttention);
void sink_attention_delta(SinkAttention);
void sink_attention_dkv(SinkAttention);
void sink_attention_dq(SinkAttention);
void sink_attention_dsinks(SinkAttention);
void sink_attention_forward_hopper(SinkAttention);
void sink_attention_dkv_hopper(SinkAttention);
void sink_attention_dq_hopper(SinkAttention);
}

namespace suite {

using cuda_host::KernelError, cuda_host::launch, cuda_host::Options;
namespace op = sink_attention;

const std::vector<Family>& families() {
  static const Kernel delta = {"delta", sink_attention_delta, op::delta_threads, 0};
  static const Kernel dsinks = {"dsinks", sink_attention_dsinks, op::dsinks_threads, op::dsinks_shared_bytes};
  static const std::vector<Family> all = {
      {"mma",
       {"forward", sink_attention_forward, op::forward_threads, op::forward_shared_bytes},
       delta,
       {"dkv", sink_attention_dkv, op::dkv_threads, op::dkv_shared_bytes},
       op::block_keys,
       {"dq", sink_attention_dq, op::dq_threads, op::dq_shared_bytes},
       dsinks},
      {"hopper",
       {"forward_hopper", sink_attention_forward_hopper, op::forward_hopper_threads, op::forward_hopper_shared_bytes},
       delta,
       {"dkv_hopper", sink_attention_dkv_hopper, op::dkv_hopper_threads, op::dkv_hopper_shared_bytes},
       op::dkv_hopper_keys,
       {"dq_hopper", sink_attention_dq_hopper, op::dq_hopper_threads, op::dq_hopper_shared_bytes},
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

std::vector<int32_t> running_sum(const std::vector<int>& lengths) {
  std::vector<int32_t> sums{0};
  for (int length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

// A problem's buffers behind the kernels' one parameter.
struct Call {
  const Options& options;
  const Problem& problem;
  std::vector<int32_t> cu_q, cu_k;
  std::vector<Tile> row_tiles, key_tiles;
  SinkAttention p{};

  Call(const Options& options, const Family& family, const Problem& problem, Results& results)
      : options(options), problem(problem), cu_q(running_sum(problem.q_lengths)), cu_k(running_sum(problem.k_lengths)) {
    std::vector<int> rows = problem.q_lengths;
    for (int& length : rows) length *= problem.group;
    row_tiles = tiles_of(rows, op::tile_rows);
    key_tiles = tiles_of(problem.k_lengths, family.dkv_keys);
    p.q = problem.q.data();
    p.k = problem.k.data();
    p.v = problem.v.data();
    p.sinks = problem.sinks.data();
    p.cu_seqlens_q = cu_q.data();
    p.cu_seqlens_k = cu_k.data();
    p.page_table = problem.page_table.empty() ? nullptr : problem.page_table.data();
    p.out = results.out.data();
    p.lse = results.lse.data();
    p.dout = problem.dout.data();
    p.delta = results.delta.data();
    p.dq = results.dq.data();
    p.dk = results.dk.data();
    p.dv = results.dv.data();
    p.dsinks = results.dsinks.data();
    p.tokens = problem.tokens();
    p.heads = problem.heads();
    p.kv_heads = problem.kv_heads;
    p.kv_token_stride = problem.kv_stride();
    p.kv_head_stride = 64;
    p.pages_max = problem.pages_max;
    p.window = problem.window;
    p.scale = problem.scale;
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

}  // namespace

void forward(const Options& options, const Family& family, const Problem& problem, Results& results) {
  results = Results();
  results.out.assign(problem.q.size(), bf16{NAN_BITS});
  results.lse.assign(size_t(problem.tokens()) * problem.heads(), NAN);
  Call call(options, family, problem, results);
  call.run(family.forward, call.row_tiles.size() * problem.kv_heads, &call.row_tiles);
}

void backward(const Options& options, const Family& family, const Problem& problem, Results& results) {
  results.delta.assign(results.lse.size(), NAN);
  results.dq.assign(problem.q.size(), bf16{NAN_BITS});
  results.dk.assign(problem.k.size(), bf16{NAN_BITS});
  results.dv.assign(problem.v.size(), bf16{NAN_BITS});
  results.dsinks.assign(problem.heads(), NAN);
  Call call(options, family, problem, results);
  call.run(family.delta, (results.delta.size() + op::delta_rows - 1) / op::delta_rows, nullptr);
  call.run(family.dkv, call.key_tiles.size() * problem.kv_heads, &call.key_tiles);
  call.run(family.dq, call.row_tiles.size() * problem.kv_heads, &call.row_tiles);
  call.run(family.dsinks, problem.heads(), nullptr);
}

}  // namespace suite
