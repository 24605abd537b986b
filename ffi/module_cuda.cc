// The Python module `_cuda`: the handlers by their target names, the kernels' scratch sizes, and the FFI version that
// they were built against. It imports without a GPU.
//
// A handler launches on XLA's stream and does nothing else, so that a run of them, or a loop around them, can be one
// CUDA graph.
#include "ffi/handlers/all.h"
#include "nanobind/nanobind.h"

namespace nb = nanobind;

NB_MODULE(_cuda, m) {
  m.def("registrations", [] {
    nb::dict targets;
#define DDTREE_REGISTER(name, handler)                                                                     \
  targets["ddtree_" #name] = nb::capsule(reinterpret_cast<void*>(                                          \
      ddtree::Entry<ddtree::handler<ddtree::Cuda>, xla::ffi::Traits::kCmdBufferCompatible>));
    DDTREE_HANDLERS(DDTREE_REGISTER)
#undef DDTREE_REGISTER
    return targets;
  });
#define DDTREE_WORKSPACE(name) m.def(#name "_workspace", &ddtree_##name##_workspace);
  DDTREE_WORKSPACES(DDTREE_WORKSPACE)
#undef DDTREE_WORKSPACE
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}
