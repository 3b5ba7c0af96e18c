// Tokens drawn from rows of logits, and log-probabilities of tokens. A block takes a draw, a thread a stretch of the
// vocabulary, one after the other in id order; sums are in f64 and in fixed places.
#include "sampling.cuh"

using namespace sampling;
using elements::exp_approx, elements::Values;
using log_prob::load;

namespace {

struct Row {
  const float* z;
  float log_sum_exp;
};

PRIMITIVE Row asked_row(const Draws& p) {
  const int64_t row = p.rows[blockIdx.x];
  return {p.z + row * p.vocabulary, p.log_sum_exp[row]};
}

// This thread's ids: from `begin` to before `end`.
struct Stretch {
  int begin, end;
};

PRIMITIVE Stretch stretch(int vocabulary) {
  const int each = (vocabulary + draw_threads * vector - 1) / (draw_threads * vector) * vector;
  const int begin = min(static_cast<int>(threadIdx.x) * each, vocabulary);
  return {begin, min(begin + each, vocabulary)};
}

PRIMITIVE double weight(const Row& row, float z) { return exp_approx(add(z, -row.log_sum_exp)); }

// Where a thread's sum lies: threads that read a group each meet no bank twice.
PRIMITIVE int place(int thread) { return thread + thread / draw_groups; }

PRIMITIVE void give(const Draws& p, uint32_t token, float log_prob) { p.drawn[blockIdx.x] = {token, __float_as_uint(log_prob)}; }

}  // namespace

// The first token whose cumulative weight exceeds uniform · total. What comes before a token is the sum of the groups
// before its own, plus (the sum of the group's threads before its own plus the sum of the thread's tokens up to it). That
// never falls from one token to the next, and a thread ends with the very number with which the next begins: exactly
// one thread finds its end above the target and its beginning not.
extern "C" __global__ void __launch_bounds__(draw_threads) sampling_draw(const __grid_constant__ Draws p) {
  double* sums = reinterpret_cast<double*>(dynamic_shared_memory());
  double* groups = sums + draw_threads + draw_groups;
  const int thread = threadIdx.x;
  const Row row = asked_row(p);
  const Stretch own = stretch(p.vocabulary);
  double own_sum = 0;
  for (int i = own.begin; i < own.end; i += vector) {
    const Values z = load(row.z, i, p.vocabulary);
    for (int k = 0; k < vector; k++) own_sum += weight(row, z.v[k]);
  }
  sums[place(thread)] = own_sum;
  block_barrier();
  // Each sum gives way to what comes before it: in its group, then the groups'.
  if (thread < draw_groups) {
    double before = 0;
    for (int k = 0; k < draw_threads / draw_groups; k++) {
      double& sum = sums[place(thread * (draw_threads / draw_groups) + k)];
      const double next = before + sum;
      sum = before;
      before = next;
    }
    groups[thread] = before;
  }
  block_barrier();
  if (thread == 0) {
    double before = 0;
    for (int k = 0; k < draw_groups; k++) {
      const double next = before + groups[k];
      groups[k] = before;
      before = next;
    }
    groups[draw_groups] = before;
  }
  block_barrier();
  const double total = groups[draw_groups];
  if (!(total > 0 && total < INFINITY)) {
    if (thread == 0) give(p, NO_TOKEN, 0.0f);
    return;
  }
  // Below the total, whatever rounding says: the factor makes of it the number before it.
  const double target = fmin(p.uniforms[blockIdx.x] * total, total * (1 - 0x1p-53));
  const double of_groups = groups[thread / (draw_threads / draw_groups)], of_threads = sums[place(thread)];
  if (of_groups + of_threads > target || of_groups + (of_threads + own_sum) <= target) return;
  double sum = 0;
  for (int i = own.begin; i < own.end; i += vector) {
    const Values z = load(row.z, i, p.vocabulary);
    for (int k = 0; k < vector; k++) {
      sum += weight(row, z.v[k]);
      if (of_groups + (of_threads + sum) > target) {
        give(p, i + k, add(z.v[k], -row.log_sum_exp));
        return;
      }
    }
  }
}

// The token of the highest value, the lowest id of equals; its log-probability is 0.
extern "C" __global__ void __launch_bounds__(draw_threads) sampling_likeliest(const __grid_constant__ Draws p) {
  float* highest = reinterpret_cast<float*>(dynamic_shared_memory());
  int* ids = reinterpret_cast<int*>(highest + draw_threads);
  const int thread = threadIdx.x;
  const Row row = asked_row(p);
  const Stretch own = stretch(p.vocabulary);
  float best = -INFINITY;
  int id = 0;
  for (int i = own.begin; i < own.end; i += vector) {
    const Values z = load(row.z, i, p.vocabulary);
    for (int k = 0; k < vector; k++) {
      if (z.v[k] > best) {
        best = z.v[k];
        id = i + k;
      }
    }
  }
  highest[thread] = best;
  ids[thread] = id;
  for (int half = draw_threads / 2; half > 0; half /= 2) {
    block_barrier();
    if (thread >= half) continue;
    const int other = thread + half;
    if (highest[other] > highest[thread] || (highest[other] == highest[thread] && ids[other] < ids[thread])) {
      highest[thread] = highest[other];
      ids[thread] = ids[other];
    }
  }
  // A sum that is a number says that all of the row's values are, and none is infinite.
  if (thread == 0) give(p, fabsf(row.log_sum_exp) < INFINITY ? ids[0] : NO_TOKEN, 0.0f);
}

extern "C" __global__ void __launch_bounds__(log_probs_threads) sampling_log_probs(const __grid_constant__ LogProbs p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * log_probs_threads + threadIdx.x;
  if (i >= p.count) return;
  const int64_t row = p.rows[i];
  p.log_probs[i] = add(p.z[row * p.vocabulary + p.tokens[i]], -p.log_sum_exp[row]);
}
