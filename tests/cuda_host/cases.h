// The problems that the suite runs, made from seeds.
#pragma once

#include "attention.h"

namespace suite {

struct Shape {
  const char* name;
  std::vector<int> q_lengths, k_lengths;  // k_lengths empty: as q_lengths
  int kv_heads = 1, group = 8, window = 0;
  float score_size = 1;                   // standard deviation of the scores, about
  std::vector<float> sinks = {0.5f};      // repeated over the heads
  int kv_padding = 0;
  bool paged = false;
  float value_size = 1;
};

// Random tensors of this shape. Paged: pages in scrambled order, the rest of the last ones NaN, a NaN page between.
Problem make(const Shape& shape, int head_dim, uint64_t seed);

// The same tokens as a rollout sees them: the queries of every sequence of `training` (packed) cut into pieces of `piece`
// tokens, each piece a sequence of its own that finds all keys up to its end in a paged cache.
Problem in_pieces(const Problem& training, int piece);

// Sequence `sequence` alone.
Problem alone(const Problem& training, int sequence);

// Shapes whose errors are compared; backward runs on those that are not paged.
const std::vector<Shape>& shapes();
// Few rows with as many keys as it takes to cross from chunk to chunk.
const std::vector<Shape>& chunk_shapes();
const std::vector<Shape>& small_chunk_shapes();
// A few of them, small: for the sanitizers and the seeded bugs.
const std::vector<Shape>& small_shapes();

}  // namespace suite
