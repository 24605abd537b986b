"""Trains the demo's drafter on the target's own continuations (DFlash, arXiv 2602.06036) and estimates acceptance."""

from __future__ import annotations

import functools
import heapq
import time

import jax
import jax.numpy as jnp
import numpy as np
from demo_target import learning_rate, optimizer, token_losses
from flax import nnx

from ddtree_jax.models import DFlashConfig, DFlashDrafter

_WEIGHT_DECAY = 0.1
_GAMMA = (
    4.0  # slot k weighs exp(-(k - 1) / gamma): a late slot counts only when all before it are right
)


def _bfloat16(params):
    return jax.tree.map(lambda value: value.astype(jnp.bfloat16), params)


def block_logits(drafter: DFlashDrafter, target, tokens: jax.Array, anchors: jax.Array):
    """The drafter's logits for blocks that start at `anchors`, all in one pass.

    A block is its anchor's token and L masks; it sees the target's features strictly before the
    anchor, and itself, and no other block.

    Args:
      tokens: i32[B, T].
      anchors: i32[B, A], the anchors' positions, at least 1.

    Returns:
      f32[B, A, L, V] and the labels i32[B, A, L], the tokens that follow each anchor.
    """
    batch, length = tokens.shape
    size = drafter.block_size
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    _, features = target.forward(tokens, positions, taps=drafter.taps)
    features = jax.lax.stop_gradient(features)
    slots = anchors[..., None] + jnp.arange(size)  # [B, A, size]
    content = jnp.take_along_axis(tokens, slots.reshape(batch, -1), axis=1).reshape(slots.shape)
    block = jnp.where(jnp.arange(size) == 0, content, drafter.config.mask_token_id)
    embedded = target.embed(block.reshape(batch, -1)) * drafter.config.input_embedding_scale
    owner = jnp.arange(slots.shape[1] * size) // size
    context = jnp.arange(length) < jnp.repeat(anchors, size, axis=1)[..., None]
    own = jnp.broadcast_to(owner[:, None] == owner, (batch, owner.size, owner.size))
    hidden = drafter.forward(
        embedded,
        slots.reshape(batch, -1),
        features,
        positions,
        jnp.concatenate([context, own], axis=-1),
    )
    hidden = hidden.reshape(*slots.shape, -1)[:, :, 1:]
    return drafter.logits(target, hidden), content[:, :, 1:]


@functools.partial(
    jax.jit,
    donate_argnums=(0, 1),
    static_argnames=("graphdef", "target_graphdef", "steps", "batch", "anchors", "block_size"),
)
def _train_steps(
    params,
    moments,
    target_params,
    sequences,
    first_anchor,
    key,
    rate,
    *,
    graphdef,
    target_graphdef,
    steps,
    batch,
    anchors,
    block_size,
):
    target = nnx.merge(target_graphdef, target_params)
    length = sequences.shape[1]

    def loss_of(params, tokens, starts):
        drafter = nnx.merge(graphdef, _bfloat16(params))
        logits, labels = block_logits(drafter, target, tokens, starts)
        slots = labels.shape[-1]
        weights = jnp.exp(-jnp.arange(slots) / _GAMMA)
        losses = token_losses(logits, labels)
        right = jnp.cumprod(jnp.argmax(logits, axis=-1) == labels, axis=-1)
        accepted = jnp.mean(jnp.sum(right, axis=-1)) + 1
        return jnp.mean(losses * weights) / jnp.mean(weights), accepted

    def step(carry, key):
        params, moments = carry
        rows, places = jax.random.split(key)
        rows = jax.random.randint(rows, (batch,), 0, sequences.shape[0])
        last = length - block_size
        starts = jax.random.randint(places, (batch, anchors), first_anchor, last + 1)
        tokens = sequences[rows].astype(jnp.int32)
        (loss, accepted), grads = jax.value_and_grad(loss_of, has_aux=True)(params, tokens, starts)
        updates, moments = optimizer(_WEIGHT_DECAY).update(grads, moments, params)
        params = jax.tree.map(lambda value, update: value - rate * update, params, updates)
        return (params, moments), (loss, accepted)

    (params, moments), (losses, accepted) = jax.lax.scan(
        step, (params, moments), jax.random.split(key, steps)
    )
    return params, moments, jnp.mean(losses), jnp.mean(accepted)


