// Sampling from rows of logits, and log-probabilities of tokens. One block per draw; each thread has a
// range of the vocabulary, in id order. Sums are f64 in a fixed order.
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

// This thread's ids, `begin` to before `end`.
struct Stretch {
  int begin, end;
};

PRIMITIVE Stretch stretch(int vocabulary) {
  const int each = (vocabulary + draw_threads * vector - 1) / (draw_threads * vector) * vector;
  const int begin = min(static_cast<int>(threadIdx.x) * each, vocabulary);
  return {begin, min(begin + each, vocabulary)};
}

PRIMITIVE double weight(const Row& row, float z) { return exp_approx(add(z, -row.log_sum_exp)); }

// Index of a thread's sum, padded so that threads that read one group each have no bank conflict.
PRIMITIVE int place(int thread) { return thread + thread / draw_groups; }

PRIMITIVE void give(const Draws& p, uint32_t token, float log_prob) { p.drawn[blockIdx.x] = {token, __float_as_uint(log_prob)}; }

}  // namespace

// Returns the first token whose cumulative weight exceeds uniform · total. A token's cumulative weight is
// the sum of earlier groups, plus (the sum of the group's earlier threads plus the thread's tokens up to
// it). It never decreases from token to token, and a thread ends with exactly the number with which the
// next one begins. So exactly one thread has the target between its beginning and its end.
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
  // Replaces each sum by the sum before it: within its group, then over groups.
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
  // Below the total despite rounding: the factor gives the largest number below it.
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

// Returns the token of the highest value (ties: the lowest id); its log-probability is 0.
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
  // If the sum is not NaN, no value of the row is NaN or infinite.
  if (thread == 0) give(p, fabsf(row.log_sum_exp) < INFINITY ? ids[0] : NO_TOKEN, 0.0f);
}

extern "C" __global__ void __launch_bounds__(log_probs_threads) sampling_log_probs(const __grid_constant__ LogProbs p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * log_probs_threads + threadIdx.x;
  if (i >= p.count) return;
  const int64_t row = p.rows[i];
  p.log_probs[i] = add(p.z[row * p.vocabulary + p.tokens[i]], -p.log_sum_exp[row]);
}
