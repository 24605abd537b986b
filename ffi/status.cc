// What the library says of itself: its version, its limit, and the texts of status codes.
#include "ffi/ddtree.h"

uint32_t ddtree_version() { return DDTREE_ABI_VERSION; }

int64_t ddtree_max_nodes() { return DDTREE_MAX_NODES; }

const char* ddtree_error_string(int status) {
  switch (status) {
    case DDTREE_OK: return "success";
    case DDTREE_INVALID_ARGUMENT: return "a size, dtype or pointer is outside what the kernel serves";
    case DDTREE_LAUNCH_FAILED: return "the CUDA runtime refused a kernel launch";
    case DDTREE_WRONG_VERSION: return "the caller was compiled against another version of ddtree.h than the library";
    case DDTREE_NO_CUDA: return "this library was built without CUDA";
    case DDTREE_OUT_OF_MEMORY: return "no memory for scratch";
    default: return "unknown ddtree status";
  }
}
