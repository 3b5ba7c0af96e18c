// dK, dV and dQ of attention with sinks, by wgmma; delta and dsinks are in sink_attention_backward.cu.
//
// Two warpgroups per block. While a warpgroup computes the probabilities of a step, the tensor cores finish
// the sums of the previous step and the other scores of this one. The other warpgroup uses the remaining
// time.
//
// With heads of 64 each warpgroup sums dK and dV of its own 64 keys. With heads of 128 registers are too few for
// both: the first warpgroup sums dV, the second dK, of the same 64 keys, and both compute the scores.

#include "sink_attention_gradients.cuh"
#include "warpgroup_products.cuh"

using namespace sink_attention;

namespace {

// A warp's 16 keys of its warpgroup's 64: S^T = K Q^T and dP^T = V dO^T, dV += P^T dO, dK += dS^T Q.
template <int panels, bool sums_dv, bool sums_dk>
struct WarpKeys {
  int first;                     // key of the sequence
  uint32_t k[4 * panels][4];
  uint32_t v[4 * panels][4];
  uint32_t probabilities[4][4];  // P^T and dS^T of the previous step
  uint32_t gradients[4][4];
  Fragment scores;
  Fragment dprobs;
  Fragment dk[panels];
  Fragment dv[panels];

  PRIMITIVE void start_scores(unsigned char* q_tile) {
    wgmma_fence();
    start_product_transposed(scores, k, q_tile);
    wgmma_commit();
  }

  PRIMITIVE void start_dprobs(unsigned char* dout_tile) {
    if (!sums_dk) return;
    wgmma_fence();
    start_product_transposed(dprobs, v, dout_tile);
    wgmma_commit();
  }

  PRIMITIVE void start_sums(unsigned char* q_tile, unsigned char* dout_tile) {
    wgmma_fence();
    if (sums_dv) start_sum_of_product(dv, probabilities, dout_tile);
    if (sums_dk) start_sum_of_product(dk, gradients, q_tile);
    wgmma_commit();
  }

  PRIMITIVE void normalise(const SinkAttention& p, const Sequence& s, const RowNumbers& numbers, bool some_hidden,
                           int lane) {
    wgmma_hold(scores);
    if (some_hidden) hide_rows(s, scores, numbers, first, lane);
    to_probabilities(p, scores, numbers, lane);
  }

  PRIMITIVE void differentiate(const RowNumbers& numbers, int lane) {
    if (sums_dv) hold(dv);
    if (sums_dk) {
      wgmma_hold(dprobs);
      hold(dk);
      to_score_gradients(scores, dprobs, numbers, lane);
    }
    if (sums_dv) to_operand(probabilities, scores);
    if (sums_dk) to_operand(gradients, dprobs);
  }
};

// A warp's 16 packed rows of its warpgroup's 64: S = Q K^T and dP = dO V^T, dQ += dS K.
template <int panels>
struct WarpQueries {
  int position_first;
  int position_last;
  uint32_t q[4 * panels][4];
  uint32_t dout[4 * panels][4];
  uint32_t gradients[4][4];  // dS of the previous block
  RowPair rows;
  Fragment scores;
  Fragment dprobs;
  Fragment dq[panels];

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
    hold(dq);
    rows.to_score_gradients(scores, dprobs);
    to_operand(gradients, dprobs);
  }
};

// Processes all key blocks of a warpgroup's rows from `block` on; `start` starts a copy.
template <int panels, class Start>
PRIMITIVE void sum_dq(WarpQueries<panels>& w, const SinkAttention& p, const Sequence& s, const DqRing<panels>& ring,
                      int block, int thread, const Start& start) {
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
  hold(w.dq);
}

