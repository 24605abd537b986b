"""Golden vectors of the kernels for tests in other languages: safetensors files, one a case, made by the NumPy oracles.

    python tests/ffi/golden.py [FOLDER]     writes them, by default to tests/data/golden_kernels

A file holds a call's arrays under the names of ddtree.h's fields, inputs and results together; what a call overwrites
is there as `NAME` before and `want_NAME` after. Sizes are the arrays' shapes; other scalars are arrays of one number.
Inputs are small fractions drawn as integers, so that every machine makes the same files.
"""

import pathlib
import sys

import ml_dtypes
import numpy as np
from safetensors.numpy import save

from ddtree_jax import reference

FOLDER = pathlib.Path(__file__).parents[1] / "data" / "golden_kernels"


def _fractions(draw, shape, most=64, step=16):
    return (draw.randint(-most, most + 1, shape) / step).astype(np.float32)


def _candidates(draw, batch, depth, k):
    """Non-increasing log-probabilities on a coarse grid, which makes ties of sums common, and distinct ids."""
    steps = np.cumsum(draw.randint(0, 24, (batch, depth, k)), axis=-1)
    ids = np.stack([draw.permutation(10 * k)[:k] for _ in range(batch * depth)])
    return (-steps / 16).astype(np.float32), ids.reshape(batch, depth, k).astype(np.int32)


def _scalar(value):
    return np.array([value], np.float32 if isinstance(value, float) else np.int64)


def draft_topk(draw, *, dtype, rows, vocab, k):
    logits = _fractions(draw, (rows, vocab)).astype(dtype)
    logits[0, draw.randint(0, vocab, 5)] = np.nan
    logits[-1] = -np.inf  # no finite normaliser
    log_probs, token_ids = reference.draft_topk(logits[None], k)
    return {"logits": logits, "log_probs": log_probs[0], "token_ids": token_ids[0]}


def tree_build(draw, *, batch, depth, k, budget, keep_spine):
    log_probs, token_ids = _candidates(draw, batch, depth, k)
    roots = draw.randint(0, 99, batch).astype(np.int32)
    budgets = draw.randint(0, budget + 1, batch).astype(np.int32)
    budgets[0] = budget
    tree = reference.tree_build(
        log_probs, token_ids, roots, budget=budget, budgets=budgets, keep_spine=keep_spine
    )
    tree["out_log_probs"] = tree.pop("log_probs")
    given = {"log_probs": log_probs, "token_ids": token_ids, "root_tokens": roots}
    return {**given, "budgets": budgets, "keep_spine": _scalar(int(keep_spine)), **tree}


def compose(draw, *, batch, depth, k, budget):
    """A tree and the walk on it: the target follows the tree at most nodes."""
    case = tree_build(draw, batch=batch, depth=depth, k=k, budget=budget, keep_spine=True)
    target = draw.randint(-1, 10 * k, case["tokens"].shape).astype(np.int32)
    for b, i in np.argwhere(case["parents"] >= 0)[::-1]:  # the first child has the last word
        if draw.randint(0, 5):
            target[b, case["parents"][b, i]] = case["tokens"][b, i]
    stops = draw.randint(0, 10 * k, 2).astype(np.int32)
    max_new = draw.randint(1, 2 * depth, batch).astype(np.int32)
    path = reference.tree_accept(
        case["tokens"],
        case["parents"],
        case["num_nodes"],
        target,
        max_depth=depth,
        stop_tokens=stops.tolist(),
        max_new=max_new,
    )
    path["out_tokens"] = path.pop("tokens")
    path["finished"] = path["finished"].astype(np.uint8)
    return {**case, "target_tokens": target, "stop_tokens": stops, "max_new": max_new, **path}


def _scales(draw, layers):
    return (draw.randint(1, 17, layers) / 8).astype(np.float32)


def verify_attn(draw, *, dtype, batch, budget, heads, rows, layers, cache_dtype=None):
    tree = tree_build(draw, batch=batch, depth=3, k=4, budget=budget, keep_spine=False)
    nodes = budget + 1
    query = _fractions(draw, (batch, nodes, heads, 576)).astype(dtype)
    cache = _fractions(draw, (layers, batch, rows, 576)).astype(cache_dtype or dtype)
    lengths = draw.randint(0, rows - nodes + 1, batch).astype(np.int32)
    scaled = {"cache_scale": _scales(draw, layers)} if cache_dtype else {}
    seen = {"ancestors": tree["ancestors"], "num_nodes": tree["num_nodes"]}
    where = {"scale": 0.01, "layer": layers - 1, **scaled}
    out = reference.verify_attn(query, cache, lengths, *seen.values(), **where)
    given = {"query": query, "cache": cache, "lengths": lengths, **seen, **scaled}
    layer = np.array([layers - 1], np.int32)
    return {**given, "layer": layer, "scale": _scalar(0.01), "out": out.astype(np.float32)}


