"""Times the kernels on this device, beside the floor and plain XLA; a whole step; a checkpoint; or XLA's compilation.

python examples/benchmark.py --suite=kernels --json=kernels.json
python examples/benchmark.py --suite=step --json=step.json --figure=step.png
python examples/benchmark.py --suite=curve --nodes=1,5,9,13,17 --prefixes=160 --json=curve.json
python examples/benchmark.py --suite=compile --json=compile.json

The suites "step" and "curve" (the cost curve of a checkpoint, the demo by default) are in step_suite.py, "compile" is
in compile_time.py; what follows is about the kernels'.

Calls run one after the other inside one jitted loop (loop_time.py), several in a round of it. What the loop itself
costs, measured with no call in it, is printed and not taken off. The median of several differences is printed. Inputs
are random.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys

import model_flags
import program
from absl import flags

_SUITE = flags.DEFINE_enum(
    "suite", "kernels", ["kernels", "step", "curve", "compile"], "What to time."
)
_JSON = flags.DEFINE_string("json", None, "Write the rows to this file.")
_ONLY = flags.DEFINE_string("only", "", "Only rows whose kernel's name contains this.")
_REPEATS = flags.DEFINE_integer("repeats", 7, "Differences to take the median of.")
_SIZE = flags.DEFINE_enum(
    "size", None, ["full", "small"], "K2.6's shapes, or ones for a CPU; by the device if not given."
)
_BANDWIDTH = flags.DEFINE_float(
    "bandwidth", 4.42e12, "Bytes a second the device reads, for the floor."
)
_MATRIX_RATE = flags.DEFINE_float("matrix_rate", 7.2e14, "bf16 FLOP a second, for the floor.")
_LAYERS = flags.DEFINE_integer(
    "layers",
    None,
    "Layers of the target; those that fit of the step's, all of what is compiled, if not given.",
)
_NODES = flags.DEFINE_list(
    "nodes", ["1", "8", "17", "33", "65"], "Sizes of the pass, of step and curve."
)
_PREFIXES = flags.DEFINE_list(
    "prefixes", None, "Context lengths of the step; the curve takes the first."
)
flags.adopt_module_key_flags(model_flags)
_BATCH = flags.DEFINE_integer("batch_size", 1, "Requests, of step and curve.")
_FIGURE = flags.DEFINE_string(
    "figure", None, "Draw the step's times to this file (needs matplotlib)."
)
_CUDA_EXPERTS = flags.DEFINE_bool(
    "cuda_experts", None, "Routed experts on CUDA by the kernel; the library's choice if not given."
)

_MAX_NODES = 257  # of a pass: `tree_build`'s largest budget, and the root


@dataclasses.dataclass
class Row:
    """One line: times in microseconds, None where there is nothing to compare with."""

    kernel: str
    shape: str
    time: float
    floor: float | None = None
    xla: float | None = None


def main():
    """Runs the suite."""
    for name in ("repeats", "batch_size", "layers"):
        value = flags.FLAGS[name].value
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, not {value}")
    nodes, prefixes = _sizes("nodes", _NODES.value), _sizes("prefixes", _PREFIXES.value or [])
    if nodes[:1] != [1] or nodes != sorted(set(nodes)) or nodes[-1] > _MAX_NODES:
        raise ValueError(f"--nodes must ascend from 1 to at most {_MAX_NODES}, not {nodes}")
    if _SUITE.value == "curve":
        model_flags.check()
    import jax

    full = _SIZE.value == "full" if _SIZE.value else jax.default_backend() != "cpu"
    device = jax.devices()[0].device_kind
    if _CUDA_EXPERTS.value is not None:
        from ddtree_jax import experts

        experts.CUDA_KERNEL = _CUDA_EXPERTS.value
    if _SUITE.value == "step":
        _step(full, device, nodes, prefixes)
        return
    if _SUITE.value == "curve":
        _curve(device, nodes, prefixes)
        return
    if _SUITE.value == "compile":
        from compile_time import compile_time

        seconds = compile_time(full, _LAYERS.value)
        print(f"{device}, jax {jax.__version__}, seconds: {seconds}")
        _write_json(device, seconds)
        return
    print(f"{device}, jax {jax.__version__}, median of {_REPEATS.value}, microseconds")
    print(f"{'kernel':<15}{'shape':<34}{'time':>9}{'floor':>9}{'ratio':>7}{'XLA':>10}")
    rows = [Row("loop", "nothing in it, a round", _empty_loop())]
    print(f"{rows[0].kernel:<15}{rows[0].shape:<34}{rows[0].time:9.1f}", flush=True)
    for name, case in _cases(full):
        if _ONLY.value not in name:
            continue
        row = case()
        rows.append(row)
        floor = f"{row.floor:9.1f}{row.time / row.floor:7.1f}" if row.floor else " " * 16
        xla = f"{row.xla:10.1f}" if row.xla else ""
        print(f"{row.kernel:<15}{row.shape:<34}{row.time:9.1f}{floor}{xla}", flush=True)
    _write_json(device, {"rows": [dataclasses.asdict(row) for row in rows]})


def _sizes(flag, texts):
    """The whole numbers above 0 of a flag, in the order given."""
    if not all(text.strip().isdecimal() and int(text) > 0 for text in map(str, texts)):
        raise ValueError(f"--{flag} must be whole numbers above 0, not {','.join(map(str, texts))}")
    return [int(text) for text in texts]


def _step(full, device, nodes, prefixes):
    """The suite "step"."""
    import step_suite
    from step_floors import Rates

    prefixes = prefixes or ([2048, 8192, 32768] if full else [64, 128])
    settings = step_suite.Settings(
        full=full,
        layers=_LAYERS.value,
        nodes=tuple(nodes),
        prefixes=tuple(prefixes),
        batch=_BATCH.value,
        repeats=_REPEATS.value,
    )
    report = step_suite.run(settings, Rates(_BANDWIDTH.value, _MATRIX_RATE.value))
    _write_json(device, dataclasses.asdict(report))
    if _FIGURE.value:
        from step_figure import draw

        draw(report, device, _FIGURE.value)


def _curve(device, nodes, prefixes):
    """The suite "curve"."""
    import step_suite

    target, drafter = model_flags.load_pair()
    prefix = prefixes[0] if prefixes else 160
    if prefix + nodes[-1] > target.max_context:
        raise ValueError(
            f"--prefixes {prefix} and a pass of {nodes[-1]} nodes are more than the target's context of "
            f"{target.max_context}"
        )
    settings = step_suite.Settings(
        full=False,
        layers=None,
        nodes=tuple(nodes),
        prefixes=(prefix,),
        batch=_BATCH.value,
        repeats=_REPEATS.value,
    )
    curve = step_suite.measure_curve(target, drafter, settings)
    held = f"{target.dtype.name}, cache {target.cache_dtype.name}"
    print(f"{device}, {held}, prefix {prefix}, microseconds: {curve}")
    _write_json(device, {"prefix": prefix, "cost_curve": dataclasses.asdict(curve)})


def _write_json(device, results):
    import jax

    if _JSON.value:
        report = {"device": device, "jax": jax.__version__, "argv": sys.argv[1:], **results}
        pathlib.Path(_JSON.value).write_text(json.dumps(report, indent=1) + "\n")


def _per_call(step, *operands, **options):
    from loop_time import per_call

    return per_call(step, *operands, repeats=_REPEATS.value, **options)


def _per_update(step, cache, *operands):
    from loop_time import per_update

    return per_update(step, cache, *operands, repeats=_REPEATS.value)


def _empty_loop():
    import jax.numpy as jnp

    return _per_call(lambda x: x + 1, jnp.float32(1), calls=1)


def _cases(full):
    vocab = 163840 if full else 4096
    batches = (1, 8, 64) if full else (1,)
    for batch in batches:
        for k in (16, 64):
            yield "draft_topk", functools.partial(_draft_topk, batch, vocab, k)
    for batch in batches:
        for budget in (16, 64, 256):
            yield "tree_build", functools.partial(_tree_build, batch, budget)
    for batch in batches:
        yield "tree_accept", functools.partial(_tree_accept, batch, 64)
    layers = 61 if full else 6
    for batch in batches[:2]:
        yield "append_latents", functools.partial(_append, layers, batch, 17)
        yield "commit_path", functools.partial(_commit, layers, batch)
    shapes = (
        [(1, 2048, 16), (1, 8192, 16), (1, 8192, 64), (8, 8192, 64), (8, 32768, 64)]
        if full
        else [(1, 512, 4), (1, 4096, 4)]
    )
    for batch, prefix, heads in shapes:
        for nodes in (1, 17, 65):
            yield "verify_attn", functools.partial(_verify_attn, full, batch, prefix, heads, nodes)
    for sizes in [(8, 32768, 16, 1), (8, 8192, 64, 17)] if full else [(1, 512, 4, 17)]:
        case = functools.partial(_verify_attn, full, *sizes, cache_dtype="float8_e4m3fn")
        yield "verify_attn", case

    for tokens in (8, 17, 33):
        yield "expert_mlp", functools.partial(_expert_mlp, full, tokens)


def _floor(moved, work=0):
    """Microseconds that the bytes or the bf16 arithmetic alone take; a GPU's rates say nothing of a CPU."""
    import jax

    if jax.default_backend() == "cpu":
        return None
    return max(moved / _BANDWIDTH.value, work / _MATRIX_RATE.value) * 1e6


