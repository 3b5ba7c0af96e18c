// O and LSE of attention with sinks, by mma.sync: training, prefill and decode alike.
//
// A block takes 128 packed rows, a warp 32 of them: its scores and output stay in registers. Key blocks pass through two
// stages of shared memory: while the tensor cores work on one, cp.async fills the other.

#include "warp_products.cuh"

using namespace sink_attention;

namespace {

constexpr int warp_rows = 32;

// What a warp keeps of its rows: two fragments of 16.
struct WarpRows {
  int first;             // packed row of the sequence
  int positions[2][2];   // of this lane's rows, [fragment][g or g + 8]
  unsigned char* tile;   // the queries; at the end the output
  Fragment out[2];
  Softmax softmax[2];
};

PRIMITIVE void start(WarpRows& w, const SinkAttention& p, const Sequence& s, int lane) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    w.softmax[i].scale = multiply(p.scale, log2_e);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = w.first + 16 * i + 8 * half + lane / 4;
      w.positions[i][half] = s.position(row);
      w.softmax[i].start(half, p.sinks[s.head(row)], lane);
    }
  }
  clear(w.out);
}

// One key block: scores, softmax, output. `seers`: the positions of the whole block's queries.
PRIMITIVE void step(WarpRows& w, const Sequence& s, Range seers, int key_first, unsigned char* k_tile,
                    unsigned char* v_tile, int lane) {
  uint32_t operand[2][4][4];  // the queries, then the probabilities
#pragma unroll
  for (int i = 0; i < 2; i++) load_operand(operand[i], w.tile, 16 * i, lane);
  Fragment scores[2];
  clear(scores);
  add_product_transposed(scores, operand, k_tile, lane);
  if (!all_see(s, seers.first, seers.end - 1, key_first, key_first + block_keys - 1)) {
#pragma unroll
    for (int i = 0; i < 2; i++) hide_keys(s, scores[i], w.positions[i], key_first, lane);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float shrink[2];
    w.softmax[i].step(scores[i], shrink);
    multiply_rows(w.out[i], shrink);
    to_operand(operand[i], scores[i]);
  }
  add_product(w.out, operand, v_tile, lane);
}

// The warp's rows of O, through its part of the queries' tile, and of LSE.
PRIMITIVE void store(WarpRows& w, const SinkAttention& p, const Sequence& s, int lane) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float lse[2];
    w.softmax[i].finish(w.out[i], lse);
    put_fragment(w.out[i], w.tile, 16 * i, lane);
    store_lse(p, s, lse, w.first + 16 * i, lane);
  }
  warp_barrier();
  store_rows<warp_rows, 32>(p, s, w.tile, p.out, w.first, s.rows, lane);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(forward_threads, 2)
sink_attention_forward(const __grid_constant__ SinkAttention p) {
  unsigned char* q_tile = dynamic_shared_memory();
  unsigned char* stages = q_tile + tile_bytes;  // k, v, k, v
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Tile tile = p.tiles[blockIdx.x / p.kv_heads];
  const Sequence s(p, tile.sequence, blockIdx.x % p.kv_heads);

  const int row_last = min(tile.first + tile_rows, s.rows) - 1;
  const Range seers = {s.position(tile.first), s.position(row_last) + 1};
  const Range blocks = blocks_seen(s, seers.first, seers.end - 1);
  const auto copy_block = [&](int block) {
    unsigned char* stage = stages + block % 2 * 2 * block_bytes;
    copy_keys<forward_threads>(p, s, stage, block, thread);
    copy_async_commit();
  };

  copy_rows<tile_rows, forward_threads, false>(p, s, q_tile, tile.first, s.rows, thread);
  copy_async_commit();
  if (blocks.first < blocks.end) copy_block(blocks.first);
  copy_async_wait<0>();
  block_barrier();

  WarpRows w;
  w.first = tile.first + warp * warp_rows;
  w.tile = q_tile + warp * warp_rows * 128;
  start(w, p, s, lane);

  for (int block = blocks.first; block < blocks.end; block++) {
    if (block + 1 < blocks.end) copy_block(block + 1);
    unsigned char* stage = stages + block % 2 * 2 * block_bytes;
    if (w.first <= row_last) step(w, s, seers, block * block_keys, stage, stage + block_bytes, lane);
    copy_async_wait<0>();
    block_barrier();
  }
  store(w, p, s, lane);
}