def append_latents(draw, *, dtype, layers, batch, rows, nodes, width, cache_dtype=None):
    cache = _fractions(draw, (layers, batch, rows, width)).astype(cache_dtype or dtype)
    latents = _fractions(draw, (batch, nodes, width)).astype(dtype)
    lengths = draw.randint(-2, rows + 1, batch).astype(np.int32)
    scaled = {"cache_scale": _scales(draw, layers)} if cache_dtype else {}
    if cache_dtype:
        # What rounds to the even of two neighbours, what saturates and what is no number.
        latents[:, :, 0] = draw.choice([0.0, 17.0, 19.0, 1e4, -1e4, np.inf, np.nan], (batch, nodes))
        scaled["cache_scale"][1] = 0.5
    want = reference.append_latents(cache, latents, lengths, layer=1, **scaled)
    given = {"cache": cache, "latents": latents, "lengths": lengths, **scaled}
    return {**given, "layer": np.array([1], np.int32), "want_cache": want}


def commit_path(draw, *, dtype, layers, batch, rows, nodes, path, width):
    cache = _fractions(draw, (layers, batch, rows, width)).astype(dtype)
    count = draw.randint(0, path + 1, batch).astype(np.int32)
    kept = np.full((batch, path), -1, np.int32)
    for b in range(batch):
        kept[b, : count[b]] = np.sort(draw.permutation(nodes)[: count[b]])
    lengths = draw.randint(-1, rows, batch).astype(np.int32)
    want = reference.commit_path(cache, kept, count, lengths)
    given = {"cache": cache, "nodes": kept, "num_emitted": count, "lengths": lengths}
    return {**given, "want_cache": want}


def expert_mlp(draw, *, tokens, top_k, experts, hidden, inner):
    given = {
        "x": _fractions(draw, (tokens, hidden)),
        "expert_ids": draw.randint(-1, experts + 1, (tokens, top_k)).astype(np.int32),
        "expert_weights": _fractions(draw, (tokens, top_k)),
    }
    for name, rows, inputs in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        words = draw.randint(0, 2**32, (experts, rows, inputs // 8), dtype=np.int64)
        given[name] = words.astype(np.uint32).view(np.int32)
        scales = draw.randint(1, 9, (experts, rows, inputs // 32)) / 256
        given[f"{name}_scale"] = scales.astype(ml_dtypes.bfloat16)
    return {**given, "out": reference.expert_mlp(*given.values()).astype(np.float32)}


def cases():
    """Each file's name and arrays. A case has its own seed, so that one more changes no other."""
    f32, bf16, e4m3 = np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
    attention = dict(batch=1, budget=4, heads=1, rows=7, layers=2)
    cache = dict(layers=3, batch=4, rows=12, width=6)
    made = [
        ("draft_topk_f32", draft_topk, dict(dtype=f32, rows=3, vocab=1030, k=9)),
        ("draft_topk_bf16", draft_topk, dict(dtype=bf16, rows=3, vocab=2051, k=64)),
        ("tree_build", tree_build, dict(batch=4, depth=7, k=6, budget=40, keep_spine=False)),
        ("tree_build_spine", tree_build, dict(batch=4, depth=7, k=6, budget=12, keep_spine=True)),
        ("compose_32", compose, dict(batch=16, depth=7, k=12, budget=32)),
        ("compose_64", compose, dict(batch=16, depth=7, k=12, budget=64)),
        ("verify_attn_f32", verify_attn, dict(dtype=f32, **attention)),
        ("verify_attn_bf16", verify_attn, dict(dtype=bf16, **attention)),
        ("append_latents_f32", append_latents, dict(dtype=f32, nodes=5, **cache)),
        ("append_latents_bf16", append_latents, dict(dtype=bf16, nodes=5, **cache)),
        ("commit_path_f32", commit_path, dict(dtype=f32, nodes=9, path=5, **cache)),
        ("commit_path_bf16", commit_path, dict(dtype=bf16, nodes=9, path=5, **cache)),
        ("expert_mlp", expert_mlp, dict(tokens=3, top_k=2, experts=3, hidden=64, inner=32)),
        ("verify_attn_e4m3", verify_attn, dict(dtype=f32, cache_dtype=e4m3, **attention)),
        (
            "append_latents_e4m3",
            append_latents,
            dict(dtype=bf16, cache_dtype=e4m3, nodes=5, **cache),
        ),
        ("commit_path_e4m3", commit_path, dict(dtype=e4m3, nodes=9, path=5, **cache)),
    ]
    for seed, (name, make, sizes) in enumerate(made):
        # RandomState's streams are frozen, unlike a Generator's.
        yield name, make(np.random.RandomState(seed), **sizes)


def main(folder=FOLDER):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, arrays in cases():
        dense = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
        (folder / f"{name}.safetensors").write_bytes(save(dense))


if __name__ == "__main__":
    main(*sys.argv[1:])