def train(
    config: DFlashConfig,
    target_graphdef,
    target_params,
    generated: list[tuple[int, np.ndarray]],
    *,
    minutes: float,
    seed: int,
    batch: int,
    anchors: int,
    steps_per_call: int,
    peak: float = 2e-3,
):
    """Trains from random numbers for `minutes`, compilation included.

    Args:
      config: the drafter's sizes.
      target_graphdef, target_params: the frozen target.
      generated: pairs of prompt length and u16[n, T] sequences, visited in turn.
      minutes: wall-clock time.
      seed: of the parameters, rows and anchors.
      batch, anchors: sequences a step and blocks a sequence.
      steps_per_call: steps in one device program.

    Returns:
      graphdef and f32 parameters of a `DFlashDrafter`.
    """
    kinds = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}
    drafter = DFlashDrafter(config, **kinds, rngs=nnx.Rngs(seed))
    graphdef, params = nnx.split(drafter)
    moments = optimizer(_WEIGHT_DECAY).init(params)
    key = jax.random.key(seed)
    data = [(max(prompt - 1, 1), jnp.asarray(sequences)) for prompt, sequences in generated]
    start, step, elapsed, turn = time.monotonic(), 0, 0.0, 0
    reported = start
    while elapsed < 1.0:
        first_anchor, sequences = data[turn % len(data)]
        turn += 1
        params, moments, loss, accepted = _train_steps(
            params,
            moments,
            target_params,
            sequences,
            first_anchor,
            jax.random.fold_in(key, step),
            learning_rate(peak, step, elapsed),
            graphdef=graphdef,
            target_graphdef=target_graphdef,
            steps=steps_per_call,
            batch=batch,
            anchors=anchors,
            block_size=config.block_size,
        )
        loss = float(loss)  # waits, so that the clock is honest
        step += steps_per_call
        now = time.monotonic()
        elapsed = (now - start) / (60 * minutes)
        if now - reported > 15 or step == steps_per_call or elapsed >= 1.0:
            reported = now
            print(
                f"drafter step {step} {now - start:.0f} s length {sequences.shape[1]} "
                f"loss {loss:.3f} tokens a block {float(accepted):.2f}",
                flush=True,
            )
    return graphdef, params


@functools.partial(jax.jit, static_argnames=("graphdef", "target_graphdef", "prompt", "width"))
def _candidates(graphdef, params, target_graphdef, target_params, tokens, *, prompt, width):
    drafter = nnx.merge(graphdef, _bfloat16(params))
    target = nnx.merge(target_graphdef, target_params)
    last = tokens.shape[1] - drafter.block_size
    anchors = jnp.broadcast_to(jnp.arange(prompt, last + 1), (tokens.shape[0], last + 1 - prompt))
    logits, labels = block_logits(drafter, target, tokens, anchors)
    log_probs, ids = jax.lax.top_k(jax.nn.log_softmax(logits), width)
    # The label's rank among the candidates; `width` when it is none of them.
    found = ids == labels[..., None]
    return log_probs, jnp.where(jnp.any(found, -1), jnp.argmax(found, -1), width)


def _tree_depth(log_probs: np.ndarray, ranks: np.ndarray, budget: int) -> int:
    """How deep the labels' path lies in the best-first tree (Ringel and Romano, arXiv 2604.12989)."""
    heap = [(-float(log_probs[0, 0]), (0,))]
    depth = 0
    for _ in range(budget):
        if not heap:
            break
        cost, path = heapq.heappop(heap)
        depth = max(depth, len(path) if path == tuple(ranks[: len(path)]) else 0)
        slot, rank = len(path) - 1, path[-1]
        if rank + 1 < log_probs.shape[1]:
            sibling = cost + float(log_probs[slot, rank]) - float(log_probs[slot, rank + 1])
            heapq.heappush(heap, (sibling, (*path[:-1], rank + 1)))
        if slot + 1 < log_probs.shape[0]:
            heapq.heappush(heap, (cost - float(log_probs[slot + 1, 0]), (*path, 0)))
    return depth


def acceptance(
    graphdef,
    params,
    target_graphdef,
    target_params,
    sequences: np.ndarray,
    *,
    prompt: int,
    budget: int = 16,
    width: int = 16,
) -> tuple[float, float]:
    """Tokens a round, the bonus included, of the chain and of a tree of `budget`, replaying greedy text.

    Args:
      graphdef, params: the drafter.
      target_graphdef, target_params: the target.
      sequences: u16[n, T], prompts and what the target greedily made of them.
      prompt: their length.
      budget: nodes of the tree, root excluded.
      width: candidates a slot.
    """
    rounds, emitted = np.zeros(2), np.zeros(2)
    for row in sequences:
        log_probs, ranks = jax.device_get(
            _candidates(
                graphdef,
                params,
                target_graphdef,
                target_params,
                jnp.asarray(row[None], jnp.int32),
                prompt=prompt,
                width=width,
            )
        )
        for mode in range(2):
            at = 0
            while at < ranks.shape[1]:
                if mode == 0:
                    depth = int(np.sum(np.cumprod(ranks[0, at] == 0)))
                else:
                    depth = _tree_depth(log_probs[0, at], ranks[0, at], budget)
                rounds[mode] += 1
                emitted[mode] += depth + 1
                at += depth + 1
    chain, tree = emitted / rounds
    return float(chain), float(tree)