// Sums dV, dK or both of the 64 keys of block `own_block` of the tile, for one warpgroup; `rows` see the tile's
// keys. `pass` hands over a step of the ring. Skips the steps whose rows do not see these keys.
template <int panels, bool sums_dv, bool sums_dk, class Pass>
PRIMITIVE void sum_keys(const SinkAttention& p, const Sequence& s, const DkvRing<panels>& ring, Tile tile, Range rows,
                        unsigned char* key_tiles, int own_block, const RowNumbers* numbers, int thread,
                        const Pass& pass) {
  const int warp = thread / 32, lane = thread % 32;
  const int key_first = tile.first + own_block * block_keys, key_last = min(key_first + block_keys, s.keys) - 1;
  const Range own = rows_seeing(s, key_first, key_last);
  const int step_first = (own.first - rows.first) / step_rows;
  const int step_end = key_first > key_last ? step_first : (own.end - rows.first + step_rows - 1) / step_rows;
  WarpKeys<panels, sums_dv, sums_dk> w;
  w.first = key_first + warp % 4 * 16;
  unsigned char* k_tile = key_tiles + own_block * 2 * block_bytes<panels> + warp % 4 * 16 * panel_row_bytes;
  unsigned char* v_tile = k_tile + block_bytes<panels>;
  // Without a step the other warpgroup of the same keys may be storing already.
  if (panels == 1 || ring.count > 0) {
    load_operand<panel_bytes>(w.k, k_tile, 0, lane);
    if (sums_dk) load_operand<panel_bytes>(w.v, v_tile, 0, lane);
  }
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
    w.normalise(p, s, numbers[DkvRing<panels>::stage(step_first)], some_hidden(step_first), lane);
    for (int i = step_first + 1; i < step_end; i++) {
      wgmma_wait<0>();
      w.differentiate(numbers[DkvRing<panels>::stage(i - 1)], lane);
      if (i > step_first + 1) ring.release(i - 2, thread);
      pass(i);
      w.start_scores(ring.first(i));
      w.start_sums(ring.first(i - 1), ring.second(i - 1));
      w.start_dprobs(ring.second(i));
      wgmma_wait<sums_dk ? 2 : 1>();
      w.normalise(p, s, numbers[DkvRing<panels>::stage(i)], some_hidden(i), lane);
    }
    wgmma_wait<0>();
    w.differentiate(numbers[DkvRing<panels>::stage(step_end - 1)], lane);
    if (step_end - step_first > 1) ring.release(step_end - 2, thread);
    w.start_sums(ring.first(step_end - 1), ring.second(step_end - 1));
    wgmma_wait<0>();
    if (sums_dv) hold(w.dv);
    if (sums_dk) hold(w.dk);
    ring.release(step_end - 1, thread);
  }
  for (int i = max(step_first, step_end); i < ring.count; i++) {
    pass(i);
    ring.release(i, thread);
  }
  copy_async_wait<0>();

  if (sums_dk) {
    multiply_all(w.dk, p.scale);
    store_keys(p, s, w.dk, k_tile, p.dk, w.first, lane);
  }
  if (sums_dv) store_keys(p, s, w.dv, v_tile, p.dv, w.first, lane);
}

template <int panels>
PRIMITIVE void sum_dkv(const SinkAttention& p) {
  constexpr int tile_blocks = dkv_hopper_tile_keys<panels> / block_keys;
  unsigned char* key_tiles = dynamic_shared_memory();  // k, v of each block of keys
  const int thread = threadIdx.x, warpgroup = thread / 128;
  const Tile tile = p.tiles[blockIdx.x / p.kv_heads];
  const Sequence s(p, tile.sequence, blockIdx.x % p.kv_heads);
  const Range rows = rows_seeing(s, tile.first, min(tile.first + dkv_hopper_tile_keys<panels>, s.keys) - 1);
  const DkvRing<panels> ring = {key_tiles + tile_blocks * 2 * block_bytes<panels>,
                                (rows.end - rows.first + step_rows - 1) / step_rows};
  RowNumbers* numbers = reinterpret_cast<RowNumbers*>(ring.tiles + DkvRing<panels>::bytes);
  RowInFlight next;  // of the next step
  const auto start = [&](int i) {
    const int row = rows.first + i * step_rows;
    copy_rows<panels, step_rows, hopper_threads, true>(p, s, ring.first(i), row, rows.end, thread);
    if (thread < step_rows) next.load(p, s, row + thread, rows.end);
  };
  const auto pass = [&](int i) {
    if (thread < step_rows) next.put(numbers[DkvRing<panels>::stage(i)], thread);
    ring.pass(i, thread, start);
    ring.wait(i);
  };

  if (thread == 0) ring.init(hopper_threads / 32);
  for (int i = 0; i < tile_blocks; i++)
    copy_keys<panels, hopper_threads>(p, s, key_tiles + i * 2 * block_bytes<panels>, tile.first / block_keys + i,
                                      thread);
  copy_async_commit();
  ring.begin(start);
  copy_async_wait<DkvRing<panels>::copies_ahead - 1>();
  block_barrier();
  if constexpr (panels == 1)
    sum_keys<panels, true, true>(p, s, ring, tile, rows, key_tiles, warpgroup, numbers, thread, pass);
  else if (warpgroup == 0)
    sum_keys<panels, true, false>(p, s, ring, tile, rows, key_tiles, 0, numbers, thread, pass);
  else
    sum_keys<panels, false, true>(p, s, ring, tile, rows, key_tiles, 0, numbers, thread, pass);
}

