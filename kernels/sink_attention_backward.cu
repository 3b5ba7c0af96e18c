// Gradients of attention with sinks, by mma.sync. No atomics: every sum has one owner and one order.
//
// First delta = rowsum(dout * out); then in any order: dkv, one block per 64 keys, over the rows that see
// them; dq, one block per 128 rows, over the keys they see; dsinks, one block per head. dkv and dq both
// recompute the scores: two products more than with atomics, but the same bits in every run.
//
// With heads of 128 a warp's registers hold dK or dV, not both: four warps sum the one, four the other, and
// both compute the scores.

#include "sink_attention_gradients.cuh"
#include "warp_products.cuh"

using namespace sink_attention;

namespace {

// A warp's 16 keys. S^T = K Q^T and dP^T = V dO^T have one key per row, so P^T and dS^T are directly the
// left operands of dV += P^T dO and dK += dS^T Q.
template <int panels>
struct WarpKeys {
  static constexpr int count = 2 / panels;  // sums of a warp: dV and dK, or one of them
  bool sums_dv;
  bool sums_dk;
  unsigned char* k_tile;  // the warp's own rows
  unsigned char* v_tile;
  Fragment sums[count][1][panels];

  PRIMITIVE Fragment (&dv())[1][panels] { return sums[0]; }
  PRIMITIVE Fragment (&dk())[1][panels] { return sums[count - 1]; }

  PRIMITIVE void step(const SinkAttention& p, const Sequence& s, unsigned char* q_tile, unsigned char* dout_tile,
                      const RowNumbers& numbers, int key, bool some_hidden, int lane) {
    Fragment scores[1], dprobs[1];
    clear(scores);
    uint32_t keys[1][4 * panels][4], operand[1][4][4];
    load_operand<panel_bytes>(keys[0], k_tile, 0, lane);
    add_product_transposed(scores, keys, q_tile, lane);
    if (sums_dk) {
      clear(dprobs);
      load_operand<panel_bytes>(keys[0], v_tile, 0, lane);
      add_product_transposed(dprobs, keys, dout_tile, lane);
    }
    if (some_hidden) hide_rows(s, scores[0], numbers, key, lane);
    to_probabilities(p, scores[0], numbers, lane);
    if (sums_dk) to_score_gradients(scores[0], dprobs[0], numbers, lane);
    if (sums_dv) {
      to_operand(operand[0], scores[0]);
      add_product(dv(), operand, dout_tile, lane);
    }
    if (sums_dk) {
      to_operand(operand[0], dprobs[0]);
      add_product(dk(), operand, q_tile, lane);
    }
  }
};

// A warp's 16 packed rows: dQ += dS K over their keys.
template <int panels>
struct WarpQueries {
  unsigned char* q_tile;  // the warp's own rows
  unsigned char* dout_tile;
  uint32_t q[1][4 * panels][4];
  uint32_t dout[1][4 * panels][4];
  RowPair rows;
  Fragment dq[1][panels];

  PRIMITIVE void load(int lane) {
    load_operand<tile_panel_bytes>(q[0], q_tile, 0, lane);
    load_operand<tile_panel_bytes>(dout[0], dout_tile, 0, lane);
  }

