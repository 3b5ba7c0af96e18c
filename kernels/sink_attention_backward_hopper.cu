// dK, dV and dQ of attention with sinks, by wgmma; delta and dsinks are in sink_attention_backward.cu.
//
// Two warpgroups per block. While a warpgroup computes the probabilities of a step, the tensor cores finish
// the sums of the previous step and the other scores of this one. The other warpgroup uses the remaining
// time.

#include "sink_attention_gradients.cuh"
#include "warpgroup_products.cuh"

using namespace sink_attention;

namespace {

// A warp's 16 keys of its warpgroup's 64: S^T = K Q^T and dP^T = V dO^T, dV += P^T dO, dK += dS^T Q.
struct WarpKeys {
  int first;                     // key of the sequence
  uint32_t k[4][4];
  uint32_t v[4][4];
  uint32_t probabilities[4][4];  // P^T and dS^T of the previous step
  uint32_t gradients[4][4];
  Fragment scores;
  Fragment dprobs;
  Fragment dk;
  Fragment dv;

  PRIMITIVE void start_scores(unsigned char* q_tile) {
    wgmma_fence();
    start_product_transposed(scores, k, q_tile);
    wgmma_commit();
  }

  PRIMITIVE void start_dprobs(unsigned char* dout_tile) {
    wgmma_fence();
    start_product_transposed(dprobs, v, dout_tile);
    wgmma_commit();
  }

  PRIMITIVE void start_sums(unsigned char* q_tile, unsigned char* dout_tile) {
    wgmma_fence();
    start_sum_of_product(dv, probabilities, dout_tile);
    start_sum_of_product(dk, gradients, q_tile);
    wgmma_commit();
  }

  PRIMITIVE void normalise(const SinkAttention& p, const Sequence& s, const RowNumbers& numbers, bool some_hidden,
                           int lane) {
    wgmma_hold(scores);
    if (some_hidden) hide_rows(s, scores, numbers, first, lane);
    to_probabilities(p, scores, numbers, lane);
  }

  PRIMITIVE void differentiate(const RowNumbers& numbers, int lane) {
    wgmma_hold(dprobs);
    wgmma_hold(dk);
    wgmma_hold(dv);
    to_score_gradients(scores, dprobs, numbers, lane);
    to_operand(probabilities, scores);
    to_operand(gradients, dprobs);
  }
};

// A warp's 16 packed rows of its warpgroup's 64: S = Q K^T and dP = dO V^T, dQ += dS K.
struct WarpQueries {
  int position_first;
  int position_last;
  uint32_t q[4][4];
  uint32_t dout[4][4];
  uint32_t gradients[4][4];  // dS of the previous block
  RowPair rows;
  Fragment scores;
  Fragment dprobs;
  Fragment dq;

  PRIMITIVE void start_scores(unsigned char* k_tile) {
    wgmma_fence();
    start_product_transposed(scores, q, k_tile);
    wgmma_commit();
  }

  PRIMITIVE void start_dprobs(unsigned char* v_tile) {
    wgmma_fence();
    start_product_transposed(dprobs, dout, v_tile);
    wgmma_commit();
  }

  PRIMITIVE void start_sum(unsigned char* k_tile) {
    wgmma_fence();
    start_sum_of_product(dq, gradients, k_tile);
    wgmma_commit();
  }

  PRIMITIVE void normalise(const SinkAttention& p, const Sequence& s, int key_first, int lane) {
    wgmma_hold(scores);
    if (!all_see(s, position_first, position_last, key_first, key_first + block_keys - 1))
      rows.hide_keys(s, scores, key_first, lane);
    rows.to_probabilities(p, scores);
  }

