// O and LSE of attention with sinks, by wgmma: the operations of sink_attention_forward.cu in the same
// order. These tensor cores round differently, so a run uses only one of the two.
//
// A block has 128 packed rows, a warpgroup 64 of them. With heads of 64 two blocks share a multiprocessor, so
// four warpgroups alternate between the tensor cores and the exponentials, which take equal time. With heads of
// 128 products take twice as long, and one block's two warpgroups alternate. Within a
// warpgroup the next block's scores are computed while this block's probabilities are multiplied by V. Key
// blocks use a ring of stages that all warps fill together and read at their own pace, with mbarriers only.
// No warp is reserved for copies: registers would then be too few for four warpgroups.
// sink_attention_chunk_hopper processes one chunk of keys, and sink_attention_merge merges the chunks.

#include "sink_attention_softmax.cuh"
#include "warpgroup_products.cuh"

using namespace sink_attention;

namespace {

constexpr int warpgroup_rows = 64;

// A warp's 16 rows of its warpgroup's 64. All four warps perform the same steps.
template <int panels>
struct WarpRows {
  KeptRows<panels> kept;
  uint32_t q[4 * panels][4];
  uint32_t probabilities[4][4];     // of the previous block
  Fragment scores;
  Fragment out[panels];
  Softmax softmax;

  PRIMITIVE WarpRows(const KeptRows<panels>& kept) : kept(kept) { clear(out); }

  PRIMITIVE void start_scores(unsigned char* k_tile) {
    wgmma_fence();
    start_product_transposed(scores, q, k_tile);
    wgmma_commit();
  }

  PRIMITIVE void start_output(unsigned char* v_tile, bool accumulate) {
    wgmma_fence();
    start_sum_of_product(out, probabilities, v_tile, accumulate);
    wgmma_commit();
  }

  // Replaces the scores of key block `block` by probabilities.
  PRIMITIVE void normalise(const SinkAttention& p, int block, float (&shrink)[2], int lane) {
    wgmma_hold(scores);
    kept.hide_keys(scores, block, lane);
    softmax.step(p, scores, shrink);
  }

