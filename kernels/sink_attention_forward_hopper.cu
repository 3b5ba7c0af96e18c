// O and LSE of attention with sinks, by wgmma: the arithmetic of sink_attention_forward.cu in the same order, on tensor
// cores that give other last bits. A run uses one or the other.
//
// A block takes 128 packed rows, a warpgroup 64 of them; two blocks share a multiprocessor, so that four warpgroups take
// turns at the tensor cores and at the exponentials, which cost the same time. Within a warpgroup the scores of the next
// block are on their way while this one's probabilities meet V. Key blocks pass through a ring of stages that all warps
// fill together and empty each at its own pace: barriers in shared memory, none of the whole block. No warp is set aside
// for copying: with one, registers would not suffice for four warpgroups.

#include "warpgroup_products.cuh"

using namespace sink_attention;

namespace {

constexpr int warpgroup_rows = 64;

// A warp's 16 rows of its warpgroup's 64. All four warps go through the same steps.
struct WarpRows {
  int first;                        // packed row of the sequence
  int positions[2];                 // of this lane's rows g and g + 8
  uint32_t q[4][4];
  uint32_t probabilities[4][4];     // of the block before
  Fragment scores;
  Fragment out;
  Softmax softmax;

  PRIMITIVE void start(const SinkAttention& p, const Sequence& s, unsigned char* tile, int lane) {
    load_operand(q, tile, 0, lane);
    softmax.scale = multiply(p.scale, log2_e);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = first + 8 * half + lane / 4;
      positions[half] = s.position(row);
      softmax.start(half, p.sinks[s.head(row)], lane);
    }
#pragma unroll
    for (int i = 0; i < 32; i++) out[i] = 0.0f;
  }

  PRIMITIVE void start_scores(unsigned char* k_tile) {
    wgmma_fence();
    start_product_transposed(scores, q, k_tile);
    wgmma_commit();
  }

  PRIMITIVE void start_output(unsigned char* v_tile) {
    wgmma_fence();
    start_sum_of_product(out, probabilities, v_tile);
    wgmma_commit();
  }

  // Scores to probabilities, in place. `seers`: the positions of the whole block's queries.
  PRIMITIVE void normalise(const Sequence& s, Range seers, int key_first, float (&shrink)[2], int lane) {
    wgmma_hold(scores);
    if (!all_see(s, seers.first, seers.end - 1, key_first, key_first + block_keys - 1))
      hide_keys(s, scores, positions, key_first, lane);
    softmax.step(scores, shrink);
  }

  PRIMITIVE void store(const SinkAttention& p, const Sequence& s, unsigned char* tile, int lane) {
    float lse[2];
    softmax.finish(out, lse);
    put_fragment(out, tile, 0, lane);
    store_lse(p, s, lse, first, lane);
    warp_barrier();
    store_rows<16, 32>(p, s, tile, p.out, first, s.rows, lane);
  }
};

// All key blocks of a warpgroup's rows, the first at `block`; `start` starts a copy.
template <class Start>
PRIMITIVE void attend(WarpRows& w, const Sequence& s, const HopperRing& ring, Range seers, int block, int thread,
                      const Start& start) {
  const int lane = thread % 32, last = ring.count - 1;
  float shrink[2];
  const auto finish_step = [&] {
    wgmma_wait<0>();
    wgmma_hold(w.out);
    multiply_rows(w.out, shrink);
    to_operand(w.probabilities, w.scores);
  };
  ring.pass(0, thread, start);
  ring.wait(0);
  w.start_scores(ring.first(0));
  wgmma_wait<0>();
  w.normalise(s, seers, block * block_keys, shrink, lane);
  for (int i = 1; i <= last; i++) {
    // Here, at the top, the compiler cannot take this wait before the exponentials of the step before.
    finish_step();
    if (i > 1) ring.release(i - 2, thread);
    ring.pass(i, thread, start);
    ring.wait(i);
    w.start_scores(ring.first(i));
    w.start_output(ring.second(i - 1));
    wgmma_wait<1>();
    w.normalise(s, seers, (block + i) * block_keys, shrink, lane);
  }
  finish_step();
  w.start_output(ring.second(last));
  wgmma_wait<0>();
  wgmma_hold(w.out);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(forward_hopper_threads, 2)
sink_attention_forward_hopper(const __grid_constant__ SinkAttention p) {
  unsigned char* q_tile = dynamic_shared_memory();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Tile tile = p.tiles[blockIdx.x / p.kv_heads];
  const Sequence s(p, tile.sequence, blockIdx.x % p.kv_heads);
  const int row_last = min(tile.first + tile_rows, s.rows) - 1;
  const int warpgroups = (row_last - tile.first) / warpgroup_rows + 1;  // that have rows
  const Range seers = {s.position(tile.first), s.position(row_last) + 1};
  const Range blocks = blocks_seen(s, seers.first, seers.end - 1);
  const HopperRing ring = {q_tile + tile_bytes, blocks.end - blocks.first};
  const auto start = [&](int i) { copy_keys<hopper_threads>(p, s, ring.first(i), blocks.first + i, thread); };

  if (thread == 0) ring.init(4 * warpgroups);
  copy_rows<tile_rows, hopper_threads, false>(p, s, q_tile, tile.first, s.rows, thread);
  copy_async_commit();
  ring.begin(start);
  copy_async_wait<HopperRing::copies_ahead - 1>();
  block_barrier();
  if (warp < 4 * warpgroups) {
    WarpRows w;
    w.first = tile.first + 16 * warp;
    unsigned char* own_tile = q_tile + warp * 16 * 128;
    w.start(p, s, own_tile, lane);
    if (ring.count > 0) attend(w, s, ring, seers, blocks.first, thread, start);
    w.store(p, s, own_tile, lane);
  } else {
    for (int i = 0; i < ring.count; i++) ring.pass(i, thread, start);
  }
  copy_async_wait<0>();
}
