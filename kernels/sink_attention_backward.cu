// Gradients of attention with sinks, by mma.sync. No atomics: every sum has one owner and one order.
//
// First delta = rowsum(dout * out); then in any order: dkv, one block per 64 keys, over the rows that see
// them; dq, one block per 128 rows, over the keys they see; dsinks, one block per head. dkv and dq both
// recompute the scores: two products more than with atomics, but the same bits in every run.

#include "sink_attention_gradients.cuh"
#include "warp_products.cuh"

using namespace sink_attention;

namespace {

// A warp's 16 keys. S^T = K Q^T and dP^T = V dO^T have one key per row, so P^T and dS^T are directly the
// left operands of dV += P^T dO and dK += dS^T Q.
struct WarpKeys {
  unsigned char* k_tile;  // the warp's own rows
  unsigned char* v_tile;
  Fragment dk[1];
  Fragment dv[1];

  PRIMITIVE void step(const SinkAttention& p, const Sequence& s, unsigned char* q_tile, unsigned char* dout_tile,
                      const RowNumbers& numbers, int key, bool some_hidden, int lane) {
    Fragment scores[1], dprobs[1];
    clear(scores);
    clear(dprobs);
    uint32_t operand[1][4][4];
    load_operand(operand[0], k_tile, 0, lane);
    add_product_transposed(scores, operand, q_tile, lane);
    load_operand(operand[0], v_tile, 0, lane);
    add_product_transposed(dprobs, operand, dout_tile, lane);
    if (some_hidden) hide_rows(s, scores[0], numbers, key, lane);
    to_probabilities(p, scores[0], numbers, lane);
    to_score_gradients(scores[0], dprobs[0], numbers, lane);
    to_operand(operand[0], scores[0]);
    add_product(dv, operand, dout_tile, lane);
    to_operand(operand[0], dprobs[0]);
    add_product(dk, operand, q_tile, lane);
  }
};

// A warp's 16 packed rows: dQ += dS K over their keys.
struct WarpQueries {
  uint32_t q[1][4][4];
  uint32_t dout[1][4][4];
  RowPair rows;
  Fragment dq[1];

  PRIMITIVE void step(const SinkAttention& p, const Sequence& s, int key_first, unsigned char* k_tile,
                      unsigned char* v_tile, bool some_hidden, int lane) {
    Fragment scores[1], dprobs[1];
    clear(scores);
    clear(dprobs);
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

}  // namespace

// delta = rowsum(dout * out), eight lanes per row.
extern "C" __global__ void __launch_bounds__(delta_threads)
sink_attention_delta(const __grid_constant__ SinkAttention p) {
  const int64_t row = delta_row(blockIdx.x, threadIdx.x);
  const bool valid = row < row_place(p, p.tokens, 0);
  const int64_t place = valid ? row * head_dim + threadIdx.x % 8 * 8 : 0;
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
  for (int mask = 1; mask < 8; mask *= 2) sum = add(sum, shuffle_xor(sum, mask));
  if (valid && threadIdx.x % 8 == 0) p.delta[row] = sum;
}

extern "C" __global__ void __launch_bounds__(dkv_threads, 2)
sink_attention_dkv(const __grid_constant__ SinkAttention p) {
  unsigned char* k_tile = dynamic_shared_memory();
  unsigned char* v_tile = k_tile + block_bytes;
  unsigned char* stages = v_tile + block_bytes;  // q, dout, q, dout
  RowNumbers* numbers = reinterpret_cast<RowNumbers*>(stages + 4 * block_bytes);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Tile tile = p.tiles[blockIdx.x / p.kv_heads];
  const Sequence s(p, tile.sequence, blockIdx.x % p.kv_heads);
  const int key_last = min(tile.first + block_keys, s.keys) - 1;
  const Range rows = rows_seeing(s, tile.first, key_last);

  const auto copy_step = [&](int row, int stage) {
    unsigned char* to = stages + stage * 2 * block_bytes;
    copy_rows<step_rows, dkv_threads, true>(p, s, to, row, rows.end, thread);
    copy_async_commit();
  };
  copy_keys<dkv_threads>(p, s, k_tile, tile.first / block_keys, thread);
  RowInFlight next;
  if (thread < step_rows) {
    next.load(p, s, rows.first + thread, rows.end);
    next.put(numbers[0], thread);
  }
  copy_step(rows.first, 0);
  copy_async_wait<0>();
  block_barrier();

  WarpKeys w;
  clear(w.dk);
  clear(w.dv);
  w.k_tile = k_tile + warp * 16 * 128;
  w.v_tile = v_tile + warp * 16 * 128;
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
    unsigned char* q_tile = stages + stage * 2 * block_bytes;
    w.step(p, s, q_tile, q_tile + block_bytes, numbers[stage], tile.first + 16 * warp, some_hidden, lane);
    if (more && thread < step_rows) next.put(numbers[stage ^ 1], thread);
    copy_async_wait<0>();
    block_barrier();
  }

  multiply_all(w.dk[0], p.scale);
  store_keys(p, s, w.dk[0], w.k_tile, p.dk, tile.first + 16 * warp, lane);
  store_keys(p, s, w.dv[0], w.v_tile, p.dv, tile.first + 16 * warp, lane);
}

extern "C" __global__ void __launch_bounds__(dq_threads, 1)
sink_attention_dq(const __grid_constant__ SinkAttention p) {
  unsigned char* q_tile = dynamic_shared_memory();
  unsigned char* dout_tile = q_tile + tile_bytes;
  unsigned char* stages = dout_tile + tile_bytes;  // k, v, k, v
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Tile tile = p.tiles[blockIdx.x / p.kv_heads];
  const Sequence s(p, tile.sequence, blockIdx.x % p.kv_heads);
  const int row_last = min(tile.first + tile_rows, s.rows) - 1;
  const Range blocks = blocks_seen(s, s.position(tile.first), s.position(row_last));

  const auto copy_block = [&](int block) {
    unsigned char* stage = stages + block % 2 * 2 * block_bytes;
    copy_keys<dq_threads>(p, s, stage, block, thread);
    copy_async_commit();
  };
  copy_rows<tile_rows, dq_threads, true>(p, s, q_tile, tile.first, s.rows, thread);
  copy_async_commit();
  if (blocks.first < blocks.end) copy_block(blocks.first);
  copy_async_wait<0>();
  block_barrier();

  const int first = tile.first + 16 * warp;
  const int position_first = s.position(first), position_last = s.position(min(first + 15, row_last));
  WarpQueries w;
  w.rows.load(p, s, first, lane);
  clear(w.dq);
  load_operand(w.q[0], q_tile, 16 * warp, lane);
  load_operand(w.dout[0], dout_tile, 16 * warp, lane);
  for (int block = blocks.first; block < blocks.end; block++) {
    if (block + 1 < blocks.end) copy_block(block + 1);
    const int key_first = block * block_keys, key_last = key_first + block_keys - 1;
    unsigned char* k_tile = stages + block % 2 * 2 * block_bytes;
    if (first <= row_last && any_sees(s, position_first, position_last, key_first, key_last))
      w.step(p, s, key_first, k_tile, k_tile + block_bytes,
             !all_see(s, position_first, position_last, key_first, key_last), lane);
    copy_async_wait<0>();
    block_barrier();
  }

  multiply_all(w.dq[0], p.scale);
  unsigned char* own_tile = q_tile + warp * 16 * 128;
  put_fragment(w.dq[0], own_tile, 0, lane);
  warp_barrier();
  store_rows<16, 32>(p, s, own_tile, p.dq, first, s.rows, lane);
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
