// O and LSE of attention with sinks, by mma.sync, for training, prefill and decode.
//
// A block has 128 packed rows, a warp 32 of them, or 16 with heads of 128; its scores and output stay in registers. Key blocks use
// two stages of shared memory: the tensor cores read one while cp.async fills the other.
// sink_attention_forward processes all chunks of keys. For few rows with many keys sink_attention_chunk
// processes one chunk, and sink_attention_merge merges them. Both ways give the same bits.

#include "sink_attention_softmax.cuh"
#include "warp_products.cuh"

using namespace sink_attention;

namespace {

// A warp's rows: fragments of 16.
template <int panels>
struct WarpRows {
  static constexpr int fragments = 2 / panels;
  static constexpr int count = 16 * fragments;
  int first;            // packed row of the sequence
  unsigned char* tile;  // the queries; at the end the output
  KeptRows<panels> kept[fragments];
  Fragment out[fragments][panels];
  Softmax softmax[fragments];

  PRIMITIVE void start(const SinkAttention& p, const Sequence& s, unsigned char* state, Range whole, int lane) {
#pragma unroll
    for (int i = 0; i < fragments; i++) {
      kept[i] = KeptRows<panels>(state + i * rows_bytes<panels>, lane);
      kept[i].start(p, s, whole, first + 16 * i, lane);
    }
    start_chunk();
  }

  // One key block: scores, softmax, output.
  PRIMITIVE void step(const SinkAttention& p, int block, unsigned char* k_tile, unsigned char* v_tile, int lane) {
    uint32_t q[fragments][4 * panels][4], probabilities[fragments][4][4];
    Fragment scores[fragments];
    clear(scores);
#pragma unroll
    for (int i = 0; i < fragments; i++) load_operand<tile_panel_bytes>(q[i], tile, 16 * i, lane);
    add_product_transposed(scores, q, k_tile, lane);
#pragma unroll
    for (int i = 0; i < fragments; i++) kept[i].hide_keys(scores[i], block, lane);
#pragma unroll
    for (int i = 0; i < fragments; i++) {
      float shrink[2];
      softmax[i].step(p, scores[i], shrink);
      shrink_rows(out[i], shrink);
      to_operand(probabilities[i], scores[i]);
    }
    add_product(out, probabilities, v_tile, lane);
  }

  PRIMITIVE void end_chunk(bool is_first) const {
#pragma unroll
    for (int i = 0; i < fragments; i++) softmax[i].end_chunk(out[i], kept[i], is_first);
  }

  PRIMITIVE void start_chunk() {
#pragma unroll
    for (int i = 0; i < fragments; i++) {
      softmax[i].start_chunk(kept[i]);
      clear(out[i]);
    }
  }

