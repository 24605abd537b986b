"""Source lists of the native code: the one place, loaded by BUILD.bazel and read by ffi/CMakeLists.txt.

CMake takes every quoted path between the brackets of a list.
"""

CPU_SRCS = [
    "cpu/append_latents.cc",
    "cpu/commit_path.cc",
    "cpu/draft_topk.cc",
    "cpu/expert_mlp.cc",
    "cpu/tree_accept.cc",
    "cpu/tree_build.cc",
    "cpu/verify_attn.cc",
    "status.cc",
]

XLA_CPU_SRCS = [
    "xla_cpu/draft_attn.cc",
    "xla_cpu/few_rows.cc",
    "xla_cpu/few_rows_amx.cc",
]

CPU_MODULE_SRCS = [
    "module_cpu.cc",
    "xla_cpu/helpers.cc",
]

CUDA_SRCS = [
    "cuda/append_latents.cu",
    "cuda/commit_path.cu",
    "cuda/draft_topk.cu",
    "cuda/expert_mlp.cu",
    "cuda/tree_accept.cu",
    "cuda/tree_build.cu",
    "cuda/verify_attn/hopper.cu",
    "cuda/verify_attn/hopper_few.cu",
    "cuda/verify_attn/launch.cu",
]

CUDA_MODULE_SRCS = [
    "module_cuda.cc",
    "status.cc",
]
