"""The kernels for torch tensors and in SGLang's forms, over the C library: no JAX and no nanobind.

Tensors are on the CPU or on one CUDA device. On CUDA a call enqueues on torch's current stream, synchronises nothing
and allocates from torch's caching allocator alone, so that a CUDA graph can capture it. On the CPU it runs in the
thread that makes it. The library is `$DDTREE_LIB`, or the one installed with the package; the first call loads it.

Every function raises ValueError where a tensor's device, dtype, shape or layout is not the documented one, ImportError
where the library is missing, and RuntimeError where it reports an error.
"""

from ddtree_jax._torch_kernels import (
    MAX_BUDGET,
    MAX_CANDIDATES,
    MAX_DEPTH,
    AcceptedPath,
    DraftTree,
    append_latents,
    commit_path,
    draft_topk,
    expert_mlp,
    tree_accept,
    tree_build,
    verify_attn,
)
from ddtree_jax._torch_sglang import (
    TreeMaskMode,
    VerifyInputs,
    sglang_verify_inputs,
    verify_tree_greedy,
)

__all__ = [
    "MAX_BUDGET",
    "MAX_CANDIDATES",
    "MAX_DEPTH",
    "AcceptedPath",
    "DraftTree",
    "TreeMaskMode",
    "VerifyInputs",
    "append_latents",
    "commit_path",
    "draft_topk",
    "expert_mlp",
    "sglang_verify_inputs",
    "tree_accept",
    "tree_build",
    "verify_attn",
    "verify_tree_greedy",
]
