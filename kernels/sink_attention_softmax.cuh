// The forward's softmax over chunks of keys: one definition for all kernels.
//
// A row's keys are processed in chunks of 512 at absolute positions. In each chunk an online softmax starts
// with the sink as its maximum, and 0 as its sum and output. The row's state (maximum, sum, output) starts
// in the same way. Merge adds the chunks to it in ascending order. One block for all chunks and one block
// per chunk perform the same operations in the same order. A maximum that starts at the sink is finite, so
// a masked chunk or block changes nothing: its factors are exactly 1 and its sums exactly 0. Total adds the
// sink once.
#pragma once

#include "sink_attention.cuh"

namespace sink_attention {

// Merges a chunk's state into that of the earlier chunks: `merge(earlier, later)` for the sum and each
// output.
struct Merge {
  float earlier;  // the factors
  float later;

  // `maximum` is the chunk's; it becomes the maximum of both.
  static PRIMITIVE Merge of(float earlier_maximum, float& maximum) {
    const float chunk_maximum = maximum;
    maximum = fmaxf(earlier_maximum, chunk_maximum);
    return {exp2_approx(add(earlier_maximum, -maximum)), exp2_approx(add(chunk_maximum, -maximum))};
  }

  PRIMITIVE float operator()(float before, float chunk) const {
    return multiply_add(before, earlier, multiply(chunk, later));
  }
};

// Adds the sums that a row's four lanes hold for their columns.
PRIMITIVE float sum_of_lanes(float sum) {
  sum = add(sum, shuffle_xor(sum, 1));
  return add(sum, shuffle_xor(sum, 2));
}

// The final softmax of a row.
struct Total {
  float share;  // the factor that normalises a term of the sum
  float lse;

  PRIMITIVE Total(float maximum, float sum, float scaled_sink) {
    const float total = add(sum, exp2_approx(add(scaled_sink, -maximum)));
    share = 1.0f / total;
    lse = multiply(add(maximum, log2_approx(total)), ln_2);
  }

  // Adding 0 turns a -0 from underflow into the +0 that a masked chunk would give.
  PRIMITIVE float operator()(float out) const { return multiply_add(out, share, 0.0f); }
};

// State of a fragment's rows g and g + 8 in shared memory, because registers are too few. Each lane has its
// own.
template <int panels>
struct KeptRows {
  float4* own;  // this lane's first element

  PRIMITIVE KeptRows() {}
  PRIMITIVE KeptRows(unsigned char* shared, int lane) : own(reinterpret_cast<float4*>(shared) + lane) {}

  PRIMITIVE int lane() const { return shared_address(own) / 16 % 32; }
  PRIMITIVE float4& output(int i) const { return own[32 * i]; }  // earlier chunks, elements 4i to 4i + 3
  PRIMITIVE float4& sums() const { return own[32 * 8 * panels]; }  // earlier chunks, two maxima and two sums
  PRIMITIVE float2& sinks() const { return *reinterpret_cast<float2*>(own + 32 * (8 * panels + 1)); }  // scaled
  PRIMITIVE Range& whole() const { return reinterpret_cast<Range*>(own + 32 * (8 * panels + 1))[1]; }  // see blocks_seen_whole
  PRIMITIVE int4& seen() const { return *reinterpret_cast<int4*>(own + 32 * (8 * panels + 2)); }  // the first and the last key

  PRIMITIVE void start(const SinkAttention& p, const Sequence& s, Range whole_blocks, int first_row, int lane) const {
    const int row = first_row + lane / 4;
    const Seen a(s, s.position(row)), b(s, s.position(row + 8));
    sinks() = make_float2(multiply(p.sinks[s.head(row)], log2_e), multiply(p.sinks[s.head(row + 8)], log2_e));
    whole() = whole_blocks;
    seen() = make_int4(a.first, a.last, b.first, b.last);
  }

  // Masks the keys of block `block` that a row does not see.
  PRIMITIVE void hide_keys(Fragment& scores, int block, int lane) const {
    if (whole().has(block)) return;
    const int4 both = seen();
    sink_attention::hide_keys(scores, {Seen(both.x, both.y), Seen(both.z, both.w)}, block * block_keys, lane);
  }
};

// Online softmax of two rows (g and g + 8) over a chunk, in base 2.
struct Softmax {
  float maximum[2];  // of the scaled scores and the sink
  float sum[2];      // of this lane's own columns

  template <int panels>
  PRIMITIVE void start_chunk(const KeptRows<panels>& kept) {
    const float2 sinks = kept.sinks();
    maximum[0] = sinks.x;
    maximum[1] = sinks.y;
    sum[0] = sum[1] = 0.0f;
  }

