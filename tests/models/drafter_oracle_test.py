"""The drafter against a NumPy oracle over random configs, its cache growing round by round."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter_oracle import draft
from safetensors.numpy import save_file

from ddtree_jax.models import load_drafter

_TARGET_LAYERS = 7


def random_settings(rng) -> dict:
    """A config.json of any kind that the drafter has."""

    def one_of(*values):
        return values[rng.integers(len(values))]

    groups, layers = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    taps = rng.permutation(_TARGET_LAYERS)[: rng.integers(1, 5)].tolist()
    settings = {
        "architectures": ["DFlashDraftModel"],
        "vocab_size": 40,
        "hidden_size": int(rng.integers(3, 9)) * 8,
        "intermediate_size": int(rng.integers(3, 12)) * 8,
        "num_hidden_layers": layers,
        "num_attention_heads": groups * one_of(1, 2, 4),
        "num_key_value_heads": groups,
        "head_dim": one_of(8, 16, 32),
        "rms_norm_eps": one_of(1e-6, 1e-5, 1e-3),
        "max_position_embeddings": 512,
        "rope_theta": one_of(1e4, 5e4),
        "block_size": int(rng.integers(2, 10)),
        "num_target_layers": _TARGET_LAYERS,
        "dflash_config": {"mask_token_id": int(rng.integers(40)), "target_layer_ids": taps},
    }
    if rng.random() < 0.7:
        settings["rope_scaling"] = {
            "type": one_of("yarn", "deepseek_yarn"),
            "factor": one_of(2.0, 8.0, 64.0),
            "beta_fast": one_of(4.0, 32.0),
            "beta_slow": 1.0,
            "original_max_position_embeddings": one_of(16, 64, 4096),
            **one_of({}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 1.3}),
            **one_of({}, {}, {"attention_factor": 1.4159}),
        }
        if rng.random() < 0.4:
            settings["rope_attention_factor"] = one_of(1.0, 1.4159)
    if rng.random() < 0.7:
        kinds = ["full_attention", "sliding_attention"]
        settings["layer_types"] = [one_of(*kinds) for _ in range(layers)]
        settings["sliding_window"] = int(rng.integers(1, 12))
    elif rng.random() < 0.5:
        settings["dflash_config"] |= {
            "use_swa": True,
            "swa_window_size": int(rng.integers(1, 12)),
        }
    if rng.random() < 0.5:
        settings["is_causal"] = bool(rng.integers(2))
    if rng.random() < 0.3:
        settings["input_embedding_scale"] = 2.5
        settings["output_multiplier"] = 0.3
    if rng.random() < 0.3:
        settings["final_logit_softcapping"] = 1.5
    return settings


def random_weights(rng, settings) -> dict[str, np.ndarray]:
    """The checkpoint's tensors by the names and shapes that DFlash gives them."""
    size, inner, dim = (settings[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (settings[f"num_{kind}_heads"] * dim for kind in ("attention", "key_value"))
    shapes = {
        "fc.weight": (size, len(settings["dflash_config"]["target_layer_ids"]) * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    for i in range(settings["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (size,),
                "post_attention_layernorm": (size,),
                "self_attn.q_proj": (queries, size),
                "self_attn.k_proj": (keys, size),
                "self_attn.v_proj": (keys, size),
                "self_attn.o_proj": (size, queries),
                "self_attn.q_norm": (dim,),
                "self_attn.k_norm": (dim,),
                "mlp.gate_proj": (inner, size),
                "mlp.up_proj": (inner, size),
                "mlp.down_proj": (size, inner),
            }.items()
        }
    return {
        name: rng.normal(1 if len(shape) == 1 else 0, 0.15, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


@jax.tree_util.register_pytree_node_class
class _Target:
    """An embedding and a head."""

    dtype = jnp.float32

    def __init__(self, embedding, output):
        self.embedding, self.output = embedding, output

    def embed(self, tokens):
        return self.embedding[tokens]

    def head(self, hidden):
        return jnp.dot(hidden, self.output, precision="highest")

    def tree_flatten(self):
        return (self.embedding, self.output), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


@pytest.mark.parametrize(
    "number",
    [n if n < 5 else pytest.param(n, marks=pytest.mark.slow) for n in range(200)],
)
def test_rounds_of_a_random_drafter(rng, tmp_path, number):
    settings = random_settings(rng)
    print(settings)
    weights = random_weights(rng, settings)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file(weights, tmp_path / "model.safetensors")
    vocab, size = settings["vocab_size"], settings["hidden_size"]
    shape = SimpleNamespace(vocab_size=vocab, hidden_size=size, num_layers=_TARGET_LAYERS)
    drafter = load_drafter(tmp_path, shape)
    embedding = rng.normal(0, 1, (vocab, size)).astype(np.float32)
    output = rng.normal(0, 0.3, (size, vocab)).astype(np.float32)
    target = _Target(jnp.asarray(embedding), jnp.asarray(output))

    batch, width, rounds = 2, 9, 5
    columns = len(drafter.taps) * size
    # Unused rows hold junk that must not be seen.
    cache = jax.tree.map(lambda a: jnp.full_like(a, 7), drafter.init_cache(batch, width * rounds))
    contexts = [np.zeros((0, columns), np.float32)] * batch
    lengths = np.zeros(batch, np.int32)
    extend, run = jax.jit(drafter.extend), jax.jit(drafter.draft)
    for _ in range(rounds):
        counts = rng.integers(0, width + 1, batch).astype(np.int32)
        features = rng.normal(0, 1, (batch, width, columns)).astype(np.float32)
        cache = extend(cache, features, lengths, counts)
        lengths = lengths + counts
        roots = rng.integers(0, vocab, batch).astype(np.int32)
        logits = run(target, cache, roots, lengths)
        for b in range(batch):
            contexts[b] = np.concatenate([contexts[b], features[b, : counts[b]]])
            want = draft(settings, weights, embedding, output, contexts[b], roots[b])
            bound = 2e-5 * np.abs(want).max()
            np.testing.assert_allclose(logits[b], want, rtol=0, atol=bound)