template <int panels>
PRIMITIVE void sum_dq(const SinkAttention& p) {
  unsigned char* q_tile = dynamic_shared_memory();
  unsigned char* dout_tile = q_tile + tile_bytes<panels>;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Tile tile = p.tiles[blockIdx.x / p.kv_heads];
  const Sequence s(p, tile.sequence, blockIdx.x % p.kv_heads);
  const int row_last = min(tile.first + tile_rows, s.rows) - 1;
  const Range blocks = blocks_seen(s, s.position(tile.first), s.position(row_last));
  const DqRing<panels> ring = {dout_tile + tile_bytes<panels>, blocks.end - blocks.first};
  const auto start = [&](int i) { copy_keys<panels, hopper_threads>(p, s, ring.first(i), blocks.first + i, thread); };

  if (thread == 0) ring.init(hopper_threads / 32);
  copy_rows<panels, tile_rows, hopper_threads, true>(p, s, q_tile, tile.first, s.rows, thread);
  copy_async_commit();
  ring.begin(start);
  copy_async_wait<DqRing<panels>::copies_ahead - 1>();
  block_barrier();

  const int first = tile.first + 16 * warp;
  unsigned char* own_tile = q_tile + warp * 16 * panel_row_bytes;
  WarpQueries<panels> w;
  w.position_first = s.position(first);
  w.position_last = s.position(first + 15);
  w.rows.load(p, s, first, lane);
  load_operand<tile_panel_bytes>(w.q, own_tile, 0, lane);
  load_operand<tile_panel_bytes>(w.dout, own_tile + tile_bytes<panels>, 0, lane);
  clear(w.dq);
  if (ring.count > 0) sum_dq(w, p, s, ring, blocks.first, thread, start);
  copy_async_wait<0>();

  multiply_all(w.dq, p.scale);
  put_rows<tile_panel_bytes>(w.dq, own_tile, 0, lane);
  warp_barrier();
  store_rows<panels, 16, 32, tile_panel_bytes>(p, s, own_tile, p.dq, first, s.rows, lane);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(dkv_hopper_threads, 1)
sink_attention_dkv_hopper(const __grid_constant__ SinkAttention p) {
  sum_dkv<1>(p);
}

extern "C" __global__ void __launch_bounds__(dkv_hopper_128_threads, 1)
sink_attention_dkv_hopper_128(const __grid_constant__ SinkAttention p) {
  sum_dkv<2>(p);
}

extern "C" __global__ void __launch_bounds__(dq_hopper_threads, 1)
sink_attention_dq_hopper(const __grid_constant__ SinkAttention p) {
  sum_dq<1>(p);
}

extern "C" __global__ void __launch_bounds__(dq_hopper_128_threads, 1)
sink_attention_dq_hopper_128(const __grid_constant__ SinkAttention p) {
  sum_dq<2>(p);
}
