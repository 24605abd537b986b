"""The target against transformers' DeepseekV3ForCausalLM, through a folder that transformers wrote."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from primitive_checks import random_tree
from routing import CLEAR, clear_tokens, routing_margin
from tiny_models import positions_of

from ddtree_jax.models import load_target
from ddtree_jax.tree import chain_tree

torch = pytest.importorskip(
    "torch", reason="torch is not installed: no outside reference to compare with"
)
transformers = pytest.importorskip("transformers", minversion="5.17")

YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 16.0,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "plain": {},
    "yarn": {"rope_parameters": YARN},
    "yarn, other mscale": {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}},
    "yarn, ramp not cut to whole pairs": {"rope_parameters": {**YARN, "truncate": False}},
    "direct queries": {"q_lora_rank": None, "n_shared_experts": 2},
    "expert groups": {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    "raw weights, all dense but one": {"norm_topk_prob": False, "first_k_dense_replace": 2},
    "tied head": {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
}


SETTINGS = {
    "vocab_size": 60,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 40,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 64,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attn_implementation": "eager",
}
TOLERANCE = 2e-5  # of the largest logit


def random_settings(rng) -> dict:
    """A config of any kind that the family has."""

    def one_of(*values):
        return values[rng.integers(len(values))]

    groups = one_of(1, 1, 2, 4)
    experts = groups * int(rng.integers(2, 5))
    kept = int(rng.integers(1, groups + 1))
    yarn = {
        **YARN,
        "rope_theta": float(one_of(10000.0, 50000.0)),
        "factor": float(one_of(2.0, 16.0, 64.0)),
        "beta_fast": float(one_of(8.0, 32.0)),
        "mscale": one_of(0.0, 0.7, 1.0),
        "mscale_all_dim": one_of(0.0, 1.0, 1.3),
        "original_max_position_embeddings": one_of(32, 64, 256),
    }
    heads = int(rng.integers(1, 5))
    layers = int(rng.integers(1, 4))
    return {
        **SETTINGS,
        "hidden_size": int(rng.integers(2, 6)) * 8,
        "num_hidden_layers": layers,
        "first_k_dense_replace": int(rng.integers(0, layers + 1)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": one_of(None, 24, 40),
        "qk_nope_head_dim": one_of(8, 16, 24),
        "v_head_dim": one_of(8, 16, 24),
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": int(rng.integers(1, experts // groups * kept + 1)),
        "n_shared_experts": one_of(0, 1, 2),
        "norm_topk_prob": bool(rng.integers(2)),
        "routed_scaling_factor": float(rng.uniform(0.5, 3)),
        "rms_norm_eps": one_of(1e-6, 1e-5, 1e-3),
        "tie_word_embeddings": bool(rng.integers(2)),
        "rope_parameters": one_of(SETTINGS["rope_parameters"], yarn),
    }


def reference(settings, rng, folder):
    """transformers' model with random weights, saved to `folder`."""
    torch.manual_seed(int(rng.integers(2**31)))
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**settings)).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if tensor.ndim == 1:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            else:
                tensor.copy_(torch.randn_like(tensor) * 0.08)
    model.save_pretrained(folder)
    return model


def logits_of(model, tokens) -> np.ndarray:
    with torch.no_grad():
        return model(torch.as_tensor(np.asarray(tokens, np.int64)), use_cache=False).logits.numpy()


@pytest.mark.parametrize("case", CASES)
def test_logits_and_layer_outputs(rng, tmp_path, case):
    model = reference({**SETTINGS, **CASES[case]}, rng, tmp_path)
    target = load_target(tmp_path, dtype="float32")
    tokens = clear_tokens(rng, target, (2, 90))
    with torch.no_grad():
        want = model(
            torch.as_tensor(tokens.astype(np.int64)), output_hidden_states=True, use_cache=False
        )

    @jax.jit
    def forward(target, tokens):
        hidden, features = target.forward(tokens, positions_of(tokens), taps=(1, 0))
        return target.head(hidden), features

    logits, features = forward(target, tokens)
    scale = want.logits.abs().max().item()
    np.testing.assert_allclose(logits, want.logits.numpy(), rtol=0, atol=TOLERANCE * scale)
    outputs = [want.hidden_states[2].numpy(), want.hidden_states[1].numpy()]
    for mine, its in zip(np.split(np.asarray(features), 2, axis=-1), outputs, strict=True):
        np.testing.assert_allclose(mine, its, rtol=0, atol=TOLERANCE * np.abs(its).max())


@pytest.mark.parametrize(
    "number",
    [n if n < 3 else pytest.param(n, marks=pytest.mark.slow) for n in range(200)],
)
def test_random_config_in_every_pass(rng, tmp_path, number):
    """The plain pass, prefill in chunks, decode token by token and a tree over the cache."""
    settings = random_settings(rng)
    print(settings)
    model = reference(settings, rng, tmp_path)
    target = load_target(tmp_path, dtype="float32")
    batch, width, tail = 2, 37, 3
    tokens = clear_tokens(rng, target, (batch, width))
    want = logits_of(model, tokens)
    bound = TOLERANCE * np.abs(want).max()

    plain = jax.jit(lambda target, tokens: target(tokens, positions_of(tokens)))(target, tokens)
    np.testing.assert_allclose(plain, want, rtol=0, atol=bound)

    @jax.jit
    def verify(target, tree, cache, lengths):
        hidden, _, cache = target.verify(tree, cache, lengths)
        return target.head(hidden), cache

    cache = target.init_cache(batch, width + 16)
    start, got = 0, []
    for chunk in [17, width - tail - 17, *[1] * tail]:
        counts = jnp.full((batch,), chunk, jnp.int32)
        part = chain_tree(jnp.asarray(tokens[:, start : start + chunk]), counts)
        logits, cache = verify(target, part, cache, jnp.full((batch,), start, jnp.int32))
        got.append(logits)
        start += chunk
    np.testing.assert_allclose(np.concatenate(got, axis=1), want, rtol=0, atol=bound)

    tree = random_tree(rng, batch, budget=12, depth=5)
    nodes = rng.integers(0, np.asarray(tree.num_nodes).min(), 3)
    while True:
        tree = dataclasses.replace(
            tree, tokens=jnp.asarray(rng.integers(0, 60, (batch, 13)), jnp.int32)
        )
        contexts = {(b, n): [*tokens[b], *_path(tree, b, n)] for b in range(batch) for n in nodes}
        padded = [context + [0] * (width + 6 - len(context)) for context in contexts.values()]
        padded += [[0] * (width + 6)] * (batch * 3 - len(padded))  # where a node was drawn twice
        if routing_margin(target, padded) > CLEAR:
            break
    logits, _ = verify(target, tree, cache, jnp.full((batch,), width, jnp.int32))
    for (b, node), context in contexts.items():
        its = logits_of(model, [context])[0, -1]
        np.testing.assert_allclose(logits[b, node], its, rtol=0, atol=bound)


def _path(tree, b, node) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, int(tree.tokens[b, node]))
        node = int(tree.parents[b, node])
    return path