def _random(shape, dtype="bfloat16", seed=0):
    import jax
    import jax.numpy as jnp

    return jax.random.normal(jax.random.key(seed), shape, jnp.dtype(dtype))


def _candidates(batch, k, depth=7):
    import jax.numpy as jnp

    from ddtree_jax import draft_topk

    log_probs, token_ids = draft_topk(_random((batch, depth, 4096)) * 3, k)
    return log_probs, token_ids, jnp.zeros((batch,), jnp.int32)


def _draft_topk(batch, vocab, k):
    import jax
    import jax.numpy as jnp

    from ddtree_jax import draft_topk

    logits = _random((batch, 7, vocab))

    def plain(logits):
        wide = logits.astype(jnp.float32)
        top, ids = jax.lax.top_k(logits, k)
        return top.astype(jnp.float32) - jax.nn.logsumexp(wide, axis=-1, keepdims=True), ids

    return Row(
        "draft_topk",
        f"B {batch} L 7 V {vocab} K {k} bf16",
        _per_call(lambda x: draft_topk(x, k), logits),
        _floor(logits.nbytes),
        _per_call(plain, logits, calls=1),
    )


def _tree_build(batch, budget):
    from ddtree_jax import tree_build

    operands = _candidates(batch, budget)

    def step(*operands):
        return tree_build(*operands, budget=budget, keep_spine=True)

    return Row(
        "tree_build", f"B {batch} L 7 K {budget} budget {budget}", _per_call(step, *operands)
    )


