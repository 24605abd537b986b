// e4m3 elements of a cache: 4 bits of exponent of bias 7, 3 of mantissa, 2^-9 to 448, no infinity, NaN 0x7f and 0xff.
//
// The same bit operations on both devices, so that they write equal bytes. No float32 subnormal takes part: threads
// that XLA owns may count those as zero.
#ifndef DDTREE_FFI_E4M3_H_
#define DDTREE_FFI_E4M3_H_

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define DDTREE_BOTH_DEVICES __host__ __device__ __forceinline__
#else
#define DDTREE_BOTH_DEVICES inline
#endif

namespace ddtree {

// The number, exactly.
DDTREE_BOTH_DEVICES float FromE4m3(uint8_t x) {
  const uint32_t magnitude = x & 0x7f;
  // Without its leading one, a subnormal m 2^-9 is (1 + m / 8) 2^-6 less 2^-6.
  const bool subnormal = magnitude < 8;
  uint32_t bits = (magnitude << 20) + (subnormal ? 121u << 23 : 120u << 23);
  float y;
  memcpy(&y, &bits, 4);
  y -= subnormal ? 0.015625f : 0.0f;
  memcpy(&bits, &y, 4);
  bits = (magnitude == 0x7f ? 0x7fc00000u : bits) | static_cast<uint32_t>(x & 0x80) << 24;
  memcpy(&y, &bits, 4);
  return y;
}

// The nearest e4m3 number to x / scale, of two the even one, and at most 448 in size. NaN, and any x that is not
// finite, become the NaN 0x7f: a row that went wrong must not look like a large one.
DDTREE_BOTH_DEVICES uint8_t ToE4m3(float x, float scale) {
  const float quotient = x / scale;
  if (!(fabsf(x) <= FLT_MAX) || quotient != quotient) return 0x7f;
  const float size = fabsf(quotient);
  uint32_t bits, code;
  memcpy(&bits, &quotient, 4);
  const uint32_t sign = bits >> 24 & 0x80;
  if (size >= 448.0f) {
    code = 0x7e;
  } else if (size < 0.015625f) {
    // Multiples of 2^-9, which is the last bit of float32 at 2^14: its own addition rounds.
    const float y = size + 16384.0f;
    memcpy(&code, &y, 4);
    code -= 0x46800000u;
  } else {
    bits &= 0x7fffffffu;
    code = (bits + 0x7ffffu + (bits >> 20 & 1) - (120u << 23)) >> 20;
  }
  return static_cast<uint8_t>(sign | code);
}

}  // namespace ddtree

#endif  // DDTREE_FFI_E4M3_H_
