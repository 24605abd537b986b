"""Times what XLA needs to compile a whole decode loop at Kimi K2.6's depth; no weights are made."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import step_model
from compile_options import compile_options
from flax import nnx

from ddtree_jax import DecodeConfig, ddtree_decode
from ddtree_jax.models import DFlashDrafter, KimiK26


def compile_time(full: bool, layers: int | None, prompt: int = 1024) -> dict[str, float]:
    """Seconds of tracing, lowering and compiling `ddtree_decode`, prefill and loop, for one request.

    Args:
      full: K2.6's widths; else small ones for a CPU.
      layers: of the target; None for all.
      prompt: tokens that the prompt has room for.

    Returns:
      "layers", and seconds by stage: "trace", "lower", "compile".
    """
    config = step_model.target_config(full, layers)
    drafter = step_model.drafter_config(full, config.num_hidden_layers)
    models = (
        nnx.eval_shape(lambda: KimiK26(config, dtype=jnp.bfloat16)),
        nnx.eval_shape(lambda: DFlashDrafter(drafter, dtype=jnp.bfloat16)),
    )
    tokens = jax.ShapeDtypeStruct((1, prompt), jnp.int32)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    decode = jax.jit(ddtree_decode, static_argnames="config", compiler_options=compile_options())
    start = time.perf_counter()
    traced = decode.trace(*models, tokens, lengths, config=DecodeConfig())
    seconds = {"trace": time.perf_counter() - start}
    start = time.perf_counter()
    lowered = traced.lower()
    seconds["lower"] = time.perf_counter() - start
    start = time.perf_counter()
    lowered.compile()
    seconds["compile"] = time.perf_counter() - start
    return {"layers": config.num_hidden_layers, **seconds}
