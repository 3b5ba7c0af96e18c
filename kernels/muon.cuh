// Parameters of Muon's kernels, which process matrices [rows, columns]. Formulas: src/ops/muon.rs. X of a
// tall matrix is transposed, so that it has at least as many columns as rows.
#pragma once

#include "primitives.cuh"

struct Muon {
  float* weights;  // all three [matrices, rows, columns]
  float* momentum;
  const float* gradient;
  bf16* x;         // [matrices, rows, columns], of tall matrices [matrices, columns, rows]
  double* parts;   // [matrices, chunks]: sums of squares of u
  float* factors;  // [matrices]: 1 / (|u| + 1e-7)
  int32_t rows;
  int32_t columns;
  float shrink;
  float rate;
  float decay;  // μ
  float one_minus_decay;
};

namespace muon {

constexpr int threads = 256;
constexpr int chunk = 8192;  // values of a matrix whose squares one block adds
constexpr int sum_shared_bytes = threads * 8;
constexpr int tile = 32;  // rows and columns that one block processes
constexpr int staged_row = tile + 1;  // so that a column of a staged tile is in different banks
constexpr int tile_shared_bytes = (tile * staged_row - 1) * 4;

}  // namespace muon
