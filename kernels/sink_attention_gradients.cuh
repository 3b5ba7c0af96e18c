// Steps of the backward that mma.sync and wgmma kernels share.
#pragma once

#include "sink_attention.cuh"

namespace sink_attention {

// P of a score: exp(score - LSE), in base 2. `lse2` is LSE * log2(e); a hidden score gives 0.
PRIMITIVE float probability(float score, float scale_log2, float lse2) {
  return exp2_approx(multiply_add(score, scale_log2, -lse2));
}

// dS of a probability without the factor `scale`: P (dP - delta).
PRIMITIVE float score_gradient(float probability, float dprob, float delta) {
  return multiply(probability, add(dprob, -delta));
}

template <int panels>
PRIMITIVE void multiply_all(Fragment (&x)[panels], float factor) {
#pragma unroll
  for (int panel = 0; panel < panels; panel++)
#pragma unroll
    for (int i = 0; i < 32; i++) x[panel][i] = multiply(x[panel][i], factor);
}

// ---- By key: loop over packed rows, in steps of 64 -------------------------------------------------------------------

constexpr int step_rows = 64;

// One number per row of the step, in shared memory. Rows past the end have an infinite LSE: their
// probability is 0.
struct RowNumbers {
  float lse2[step_rows];
  float delta[step_rows];
  int position[step_rows];
};

// A row's numbers between global and shared memory.
struct RowInFlight {
  float lse = 0.0f, delta = 0.0f;
  int position = -1;

  PRIMITIVE void load(const SinkAttention& p, const Sequence& s, int row, int end) {
    if (row < end) {
      const int64_t place = s.place(p, row);
      lse = p.lse[place];
      delta = p.delta[place];
      position = s.position(row);
    } else {
      lse = -hidden;
      delta = 0.0f;
      position = -1;
    }
  }

  PRIMITIVE void put(RowNumbers& numbers, int i) const {
    numbers.lse2[i] = multiply(lse, log2_e);
    numbers.delta[i] = delta;
    numbers.position[i] = position;
  }
};

// The row of [T, N] of a thread of sink_attention_delta, eight threads per row and panel.
template <int panels>
PRIMITIVE int64_t delta_row(int block, int thread) {
  return static_cast<int64_t>(block) * delta_rows + thread / (8 * panels);
}

// Packed rows that see at least one key from `key_first` to `key_last`.
PRIMITIVE Range rows_seeing(const Sequence& s, int key_first, int key_last) {
  const int tokens = s.rows / s.group;
  const int first = min(tokens, max(0, key_first - s.offset));
  const int end = min(tokens, max(first, key_last + s.window - s.offset));
  return {first * s.group, end * s.group};
}

// Masks transposed scores: a key per row (g and g + 8 from `key`), a packed row per column.
PRIMITIVE void hide_rows(const Sequence& s, Fragment& scores, const RowNumbers& numbers, int key, int lane) {
#pragma unroll
  for (int i = 0; i < 32; i++) {
    const Seen seen(s, numbers.position[fragment_column(i, lane)]);
    const int own = key + lane / 4 + 8 * fragment_row(i);
    if (own < seen.first || own > seen.last) scores[i] = hidden;
  }
}

// P^T of S^T, in place.
PRIMITIVE void to_probabilities(const SinkAttention& p, Fragment& scores, const RowNumbers& numbers, int lane) {
#pragma unroll
  for (int i = 0; i < 32; i++) scores[i] = probability(scores[i], p.scale_log2, numbers.lse2[fragment_column(i, lane)]);
}

// dS^T of P^T and dP^T, in place of dP^T.
PRIMITIVE void to_score_gradients(const Fragment& probabilities, Fragment& dprobs, const RowNumbers& numbers,
                                  int lane) {
#pragma unroll
  for (int i = 0; i < 32; i++)
    dprobs[i] = score_gradient(probabilities[i], dprobs[i], numbers.delta[fragment_column(i, lane)]);
}

// Stores a warp's 16 rows of dK or dV, through its own rows of the tile.
template <int panels>
PRIMITIVE void store_keys(const SinkAttention& p, const Sequence& s, const Fragment (&x)[panels], unsigned char* tile,
                          bf16* to, int key, int lane) {
  put_rows<panel_bytes>(x, tile, 0, lane);
  warp_barrier();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = lane / 8 + 4 * i, chunk = lane % 8;
#pragma unroll
    for (int panel = 0; panel < panels; panel++)
      if (key + row < s.keys)
        *reinterpret_cast<uint4*>(to + key_place(p, s.key_start + key + row, s.kv_head) + panel * panel_columns +
                                  chunk * 8) =
            *reinterpret_cast<const uint4*>(chunk_at(tile + panel * panel_bytes, row, chunk));
  }
}

// ---- By packed row: loop over key blocks -----------------------------------------------------------------------------

// This lane's two rows of a fragment, g and g + 8.
struct RowPair {
  int positions[2];
  float lse2[2];
  float delta[2];

  PRIMITIVE void load(const SinkAttention& p, const Sequence& s, int first, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = first + 8 * half + lane / 4;
      const bool valid = row < s.rows;
      const int64_t place = s.place(p, valid ? row : 0);
      positions[half] = s.position(row);
      lse2[half] = valid ? multiply(p.lse[place], log2_e) : -hidden;
      delta[half] = valid ? p.delta[place] : 0.0f;
    }
  }

  PRIMITIVE void hide_keys(const Sequence& s, Fragment& scores, int key_first, int lane) const {
    sink_attention::hide_keys(scores, {Seen(s, positions[0]), Seen(s, positions[1])}, key_first, lane);
  }

  // P of S, in place.
  PRIMITIVE void to_probabilities(const SinkAttention& p, Fragment& scores) const {
#pragma unroll
    for (int i = 0; i < 32; i++) scores[i] = probability(scores[i], p.scale_log2, lse2[fragment_row(i)]);
  }

  // dS of P and dP, in place of dP.
  PRIMITIVE void to_score_gradients(const Fragment& probabilities, Fragment& dprobs) const {
#pragma unroll
    for (int i = 0; i < 32; i++) dprobs[i] = score_gradient(probabilities[i], dprobs[i], delta[fragment_row(i)]);
  }
};

}  // namespace sink_attention
