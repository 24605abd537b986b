"""The kernels on torch tensors. Each function has the contract of its namesake in `ddtree_jax`."""

from __future__ import annotations

import ctypes
import dataclasses

import torch

from ddtree_jax import _clib
from ddtree_jax._torch_checks import (
    INT32_MAX,
    aligned,
    between,
    instance,
    layer_index,
    number,
    rows,
    tensor,
)

MAX_BUDGET = 256  # draft nodes a tree, root excluded
MAX_CANDIDATES = 256  # candidates a position
MAX_DEPTH = 31  # draft positions
_ROW_DIM, _LATENT_DIM = 576, 512
_GROUP, _PER_WORD = 32, 8  # of expert weights: inputs that share a scale, weights in a word

_FLOATS = (torch.float32, torch.bfloat16)
_E4M3 = torch.float8_e4m3fn
_TAGS = {torch.float32: _clib.F32, torch.bfloat16: _clib.BF16, _E4M3: _clib.E4M3}


@dataclasses.dataclass(frozen=True)
class DraftTree:
    """`ddtree_jax.DraftTree` in torch tensors. B requests, N nodes (the root is node 0), W = ceil(N / 32).

    Attributes:
      tokens, parents, depths, next_token, next_sibling: i32[B, N].
      ancestors: i32[B, N, W], the 32 bits of a word as they are: torch has few operations on uint32.
      log_probs: f32[B, N].
      num_nodes: i32[B].
      max_depth: L.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor
    ancestors: torch.Tensor
    log_probs: torch.Tensor
    num_nodes: torch.Tensor
    max_depth: int


@dataclasses.dataclass(frozen=True)
class AcceptedPath:
    """`ddtree_jax.AcceptedPath` in torch tensors.

    Attributes:
      nodes, tokens: i32[B, L + 1], -1 past `num_emitted`.
      num_emitted: i32[B].
      finished: bool[B].
    """

    nodes: torch.Tensor
    tokens: torch.Tensor
    num_emitted: torch.Tensor
    finished: torch.Tensor


def draft_topk(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most probable tokens of each draft position (`ddtree_jax.draft_topk`).

    Args:
      logits: float32 or bfloat16 [B, L, V].
      k: 1 .. min(V, 256).

    Returns:
      log_probs f32[B, L, K] and token_ids i32[B, L, K].

    Raises:
      ValueError: another dtype, shape, device or k, or a tensor that is not contiguous.
    """
    tensor("logits", logits, ("B", "L", "V"), _FLOATS)
    batch, depth, vocab = logits.shape
    if vocab < 1:
        raise ValueError("logits must have at least one token in the vocabulary V")
    between("k", k, 1, min(vocab, MAX_CANDIDATES))
    log_probs = _empty(logits, torch.float32, batch, depth, k)
    token_ids = _empty(logits, torch.int32, batch, depth, k)
    _call(
        "draft_topk",
        logits,
        workspace=(batch * depth, vocab, k),
        logits=logits,
        log_probs=log_probs,
        token_ids=token_ids,
        rows=batch * depth,
        vocab=vocab,
        k=k,
        dtype=_TAGS[logits.dtype],
    )
    return log_probs, token_ids


