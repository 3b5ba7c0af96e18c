#include "cases.h"

#include <cmath>

namespace suite {

namespace {

constexpr bf16 NOTHING = {0xffff};  // NaN

struct Random {
  uint64_t state;
  double uniform() {
    uint64_t x = state += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return double((x ^ (x >> 31)) >> 11) * 0x1p-53;
  }
  float normal() { return float(std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform())); }
  std::vector<bf16> normals(size_t count, float size) {
    std::vector<bf16> all(count);
    for (bf16& x : all) x = to_bf16(normal() * size);
    return all;
  }
};

// Pages of 64 keys for every sequence, in scrambled order, with unused ones between.
void make_pages(Problem& problem, const std::vector<int>& k_lengths) {
  int pages = 0;
  for (int length : k_lengths) problem.pages_max = std::max(problem.pages_max, (length + 63) / 64);
  for (int length : k_lengths)
    for (int page = 0; page < problem.pages_max; page++)
      problem.page_table.push_back(page < (length + 63) / 64 ? 2 * pages++ + 1 : -1);
  // An odd place for each: reversed.
  for (int32_t& page : problem.page_table)
    if (page >= 0) page = 2 * pages - page;
  problem.k.assign(size_t(2 * pages + 1) * 64 * problem.kv_stride(), NOTHING);
  problem.v = problem.k;
}

void copy_key(Problem& to, const Problem& from, int to_sequence, int from_sequence, int key) {
  for (int head = 0; head < from.kv_heads; head++)
    for (int i = 0; i < from.head_dim; i++) {
      const size_t source = from.key_row(from_sequence, key, head) + i, target = to.key_row(to_sequence, key, head) + i;
      to.k[target] = from.k[source];
      to.v[target] = from.v[source];
    }
}

Problem without_keys(const Problem& problem) {
  Problem copy;
  copy.head_dim = problem.head_dim;
  copy.kv_heads = problem.kv_heads;
  copy.group = problem.group;
  copy.window = problem.window;
  copy.scale = problem.scale;
  copy.kv_padding = problem.kv_padding;
  copy.sinks = problem.sinks;
  return copy;
}

}  // namespace

Problem make(const Shape& shape, int head_dim, uint64_t seed) {
  Random random{seed * 1000003};
  Problem problem;
  problem.q_lengths = shape.q_lengths;
  problem.k_lengths = shape.k_lengths.empty() ? shape.q_lengths : shape.k_lengths;
  problem.head_dim = head_dim;
  problem.scale = float(1 / std::sqrt(double(head_dim)));
  problem.kv_heads = shape.kv_heads;
  problem.group = shape.group;
  problem.window = shape.window;
  problem.kv_padding = shape.kv_padding;
  for (int head = 0; head < problem.heads(); head++) problem.sinks.push_back(shape.sinks[head % shape.sinks.size()]);
  const size_t elements = size_t(problem.tokens()) * problem.heads() * head_dim;
  problem.q = random.normals(elements, shape.score_size);  // with this scale a score is of this size
  problem.dout = random.normals(elements, 1);

  // Packed first; keys of a paged cache are copied to their pages.
  problem.k.assign(size_t(problem.keys()) * problem.kv_stride(), NOTHING);
  problem.v = problem.k;
  for (int row = 0; row < problem.keys(); row++)
    for (int i = 0; i < problem.kv_heads * head_dim; i++) {
      problem.k[size_t(row) * problem.kv_stride() + i] = to_bf16(random.normal());
      problem.v[size_t(row) * problem.kv_stride() + i] = to_bf16(random.normal() * shape.value_size);
    }
  if (!shape.paged) return problem;
  Problem paged = without_keys(problem);
  paged.q_lengths = problem.q_lengths;
  paged.k_lengths = problem.k_lengths;
  paged.q = problem.q;
  paged.dout = problem.dout;
  make_pages(paged, problem.k_lengths);
  for (int sequence = 0; sequence < problem.sequences(); sequence++)
    for (int key = 0; key < problem.k_lengths[sequence]; key++) copy_key(paged, problem, sequence, sequence, key);
  return paged;
}

Problem in_pieces(const Problem& training, int piece) {
  Problem cache = without_keys(training);  // one sequence each, to fill the pages
  make_pages(cache, training.k_lengths);
  for (int sequence = 0; sequence < training.sequences(); sequence++)
    for (int key = 0; key < training.k_lengths[sequence]; key++) copy_key(cache, training, sequence, sequence, key);

  Problem rollout = cache;
  rollout.q = training.q;
  rollout.dout = training.dout;
  rollout.page_table.clear();
  for (int sequence = 0; sequence < training.sequences(); sequence++)
    for (int first = 0; first < training.q_lengths[sequence]; first += piece) {
      const int last = std::min(first + piece, training.q_lengths[sequence]);
      const int keys = training.k_lengths[sequence] - training.q_lengths[sequence] + last;
      rollout.q_lengths.push_back(last - first);
      rollout.k_lengths.push_back(keys);
      for (int page = 0; page < cache.pages_max; page++) {
        const bool used = page < (keys + 63) / 64;
        rollout.page_table.push_back(used ? cache.page_table[sequence * cache.pages_max + page] : -1);
      }
    }
  return rollout;
}

