// The sink-attention kernels as a host program calls them: problems, tile lists, launches.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "engine.h"
#include "sink_attention.cuh"

namespace suite {

// Every buffer is exactly as long as the kernel may touch, so that AddressSanitizer sees one byte more.
struct Problem {
  std::vector<int> q_lengths, k_lengths;  // tokens a sequence; keys include the queries' own, at their end
  int head_dim = 64;
  int kv_heads = 1, group = 1;            // query heads a key-value head
  int window = 0;
  float scale = 0.125f;
  int kv_padding = 0;                     // unused elements after each key row, NaN; a multiple of 8
  std::vector<float> sinks;               // a query head
  std::vector<bf16> q, dout;              // [tokens, heads, head_dim]
  std::vector<bf16> k, v;                 // key rows of kv_stride() elements
  std::vector<int32_t> page_table;        // [sequences, pages_max]; empty: packed
  int pages_max = 0;

  int heads() const { return kv_heads * group; }
  int sequences() const { return int(q_lengths.size()); }
  int tokens() const { return sum(q_lengths); }
  int keys() const { return sum(k_lengths); }
  int kv_stride() const { return kv_heads * head_dim + kv_padding; }
  // The first element of key `key` of a sequence and head in k and v.
  size_t key_row(int sequence, int key, int head) const {
    size_t row = page_table.empty() ? first(k_lengths, sequence) + key
                                    : size_t(page_table[sequence * pages_max + key / 64]) * 64 + key % 64;
    return row * kv_stride() + head * head_dim;
  }
  static int sum(const std::vector<int>& lengths) { return first(lengths, int(lengths.size())); }
  static int first(const std::vector<int>& lengths, int sequence) {
    int total = 0;
    for (int i = 0; i < sequence; i++) total += lengths[i];
    return total;
  }
};

struct Results {
  std::vector<bf16> out;
  std::vector<float> lse, delta;
  std::vector<bf16> dq, dk, dv;  // dk and dv laid out as k and v
  std::vector<float> dsinks;
};

// One family of kernels that does the whole op.
struct Kernel {
  const char* name;
  void (*run)(SinkAttention);
  int threads;
  size_t shared_bytes;
};
struct Family {
  const char* name;
  int head_dim;
  Kernel forward;
  Kernel chunk, merge;  // the forward, spread
  Kernel delta, dkv;
  int dkv_keys;  // keys of a tile
  Kernel dq, dsinks;
};
const std::vector<Family>& families();

// Puts a small problem at large offsets, in memory that is addressed but not there.
struct Far {
  int tokens = 0;           // before the first of the problem's
  int keys = 0;             // key rows before the first; a multiple of 64
  int kv_token_stride = 0;  // in the place of the problem's
};

// Fills out and lse.
void forward(const cuda_host::Options& options, const Family& family, const Problem& problem, Results& results,
             Far far = {});
// The same by a block a chunk of keys and a merge; `together`: how many chunks a launch, whatever the order.
void forward_spread(const cuda_host::Options& options, const Family& family, const Problem& problem, Results& results,
                    int together);
// Fills the rest from out and lse. Far away, delta is read, and dsinks left out: both walk all tokens.
void backward(const cuda_host::Options& options, const Family& family, const Problem& problem, Results& results,
              Far far = {});

// What the kernels' arithmetic of places gets wrong at sizes that no problem here reaches; empty when nothing.
std::string wrong_place();

}  // namespace suite