  // Stores O, through the warp's rows of the queries' tile, and LSE.
  PRIMITIVE void store(const SinkAttention& p, const Sequence& s, int lane) {
#pragma unroll
    for (int i = 0; i < fragments; i++) {
      finish(out[i], kept[i], p, s, first + 16 * i, lane);
      put_rows<tile_panel_bytes>(out[i], tile, 16 * i, lane);
    }
    warp_barrier();
    store_rows<panels, count, 32, tile_panel_bytes>(p, s, tile, p.out, first, s.rows, lane);
  }
};

// The work of a block: rows `tile` over all their key blocks, or over those of `chunk`.
template <int panels, bool all_chunks>
PRIMITIVE void forward(const SinkAttention& p, Tile tile, int chunk) {
  unsigned char* q_tile = dynamic_shared_memory();
  unsigned char* stages = q_tile + tile_bytes<panels>;  // k, v, k, v
  constexpr int threads = forward_threads * panels;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Sequence s(p, tile.sequence, blockIdx.x % p.kv_heads);

  const int row_last = min(tile.first + tile_rows, s.rows) - 1;
  const int position_first = s.position(tile.first), position_last = s.position(row_last);
  const Range seen = blocks_seen(s, position_first, position_last);
  const Range blocks = all_chunks ? seen : blocks_of(seen, chunk);
  const auto copy_block = [&](int block) {
    unsigned char* stage = stages + block % 2 * 2 * block_bytes<panels>;
    copy_keys<panels, threads>(p, s, stage, block, thread);
    copy_async_commit();
  };

  copy_rows<panels, tile_rows, threads, false>(p, s, q_tile, tile.first, s.rows, thread);
  copy_async_commit();
  if (blocks.first < blocks.end) copy_block(blocks.first);
  copy_async_wait<0>();
  block_barrier();

  WarpRows<panels> w;
  w.first = tile.first + warp * w.count;
  w.tile = q_tile + warp * w.count * panel_row_bytes;
  unsigned char* kept = stages + 4 * block_bytes<panels>;
  w.start(p, s, kept + warp * w.fragments * rows_bytes<panels>, blocks_seen_whole(s, position_first, position_last), lane);

  const int first_chunk = blocks.first / chunk_blocks;
  for (int block = blocks.first; block < blocks.end; block++) {
    if (block + 1 < blocks.end) copy_block(block + 1);
    unsigned char* stage = stages + block % 2 * 2 * block_bytes<panels>;
    if (w.first <= row_last) {
      if (all_chunks && block % chunk_blocks == 0 && block > blocks.first) {
        w.end_chunk(block / chunk_blocks - 1 == first_chunk);
        w.start_chunk();
      }
      w.step(p, block, stage, stage + block_bytes<panels>, lane);
    }
    copy_async_wait<0>();
    block_barrier();
  }
  if (all_chunks) {
    w.end_chunk(blocks.end <= (first_chunk + 1) * chunk_blocks);
    w.store(p, s, lane);
  } else {
#pragma unroll
    for (int i = 0; i < w.fragments; i++) w.softmax[i].store_part(w.out[i], p, s, chunk, w.first + 16 * i, lane);
  }
}

// O and LSE from the parts of a tile's chunks. 16 threads per row, or 32: each has four columns, four of them a
// share of the sum.
template <int panels>
PRIMITIVE void merge_chunks(const SinkAttention& p) {
  constexpr int threads = 16 * panels;
  const Tile tile = p.tiles[blockIdx.x / p.kv_heads];
  const Sequence s(p, tile.sequence, blockIdx.x % p.kv_heads);
  const int row_end = min(tile.first + tile_rows, s.rows), own = threadIdx.x % threads;
  const Range chunks = chunks_of(blocks_seen(s, s.position(tile.first), s.position(row_end - 1)));
  for (int first = tile.first; first < row_end; first += merge_threads / threads) {
    const int row = min(first + static_cast<int>(threadIdx.x) / threads, row_end - 1);  // repeats the last one
    const float sink = multiply(p.sinks[s.head(row)], log2_e);
    float maximum = sink, sum = 0.0f;
    float out[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
    for (int chunk = chunks.first; chunk < chunks.end; chunk++) {
      const int64_t place = s.part_place(p, row, chunk);
      const float2 sums = p.part_sums[place * 4 + own % 4];
      const float4 part = *reinterpret_cast<const float4*>(p.part_out + place * head_dim<panels> + own * 4);
      float both = sums.x;
      const Merge merge = Merge::of(maximum, both);
      maximum = both;
      sum = merge(sum, sums.y);
      out[0] = merge(out[0], part.x);
      out[1] = merge(out[1], part.y);
      out[2] = merge(out[2], part.z);
      out[3] = merge(out[3], part.w);
    }
    const Total total(maximum, sum_of_lanes(sum), sink);
    if (first + static_cast<int>(threadIdx.x) / threads >= row_end) continue;
    const int64_t place = s.place(p, row);
    *reinterpret_cast<uint2*>(p.out + place * head_dim<panels> + own * 4) =
        make_uint2(pack_bf16(total(out[0]), total(out[1])), pack_bf16(total(out[2]), total(out[3])));
    if (own == 0) p.lse[place] = total.lse;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(forward_threads, 2)
sink_attention_forward(const __grid_constant__ SinkAttention p) {
  forward<1, true>(p, p.tiles[blockIdx.x / p.kv_heads], 0);
}

extern "C" __global__ void __launch_bounds__(forward_128_threads, 1)
sink_attention_forward_128(const __grid_constant__ SinkAttention p) {
  forward<2, true>(p, p.tiles[blockIdx.x / p.kv_heads], 0);
}

extern "C" __global__ void __launch_bounds__(chunk_threads, 2)
sink_attention_chunk(const __grid_constant__ SinkAttention p) {
  const ChunkTile chunk_tile = p.chunk_tiles[blockIdx.x / p.kv_heads];
  forward<1, false>(p, chunk_tile.tile, chunk_tile.chunk);
}

extern "C" __global__ void __launch_bounds__(chunk_128_threads, 1)
sink_attention_chunk_128(const __grid_constant__ SinkAttention p) {
  const ChunkTile chunk_tile = p.chunk_tiles[blockIdx.x / p.kv_heads];
  forward<2, false>(p, chunk_tile.tile, chunk_tile.chunk);
}

extern "C" __global__ void __launch_bounds__(merge_threads)
sink_attention_merge(const __grid_constant__ SinkAttention p) {
  merge_chunks<1>(p);
}

extern "C" __global__ void __launch_bounds__(merge_128_threads)
sink_attention_merge_128(const __grid_constant__ SinkAttention p) {
  merge_chunks<2>(p);
}
