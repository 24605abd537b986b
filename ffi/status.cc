// Texts of the C ABI's status codes.
#include "ffi/ddtree.h"

const char* ddtree_error_string(int status) {
  switch (status) {
    case DDTREE_OK: return "success";
    case DDTREE_INVALID_ARGUMENT: return "a size, dtype or pointer is outside what the kernel serves";
    case DDTREE_LAUNCH_FAILED: return "the CUDA runtime refused a kernel launch";
    default: return "unknown ddtree status";
  }
}
