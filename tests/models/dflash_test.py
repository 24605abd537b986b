"""The drafter's options: windows, causality, scaling, ragged batches, dropped rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from hlo import cache_copies
from tiny_models import random_drafter, random_target

# The weights are arguments, so that tests of one shape share a compilation.
_extend = quick_compile.jit(lambda drafter, *inputs: drafter.extend(*inputs))
_draft = quick_compile.jit(lambda drafter, *inputs: drafter.draft(*inputs))
_forward = quick_compile.jit(lambda drafter, *inputs: drafter.forward(*inputs))


def _draft_by_forward(drafter, target, features, root, causal, window):
    """One request through `forward` with a mask written out in NumPy."""
    length, slots = features.shape[0], drafter.block_size
    columns = np.concatenate([np.arange(length), length + np.arange(slots)])
    mask = np.ones((slots, length + slots), bool)
    for i in range(slots):
        for j, column in enumerate(columns):
            distance = length + i - column
            if causal and distance < 0:
                mask[i, j] = False
            if window is not None and abs(distance) >= window:
                mask[i, j] = False
    tokens = np.full((1, slots), drafter.config.mask_token_id)
    tokens[0, 0] = root
    hidden = _forward(
        drafter,
        target.embed(jnp.asarray(tokens)) * drafter.config.input_embedding_scale,
        jnp.asarray(columns[None, length:]),
        jnp.asarray(features[None]),
        jnp.arange(length)[None],
        jnp.asarray(mask[None]),
    )
    logits = np.asarray(target.head(hidden))[0, 1:] * drafter.config.output_multiplier
    cap = drafter.config.final_logit_softcapping
    return logits if cap is None else np.tanh(logits / cap) * cap


@pytest.mark.parametrize(
    "changes, causal, window",
    [
        ({}, False, None),
        ({"is_causal": True}, True, None),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, True, 4),
        ({"use_sliding_window": True, "sliding_window": 3}, True, 3),
        ({"use_swa": True, "swa_window_size": 6}, False, 6),
        ({"input_embedding_scale": 2.5, "output_multiplier": 0.3}, False, None),
        ({"final_logit_softcapping": 1.5}, False, None),
    ],
)
def test_draft_equals_forward_on_each_request_alone(rng, changes, causal, window):
    target, drafter = random_target(rng), random_drafter(rng, **changes)
    width = len(drafter.taps) * target.hidden_size
    lengths = rng.integers(0, 12, 3)
    lengths[0], lengths[1] = 0, 11
    features = rng.normal(0, 1, (3, 12, width)).astype(np.float32)
    roots = rng.integers(0, target.vocab_size, 3)
    first = np.minimum(lengths, 7)
    cache = drafter.init_cache(3, 20)
    cache = _extend(drafter, cache, jnp.asarray(features), jnp.zeros(3, int), jnp.asarray(first))
    rest = np.stack([np.roll(features[b], -first[b], axis=0) for b in range(3)])
    cache = _extend(drafter, cache, rest, jnp.asarray(first), jnp.asarray(lengths - first))
    logits = _draft(drafter, target, cache, jnp.asarray(roots), jnp.asarray(lengths))
    logits = np.asarray(logits)
    assert logits.shape == (3, drafter.block_size - 1, target.vocab_size)
    for b in range(3):
        alone = _draft_by_forward(
            drafter, target, features[b, : lengths[b]], roots[b], causal, window
        )
        np.testing.assert_allclose(logits[b], alone, rtol=1e-4, atol=2e-5)


def test_rows_past_the_cache_and_idle_requests_change_nothing(rng):
    drafter = random_drafter(rng)
    cache = jax.tree.map(
        lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), drafter.init_cache(3, 6)
    )
    features = jnp.asarray(rng.normal(size=(3, 4, drafter.fc.kernel.shape[0])), jnp.float32)
    # One request overflows the cache, one is idle, one has no row at all.
    after = _extend(drafter, cache, features, jnp.array([4, 2, -1]), jnp.array([4, 0, 0]))
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new[1:], old[1:])
        np.testing.assert_array_equal(new[0, :, :4], old[0, :, :4])
        assert np.all(np.any(np.asarray(new[0, :, 4:] != old[0, :, 4:]), axis=-1))


def test_a_loop_copies_no_cache(rng):
    target, drafter = random_target(rng), random_drafter(rng)
    cache = drafter.init_cache(2, 77)

    @jax.jit
    def run(drafter, target, cache, features):
        def body(carry):
            step, cache, root = carry
            lengths = jnp.full((2,), step)
            cache = drafter.extend(cache, features, lengths, jnp.ones((2,), jnp.int32))
            logits = drafter.draft(target, cache, root, lengths + 1)
            return step + 1, cache, jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32)

        start = (jnp.int32(0), cache, jnp.zeros((2,), jnp.int32))
        return jax.lax.while_loop(lambda carry: carry[0] < 5, body, start)[2]

    features = jnp.ones((2, 3, drafter.fc.kernel.shape[0]), jnp.float32)
    text = run.lower(drafter, target, cache, features).compile().as_text()
    inside = cache_copies(text, cache, also=("transpose",))
    # The caller keeps its cache, so each array is copied once on the way into the loop.
    assert len(inside) <= len(jax.tree.leaves(cache)), "\n".join(inside)
