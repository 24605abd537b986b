"""The setting under which XLA runs a whole decode loop as one CUDA graph."""

from __future__ import annotations


def whole_loop_options() -> dict[str, object]:
    """Compiler options that let XLA put a `while_loop`, predicate and all, into one CUDA graph.

    By default XLA captures runs of kernels inside a loop's body but reads the condition back to the host every
    round. These options ask for the whole loop as one graph; all of ddtree_jax's kernels can be captured, but
    whether the whole decode loop was has not been seen on a GPU yet.
    They belong to one compilation and change no global flag:

        jax.jit(ddtree_decode, static_argnames="config", compiler_options=whole_loop_options())

    A loop is captured only if every operation in it can be. They are for CUDA alone;
    XLA's CPU backend ignores them. CUDA and driver 12.3 or newer.

    Returns:
      A fresh dict to pass as `compiler_options`.
    """
    return {
        "xla_gpu_enable_command_buffer": "+WHILE,+CONDITIONAL",
        # XLA otherwise leaves runs of fewer than five commands alone, and a loop counts as one.
        "xla_gpu_graph_min_graph_size": 1,
    }
