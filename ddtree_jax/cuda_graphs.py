"""The setting under which XLA runs a whole decode loop as one CUDA graph."""

from __future__ import annotations

# What XLA captures by default, and loops.
_COMMANDS = (
    "FUSION",
    "CUBLAS",
    "CUBLASLT",
    "CUDNN",
    "CUSTOM_CALL",
    "DYNAMIC_SLICE_FUSION",
    "CONDITIONAL",
    "WHILE",
)


def whole_loop_options() -> dict[str, object]:
    """Compiler options that let XLA put a `while_loop`, predicate and all, into one CUDA graph.

    By default XLA captures runs of kernels inside a loop's body but reads the condition back to the host every
    round. These options ask for the whole loop as one graph. They belong to one compilation and change no global
    flag:

        jax.jit(ddtree_decode, static_argnames="config", compiler_options=whole_loop_options())

    A loop is captured only if every operation in it can be, and XLA says nothing when one cannot; a slice at the
    counter of an inner loop is such an operation. `tests/gpu/decode_test.py` shows how to see it. XLA runs a
    program's first call without graphs and makes them in the second.

    The graph keeps the host free, which is not always faster: docs/log/2026-11-29-cuda-graph.md has figures.
    The options are for CUDA alone (driver 12.4 or newer, seen to work with jax 0.11.2); XLA's CPU backend ignores them.

    Returns:
      A fresh dict to pass as `compiler_options`.
    """
    return {
        # As a compiler option this takes the whole list; the "+WHILE" of XLA_FLAGS is not understood here.
        "xla_gpu_enable_command_buffer": ",".join(_COMMANDS),
        # XLA otherwise leaves runs of fewer than five commands alone, and a loop counts as one.
        "xla_gpu_graph_min_graph_size": 1,
    }
