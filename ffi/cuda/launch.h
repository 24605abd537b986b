// What the launchers of the CUDA kernels share.
#ifndef DDTREE_FFI_CUDA_LAUNCH_H_
#define DDTREE_FFI_CUDA_LAUNCH_H_

#include <cuda_runtime.h>
#include <stdint.h>

#include <initializer_list>
#include <optional>

#include "ffi/ddtree.h"
#include "ffi/sizes.h"

namespace ddtree {

inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Blocks of so many threads for a thread each of `sizes` multiplied; nothing where no grid has as many, or none.
inline std::optional<unsigned> grid_blocks(std::initializer_list<int64_t> sizes, int64_t threads) {
  const std::optional<int64_t> count = Product(sizes);
  if (!count || *count == 0 || ceil_div(*count, threads) > INT32_MAX) return std::nullopt;
  return static_cast<unsigned>(ceil_div(*count, threads));
}

// Whether the launches just made were accepted; needs no synchronisation.
inline int launch_status() { return cudaGetLastError() == cudaSuccess ? DDTREE_OK : DDTREE_LAUNCH_FAILED; }

// What to return where the runtime refused a call that is no launch: its error must not be taken for the next launch's.
inline int refused() {
  cudaGetLastError();
  return DDTREE_LAUNCH_FAILED;
}

// Whether each array starts at a multiple of the 16 bytes that kernels move at once.
inline bool aligned(std::initializer_list<const void*> arrays) {
  uintptr_t address = 0;
  for (const void* array : arrays) address |= reinterpret_cast<uintptr_t>(array);
  return address % 16 == 0;
}

// Whether the caller's scratch is what the workspace query asked for.
inline bool has_workspace(const void* workspace, size_t bytes, size_t needed) {
  return bytes >= needed && (needed == 0 || (workspace != nullptr && aligned({workspace})));
}

}  // namespace ddtree

#endif  // DDTREE_FFI_CUDA_LAUNCH_H_
