// Copies heads of rows to a part for each rank, and back. A thread copies or adds eight elements.
#include "head_parts.cuh"

using namespace elements;

namespace {

PRIMITIVE int own_heads(const HeadParts& p) { return p.heads < p.ranks ? 1 : p.heads / p.ranks; }

}  // namespace

// from [rows, groups, heads, vectors, 8], to [ranks, rows, groups, own, vectors, 8].
extern "C" __global__ void __launch_bounds__(head_parts_op::threads) pack_heads(const __grid_constant__ HeadParts p) {
  const int own = own_heads(p), of_head = own * p.vectors, of_row = p.groups * of_head;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * head_parts_op::threads + threadIdx.x;
  const int64_t row_of_parts = index / of_row;
  if (row_of_parts >= p.rows * p.ranks) return;
  const int in_row = static_cast<int>(index - row_of_parts * of_row);
  const int rank = static_cast<int>(row_of_parts / p.rows);
  const int64_t row = row_of_parts - rank * p.rows;
  const int group = in_row / of_head, in_group = in_row % of_head;
  const int head = rank * p.heads / p.ranks;
  const int64_t from = ((row * p.groups + group) * p.heads + head) * p.vectors + in_group;
  reinterpret_cast<uint4*>(p.to)[index] = reinterpret_cast<const uint4*>(p.from)[from];
}

// from [ranks, rows, groups, own, vectors, 8], to [rows, groups, heads, vectors, 8]. A shared head is the sum over its ranks,
// in rank order, rounded once.
extern "C" __global__ void __launch_bounds__(head_parts_op::threads) unpack_heads(const __grid_constant__ HeadParts p) {
  const int own = own_heads(p), of_group = p.heads * p.vectors, of_row = p.groups * of_group;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * head_parts_op::threads + threadIdx.x;
  const int64_t row = index / of_row;
  if (row >= p.rows) return;
  const int in_row = static_cast<int>(index - row * of_row);
  const int group = in_row / of_group, head = in_row % of_group / p.vectors, vector_of_head = in_row % p.vectors;
  // The first rank that has the head, and the head's index there.
  const int first = head * p.ranks / p.heads, place = head - first * p.heads / p.ranks;
  const int sharing = p.heads < p.ranks ? p.ranks / p.heads : 1;
  const int64_t part = p.rows * p.groups * own * p.vectors;
  const int64_t from = first * part + ((row * p.groups + group) * own + place) * p.vectors + vector_of_head;
  Values sum = load(p.from + from * vector);
  for (int i = 1; i < sharing; i++) {
    const Values x = load(p.from + (from + i * part) * vector);
    for (int k = 0; k < vector; k++) sum.v[k] = add(sum.v[k], x.v[k]);
  }
  store(p.to + index * vector, sum);
}