  // Replaces a block of scores by exp2(scaled score - maximum). Sums of earlier blocks are multiplied by
  // `shrink`.
  PRIMITIVE void step(const SinkAttention& p, Fragment& scores, float (&shrink)[2]) {
#pragma unroll
    for (int row = 0; row < 2; row++) {
      float top = scores[2 * row];
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (fragment_row(i) == row) top = fmaxf(top, scores[i]);
      top = fmaxf(top, shuffle_xor(top, 1));
      top = fmaxf(top, shuffle_xor(top, 2));
      top = fmaxf(maximum[row], multiply(top, p.scale_log2));
      shrink[row] = exp2_approx(add(maximum[row], -top));
      maximum[row] = top;
      sum[row] = multiply(sum[row], shrink[row]);
    }
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const int row = fragment_row(i);
      scores[i] = exp2_approx(multiply_add(scores[i], p.scale_log2, -maximum[row]));
      sum[row] = add(sum[row], scores[i]);
    }
  }

  // Merges a finished chunk into the earlier ones, in shared memory. The first chunk is stored as it is,
  // which equals merging it into the initial state.
  template <int panels>
  PRIMITIVE void end_chunk(const Fragment (&out)[panels], const KeptRows<panels>& kept, bool is_first) const {
    if (is_first) {
      kept.sums() = make_float4(maximum[0], maximum[1], sum[0], sum[1]);
#pragma unroll
      for (int i = 0; i < 8 * panels; i++) {
        const float* x = out[i / 8] + i % 8 * 4;
        kept.output(i) = make_float4(x[0], x[1], x[2], x[3]);
      }
      return;
    }
    float4& sums = kept.sums();
    float both[2] = {maximum[0], maximum[1]};
    const Merge merge[2] = {Merge::of(sums.x, both[0]), Merge::of(sums.y, both[1])};
    sums = make_float4(both[0], both[1], merge[0](sums.z, sum[0]), merge[1](sums.w, sum[1]));
#pragma unroll
    for (int i = 0; i < 8 * panels; i++) {
      const float* x = out[i / 8] + i % 8 * 4;
      float4& o = kept.output(i);
      o = make_float4(merge[0](o.x, x[0]), merge[0](o.y, x[1]), merge[1](o.z, x[2]), merge[1](o.w, x[3]));
    }
  }

  // Stores a chunk's state for sink_attention_merge.
  template <int panels>
  PRIMITIVE void store_part(const Fragment (&out)[panels], const SinkAttention& p, const Sequence& s, int chunk,
                            int first_row, int lane) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = first_row + 8 * half + lane / 4;
      if (row >= s.rows) continue;
      const int64_t place = s.part_place(p, row, chunk);
      p.part_sums[place * 4 + lane % 4] = make_float2(maximum[half], sum[half]);
#pragma unroll
      for (int i = 0; i < 8 * panels; i++) {
        const float* x = out[i / 8] + i % 8 * 4;
        *reinterpret_cast<float2*>(p.part_out + place * head_dim<panels> + 8 * i + lane % 4 * 2) =
            make_float2(x[2 * half], x[2 * half + 1]);
      }
    }
  }
};

// Multiplies the output of earlier blocks by `shrink`. If no maximum of the warp's rows has changed, all
// factors are exactly 1 and it is skipped: the same bits.
template <int panels>
PRIMITIVE void shrink_rows(Fragment (&out)[panels], const float (&shrink)[2]) {
  if (any_lane(shrink[0] != 1.0f || shrink[1] != 1.0f)) multiply_rows(out, shrink);
}

// Finishes all chunks: O of 16 rows to `out`, and LSE to memory.
template <int panels>
PRIMITIVE void finish(Fragment (&out)[panels], const KeptRows<panels>& kept, const SinkAttention& p, const Sequence& s, int first_row,
                      int lane) {
  const float2 sinks = kept.sinks();
  const float4 sums = kept.sums();
  const Total total[2] = {{sums.x, sum_of_lanes(sums.z), sinks.x}, {sums.y, sum_of_lanes(sums.w), sinks.y}};
#pragma unroll
  for (int i = 0; i < 8 * panels; i++) {
    const float4 o = kept.output(i);
    float* x = out[i / 8] + i % 8 * 4;
    x[0] = total[0](o.x);
    x[1] = total[0](o.y);
    x[2] = total[1](o.z);
    x[3] = total[1](o.w);
  }
  store_lse(p, s, {total[0].lse, total[1].lse}, first_row, lane);
}

}  // namespace sink_attention