Problem alone(const Problem& training, int sequence) {
  Problem one = without_keys(training);
  one.q_lengths = {training.q_lengths[sequence]};
  one.k_lengths = {training.k_lengths[sequence]};
  const size_t row = size_t(training.heads()) * training.head_dim;
  const size_t first = Problem::first(training.q_lengths, sequence) * row, end = first + one.q_lengths[0] * row;
  one.q.assign(training.q.begin() + first, training.q.begin() + end);
  one.dout.assign(training.dout.begin() + first, training.dout.begin() + end);
  one.k.assign(size_t(one.keys()) * one.kv_stride(), NOTHING);
  one.v = one.k;
  for (int key = 0; key < one.keys(); key++) copy_key(one, training, 0, sequence, key);
  return one;
}

const std::vector<Shape>& shapes() {
  // Name, queries, keys; key-value heads, query heads of each, window; size of scores, sinks.
  static const std::vector<Shape> all = {
      // 9 sinks over 16 heads: no two key-value heads have the same.
      {"odd lengths, two kv heads", {1, 2, 15, 17, 63, 64, 65, 0, 127, 129, 1}, {}, 2, 8, 0, 1, {0.5f, -2, 3, 0, 1.5f, -1, 2, 1, -3}},
      {"long", {400, 257}, {}},
      {"window 1", {1, 70, 130}, {}, 1, 8, 1},
      {"window 5", {200, 3}, {}, 1, 8, 5},
      {"window 64", {193, 65}, {}, 1, 8, 64},
      {"window 65", {193, 64}, {}, 1, 8, 65},
      {"window 128", {300, 129, 128}, {}, 1, 8, 128},
      {"window 200", {321}, {}, 1, 8, 200},
      {"1 query head a kv head", {1, 150, 260}, {}, 1, 1},
      {"2 query heads a kv head", {33, 150}, {}, 1, 2},
      {"3 query heads a kv head, window 50", {43, 130}, {}, 1, 3, 50},
      {"5 query heads a kv head", {26, 103}, {}, 1, 5},
      {"16 query heads a kv head", {9, 77}, {}, 1, 16},
      {"7 query heads a kv head, window 100", {1, 140}, {}, 1, 7, 100},
      {"extreme scores", {100, 70}, {}, 1, 8, 0, 20, {50, -50, -1e9f, 0}},
      {"extreme sinks", {130, 1}, {}, 1, 8, 0, 1, {50, -50, -1e9f, 0}},
      {"rows of padded tensors", {90, 0, 31}, {}, 3, 8, 0, 1, {0.5f}, 24},
      {"more keys than queries", {5, 0, 64, 1}, {69, 3, 200, 130}},
      {"more keys than queries, window 70", {20, 100}, {180, 101}, 1, 8, 70},
      {"fewer keys than queries", {10, 70}, {4, 66}},
      {"chunks of keys", {3, 2, 9, 1, 4}, {511, 512, 516, 1024, 1027}, 2, 3, 0, 1, {0.5f, -2, 3, 0, 1.5f}},
      {"chunks of keys, extreme scores and sinks", {5, 3}, {515, 1025}, 1, 8, 0, 20, {50, -50, -1e9f, 0}},
      {"chunks of keys, window 520", {20, 9}, {1040, 530}, 1, 8, 520},
      {"paged", {40, 1, 0, 1, 65, 1}, {140, 1, 0, 64, 65, 333}, 2, 8, 0, 1, {0.5f}, 0, true},
      {"paged, window 128", {1, 1, 30}, {129, 300, 222}, 1, 8, 128, 1, {0.5f}, 0, true},
  };
  return all;
}

const std::vector<Shape>& chunk_shapes() {
  static const std::vector<Shape> all = {
      {"511 to 514 keys", {4}, {514}, 2, 3, 0, 1, {0.5f, -2, 3, 0, 1.5f}},
      {"1,023 to 1,025 keys", {3}, {1025}, 1, 5},
      {"window 100 across an edge", {8}, {600}, 1, 3, 100},
      {"window 520, first chunk hidden from some", {14}, {1037}, 1, 3, 520},
      {"extreme scores and sinks", {3}, {1026}, 1, 8, 0, 20, {50, -50, -1e9f, 0}},
      {"values that underflow", {2, 1}, {513, 512}, 1, 2, 0, 1, {50, 40}, 0, false, 1e-30f},
  };
  return all;
}

const std::vector<Shape>& small_chunk_shapes() {
  static const std::vector<Shape> all = {
      // Many rows: what is off by a rounding shows in few of them. Odd counts too: a warp merges two rows.
      {"window 520, first chunk hidden from some", {20}, {1043}, 1, 5, 520},
      {"three chunks, the last hidden from some", {5, 25}, {601, 1037}, 1, 5, 0, 1, {0.5f, -1e9f, 2}},
  };
  return all;
}

const std::vector<Shape>& small_shapes() {
  static const std::vector<Shape> all = {
      {"small", {1, 40, 0, 65}, {}, 2, 3, 0, 1, {0.5f, -2, 3, 0, 1.5f}},
      {"small, window 20", {130, 7}, {150, 7}, 1, 8, 20},
      // The last query of tokens 64 to 79 just misses key 0: a block begins at the window's edge.
      {"small, window 79", {80}, {}, 1, 8, 79},
      {"small, window 100, padded", {150}, {}, 1, 2, 100, 1, {0.5f, -1}, 8},
      // Rows of all heads in an odd number: the last warp of delta is not full.
      {"small, extreme", {71}, {}, 1, 5, 0, 20, {50, -50, -1e9f, 0}},
      {"small, many keys", {20, 2}, {470, 523}, 1, 2},
      {"small, blocks of keys that nobody sees", {5, 3}, {140, 9}, 1, 3, 20},
      {"small, paged", {1, 3, 20, 0}, {130, 64, 85, 0}, 1, 8, 70, 1, {0.5f}, 0, true},
  };
  return all;
}

}  // namespace suite