def tree_build(
    log_probs: torch.Tensor,
    token_ids: torch.Tensor,
    root_tokens: torch.Tensor,
    *,
    budget: int,
    budgets: torch.Tensor | None = None,
    keep_spine: bool = False,
) -> DraftTree:
    """The `budget` most probable continuations as one tree (`ddtree_jax.tree_build`).

    Args:
      log_probs: f32[B, L, K], non-increasing in K.
      token_ids: i32[B, L, K].
      root_tokens: i32[B].
      budget: draft nodes, 0 .. 256; N = budget + 1.
      budgets: i32[B], caps a request below `budget`.
      keep_spine: keep the path of every position's best candidate where the budget is at least L.

    Returns:
      A `DraftTree`.

    Raises:
      ValueError: another dtype, shape, device or budget, or a tensor that is not contiguous.
    """
    tensor("log_probs", log_probs, ("B", "L", "K"), torch.float32)
    batch, depth, k = log_probs.shape
    tensor("token_ids", token_ids, log_probs.shape, torch.int32, log_probs)
    tensor("root_tokens", root_tokens, (batch,), torch.int32, log_probs)
    between("budget", budget, 0, MAX_BUDGET)
    between("log_probs' positions L", depth, 1, MAX_DEPTH)
    between("log_probs' candidates K", k, 1, MAX_CANDIDATES)
    budgets = rows("budgets", budgets, budget, root_tokens)
    nodes = budget + 1
    tree = DraftTree(
        *(_empty(log_probs, torch.int32, batch, nodes) for _ in range(5)),
        _empty(log_probs, torch.int32, batch, nodes, -(-nodes // 32)),
        _empty(log_probs, torch.float32, batch, nodes),
        _empty(log_probs, torch.int32, batch),
        max_depth=depth,
    )
    fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    fields["out_log_probs"] = fields.pop("log_probs")
    del fields["max_depth"]
    _call(
        "tree_build",
        log_probs,
        workspace=(batch, depth, k, budget),
        log_probs=log_probs,
        token_ids=token_ids,
        root_tokens=root_tokens,
        budgets=budgets,
        **fields,
        batch=batch,
        depth=depth,
        k=k,
        budget=budget,
        keep_spine=int(keep_spine),
    )
    return tree


def verify_attn(
    query: torch.Tensor,
    cache: torch.Tensor,
    lengths: torch.Tensor,
    tree: DraftTree,
    *,
    scale: float,
    layer: int | torch.Tensor,
    path: str = "auto",
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Absorbed latent attention of a tree's nodes (`ddtree_jax.verify_attn`).

    Args:
      query: float32 or bfloat16 [B, N, H, 576].
      cache: [layers, B, S, 576] of the same dtype or torch.float8_e4m3fn.
      lengths: i32[B].
      tree: `ancestors` and `num_nodes` are read.
      scale: multiplies the scores.
      layer: an int or an i32 scalar on the device.
      path: which CUDA kernel serves bfloat16: "auto", "portable" or "hopper".
      cache_scale: f32[layers] for an e4m3 cache, what its numbers are multiplied with; None means 1.

    Returns:
      [B, N, H, 512] in the query's dtype.

    Raises:
      ValueError: another dtype, shape, device, layer or path, a scale for a cache of another dtype, or a
        tensor that is not contiguous; a `scale` that is not finite in float32.
      TypeError: `tree` is no `DraftTree`.
    """
    tensor("query", query, ("B", "N", "H", _ROW_DIM), _FLOATS)
    batch, nodes, heads, _ = query.shape
    tensor("cache", cache, ("layers", batch, "S", _ROW_DIM), (query.dtype, _E4M3), query)
    instance("tree", tree, DraftTree)
    kernel = _clib.path_number(path)
    tensor("lengths", lengths, (batch,), torch.int32, query)
    between("query's nodes N", nodes, 1, MAX_BUDGET + 1)
    if heads < 1:
        raise ValueError("query must have at least one head")
    if cache.shape[2] < nodes:
        raise ValueError(f"cache holds {cache.shape[2]} rows, fewer than the tree's {nodes} nodes")
    words = (batch, nodes, -(-nodes // 32))
    tensor("tree.ancestors", tree.ancestors, words, (torch.int32, torch.uint32), query)
    tensor("tree.num_nodes", tree.num_nodes, (batch,), torch.int32, query)
    if query.is_cuda:
        aligned("query", query, 16)
        aligned("cache", cache, 16)
    layers, _, length, _ = cache.shape
    index = layer_index(layer, layers, query)
    out = _empty(query, query.dtype, batch, nodes, heads, _LATENT_DIM)
    _call(
        "verify_attn",
        query,
        workspace=(batch, length, nodes, heads, _TAGS[query.dtype]),
        query=query,
        cache=cache,
        ancestors=tree.ancestors,
        lengths=lengths,
        num_nodes=tree.num_nodes,
        layer=index,
        out=out,
        layers=layers,
        batch=batch,
        rows=length,
        nodes=nodes,
        heads=heads,
        scale=number("scale", scale),
        dtype=_TAGS[query.dtype],
        path=kernel,
        cache_dtype=_TAGS[cache.dtype],
        cache_scale=_scale(cache_scale, cache),
    )
    return out


def append_latents(
    cache: torch.Tensor,
    latents: torch.Tensor,
    lengths: torch.Tensor,
    *,
    layer: int | torch.Tensor,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes rows behind each request's prefix, in place (`ddtree_jax.append_latents`).

    Args:
      cache: float32, bfloat16 or float8_e4m3fn [layers, B, S, width].
      latents: [B, N, width] of the same dtype, float32 or bfloat16 for float8_e4m3fn.
      lengths: i32[B].
      layer: an int or an i32 scalar on the device.
      cache_scale: f32[layers] for a float8_e4m3fn cache, by which latents are divided; finite, normal and above 0,
        which is not looked at: by 0 or NaN rows become NaN or +-448, and a subnormal one counts as 0 on some
        devices. None means 1.

    Returns:
      `cache`.

    Raises:
      ValueError: another dtype, shape, device or layer, a scale for a cache of another dtype, or a tensor
        that is not contiguous.
    """
    tensor("cache", cache, ("layers", "B", "S", "width"), (*_FLOATS, _E4M3))
    layers, batch, length, width = cache.shape
    floats = _FLOATS if cache.dtype == _E4M3 else cache.dtype
    tensor("latents", latents, (batch, "N", width), floats, cache)
    tensor("lengths", lengths, (batch,), torch.int32, cache)
    if width < 1:
        raise ValueError("cache must have rows of at least one number")
    _call(
        "append_latents",
        cache,
        cache=cache,
        latents=latents,
        lengths=lengths,
        layer=layer_index(layer, layers, cache),
        layers=layers,
        batch=batch,
        rows=length,
        nodes=latents.shape[1],
        width=width,
        dtype=_TAGS[latents.dtype],
        cache_dtype=_TAGS[cache.dtype],
        cache_scale=_scale(cache_scale, cache),
    )
    return cache


def tree_accept(
    tree: DraftTree,
    target_tokens: torch.Tensor,
    *,
    stop_tokens: tuple[int, ...] | torch.Tensor = (),
    max_new: torch.Tensor | None = None,
) -> AcceptedPath:
    """Walks each tree along the target's tokens (`ddtree_jax.tree_accept`).

    Args:
      tree: `tokens`, `next_token`, `next_sibling` and `num_nodes` are read.
      target_tokens: i32[B, N].
      stop_tokens: a tuple of ids or i32[M].
      max_new: i32[B], tokens to emit at most.

    Returns:
      An `AcceptedPath`.

    Raises:
      ValueError: another dtype, shape or device, or a tensor that is not contiguous.
      TypeError: `tree` is no `DraftTree`.
    """
    instance("tree", tree, DraftTree)
    tensor("target_tokens", target_tokens, ("B", "N"), torch.int32)
    batch, nodes = target_tokens.shape
    between("target_tokens' nodes N", nodes, 1, MAX_BUDGET + 1)
    between("tree.max_depth", tree.max_depth, 0, INT32_MAX - 1)
    for name in ("tokens", "next_token", "next_sibling"):
        tensor(f"tree.{name}", getattr(tree, name), (batch, nodes), torch.int32, target_tokens)
    tensor("tree.num_nodes", tree.num_nodes, (batch,), torch.int32, target_tokens)
    if not isinstance(stop_tokens, torch.Tensor):
        ids = [between("a stop token", token, -INT32_MAX, INT32_MAX) for token in stop_tokens]
        stop_tokens = _empty(target_tokens, torch.int32, len(ids))
        for place, token in enumerate(ids):
            stop_tokens[place].fill_(token)  # a fill each, which a CUDA graph can hold
    tensor("stop_tokens", stop_tokens, ("M",), torch.int32, target_tokens)
    path = AcceptedPath(
        _empty(target_tokens, torch.int32, batch, tree.max_depth + 1),
        _empty(target_tokens, torch.int32, batch, tree.max_depth + 1),
        _empty(target_tokens, torch.int32, batch),
        _empty(target_tokens, torch.bool, batch),
    )
    _call(
        "tree_accept",
        target_tokens,
        tokens=tree.tokens,
        next_token=tree.next_token,
        next_sibling=tree.next_sibling,
        num_nodes=tree.num_nodes,
        target_tokens=target_tokens,
        stop_tokens=stop_tokens,
        max_new=rows("max_new", max_new, INT32_MAX, target_tokens),
        nodes=path.nodes,
        out_tokens=path.tokens,
        num_emitted=path.num_emitted,
        finished=path.finished,
        batch=batch,
        max_nodes=nodes,
        depth=tree.max_depth,
        num_stops=stop_tokens.shape[0],
    )
    return path


def commit_path(cache: torch.Tensor, path: AcceptedPath, lengths: torch.Tensor) -> torch.Tensor:
    """Moves the accepted rows up behind the prefix in every layer, in place (`ddtree_jax.commit_path`).

    Args:
      cache: float32, bfloat16 or float8_e4m3fn [layers, B, S, width], whose rows move as they are.
      path: `nodes` and `num_emitted` are read.
      lengths: i32[B].

    Returns:
      `cache`.

    Raises:
      ValueError: another dtype, shape or device, or a tensor that is not contiguous.
      TypeError: `path` is no `AcceptedPath`.
    """
    tensor("cache", cache, ("layers", "B", "S", "width"), (*_FLOATS, _E4M3))
    layers, batch, length, width = cache.shape
    instance("path", path, AcceptedPath)
    tensor("path.nodes", path.nodes, (batch, "L + 1"), torch.int32, cache)
    tensor("path.num_emitted", path.num_emitted, (batch,), torch.int32, cache)
    tensor("lengths", lengths, (batch,), torch.int32, cache)
    if width < 1:
        raise ValueError("cache must have rows of at least one number")
    _call(
        "commit_path",
        cache,
        cache=cache,
        nodes=path.nodes,
        num_emitted=path.num_emitted,
        lengths=lengths,
        layers=layers,
        batch=batch,
        rows=length,
        width=width,
        path=path.nodes.shape[1],
        dtype=_TAGS[cache.dtype],
    )
    return cache


def expert_mlp(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
) -> torch.Tensor:
    """Routed experts with packed int4 weights (`ddtree_jax.expert_mlp`).

    Args:
      x: float32 or bfloat16 [T, D].
      expert_ids: i32[T, k]. expert_weights: f32[T, k].
      gate_up: i32[E, 2I, D / 8]. gate_up_scale: bf16[E, 2I, D / 32].
      down: i32[E, D, I / 8]. down_scale: bf16[E, D, I / 32].

    Returns:
      [T, D] in x's dtype.

    Raises:
      ValueError: another dtype, shape or device, a tensor that is not contiguous, or D or I no multiple of 32.
    """
    tensor("x", x, ("T", "D"), _FLOATS)
    tokens, hidden = x.shape
    tensor("expert_ids", expert_ids, (tokens, "k"), torch.int32, x)
    tensor("expert_weights", expert_weights, expert_ids.shape, torch.float32, x)
    tensor("down", down, ("E", hidden, "I / 8"), torch.int32, x)
    experts, inner, top_k = down.shape[0], down.shape[2] * _PER_WORD, expert_ids.shape[1]
    if hidden % _GROUP or inner % _GROUP:
        raise ValueError(f"D and I must be multiples of {_GROUP}, not {hidden} and {inner}")
    shape = (experts, 2 * inner, hidden // _PER_WORD)
    tensor("gate_up", gate_up, shape, torch.int32, x)
    shape = (experts, 2 * inner, hidden // _GROUP)
    tensor("gate_up_scale", gate_up_scale, shape, torch.bfloat16, x)
    shape = (experts, hidden, inner // _GROUP)
    tensor("down_scale", down_scale, shape, torch.bfloat16, x)
    out = torch.empty_like(x)
    on_cpu = x.device.type == "cpu"
    if not on_cpu:
        between("the number of experts", experts, 0, 2048)
        weights = {"gate_up": gate_up, "gate_up_scale": gate_up_scale}
        weights |= {"down": down, "down_scale": down_scale}
        for name, value in {"x": x, **weights}.items():
            aligned(name, value, 16)
    partial = _empty(x, torch.float32, tokens, top_k, hidden) if on_cpu else None
    block = _call(
        "expert_mlp",
        x,
        workspace=(tokens, top_k, experts, hidden, inner, _TAGS[x.dtype]),
        x=x,
        expert_ids=expert_ids,
        expert_weights=expert_weights,
        gate_up=gate_up,
        gate_up_scale=gate_up_scale,
        down=down,
        down_scale=down_scale,
        partial=partial,
        out=out,
        tokens=tokens,
        top_k=top_k,
        experts=experts,
        hidden=hidden,
        inner=inner,
        dtype=_TAGS[x.dtype],
    )
    if on_cpu:
        _clib.check("expert_mlp", _clib.library().ddtree_expert_mlp_sum_cpu(ctypes.byref(block)))
    return out


def _scale(value, cache: torch.Tensor) -> torch.Tensor | None:
    """The scale of an e4m3 cache's layers, if there is one."""
    if value is None:
        return None
    if cache.dtype != _E4M3:
        raise ValueError(
            f"cache_scale is for a torch.float8_e4m3fn cache, and this one is {cache.dtype}: leave it out"
        )
    return tensor("cache_scale", value, (cache.shape[0],), torch.float32, cache)


def _empty(like: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _call(name: str, like: torch.Tensor, *, workspace: tuple[int, ...] = (), **fields):
    """Calls a kernel where `like` is: on the CPU in this thread, on CUDA on torch's current stream.

    Args:
      name: the kernel's.
      like: a tensor on the device.
      workspace: the sizes that the workspace query takes; () where the kernel has none.
      fields: of the argument block; a tensor stands for its address.

    Returns:
      The block.
    """
    library = _clib.library()
    block = _clib.BLOCKS[name](abi_version=_clib.ABI_VERSION)
    for field, value in fields.items():
        setattr(block, field, value.data_ptr() if isinstance(value, torch.Tensor) else value)
    if like.device.type == "cpu":
        status = getattr(library, f"ddtree_{name}_cpu")(ctypes.byref(block), 0, 1)
    else:
        with torch.cuda.device(like.device):
            # torch's allocator orders scratch by stream: freed on return, it is reused only after the kernel.
            scratch = None
            if workspace:
                size = getattr(library, f"ddtree_{name}_workspace")(*workspace)
                scratch = _empty(like, torch.uint8, size)
                block.workspace, block.workspace_bytes = scratch.data_ptr(), size
            stream = torch.cuda.current_stream(like.device).cuda_stream
            status = getattr(library, f"ddtree_{name}_cuda")(ctypes.byref(block), stream)
    _clib.check(name, status)
    return block
