// The Python module `_cpu`: the handlers by their target names, and the FFI version that they were built against.
#include "ffi/cpu/kernels.h"
#include "nanobind/nanobind.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

#define DDTREE_HANDLERS(X)                                                                            \
  X(ddtree_draft_topk, DraftTopkCpu) X(ddtree_tree_build, TreeBuildCpu) X(ddtree_verify_attn, VerifyAttnCpu) \
  X(ddtree_append_latents, AppendLatentsCpu) X(ddtree_tree_accept, TreeAcceptCpu) X(ddtree_commit_path, CommitPathCpu) \
  X(ddtree_expert_mlp, ExpertMlpCpu) X(ddtree_few_rows_dot, FewRowsDotCpu) \
  X(ddtree_draft_attn, DraftAttnCpu)

namespace ddtree {
#define DDTREE_DECLARE(target, handler) extern "C" XLA_FFI_Error* handler(XLA_FFI_CallFrame*);
DDTREE_HANDLERS(DDTREE_DECLARE)
#undef DDTREE_DECLARE
}  // namespace ddtree

NB_MODULE(_cpu, m) {
  m.def("registrations", [] {
    nb::dict targets;
#define DDTREE_REGISTER(target, handler) targets[#target] = nb::capsule(reinterpret_cast<void*>(ddtree::handler));
    DDTREE_HANDLERS(DDTREE_REGISTER)
#undef DDTREE_REGISTER
    return targets;
  });
  m.attr("draft_attn_most_dim") = ddtree::kMostDim;
  m.attr("has_few_rows") = ddtree::HasFewRows();
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}