  PRIMITIVE void step(const SinkAttention& p, const Sequence& s, int key_first, unsigned char* k_tile,
                      unsigned char* v_tile, bool some_hidden, int lane) {
    Fragment scores[1], dprobs[1];
    clear(scores);
    clear(dprobs);
    if (panels > 1) load(lane);  // again: registers are too few to keep them
    add_product_transposed(scores, q, k_tile, lane);
    add_product_transposed(dprobs, dout, v_tile, lane);
    if (some_hidden) rows.hide_keys(s, scores[0], key_first, lane);
    rows.to_probabilities(p, scores[0]);
    rows.to_score_gradients(scores[0], dprobs[0]);
    uint32_t operand[1][4][4];
    to_operand(operand[0], dprobs[0]);
    add_product(dq, operand, k_tile, lane);
  }
};

// delta = rowsum(dout * out), eight lanes per row and panel.
template <int panels>
PRIMITIVE void sum_delta(const SinkAttention& p) {
  constexpr int lanes = 8 * panels;
  const int64_t row = delta_row<panels>(blockIdx.x, threadIdx.x);
  const bool valid = row < row_place(p, p.tokens, 0);
  const int64_t place = valid ? row * head_dim<panels> + threadIdx.x % lanes * 8 : 0;
  const uint4 out = *reinterpret_cast<const uint4*>(p.out + place);
  const uint4 dout = *reinterpret_cast<const uint4*>(p.dout + place);
  const uint32_t a[4] = {out.x, out.y, out.z, out.w}, b[4] = {dout.x, dout.y, dout.z, dout.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum = multiply_add(low_to_float(a[i]), low_to_float(b[i]), sum);
    sum = multiply_add(high_to_float(a[i]), high_to_float(b[i]), sum);
  }
#pragma unroll
  for (int mask = 1; mask < lanes; mask *= 2) sum = add(sum, shuffle_xor(sum, mask));
  if (valid && threadIdx.x % lanes == 0) p.delta[row] = sum;
}

template <int panels>
PRIMITIVE void sum_dkv(const SinkAttention& p) {
  constexpr int threads = dkv_threads * panels;
  unsigned char* k_tile = dynamic_shared_memory();
  unsigned char* v_tile = k_tile + block_bytes<panels>;
  unsigned char* stages = v_tile + block_bytes<panels>;  // q, dout, q, dout
  RowNumbers* numbers = reinterpret_cast<RowNumbers*>(stages + 4 * block_bytes<panels>);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Tile tile = p.tiles[blockIdx.x / p.kv_heads];
  const Sequence s(p, tile.sequence, blockIdx.x % p.kv_heads);
  const int key_last = min(tile.first + block_keys, s.keys) - 1;
  const Range rows = rows_seeing(s, tile.first, key_last);

  const auto copy_step = [&](int row, int stage) {
    unsigned char* to = stages + stage * 2 * block_bytes<panels>;
    copy_rows<panels, step_rows, threads, true>(p, s, to, row, rows.end, thread);
    copy_async_commit();
  };
  copy_keys<panels, threads>(p, s, k_tile, tile.first / block_keys, thread);
  RowInFlight next;
  if (thread < step_rows) {
    next.load(p, s, rows.first + thread, rows.end);
    next.put(numbers[0], thread);
  }
  copy_step(rows.first, 0);
  copy_async_wait<0>();
  block_barrier();

  const int key = (panels == 1 ? warp : warp % 4) * 16;  // of the tile
  WarpKeys<panels> w;
  w.sums_dv = panels == 1 || warp < 4;
  w.sums_dk = panels == 1 || warp >= 4;
  clear(w.dv()[0]);
  clear(w.dk()[0]);
  w.k_tile = k_tile + key * panel_row_bytes;
  w.v_tile = v_tile + key * panel_row_bytes;
  int stage = 0;
  for (int row = rows.first; row < rows.end; row += step_rows, stage ^= 1) {
    const bool more = row + step_rows < rows.end;
    if (more) {
      copy_step(row + step_rows, stage ^ 1);
      if (thread < step_rows) next.load(p, s, row + step_rows + thread, rows.end);
    }
    const int row_last = min(row + step_rows, rows.end) - 1;
    const bool some_hidden =
        !all_see(s, s.position(row), s.position(row_last), tile.first, tile.first + block_keys - 1);
    unsigned char* q_tile = stages + stage * 2 * block_bytes<panels>;
    w.step(p, s, q_tile, q_tile + block_bytes<panels>, numbers[stage], tile.first + key, some_hidden, lane);
    if (more && thread < step_rows) next.put(numbers[stage ^ 1], thread);
    copy_async_wait<0>();
    block_barrier();
  }

  if (w.sums_dk) {
    multiply_all(w.dk()[0], p.scale);
    store_keys(p, s, w.dk()[0], w.k_tile, p.dk, tile.first + key, lane);
  }
  if (w.sums_dv) store_keys(p, s, w.dv()[0], w.v_tile, p.dv, tile.first + key, lane);
}

template <int panels>
PRIMITIVE void sum_dq(const SinkAttention& p) {
  unsigned char* q_tile = dynamic_shared_memory();
  unsigned char* dout_tile = q_tile + tile_bytes<panels>;
  unsigned char* stages = dout_tile + tile_bytes<panels>;  // k, v, k, v
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Tile tile = p.tiles[blockIdx.x / p.kv_heads];
  const Sequence s(p, tile.sequence, blockIdx.x % p.kv_heads);
  const int row_last = min(tile.first + tile_rows, s.rows) - 1;
  const Range blocks = blocks_seen(s, s.position(tile.first), s.position(row_last));

  const auto copy_block = [&](int block) {
    unsigned char* stage = stages + block % 2 * 2 * block_bytes<panels>;
    copy_keys<panels, dq_threads>(p, s, stage, block, thread);
    copy_async_commit();
  };
  copy_rows<panels, tile_rows, dq_threads, true>(p, s, q_tile, tile.first, s.rows, thread);
  copy_async_commit();
  if (blocks.first < blocks.end) copy_block(blocks.first);
  copy_async_wait<0>();
  block_barrier();

  const int first = tile.first + 16 * warp;
  const int position_first = s.position(first), position_last = s.position(min(first + 15, row_last));
  WarpQueries<panels> w;
  w.rows.load(p, s, first, lane);
  clear(w.dq[0]);
  w.q_tile = q_tile + warp * 16 * panel_row_bytes;
  w.dout_tile = dout_tile + warp * 16 * panel_row_bytes;
  if (panels == 1) w.load(lane);
  for (int block = blocks.first; block < blocks.end; block++) {
    if (block + 1 < blocks.end) copy_block(block + 1);
    const int key_first = block * block_keys, key_last = key_first + block_keys - 1;
    unsigned char* k_tile = stages + block % 2 * 2 * block_bytes<panels>;
    if (first <= row_last && any_sees(s, position_first, position_last, key_first, key_last))
      w.step(p, s, key_first, k_tile, k_tile + block_bytes<panels>,
             !all_see(s, position_first, position_last, key_first, key_last), lane);
    copy_async_wait<0>();
    block_barrier();
  }

  multiply_all(w.dq[0], p.scale);
  put_rows<tile_panel_bytes>(w.dq[0], w.q_tile, 0, lane);
  warp_barrier();
  store_rows<panels, 16, 32, tile_panel_bytes>(p, s, w.q_tile, p.dq, first, s.rows, lane);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(delta_threads)
sink_attention_delta(const __grid_constant__ SinkAttention p) {
  sum_delta<1>(p);
}

extern "C" __global__ void __launch_bounds__(delta_128_threads)
sink_attention_delta_128(const __grid_constant__ SinkAttention p) {
  sum_delta<2>(p);
}

extern "C" __global__ void __launch_bounds__(dkv_threads, 2)
sink_attention_dkv(const __grid_constant__ SinkAttention p) {
  sum_dkv<1>(p);
}

extern "C" __global__ void __launch_bounds__(dkv_128_threads, 1)
sink_attention_dkv_128(const __grid_constant__ SinkAttention p) {
  sum_dkv<2>(p);
}

extern "C" __global__ void __launch_bounds__(dq_threads, 1)
sink_attention_dq(const __grid_constant__ SinkAttention p) {
  sum_dq<1>(p);
}

extern "C" __global__ void __launch_bounds__(dq_128_threads, 1)
sink_attention_dq_128(const __grid_constant__ SinkAttention p) {
  sum_dq<2>(p);
}

// ds = -sum over all tokens of exp(s - LSE) delta: each thread adds its tokens in ascending order, then a
// tree.
extern "C" __global__ void __launch_bounds__(dsinks_threads)
sink_attention_dsinks(const __grid_constant__ SinkAttention p) {
  float* sums = reinterpret_cast<float*>(dynamic_shared_memory());
  const int head = blockIdx.x, thread = threadIdx.x;
  const float sink = p.sinks[head];
  float sum = 0.0f;
  for (int token = thread; token < p.tokens; token += dsinks_threads) {
    const int64_t place = row_place(p, token, head);
    sum = multiply_add(exp2_approx(multiply(add(sink, -p.lse[place]), log2_e)), p.delta[place], sum);
  }
  sums[thread] = sum;
  for (int half = dsinks_threads / 2; half > 0; half /= 2) {
    block_barrier();
    if (thread < half) sums[thread] = add(sums[thread], sums[thread + half]);
  }
  if (thread == 0) p.dsinks[head] = -sums[0];
}