  PRIMITIVE void store(const SinkAttention& p, const Sequence& s, int first, int lane) {
    unsigned char* tile = reinterpret_cast<unsigned char*>(kept.own - lane);
    Fragment out[panels];
    finish(out, kept, p, s, first, lane);
    warp_barrier();  // the tile overlaps the rows' state
    put_rows<16 * panel_row_bytes>(out, tile, 0, lane);
    warp_barrier();
    store_rows<panels, 16, 32, 16 * panel_row_bytes>(p, s, tile, p.out, first, s.rows, lane);
  }
};

// Processes `blocks` of the ring, all in one chunk, for a warpgroup's rows. The ring starts with key block
// `ring_first`; `start` starts a copy.
template <int panels, class Start>
PRIMITIVE void attend(WarpRows<panels>& w, const SinkAttention& p, const ForwardRing<panels>& ring, Range blocks, int ring_first,
                      int thread, const Start& start) {
  const int lane = thread % 32, last = blocks.end - 1;
  float shrink[2];
  const auto finish_step = [&] {
    wgmma_wait<0>();
    hold(w.out);
    shrink_rows(w.out, shrink);
    to_operand(w.probabilities, w.scores);
  };
  ring.pass(blocks.first, thread, start);
  ring.wait(blocks.first);
  w.start_scores(ring.first(blocks.first));
  wgmma_wait<0>();
  w.normalise(p, ring_first + blocks.first, shrink, lane);
  for (int i = blocks.first + 1; i <= last; i++) {
    // At the top, so that the compiler cannot move this wait before the previous step's exponentials.
    finish_step();
    if (i > blocks.first + 1) ring.release(i - 2, thread);
    ring.pass(i, thread, start);
    ring.wait(i);
    w.start_scores(ring.first(i));
    w.start_output(ring.second(i - 1), i - 1 > blocks.first);
    wgmma_wait<1>();
    w.normalise(p, ring_first + i, shrink, lane);
  }
  finish_step();
  w.start_output(ring.second(last), last > blocks.first);
  wgmma_wait<0>();
  hold(w.out);
  if (last > blocks.first) ring.release(last - 1, thread);
  ring.release(last, thread);
}

// The work of a block: rows `tile` over all their key blocks, or over those of `chunk`. Shared memory: the
// queries' tile, later replaced by the rows' state; then the ring.
template <int panels, bool all_chunks>
PRIMITIVE void forward(const SinkAttention& p, Tile tile, int chunk) {
  unsigned char* q_tile = dynamic_shared_memory();
  unsigned char* ring_tiles = q_tile + tile_rows / 16 * rows_bytes<panels>;
  const int thread = threadIdx.x % hopper_threads, warp = thread / 32, lane = thread % 32;  // known to be nonnegative
  const Sequence s(p, tile.sequence, blockIdx.x % p.kv_heads);
  const int row_last = min(tile.first + tile_rows, s.rows) - 1;
  const int warpgroups = (row_last - tile.first) / warpgroup_rows + 1;  // number with rows
  const int position_first = s.position(tile.first), position_last = s.position(row_last);
  const Range seen = blocks_seen(s, position_first, position_last);
  const Range blocks = all_chunks ? seen : blocks_of(seen, chunk);
  const ForwardRing<panels> ring = {ring_tiles, blocks.end - blocks.first};
  const auto start = [&](int i) { copy_keys<panels, hopper_threads>(p, s, ring.first(i), blocks.first + i, thread); };

  if (thread == 0) ring.init(4 * warpgroups);
  copy_rows<panels, tile_rows, hopper_threads, false>(p, s, q_tile, tile.first, s.rows, thread);
  copy_async_commit();
  ring.begin(start);
  copy_async_wait<ForwardRing<panels>::copies_ahead - 1>();
  block_barrier();
  WarpRows<panels> w(KeptRows<panels>(q_tile + warp * rows_bytes<panels>, lane));
  load_operand<tile_panel_bytes>(w.q, q_tile + warp * 16 * panel_row_bytes, 0, lane);
  block_barrier();  // the queries are read
  w.kept.start(p, s, blocks_seen_whole(s, position_first, position_last), tile.first + 16 * warp, lane);
  w.softmax.start_chunk(w.kept);
  if (warp < 4 * warpgroups) {
    if (all_chunks) {
      if (ring.count == 0) w.softmax.end_chunk(w.out, w.kept, true);
      for (int i = 0; i < ring.count;) {
        const int block = blocks.first + i, end = min(ring.count, i + chunk_blocks - block % chunk_blocks);
        attend(w, p, ring, {i, end}, blocks.first, thread, start);
        w.softmax.end_chunk(w.out, w.kept, i == 0);
        w.softmax.start_chunk(w.kept);
        i = end;
      }
      // Read again: registers are too few to keep it through the loop.
      const Tile own = p.tiles[blockIdx.x / p.kv_heads];
      w.store(p, Sequence(p, own.sequence, blockIdx.x % p.kv_heads), own.first + 16 * warp, w.kept.lane());
    } else {
      attend(w, p, ring, {0, ring.count}, blocks.first, thread, start);
      w.softmax.store_part(w.out, p, s, chunk, tile.first + 16 * warp, lane);
    }
  } else {
    for (int i = 0; i < ring.count; i++) ring.pass(i, thread, start);
  }
  copy_async_wait<0>();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(forward_hopper_threads, 2)
sink_attention_forward_hopper(const __grid_constant__ SinkAttention p) {
  forward<1, true>(p, p.tiles[blockIdx.x / p.kv_heads], 0);
}

extern "C" __global__ void __launch_bounds__(forward_hopper_128_threads, 1)
sink_attention_forward_hopper_128(const __grid_constant__ SinkAttention p) {
  forward<2, true>(p, p.tiles[blockIdx.x / p.kv_heads], 0);
}

extern "C" __global__ void __launch_bounds__(chunk_hopper_threads, 2)
sink_attention_chunk_hopper(const __grid_constant__ SinkAttention p) {
  const ChunkTile chunk_tile = p.chunk_tiles[blockIdx.x / p.kv_heads];
  forward<1, false>(p, chunk_tile.tile, chunk_tile.chunk);
}

extern "C" __global__ void __launch_bounds__(chunk_hopper_128_threads, 1)
sink_attention_chunk_hopper_128(const __grid_constant__ SinkAttention p) {
  const ChunkTile chunk_tile = p.chunk_tiles[blockIdx.x / p.kv_heads];
  forward<2, false>(p, chunk_tile.tile, chunk_tile.chunk);
}
