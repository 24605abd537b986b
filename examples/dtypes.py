"""The dtypes that a device computes with, and holds a checkpoint's weights in."""

from __future__ import annotations

import jax

from ddtree_jax.few_rows import on_one_cpu


def dtypes(
    dtype: str | None, param_dtype: str | None = None, *, devices: int = 1
) -> dict[str, str | None]:
    """`dtype` and `param_dtype` as `load_target` and `load_drafter` take them.

    Args:
      dtype: "float32" or "bfloat16"; by default float32 on a CPU, bfloat16 elsewhere.
      param_dtype: as `load_target` takes it; by default "stored" for float32 where the kernel for few rows reads
        bfloat16 weights as they are stored, which it does on one device, else `dtype`.
      devices: that the weights are for.
    """
    dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    if param_dtype is None and dtype == "float32" and devices == 1 and on_one_cpu():
        param_dtype = "stored"
    return {"dtype": dtype, "param_dtype": param_dtype}