def _tree(batch, budget):
    from ddtree_jax import tree_build

    return tree_build(*_candidates(batch, max(budget, 1)), budget=budget, keep_spine=True)


def _tree_accept(batch, budget):
    import jax.numpy as jnp

    from ddtree_jax import tree_accept

    tree = _tree(batch, budget)
    # A target that agrees with every first child: the longest walk.
    child = jnp.maximum(tree.next_token, 0)
    target = jnp.take_along_axis(tree.tokens, child, axis=1)
    return Row("tree_accept", f"B {batch} N {budget + 1}", _per_call(tree_accept, tree, target))


def _append(layers, batch, nodes):
    import jax.numpy as jnp

    from ddtree_jax import append_latents

    cache, rows = _random((layers, batch, 4096, 576)), _random((batch, nodes, 576))
    lengths = jnp.full((batch,), 2048, jnp.int32)

    def step(cache, rows, lengths):
        return append_latents(cache, rows, lengths, layer=layers // 2)

    floor = _floor(2 * rows.nbytes)
    time = _per_update(step, cache, rows, lengths)
    return Row("append_latents", f"layers {layers} B {batch} N {nodes} bf16", time, floor)


def _commit(layers, batch):
    import jax.numpy as jnp

    from ddtree_jax import AcceptedPath, commit_path

    cache = _random((layers, batch, 4096, 576))
    lengths = jnp.full((batch,), 2048, jnp.int32)
    nodes = jnp.broadcast_to(jnp.array([0, 2, 3, 5, 7, 9, 12, 15], jnp.int32), (batch, 8))
    count = jnp.full((batch,), 8, jnp.int32)
    path = AcceptedPath(nodes, nodes, count, jnp.zeros((batch,), bool))

    def step(cache, path, lengths):
        return commit_path(cache, path, lengths)

    floor = _floor(2 * layers * batch * 7 * 1152)
    time = _per_update(step, cache, path, lengths)
    return Row("commit_path", f"layers {layers} B {batch} path 8 bf16", time, floor)


def _verify_attn(full, batch, prefix, heads, nodes, cache_dtype=None):
    import jax
    import jax.numpy as jnp

    from ddtree_jax import verify_attn

    dtype = "bfloat16" if full else "float32"
    query = _random((batch, nodes, heads, 576), dtype)
    cache = _random((1, batch, prefix + nodes, 576), dtype, 1).astype(cache_dtype or dtype)
    lengths = jnp.full((batch,), prefix, jnp.int32)
    tree = _tree(batch, nodes - 1)

    def step(query, cache, lengths, tree):
        return verify_attn(query, cache, lengths, tree, scale=0.1447, layer=0)

    def plain(query, cache, lengths, tree):
        rows = cache[0].astype(query.dtype)
        scores = jnp.einsum("bnhd,bsd->bnhs", query, rows, preferred_element_type=jnp.float32)
        bits = jnp.arange(nodes)
        words = jnp.take(tree.ancestors, bits // 32, axis=2)
        seen = (words >> (bits % 32).astype(jnp.uint32)) & 1
        seen = jnp.concatenate([jnp.ones((batch, nodes, prefix), bool), seen == 1], axis=-1)
        weights = jax.nn.softmax(jnp.where(seen[:, :, None], scores * 0.1447, -jnp.inf))
        return jnp.einsum("bnhs,bsd->bnhd", weights.astype(query.dtype), rows[..., :512])

    work = 2 * batch * nodes * heads * (prefix + nodes) * (576 + 512)
    floor = _floor(cache.nbytes, work)
    operands = (query, cache, lengths, tree)
    scores = batch * nodes * heads * (prefix + nodes) * 4
    return Row(
        "verify_attn",
        f"B {batch} P {prefix} H {heads} N {nodes} {'bf16' if full else 'f32'}"
        + (", cache e4m3" if cache_dtype else ""),
        _per_call(step, *operands),
        floor,
        _per_call(plain, *operands, calls=1) if scores < 4e9 else None,
    )


def _expert_mlp(full, tokens):
    """On CUDA the kernel, beside the plain JAX that takes its place by default."""
    import jax
    import jax.numpy as jnp
    import step_floors
    import step_model

    from ddtree_jax import expert_mlp

    config = step_model.target_config(full)
    experts, top_k = config.n_routed_experts, config.num_experts_per_tok
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    weights = step_model.random_experts(experts, hidden, inner)
    noise = jax.random.uniform(jax.random.key(tokens), (tokens, experts))
    ids = jax.lax.top_k(noise, top_k)[1].astype(jnp.int32)
    operands = (_random((tokens, hidden)), ids, jnp.full(ids.shape, 0.3, jnp.float32), *weights)
    touched = len(set(ids.ravel().tolist()))

    def time(**options):
        return _per_call(functools.partial(expert_mlp, **options), *operands, calls=1)

    on_cuda = jax.default_backend() == "gpu"
    return Row(
        "expert_mlp",
        f"T {tokens} E {experts}, {touched} touched, bf16",
        time(cuda_kernel=True),
        _floor(touched * step_floors.weight_bytes(weights) / experts),
        time(cuda_kernel=False) if on_cuda else None,
    )


if __name__ == "__main__":
    program.run(main)
