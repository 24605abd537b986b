// The Python module `_cuda`: the handlers by their target names, the kernels' scratch sizes, and the FFI version that
// they were built against. It imports without a GPU.
#include "ffi/ddtree.h"
#include "nanobind/nanobind.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;

#define DDTREE_HANDLERS(X)                                                                                     \
  X(ddtree_draft_topk, DraftTopkCuda) X(ddtree_tree_build, TreeBuildCuda) X(ddtree_verify_attn, VerifyAttnCuda) \
  X(ddtree_append_latents, AppendLatentsCuda) X(ddtree_tree_accept, TreeAcceptCuda)                            \
  X(ddtree_commit_path, CommitPathCuda) X(ddtree_expert_mlp, ExpertMlpCuda)

namespace ddtree {
#define DDTREE_DECLARE(target, handler) extern "C" XLA_FFI_Error* handler(XLA_FFI_CallFrame*);
DDTREE_HANDLERS(DDTREE_DECLARE)
#undef DDTREE_DECLARE
}  // namespace ddtree

NB_MODULE(_cuda, m) {
  m.def("registrations", [] {
    nb::dict targets;
#define DDTREE_REGISTER(target, handler) targets[#target] = nb::capsule(reinterpret_cast<void*>(ddtree::handler));
    DDTREE_HANDLERS(DDTREE_REGISTER)
#undef DDTREE_REGISTER
    return targets;
  });
  m.def("draft_topk_workspace", &ddtree_draft_topk_workspace, nb::arg("rows"), nb::arg("vocab"), nb::arg("k"));
  m.def("tree_build_workspace", &ddtree_tree_build_workspace, nb::arg("batch"), nb::arg("depth"), nb::arg("k"),
        nb::arg("budget"));
  m.def("verify_attn_workspace", &ddtree_verify_attn_workspace, nb::arg("batch"), nb::arg("rows"), nb::arg("nodes"),
        nb::arg("heads"), nb::arg("dtype"));
  m.def("expert_mlp_workspace", &ddtree_expert_mlp_workspace, nb::arg("tokens"), nb::arg("top_k"), nb::arg("experts"),
        nb::arg("hidden"), nb::arg("inner"), nb::arg("dtype"));
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}
