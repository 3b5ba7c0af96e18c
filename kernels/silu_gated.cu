// SwiGLU without clamping. A thread processes eight elements; a remainder is processed one by one.
#include "silu_gated.cuh"

using namespace elements;

namespace {

PRIMITIVE float sigmoid(float x) { return 1.0f / add(1.0f, exp_approx(-x)); }

PRIMITIVE float value(float gate, float up) { return multiply(multiply(gate, sigmoid(gate)), up); }

// Gradients of gate and up.
PRIMITIVE float2 gradients(float gate, float up, float dy) {
  const float s = sigmoid(gate), unit = multiply(gate, s);
  return make_float2(multiply(multiply(dy, up), multiply_add(unit, add(1.0f, -s), s)), multiply(dy, unit));
}

PRIMITIVE int64_t first_element() {
  return (static_cast<int64_t>(blockIdx.x) * silu_gated_op::threads + threadIdx.x) * vector;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(silu_gated_op::threads)
    silu_gated_forward(const __grid_constant__ SiluGated p) {
  const int64_t first = first_element();
  if (first + vector <= p.elements) {
    const Values gate = load(p.gate + first), up = load(p.up + first);
    Values y;
    for (int k = 0; k < vector; k++) y.v[k] = value(gate.v[k], up.v[k]);
    store(p.out + first, y);
    return;
  }
  for (int64_t i = first; i < p.elements; i++) p.out[i] = to_bf16(value(to_float(p.gate[i]), to_float(p.up[i])));
}

extern "C" __global__ void __launch_bounds__(silu_gated_op::threads)
    silu_gated_backward(const __grid_constant__ SiluGated p) {
  const int64_t first = first_element();
  if (first + vector <= p.elements) {
    const Values gate = load(p.gate + first), up = load(p.up + first), dy = load(p.dy + first);
    Values dgate, dup;
    for (int k = 0; k < vector; k++) {
      const float2 both = gradients(gate.v[k], up.v[k], dy.v[k]);
      dgate.v[k] = both.x;
      dup.v[k] = both.y;
    }
    store(p.out + first, dgate);
    store(p.dup + first, dup);
    return;
  }
  for (int64_t i = first; i < p.elements; i++) {
    const float2 both = gradients(to_float(p.gate[i]), to_float(p.up[i]), to_float(p.dy[i]));
    p.out[i] = to_bf16(both.x);
    p.dup[i] = to_bf16(both.y);
  }
}
