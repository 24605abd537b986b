// e4m3 numbers made bfloat16, exactly, by integer operations and one product, which every card since sm_80 has.
#ifndef DDTREE_FFI_CUDA_VERIFY_WIDEN_H_
#define DDTREE_FFI_CUDA_VERIFY_WIDEN_H_

#include <cuda_bf16.h>
#include <stdint.h>

namespace ddtree {

// Two e4m3 numbers, in the high bytes of the halves of `spread`, as bfloat16: as bits of bfloat16 they are too small by
// 2^120, subnormals included. NaN comes out as 480, which is no e4m3 number.
__device__ __forceinline__ uint32_t widen_pair(uint32_t spread) {
  const uint32_t bits = (spread & 0x80008000u) | (spread >> 4 & 0x07f007f0u);
  const __nv_bfloat162 power = __halves2bfloat162(__ushort_as_bfloat16(0x7b80), __ushort_as_bfloat16(0x7b80));
  const __nv_bfloat162 pair = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), power);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Eight of them; NaN as 480.
__device__ __forceinline__ uint4 widen_eight(uint2 x) {
  return make_uint4(widen_pair(__byte_perm(x.x, 0, 0x1404)), widen_pair(__byte_perm(x.x, 0, 0x3424)),
                    widen_pair(__byte_perm(x.y, 0, 0x1404)), widen_pair(__byte_perm(x.y, 0, 0x3424)));
}

// Has a bit of 0x80808080 where one of eight is NaN: a byte of 0x7f or 0xff carries into its eighth bit.
__device__ __forceinline__ uint32_t nan_bits(uint2 x) {
  return ((x.x & 0x7f7f7f7fu) + 0x01010101u) | ((x.y & 0x7f7f7f7fu) + 0x01010101u);
}

// Makes 480 NaN.
__device__ __forceinline__ uint32_t restore_nan(uint32_t pair) {
  if ((pair & 0x7fffu) == 0x43f0u) pair |= 0x7f80u;
  if ((pair & 0x7fff0000u) == 0x43f00000u) pair |= 0x7f800000u;
  return pair;
}

__device__ __forceinline__ uint4 restore_nan(uint4 x) {
  return make_uint4(restore_nan(x.x), restore_nan(x.y), restore_nan(x.z), restore_nan(x.w));
}

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_VERIFY_WIDEN_H_
