// The Python module `_cpu`: the handlers by their target names, and the FFI version that they were built against.
#include "ffi/handlers/all.h"
#include "ffi/xla_cpu/handlers.h"
#include "nanobind/nanobind.h"

namespace nb = nanobind;

NB_MODULE(_cpu, m) {
  m.def("registrations", [] {
    nb::dict targets;
#define DDTREE_REGISTER(name, handler) \
  targets["ddtree_" #name] = nb::capsule(reinterpret_cast<void*>(ddtree::Entry<ddtree::handler<ddtree::Cpu>>));
    DDTREE_HANDLERS(DDTREE_REGISTER)
#undef DDTREE_REGISTER
    targets["ddtree_few_rows_dot"] = nb::capsule(reinterpret_cast<void*>(ddtree::Entry<ddtree::FewRowsDot>));
    targets["ddtree_draft_attn"] = nb::capsule(reinterpret_cast<void*>(ddtree::Entry<ddtree::DraftAttention>));
    return targets;
  });
  m.attr("draft_attn_most_dim") = ddtree::kMostDim;
  m.attr("has_few_rows") = ddtree::HasFewRows();
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}
