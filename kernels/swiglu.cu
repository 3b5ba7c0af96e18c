// GPT-OSS's SwiGLU. A thread processes eight pairs of gate and up; a remainder is processed one by one.
#include "row_ops.cuh"

using namespace row_ops;

namespace {

PRIMITIVE float value(const Swiglu& p, uint32_t pair) { return swiglu_value(p.limit, p.alpha, low(pair), high(pair)); }

// Gradients of gate and up, packed.
PRIMITIVE uint32_t gradient(const Swiglu& p, uint32_t pair, float dy) {
  const float gate = low(pair), up = high(pair);
  const Unit u = swiglu_unit(p.limit, p.alpha, gate, up);
  // gate · σ first: for a very negative gate it is 0, while alpha · gate may be infinite.
  const float slope = multiply_add(multiply(p.alpha, multiply(u.gate, u.sigmoid)), add(1.0f, -u.sigmoid), u.sigmoid);
  const float dgate = multiply(multiply(dy, add(u.up, 1.0f)), slope);
  const float dup = multiply(multiply(dy, u.gate), u.sigmoid);
  return pack_bf16(gate <= p.limit ? dgate : 0.0f, up >= -p.limit && up <= p.limit ? dup : 0.0f);
}

PRIMITIVE int64_t first_pair() { return (static_cast<int64_t>(blockIdx.x) * swiglu_threads + threadIdx.x) * vector; }

}  // namespace

extern "C" __global__ void __launch_bounds__(swiglu_threads) swiglu_forward(const __grid_constant__ Swiglu p) {
  const int64_t first = first_pair();
  const uint32_t* x = reinterpret_cast<const uint32_t*>(p.x);
  if (first + vector <= p.pairs) {
    const uint4 a = *reinterpret_cast<const uint4*>(x + first), b = *reinterpret_cast<const uint4*>(x + first + 4);
    const uint4 y = {pack_bf16(value(p, a.x), value(p, a.y)), pack_bf16(value(p, a.z), value(p, a.w)),
                     pack_bf16(value(p, b.x), value(p, b.y)), pack_bf16(value(p, b.z), value(p, b.w))};
    *reinterpret_cast<uint4*>(p.out + first) = y;
    return;
  }
  for (int64_t i = first; i < p.pairs; i++) p.out[i] = to_bf16(value(p, x[i]));
}

extern "C" __global__ void __launch_bounds__(swiglu_threads) swiglu_backward(const __grid_constant__ Swiglu p) {
  const int64_t first = first_pair();
  const uint32_t* x = reinterpret_cast<const uint32_t*>(p.x);
  uint32_t* dx = reinterpret_cast<uint32_t*>(p.out);
  if (first + vector <= p.pairs) {
    const uint4 a = *reinterpret_cast<const uint4*>(x + first), b = *reinterpret_cast<const uint4*>(x + first + 4);
    const uint4 dy = *reinterpret_cast<const uint4*>(p.dy + first);
    const uint4 da = {gradient(p, a.x, low(dy.x)), gradient(p, a.y, high(dy.x)), gradient(p, a.z, low(dy.y)),
                      gradient(p, a.w, high(dy.y))};
    const uint4 db = {gradient(p, b.x, low(dy.z)), gradient(p, b.y, high(dy.z)), gradient(p, b.z, low(dy.w)),
                      gradient(p, b.w, high(dy.w))};
    *reinterpret_cast<uint4*>(dx + first) = da;
    *reinterpret_cast<uint4*>(dx + first + 4) = db;
    return;
  }
  for (int64_t i = first; i < p.pairs; i++) dx[i] = gradient(p, x[i], to_float(p.dy[i]));
}
