// How the CPU's verify_attn cuts its work into items.
#ifndef DDTREE_FFI_CPU_VERIFY_ATTN_H_
#define DDTREE_FFI_CPU_VERIFY_ATTN_H_

#include <cstdint>

namespace ddtree {

// Rows of verify_attn's work item, of `rows` = nodes * heads in all: few are cut finer, so that threads can share them.
inline int64_t VerifyAttnRows(int64_t rows) { return rows <= 16 ? 4 : rows <= 64 ? 8 : 16; }

}  // namespace ddtree

#endif  // DDTREE_FFI_CPU_VERIFY_ATTN_H_
