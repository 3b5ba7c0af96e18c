#include "oracle.h"

#include <cmath>
#include <limits>

namespace suite {

namespace {

double as_is(double x) { return x; }
double to_f32(double x) { return float(x); }
double to_bf16_and_back(double x) { return to_float(to_bf16(float(x))); }

double dot(const double* a, const double* b, int count) {
  double sum = 0;
  for (int i = 0; i < count; i++) sum += a[i] * b[i];
  return sum;
}

std::vector<double> widen(const std::vector<bf16>& x) {
  std::vector<double> wide(x.size());
  for (size_t i = 0; i < x.size(); i++) wide[i] = to_float(x[i]);
  return wide;
}

// One query head of one sequence. `round` after each tensor, `sum` after each sum.
struct Head {
  const Problem& problem;
  const std::vector<double>&q, &k, &v, &dout;
  double (*round)(double);
  double (*sum)(double);
  Reference& to;

  void run(int sequence, int head) const {
    const int queries = problem.q_lengths[sequence], keys = problem.k_lengths[sequence];
    const int first_token = Problem::first(problem.q_lengths, sequence);
    const int first_key = Problem::first(problem.k_lengths, sequence);
    const int kv_head = head / problem.group, d = problem.head_dim;
    for (int query = 0; query < queries; query++) {
      const size_t row = size_t(first_token + query) * problem.heads() + head;
      const int position = keys - queries + query;
      const int begin = problem.window ? std::max(0, position - problem.window + 1) : 0, end = position + 1;
      const auto key_at = [&](int key) { return problem.key_row(sequence, key, kv_head); };
      const auto key_out = [&](int key) { return (size_t(first_key + key) * problem.kv_heads + kv_head) * d; };

      std::vector<double> p(std::max(0, end - begin));
      double largest = round(problem.sinks[head]);
      for (int key = begin; key < end; key++) {
        p[key - begin] = round(sum(dot(&q[row * d], &k[key_at(key)], d)) * problem.scale);
        largest = std::max(largest, p[key - begin]);
      }
      double total = std::exp(round(problem.sinks[head]) - largest);
      for (double score : p) total += std::exp(score - largest);
      const double sink_p = round(std::exp(round(problem.sinks[head]) - largest) / total);
      for (double& x : p) x = round(std::exp(x - largest) / total);
      to.lse[row] = sum(largest + std::log(total));

      std::vector<double> out(d);
      for (int key = begin; key < end; key++)
        for (int i = 0; i < d; i++) out[i] += p[key - begin] * v[key_at(key) + i];
      for (int i = 0; i < d; i++) to.out[row * d + i] = round(sum(out[i]));

      // The softmax's own backward: sum over keys of p dp is dout . out.
      std::vector<double> dp(p.size());
      double delta = 0;
      for (int key = begin; key < end; key++) {
        dp[key - begin] = round(sum(dot(&dout[row * d], &v[key_at(key)], d)));
        delta += p[key - begin] * dp[key - begin];
      }
      delta = sum(delta);
      to.dsinks[head] -= round(sink_p * delta);
      for (int key = begin; key < end; key++) {
        const double ds = round(round(p[key - begin] * (dp[key - begin] - delta)) * problem.scale);
        for (int i = 0; i < d; i++) {
          to.dq[row * d + i] += ds * k[key_at(key) + i];
          to.dk[key_out(key) + i] += ds * q[row * d + i];
          to.dv[key_out(key) + i] += p[key - begin] * dout[row * d + i];
        }
      }
    }
  }
};

Reference attention(const Problem& problem, double (*round)(double), double (*sum)(double)) {
  Reference to;
  to.out.resize(problem.q.size());
  to.dq.resize(problem.q.size());
  to.lse.resize(problem.q.size() / problem.head_dim);
  to.dk.resize(size_t(problem.keys()) * problem.kv_heads * problem.head_dim);
  to.dv.resize(to.dk.size());
  to.dsinks.resize(problem.heads());
  const std::vector<double> q = widen(problem.q), k = widen(problem.k), v = widen(problem.v),
                            dout = widen(problem.dout);
  for (int head = 0; head < problem.heads(); head++)
    for (int sequence = 0; sequence < problem.sequences(); sequence++)
      Head{problem, q, k, v, dout, round, sum, to}.run(sequence, head);
  for (auto* tensor : {&to.dq, &to.dk, &to.dv, &to.dsinks})
    for (double& x : *tensor) x = round(x);
  return to;
}

}  // namespace

Reference exact(const Problem& problem) { return attention(problem, as_is, as_is); }
Reference plain_bf16(const Problem& problem) { return attention(problem, to_bf16_and_back, to_f32); }

Error distance(const std::vector<double>& a, const std::vector<double>& b) {
  Error error;
  if (a.size() != b.size()) return {INFINITY, INFINITY};
  for (size_t i = 0; i < a.size(); i++) {
    const double apart = std::fabs(a[i] - b[i]);
    if (!(apart <= std::numeric_limits<double>::max())) return {INFINITY, INFINITY};
    error.largest = std::max(error.largest, apart);
    error.rms += apart * apart / double(a.size());
  }
  error.rms = std::sqrt(error.rms);
  return error;
}

}  // namespace suite
