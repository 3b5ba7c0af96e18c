// Parameters of Muon's kernels. Formulas: src/ops/muon.rs.
#pragma once

#include "primitives.cuh"

// Values of any matrices, or of parts of them.
struct MuonMomentum {
  float* momentum;
  const float* gradient;
  float* u;
  int64_t count;
  float decay;  // μ
  float one_minus_decay;
};

// Matrices [rows, columns]. X of a tall matrix is transposed, so that it has at least as many columns as rows.
struct Muon {
  float* weights;  // [matrices, rows, columns], as u
  const float* u;
  bf16* x;         // [matrices, rows, columns], of tall matrices [matrices, columns, rows]
  double* parts;   // [matrices, chunks]: sums of squares of u
  float* factors;  // [matrices]: 1 / (|u| + 1e-7)
  int32_t rows;
  int32_t columns;
  float shrink;
  float rate;
};

namespace muon {

constexpr int threads = 256;
constexpr int values = 4;  // of the momentum, a thread
constexpr int chunk = 8192;  // values of a matrix whose squares one block adds
constexpr int sum_shared_bytes = threads * 8;
constexpr int tile = 32;  // rows and columns that one block processes
constexpr int staged_row = tile + 1;  // so that a column of a staged tile is in different banks
constexpr int tile_shared_bytes = (tile * staged_row - 1) * 4;

}  // namespace muon
