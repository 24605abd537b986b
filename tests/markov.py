"""A target and a drafter that are tables: every decode has an oracle of three lines of NumPy.

The target's logits depend on the last token alone. The drafter follows a damaged copy of the table, so
that drafts are right now and then. Its features are the node's token and depth, checked when extended.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarkovTarget:
    table: jax.Array  # f32[V, V] logits after each token
    max_context: int = dataclasses.field(default=4096, metadata={"static": True})

    @property
    def vocab_size(self):
        return self.table.shape[0]

    def init_cache(self, batch, rows):
        return jnp.zeros((2, batch, rows, 576), jnp.float32)

    def embed(self, tokens):
        return self.table[tokens]

    def head(self, hidden):
        return hidden

    def verify(self, tree, cache, lengths, *, taps=()):
        from ddtree_jax import append_latents

        positions = lengths[:, None] + tree.depths
        rows = jnp.stack([tree.tokens, positions], axis=-1).astype(jnp.float32)
        rows = jnp.pad(rows, ((0, 0), (0, 0), (0, 574)))
        for layer in range(cache.shape[0]):
            cache = append_latents(cache, rows + layer, lengths, layer=layer)
        return self.table[tree.tokens], rows[..., :2], cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MarkovDrafter:
    table: jax.Array
    block_size: int = dataclasses.field(default=8, metadata={"static": True})
    taps: tuple = dataclasses.field(default=(0,), metadata={"static": True})

    def init_cache(self, batch, rows):
        return (jnp.full((batch, rows, 2), -1.0, jnp.float32),)

    def extend(self, cache, features, lengths, counts):
        steps = jnp.arange(features.shape[1], dtype=jnp.int32)
        columns = jnp.where(steps < counts[:, None], lengths[:, None] + steps, cache[0].shape[1])
        rows = jnp.arange(features.shape[0], dtype=jnp.int32)[:, None]
        return (cache[0].at[rows, columns].set(features, mode="drop"),)

    def draft(self, target, cache, root_tokens, lengths):
        logits, token = [], root_tokens
        for _ in range(self.block_size - 1):
            logits.append(self.table[token])
            token = jnp.argmax(logits[-1], axis=-1).astype(jnp.int32)
        return jnp.stack(logits, axis=1)


def random_pair(rng, vocab=23, damage=0.35, block_size=8, max_context=4096):
    """A random target and a drafter that disagrees with it at about `damage` of the tokens."""
    table = rng.normal(size=(vocab, vocab)).astype(np.float32) * 3
    wrong = rng.random(vocab) < damage
    other = rng.normal(size=(vocab, vocab)).astype(np.float32) * 3
    drafts = np.where(wrong[:, None], other, table + rng.normal(size=table.shape) * 0.3)
    target = MarkovTarget(jnp.asarray(table), max_context)
    return target, MarkovDrafter(jnp.asarray(drafts, jnp.float32), block_size)


def wrong_drafter(target, block_size=8):
    """A drafter that is sure of the target's least probable token wherever it is."""
    return MarkovDrafter(-4 * target.table, block_size)


def counting(drafter, calls: list):
    """The drafter, which adds to `calls` whenever it drafts."""

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Counting(MarkovDrafter):
        def draft(self, *arguments):
            jax.debug.callback(lambda: calls.append(1))
            return super().draft(*arguments)

    return Counting(drafter.table, drafter.block_size, drafter.taps)


def follow(table, prompt, max_new, stops=(), max_context=4096):
    """The oracle: the greedy continuation, and why it ends."""
    tokens = list(prompt)
    for _ in range(max_new):
        if len(tokens) >= max_context:
            return tokens, "context"
        row = table[tokens[-1]]
        if not np.isfinite(row.max()):
            return tokens, "numerical"
        tokens.append(int(np.argmax(row)))
        if tokens[-1] in stops:
            return tokens, "stop"
    return tokens, "length"
