// What the op should give: in f64, and as a plain bf16 implementation gives it. docs/KERNELS.md derives the formulas.
#pragma once

#include "attention.h"

namespace suite {

// Laid out as Results; dk and dv as [keys, kv_heads, head_dim].
struct Reference {
  std::vector<double> out, lse, dq, dk, dv, dsinks;
};

// Everything in f64.
Reference exact(const Problem& problem);
// Every tensor of the computation rounded to bf16, sums in f32: scores, probabilities, their gradients, outputs.
Reference plain_bf16(const Problem& problem);

// The largest and the root-mean-square distance.
struct Error {
  double largest = 0, rms = 0;
};
Error distance(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace suite
