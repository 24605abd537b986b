// The CUDA entry points of a library without CUDA, one beside each CPU kernel: one header and one set of symbols for
// both builds. They are weak: where the CUDA kernels are linked, theirs take the place of these.
#ifndef DDTREE_FFI_CPU_NO_CUDA_H_
#define DDTREE_FFI_CPU_NO_CUDA_H_

#include "ffi/ddtree.h"

#define DDTREE_NO_CUDA_KERNEL(name) \
  __attribute__((weak)) int ddtree_##name##_cuda(const ddtree_##name##_args*, void*) { return DDTREE_NO_CUDA; }

// Beside it, of a kernel with a workspace query: the types of the query's sizes.
#define DDTREE_NO_CUDA_WORKSPACE(name, ...) \
  __attribute__((weak)) size_t ddtree_##name##_workspace(__VA_ARGS__) { return 0; }

#endif  // DDTREE_FFI_CPU_NO_CUDA_H_