  PRIMITIVE void differentiate() {
    wgmma_hold(dprobs);
    wgmma_hold(dq);
    rows.to_score_gradients(scores, dprobs);
    to_operand(gradients, dprobs);
  }
};

// Processes all key blocks of a warpgroup's rows from `block` on; `start` starts a copy.
template <class Start>
PRIMITIVE void sum_dq(WarpQueries& w, const SinkAttention& p, const Sequence& s, const DqRing& ring, int block,
                      int thread, const Start& start) {
  const int lane = thread % 32, last = ring.count - 1;
  ring.pass(0, thread, start);
  ring.wait(0);
  w.start_scores(ring.first(0));
  w.start_dprobs(ring.second(0));
  wgmma_wait<0>();  // with one group left in flight into the loop, ptxas serialises every wgmma
  w.normalise(p, s, block * block_keys, lane);
  for (int i = 1; i <= last; i++) {
    wgmma_wait<0>();  // at the top: see sink_attention_forward_hopper.cu
    w.differentiate();
    if (i > 1) ring.release(i - 2, thread);
    ring.pass(i, thread, start);
    ring.wait(i);
    w.start_scores(ring.first(i));
    w.start_sum(ring.first(i - 1));
    w.start_dprobs(ring.second(i));
    wgmma_wait<2>();
    w.normalise(p, s, (block + i) * block_keys, lane);
  }
  wgmma_wait<0>();
  w.differentiate();
  w.start_sum(ring.first(last));
  wgmma_wait<0>();
  wgmma_hold(w.dq);
}

PRIMITIVE void clear(Fragment& x) {
#pragma unroll
  for (int i = 0; i < 32; i++) x[i] = 0.0f;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(dkv_hopper_threads, 1)
sink_attention_dkv_hopper(const __grid_constant__ SinkAttention p) {
  unsigned char* key_tiles = dynamic_shared_memory();  // k, v of each warpgroup
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, warpgroup = warp / 4;
  const Tile tile = p.tiles[blockIdx.x / p.kv_heads];
  const Sequence s(p, tile.sequence, blockIdx.x % p.kv_heads);
  const Range rows = rows_seeing(s, tile.first, min(tile.first + dkv_hopper_keys, s.keys) - 1);
  const DkvRing ring = {key_tiles + 4 * block_bytes, (rows.end - rows.first + step_rows - 1) / step_rows};
  RowNumbers* numbers = reinterpret_cast<RowNumbers*>(ring.tiles + DkvRing::bytes);
  RowInFlight next;  // of the next step
  const auto start = [&](int i) {
    const int row = rows.first + i * step_rows;
    copy_rows<step_rows, hopper_threads, true>(p, s, ring.first(i), row, rows.end, thread);
    if (thread < step_rows) next.load(p, s, row + thread, rows.end);
  };
  const auto pass = [&](int i) {
    if (thread < step_rows) next.put(numbers[DkvRing::stage(i)], thread);
    ring.pass(i, thread, start);
    ring.wait(i);
  };

  if (thread == 0) ring.init(hopper_threads / 32);
  for (int i = 0; i < 2; i++)
    copy_keys<hopper_threads>(p, s, key_tiles + i * 2 * block_bytes, tile.first / block_keys + i, thread);
  copy_async_commit();
  ring.begin(start);
  copy_async_wait<DkvRing::copies_ahead - 1>();
  block_barrier();

  // Only the steps whose rows see this warpgroup's keys; it skips the others.
  const int key_first = tile.first + warpgroup * block_keys, key_last = min(key_first + block_keys, s.keys) - 1;
  const Range own = rows_seeing(s, key_first, key_last);
  const int step_first = (own.first - rows.first) / step_rows;
  const int step_end = key_first > key_last ? step_first : (own.end - rows.first + step_rows - 1) / step_rows;
  WarpKeys w;
  w.first = key_first + warp % 4 * 16;
  unsigned char* k_tile = key_tiles + warpgroup * 2 * block_bytes + warp % 4 * 16 * 128;
  load_operand(w.k, k_tile, 0, lane);
  load_operand(w.v, k_tile + block_bytes, 0, lane);
  clear(w.dk);
  clear(w.dv);
  const auto some_hidden = [&](int i) {
    const int row = rows.first + i * step_rows, row_last = min(row + step_rows, rows.end) - 1;
    return !all_see(s, s.position(row), s.position(row_last), w.first, w.first + 15);
  };

  for (int i = 0; i < min(step_first, ring.count); i++) {
    pass(i);
    ring.release(i, thread);
  }
  if (step_first < step_end) {
    pass(step_first);
    w.start_scores(ring.first(step_first));
    w.start_dprobs(ring.second(step_first));
    wgmma_wait<0>();
    w.normalise(p, s, numbers[DkvRing::stage(step_first)], some_hidden(step_first), lane);
    for (int i = step_first + 1; i < step_end; i++) {
      wgmma_wait<0>();
      w.differentiate(numbers[DkvRing::stage(i - 1)], lane);
      if (i > step_first + 1) ring.release(i - 2, thread);
      pass(i);
      w.start_scores(ring.first(i));
      w.start_sums(ring.first(i - 1), ring.second(i - 1));
      w.start_dprobs(ring.second(i));
      wgmma_wait<2>();
      w.normalise(p, s, numbers[DkvRing::stage(i)], some_hidden(i), lane);
    }
    wgmma_wait<0>();
    w.differentiate(numbers[DkvRing::stage(step_end - 1)], lane);
    if (step_end - step_first > 1) ring.release(step_end - 2, thread);
    w.start_sums(ring.first(step_end - 1), ring.second(step_end - 1));
    wgmma_wait<0>();
    wgmma_hold(w.dk);
    wgmma_hold(w.dv);
    ring.release(step_end - 1, thread);
  }
  for (int i = max(step_first, step_end); i < ring.count; i++) {
    pass(i);
    ring.release(i, thread);
  }
  copy_async_wait<0>();

  multiply_all(w.dk, p.scale);
  store_keys(p, s, w.dk, k_tile, p.dk, w.first, lane);
  store_keys(p, s, w.dv, k_tile + block_bytes, p.dv, w.first, lane);
}

extern "C" __global__ void __launch_bounds__(dq_hopper_threads, 1)
sink_attention_dq_hopper(const __grid_constant__ SinkAttention p) {
  unsigned char* q_tile = dynamic_shared_memory();
  unsigned char* dout_tile = q_tile + tile_bytes;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Tile tile = p.tiles[blockIdx.x / p.kv_heads];
  const Sequence s(p, tile.sequence, blockIdx.x % p.kv_heads);
  const int row_last = min(tile.first + tile_rows, s.rows) - 1;
  const Range blocks = blocks_seen(s, s.position(tile.first), s.position(row_last));
  const DqRing ring = {dout_tile + tile_bytes, blocks.end - blocks.first};
  const auto start = [&](int i) { copy_keys<hopper_threads>(p, s, ring.first(i), blocks.first + i, thread); };

  if (thread == 0) ring.init(hopper_threads / 32);
  copy_rows<tile_rows, hopper_threads, true>(p, s, q_tile, tile.first, s.rows, thread);
  copy_async_commit();
  ring.begin(start);
  copy_async_wait<DqRing::copies_ahead - 1>();
  block_barrier();

  const int first = tile.first + 16 * warp;
  unsigned char* own_tile = q_tile + warp * 16 * 128;
  WarpQueries w;
  w.position_first = s.position(first);
  w.position_last = s.position(first + 15);
  w.rows.load(p, s, first, lane);
  load_operand(w.q, own_tile, 0, lane);
  load_operand(w.dout, own_tile + tile_bytes, 0, lane);
  clear(w.dq);
  if (ring.count > 0) sum_dq(w, p, s, ring, blocks.first, thread, start);
  copy_async_wait<0>();

  multiply_all(w.dq, p.scale);
  put_fragment(w.dq, own_tile, 0, lane);
  warp_barrier();
  store_rows<16, 32>(p, s, own_tile, p.dq, first, s.rows, lane);
}
