// What the CPU kernels share: conversions and function multiversioning.
#ifndef DDTREE_FFI_CPU_KERNELS_H_
#define DDTREE_FFI_CPU_KERNELS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ffi/e4m3.h"

// One build serves every x86-64: the loader picks the clone that the processor runs, when AddressSanitizer is not up
// yet.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define DDTREE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DDTREE_CLONES
#endif

namespace ddtree {

// A vector as wide as the widest clone's registers; narrower clones take it in pieces.
constexpr int64_t kLanes = 16;
typedef float Vec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline float FromBf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

// Numbers of any dtype as float32. Static: files would share an inline function's resolver, but not its clones.
[[maybe_unused]] static DDTREE_CLONES void Widen(const uint16_t* x, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = FromBf16(x[i]);
}
[[maybe_unused]] static DDTREE_CLONES void Widen(const uint8_t* x, int64_t count, float* out) {  // e4m3
  for (int64_t i = 0; i < count; ++i) out[i] = FromE4m3(x[i]);
}
inline void Widen(const float* x, int64_t count, float* out) { std::copy(x, x + count, out); }

// Round to nearest even; NaN stays NaN.
inline uint16_t ToBf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// exp(x) for x <= 0 to float32 rounding (relative 2e-7): 2^n times a degree-6 polynomial, which vectorises as libm's
// does not.
inline float Exp(float x) {
  x = x < -87.0f ? -87.0f : x;  // NaN passes through
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.3888889e-3f;
  p = p * r + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}

}  // namespace ddtree

#endif  // DDTREE_FFI_CPU_KERNELS_H_
