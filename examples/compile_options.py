"""Options for XLA that make decoding faster on a CPU."""

from __future__ import annotations

import functools

import jax

# XLA hands products to a library of fused kernels, whose packing costs products of few rows more than it gains:
# without it a round of the demo takes 5 to 15% less (docs/log/2026-11-30-cpu-round.md). The option is
# called experimental.
_CPU = {"xla_cpu_experimental_ynn_fusion_type": ""}


@functools.cache
def compile_options() -> dict[str, str]:
    """`compiler_options` for `jax.jit` on the default device; none where XLA does not know them."""
    if jax.default_backend() != "cpu":
        return {}
    try:
        jax.jit(lambda x: x).lower(0).compile(compiler_options=_CPU)
    except jax.errors.JaxRuntimeError:
        return {}
    return dict(_CPU)
