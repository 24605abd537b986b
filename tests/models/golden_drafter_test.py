"""The drafter against values that its authors' code computed, round by round."""

import dataclasses
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from safetensors.numpy import load_file

from ddtree_jax.models import DFlashConfig, load_drafter

_DATA = pathlib.Path(__file__).parents[1] / "data"


@pytest.fixture(params=["plain", "yarn"])
def golden(request):
    folder = _DATA / f"golden_drafter_{request.param}"
    config = DFlashConfig.from_json(folder)
    shape = SimpleNamespace(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_layers=config.num_target_layers,
    )
    drafter = load_drafter(folder, shape)
    values = load_file(folder / "golden.safetensors")
    rounds = sum(name.endswith(".features") for name in values)
    assert rounds >= 4
    return drafter, [
        {
            key: values[f"round{r}.{key}"]
            for key in ("features", "block_embedding", "hidden", "start")
        }
        for r in range(rounds)
    ]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Echo:
    """A target whose embedding is given and whose head changes nothing."""

    embedding: jax.Array
    dtype = jnp.float32

    def embed(self, tokens):
        return self.embedding

    def head(self, hidden):
        return hidden


def test_forward(golden):
    drafter, rounds = golden
    # The weights are an argument: XLA would fold constants anew for each length.
    forward = quick_compile.jit(lambda drafter, *inputs: drafter.forward(*inputs))
    features = rounds[0]["features"][:, :0]
    for values in rounds:
        features = np.concatenate([features, values["features"]], axis=1)
        start, slots = features.shape[1], drafter.block_size
        assert start == values["start"]
        hidden = forward(
            drafter,
            jnp.asarray(values["block_embedding"]),
            start + jnp.arange(slots)[None],
            jnp.asarray(features),
            jnp.arange(start)[None],
            jnp.ones((1, slots, start + slots), bool),
        )
        np.testing.assert_allclose(hidden, values["hidden"], rtol=0, atol=1e-5)


def test_extend_and_draft(golden, rng):
    drafter, rounds = golden
    # Rows past the count hold junk that must not be appended, and so does the cache's unused part.
    cache = jax.tree.map(lambda a: jnp.full_like(a, 7.0), drafter.init_cache(1, 80))
    extend = jax.jit(drafter.extend, donate_argnums=0)
    draft = jax.jit(drafter.draft)
    length = 0
    for values in rounds:
        new = values["features"].shape[1]
        junk = rng.normal(0, 9, (1, 3, values["features"].shape[2])).astype(np.float32)
        features = np.concatenate([values["features"], junk], axis=1)
        cache = extend(cache, features, jnp.array([length]), jnp.array([new]))
        length += new
        out = draft(_Echo(values["block_embedding"]), cache, jnp.array([0]), jnp.array([length]))
        np.testing.assert_allclose(out, values["hidden"][:, 1:], rtol=0, atol=1e-5)
