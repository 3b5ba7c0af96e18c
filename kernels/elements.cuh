// Helpers of elementwise and row kernels: eight bf16 at a time, e^x.
#pragma once

#include "primitives.cuh"

namespace elements {

constexpr int vector = 8;  // bf16 in 16 bytes

// Unpacks the two bf16 of a register.
PRIMITIVE float low(uint32_t pair) { return __uint_as_float(pair << 16); }
PRIMITIVE float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

struct Values {
  float v[vector];
};

// 16 bytes, aligned.
PRIMITIVE Values load(const bf16* from) {
  const uint4 x = *reinterpret_cast<const uint4*>(from);
  return {{low(x.x), high(x.x), low(x.y), high(x.y), low(x.z), high(x.z), low(x.w), high(x.w)}};
}

PRIMITIVE void store(bf16* to, const Values& y) {
  *reinterpret_cast<uint4*>(to) = make_uint4(pack_bf16(y.v[0], y.v[1]), pack_bf16(y.v[2], y.v[3]),
                                             pack_bf16(y.v[4], y.v[5]), pack_bf16(y.v[6], y.v[7]));
}

// The nearest bf16.
PRIMITIVE float rounded(float x) { return to_float(to_bf16(x)); }

// e^x, relative error below 2^-22 + |x| · 2^-24.
PRIMITIVE float exp_approx(float x) { return exp2_approx(multiply(x, 1.4426950408889634f)); }

}  // namespace elements
