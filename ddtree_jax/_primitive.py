"""How a kernel becomes a JAX primitive: shapes, a lowering per platform, a batching rule, and no derivative.

Own primitives show by name in a jaxpr and take part in `jit`, `while_loop`, `vmap` and `shard_map`. `vmap`
folds the mapped axis into the batch axis, so what all requests share, a layer index for instance, cannot be
mapped over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching, mlir


def kernel_primitive(
    name: str,
    shapes: Callable,
    *,
    batch_axes: Sequence[int | None],
    result_batch_axes: Sequence[int],
    attributes: Sequence[str] = (),
    aliases: dict[int, int] | None = None,
    workspace: dict[str, Callable] | None = None,
    plain: dict[str, tuple[str, Callable]] | None = None,
    unshared: Callable | None = None,
    largest_batch: int | None = None,
) -> jax.extend.core.Primitive:
    """Makes the primitive of the kernel `ddtree_{name}`.

    Args:
      name: the primitive's name; the custom call's target is "ddtree_" + name.
      shapes: (*avals, **parameters) -> list of the results' jax.ShapeDtypeStruct.
      batch_axes: each operand's batch axis, None for operands that all requests share.
      result_batch_axes: each result's.
      attributes: which parameters the handler takes; it reads the others off the shapes.
      aliases: operand index -> result index that is the same buffer.
      workspace: platform -> (*avals, **parameters) -> bytes of scratch; an extra result, so that XLA
        owns the memory.
      plain: platform -> (flag, *operands -> results): plain JAX that takes the kernel's place on that
        platform in calls whose parameter of that name is false.
      unshared: (*operands, **parameters) -> results: what `vmap` over an operand that all requests share
        becomes, mapped axes in front of the operands that have them; without it such a `vmap` is refused.
      largest_batch: requests above which a `vmap` becomes `unshared` as well.

    Returns:
      A primitive with multiple results.
    """
    primitive = jax.extend.core.Primitive(name)
    primitive.multiple_results = True

    @primitive.def_abstract_eval
    def abstract(*avals, **parameters):
        return [_varying_like(avals, r) for r in shapes(*avals, **parameters)]

    def call(platform):
        flag, in_plain_jax = (plain or {}).get(platform, (None, None))

        def run(*operands, **parameters):
            if flag is not None and not parameters[flag]:
                return in_plain_jax(*operands)
            avals = [jax.typeof(operand) for operand in operands]
            results = list(shapes(*avals, **parameters))
            if platform in (workspace or {}):
                size = workspace[platform](*avals, **parameters)
                results.append(jax.ShapeDtypeStruct((size,), jnp.uint8))
            outputs = jax.ffi.ffi_call(
                f"ddtree_{name}",
                results,
                input_output_aliases=aliases or {},
            )(*operands, **{name: _native(parameters[name]) for name in attributes})
            return outputs[: len(result_batch_axes)]

        return run

    for platform in ("cpu", "cuda"):
        lowering = mlir.lower_fun(call(platform), multiple_results=True)
        mlir.register_lowering(primitive, lowering, platform=platform)

    @functools.cache
    def compiled(parameters):
        return jax.jit(lambda *operands: primitive.bind(*operands, **dict(parameters)))

    def impl(*operands, **parameters):
        return compiled(tuple(sorted(parameters.items())))(*operands)

    primitive.def_impl(impl)

    def batch(operands, dims, **parameters):
        shared = [dim for dim, axis in zip(dims, batch_axes, strict=True) if axis is None]
        apart = any(dim is not None for dim in shared)
        if largest_batch is not None:
            for x, dim, axis in zip(operands, dims, batch_axes, strict=True):
                if axis is not None and dim is not None:
                    requests = [n for i, n in enumerate(x.shape) if i != dim][axis]
                    apart |= x.shape[dim] * requests > largest_batch
        if unshared is not None and apart:
            pairs = zip(operands, dims, strict=True)
            results = unshared(
                *(x if d is None else jnp.moveaxis(x, d, 0) for x, d in pairs), **parameters
            )
            return results, [0] * len(results)
        size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        folded = []
        for i, (operand, dim, axis) in enumerate(zip(operands, dims, batch_axes, strict=True)):
            if axis is None:
                if dim is not None:
                    raise NotImplementedError(
                        f"{name}: vmap cannot map over operand {i}, {jax.typeof(operand).str_short()}, "
                        "because one call's requests share it; loop over it with jax.lax.map"
                    )
                folded.append(operand)
                continue
            if dim is None:
                operand = jnp.broadcast_to(operand, (size, *operand.shape))
                dim = 0
            operand = jnp.moveaxis(operand, dim, axis)
            shape = operand.shape
            requests = shape[axis + 1]
            folded.append(operand.reshape(*shape[:axis], size * requests, *shape[axis + 2 :]))
        results = primitive.bind(*folded, **parameters)
        unfolded = [
            r.reshape(*r.shape[:axis], size, requests, *r.shape[axis + 1 :])
            for r, axis in zip(results, result_batch_axes, strict=True)
        ]
        return unfolded, list(result_batch_axes)

    def derive(*_, **__):
        raise NotImplementedError(
            f"{name} has no derivative: the kernels are for decoding; train through the target's plain pass, "
            "target(tokens, positions), or keep the gradient out with jax.lax.stop_gradient"
        )

    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = derive
    return primitive


def _native(value):
    """An attribute in the dtype that the handlers declare: a Python float would arrive as float64."""
    return np.float32(value) if isinstance(value, float) else value


def _varying_like(operands, result) -> jax.core.ShapedArray:
    """`result` as an aval that varies over every mesh axis that some operand varies over (shard_map)."""
    first = max(operands, key=lambda aval: len(aval.mat.varying))
    varying = frozenset().union(*(aval.mat.varying for aval in operands))
    if not varying:
        return jax.core.ShapedArray(result.shape, result.dtype)
    spec = jax.sharding.PartitionSpec(*(None,) * len(result.shape))
    return first.update(
        shape=result.shape,
        dtype=result.dtype,
        sharding=jax.sharding.NamedSharding(first.sharding.mesh, spec),
        manual_axis_type=first.mat.update(varying=varying),
    )
