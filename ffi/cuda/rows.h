// Moving cache rows: a row is cut into the widest words that its size and address allow.
#ifndef DDTREE_FFI_CUDA_ROWS_H_
#define DDTREE_FFI_CUDA_ROWS_H_

#include <cuda_runtime.h>
#include <stdint.h>

namespace ddtree {

// Calls `launch(word)` with a value of the widest word type for rows of `bytes` at addresses whose bits `address`
// unites.
template <typename Launch>
int with_row_word(int64_t bytes, uintptr_t address, Launch launch) {
  const uintptr_t bits = address | static_cast<uintptr_t>(bytes);
  if (bits % 16 == 0) return launch(uint4{});
  if (bits % 4 == 0) return launch(uint32_t{});
  if (bits % 2 == 0) return launch(uint16_t{});
  return launch(uint8_t{});
}

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_ROWS_H_
