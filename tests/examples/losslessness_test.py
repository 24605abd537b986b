"""Which differences between two texts rounding explains."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losslessness import first_difference, judge, tie
from tiny_models import random_target


def test_first_difference():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1


class _Seen(list):
    """A list that jit takes for static data: it is itself alone."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Constant:
    """A target that says the same after every token, and writes down the precision that it was asked at."""

    logits: jax.Array
    seen: _Seen = dataclasses.field(metadata={"static": True})

    def __call__(self, ids, positions):
        self.seen.append(jax.config.jax_default_matmul_precision)
        return jnp.broadcast_to(self.logits, (*ids.shape, self.logits.shape[0]))


def test_float32_is_in_full():
    """A tie is judged at full precision whatever the process's default."""
    target = _Constant(jnp.zeros(5), _Seen())
    assert tie(target, [1, 2, 3], (0, 1), jnp.float32) == "tie"
    assert set(target.seen) == {"highest"}


@pytest.mark.parametrize(
    ("gap", "dtype", "verdict"),
    [(5e-5, jnp.float32, "tie"), (1e-3, jnp.float32, None), (0.01, jnp.bfloat16, "tie")]
    + [(0.1, jnp.bfloat16, None)],
)
def test_a_tie_of_logits(gap, dtype, verdict):
    """Between 2 and 4 a step of bfloat16 is 2^-6."""
    target = _Constant(jnp.asarray([3.0, 3.0 - gap, 1.0]), _Seen())
    assert tie(target, [1], (0, 1), dtype) == verdict
    assert tie(target, [1], (0, 2), dtype) is None


def _undecided(rng, gap):
    """A target whose last router prefers expert 2 to expert 1 by `gap`, a prefix, and what follows by either.

    Nothing else is near a tie: neither the other routers nor the logits of the two tokens.
    """
    target = random_target(rng)
    routers = [layer.mlp.gate for layer in target.layers if layer.is_moe]
    for router in routers:
        router.kernel[...] = jnp.zeros_like(router.kernel[...])  # scores of 1/2
        router.e_score_correction_bias[...] = jnp.asarray([1, 0.5, 0, -1, -1, -1], jnp.float32)

    def logits(bias, prefix):
        routers[-1].e_score_correction_bias[...] = jnp.asarray(bias, jnp.float32)
        ids = jnp.asarray([prefix], jnp.int32)
        return np.asarray(target(ids, jnp.arange(len(prefix))[None])[0, -1])

    ours, other = [1, 0, gap, -1, -1, -1], [1, gap, 0, -1, -1, -1]
    for _ in range(300):
        prefix = rng.integers(0, target.vocab_size, 5).tolist()
        both = logits(other, prefix), logits(ours, prefix)  # the last call leaves `ours`
        pair = tuple(int(np.argmax(one)) for one in both)
        # Several steps of bfloat16 at the size of the largest.
        if abs(both[1][pair[1]] - both[1][pair[0]]) > 0.04 * abs(both[1]).max():
            return target, prefix, pair
    pytest.fail("the experts never decide")


def test_a_tie_of_experts(rng):
    with jax.default_matmul_precision("highest"):
        target, prefix, pair = _undecided(rng, 1e-3)
        assert tie(target, prefix, pair, jnp.bfloat16) == "expert tie"
        assert tie(target, prefix, pair, jnp.float32) is None
        ids = jnp.asarray([prefix], jnp.int32)
        worst = int(jnp.argmin(target(ids, jnp.arange(len(prefix))[None])[0, -1]))
        assert tie(target, prefix, (pair[1], worst), jnp.bfloat16) is None
        texts = [*prefix, pair[0]], [*prefix, pair[1]]
        assert judge(target, [], *texts, jnp.bfloat16) == "expert tie"
        assert judge(target, [], *texts, jnp.float32) == "different"


def test_experts_apart_are_no_tie(rng):
    target, prefix, pair = _undecided(rng, 0.05)
    assert tie(target, prefix, pair, jnp.bfloat16) is None
