// Rows of logits of the head: statistics in one pass, and the gradient. Statistics use one block per row.
// Each thread reads fixed positions, and a fixed tree adds the threads' sums. A row's bits depend only on
// the row.
#include "log_prob.cuh"

using namespace log_prob;

namespace {

// Keeps 0 · −∞ out of the sums: a value so far below the highest has weight 0.
constexpr float LOWEST_SHIFT = -1e4f;

// Sums over some values with highest value h: Σ e^{z − h}, and Σ e^{z − h} (z − h).
struct Part {
  float highest, sum, moment;
};

// Converts the sums to another highest value that is not lower.
PRIMITIVE Part over(float highest, const Part& part) {
  const float shift = max(add(part.highest, -highest), LOWEST_SHIFT);
  const float factor = exp_approx(shift);
  return {highest, multiply(part.sum, factor), multiply(multiply_add(part.sum, shift, part.moment), factor)};
}

PRIMITIVE Part with(const Part& part, const Values& z) {
  float highest = part.highest;
  for (int k = 0; k < vector; k++) highest = max(highest, z.v[k]);
  Part all = over(highest, part);
  for (int k = 0; k < vector; k++) {
    const float shift = add(z.v[k], -highest);
    const float e = exp_approx(shift);
    all.sum = add(all.sum, e);
    all.moment = multiply_add(e, max(shift, LOWEST_SHIFT), all.moment);
  }
  return all;
}

PRIMITIVE Part both(const Part& a, const Part& b) {
  const float highest = max(a.highest, b.highest);
  const Part c = over(highest, a), d = over(highest, b);
  return {highest, add(c.sum, d.sum), add(c.moment, d.moment)};
}

// Adds the sums of all lanes; every lane gets the result.
PRIMITIVE Part of_warp(Part part) {
  for (int mask = 16; mask > 0; mask /= 2)
    part = both(part, {shuffle_xor(part.highest, mask), shuffle_xor(part.sum, mask), shuffle_xor(part.moment, mask)});
  return part;
}

PRIMITIVE void store(float* row, int at, int width, const Values& z) {
  if (whole(row, at, width)) {
    *reinterpret_cast<float4*>(row + at) = make_float4(z.v[0], z.v[1], z.v[2], z.v[3]);
    *reinterpret_cast<float4*>(row + at + 4) = make_float4(z.v[4], z.v[5], z.v[6], z.v[7]);
    return;
  }
  for (int k = 0; k < vector && at + k < width; k++) row[at + k] = z.v[k];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(stats_threads) log_prob_row_stats(const __grid_constant__ RowStats p) {
  const int64_t row = blockIdx.x;
  float* z = p.z + row * p.vocabulary;
  Part part = {-3.4028234e38f, 0.0f, 0.0f};
  for (int i = threadIdx.x * vector; i < p.vocabulary; i += stats_threads * vector) {
    Values values = load(z, i, p.vocabulary);
    for (int k = 0; k < vector; k++) values.v[k] = multiply(values.v[k], p.inverse_temperature);
    store(z, i, p.vocabulary, values);
    part = with(part, values);
  }
  part = of_warp(part);
  float* of_warps = reinterpret_cast<float*>(dynamic_shared_memory());
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) {
    of_warps[3 * warp] = part.highest;
    of_warps[3 * warp + 1] = part.sum;
    of_warps[3 * warp + 2] = part.moment;
  }
  block_barrier();
  if (warp > 0) return;
  part = of_warp({of_warps[3 * lane], of_warps[3 * lane + 1], of_warps[3 * lane + 2]});
  if (lane > 0) return;
  const float log_sum = multiply(log2_approx(part.sum), LN2);
  const float log_sum_exp = add(part.highest, log_sum);
  p.log_sum_exp[row] = log_sum_exp;
  p.entropy[row] = add(log_sum, -(part.moment / part.sum));
  if (p.targets == nullptr) return;
  // NaN if the target is not in the vocabulary.
  const uint32_t target = p.targets[row];
  p.log_prob[row] = target < static_cast<uint32_t>(p.vocabulary) ? add(z[target], -log_sum_exp) : NAN;
}

// A thread processes eight values of a row.
extern "C" __global__ void __launch_bounds__(gradient_threads) log_prob_gradient(const __grid_constant__ LogitsGradient p) {
  const int blocks = (p.vocabulary + gradient_threads * vector - 1) / (gradient_threads * vector);
  const int64_t row = blockIdx.x / blocks;
  const int first = ((blockIdx.x % blocks) * gradient_threads + threadIdx.x) * vector;
  if (first >= p.vocabulary) return;
  const float log_sum_exp = p.log_sum_exp[row], entropy = p.entropy[row];
  const float d_log_prob = p.d_log_prob[row], d_entropy = p.d_entropy[row];
  const float* z = p.z + row * p.vocabulary;
  Values d = load(z, first, p.vocabulary);
  for (int k = 0; k < vector; k++) {
    const float log_p = add(d.v[k], -log_sum_exp);
    const float probability = exp_approx(log_p);
    const float slope = multiply_add(d_entropy, add(max(log_p, LOWEST_SHIFT), entropy), d_log_prob);
    d.v[k] = multiply(multiply(-p.inverse_temperature, probability), slope);
    if (p.targets[row] == static_cast<uint32_t>(first + k)) d.v[k] = multiply_add(d_log_prob, p.inverse_temperature, d.v[k]);
  }
  bf16* dz = p.dz + row * p.vocabulary;
  if (whole(z, first, p.vocabulary) && reinterpret_cast<uintptr_t>(dz) % 16 == 0) {
    *reinterpret_cast<uint4*>(dz + first) = make_uint4(pack_bf16(d.v[0], d.v[1]), pack_bf16(d.v[2], d.v[3]),
                                                       pack_bf16(d.v[4], d.v[5]), pack_bf16(d.v[6], d.v[7]));
    return;
  }
  for (int k = 0; k < vector && first + k < p.vocabulary; k++) dz[first + k] = to_bf16(d.v[k]);
}
