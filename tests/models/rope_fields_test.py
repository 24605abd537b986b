"""Every key of a rotary embedding, read as transformers reads it."""

import pytest
from tiny_models import DRAFTER, TARGET, YARN

from ddtree_jax.models import DFlashConfig, KimiK26Config, rope

PLAIN = {
    **{k: v for k, v in TARGET.items() if k not in ("rope_theta", "rope_scaling")},
    "n_group": 1,
    "num_key_value_heads": 3,
}
FULL = {**YARN, "rope_theta": 10000.0}
DRAFT = {k: v for k, v in DRAFTER.items() if k != "rope_theta"}


def random_rope(rng, *, null_factor: bool) -> dict:
    """The keys of a config.json, in any of the places where they may stand."""

    def one_of(*values):
        return values[rng.integers(len(values))]

    def scaling() -> dict:
        kind = one_of("yarn", "yarn", "yarn", "default")
        found = {one_of("type", "rope_type"): kind}
        if kind == "default":
            return found if rng.random() < 0.7 else {}
        found["factor"] = one_of(*([None] if null_factor else []), 1.0, 4, 16.0, 64.0)
        for key, values in (
            ("original_max_position_embeddings", (16, 64, 300)),
            ("beta_fast", (4, 32.0)),
            ("beta_slow", (0.5, 1)),
            ("mscale", (0, 0.7, 1.0)),
            ("mscale_all_dim", (0, 1.0, 1.3)),
            ("attention_factor", (1.25,)),
            ("truncate", (True, False)),
            ("partial_rotary_factor", (1.0,)),
        ):
            if rng.random() < 0.6:
                found[key] = one_of(*values)
        return found

    theta, values = one_of(5000.0, 10000, 1e6), {}
    where = one_of("scaling", "parameters", "both", "empty scaling", "null scaling")
    if where != "parameters":
        values["rope_scaling"] = {"empty scaling": {}, "null scaling": None}.get(where, scaling())
    if where != "scaling":
        values["rope_parameters"] = scaling()
    counts = values.get("rope_scaling") or values.get("rope_parameters")
    if counts and rng.random() < 0.5:
        counts["rope_theta"] = theta
        if rng.random() < 0.5:
            values["rope_theta"] = 777.0  # beside it: the one inside counts
    else:
        values["rope_theta"] = theta
    if rng.random() < 0.2:
        values["original_max_position_embeddings"] = one_of(32, 128)
    return values


def same(mine: rope.RopeConfig, size: int, theirs):
    assert mine.amplitude == pytest.approx(theirs.attention_scaling, rel=1e-12)
    frequencies = rope.inverse_frequencies(mine, size)
    assert frequencies.tolist() == pytest.approx(theirs.inv_freq.tolist(), rel=3e-6)


@pytest.mark.parametrize("number", range(60))
def test_target_as_in_transformers(rng, number):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.17")
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    values = random_rope(rng, null_factor=False)
    print(values)
    mine = KimiK26Config.from_json({**PLAIN, **values})
    config = transformers.DeepseekV3Config.from_dict(
        {**PLAIN, "model_type": "deepseek_v3", **values}
    )
    same(mine.rope, 64, theirs.DeepseekV3RotaryEmbedding(config))
    attention = theirs.DeepseekV3Attention(config, 0)
    assert mine.softmax_scale == pytest.approx(attention.scaling, rel=1e-12)


@pytest.mark.parametrize("number", range(60))
def test_drafter_as_in_transformers(rng, number):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.17")
    from transformers.models.qwen3 import modeling_qwen3 as theirs

    values = random_rope(rng, null_factor=True)
    print(values)
    mine = DFlashConfig.from_json({**DRAFT, **values})
    config = transformers.Qwen3Config.from_dict({**DRAFT, **values})
    same(mine.rope, DRAFTER["head_dim"], theirs.Qwen3RotaryEmbedding(config))


@pytest.mark.parametrize(
    "read, base", [(KimiK26Config.from_json, PLAIN), (DFlashConfig.from_json, DRAFT)]
)
def test_forms_keyed_by_layer_type(read, base):
    want = read({**base, "rope_parameters": FULL}).rope
    assert want.factor == 8.0
    keyed = {"full_attention": FULL}
    assert read({**base, "rope_parameters": keyed}).rope == want
    keyed["sliding_attention"] = {**FULL, "type": "yarn"}
    assert read({**base, "rope_scaling": keyed}).rope == want
    # Theta may stand beside.
    keyed = {"full_attention": YARN}
    assert read({**base, "rope_theta": 10000.0, "rope_parameters": keyed}).rope == want
    for other, message in (
        ({**FULL, "factor": 4.0}, "rope_parameters differs by layer type"),
        ({"rope_theta": 10000.0}, "rope_parameters differs by layer type"),
        (None, "rope_parameters.sliding_attention is null: layers without rotary embedding"),
        (3.0, "rope_parameters.sliding_attention must be an object, not 3.0"),
        ({**FULL, "factr": 4.0}, "'rope_parameters.sliding_attention.factr': not understood"),
    ):
        keyed = {"full_attention": FULL, "sliding_attention": other}
        with pytest.raises(ValueError, match=message):
            read({**base, "rope_parameters": keyed})
    with pytest.raises(
        ValueError, match="rope_parameters.linear is no layer type; known are full_"
    ):
        read({**base, "rope_parameters": {"linear": FULL}})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"factor": 4.0, "rope_theta": 1e4}, "'rope_parameters.factor': not understood"),
        ({**FULL, "extrapolation_factor": 1.0}, "'rope_parameters.extrapolation_factor': not und"),
        ({**FULL, "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({**FULL, "truncate": None}, "rope_parameters.truncate must be true or false, not None"),
        ({**FULL, "truncate": 0}, "rope_parameters.truncate must be true or false, not 0"),
        ({**FULL, "type": "longrope"}, "rope type 'longrope', but only"),
        ({**FULL, "type": ["yarn"]}, r"rope_parameters.type must be a string, not \['yarn'\]"),
        ({**FULL, "mscale_all_dim": -4.8}, "mscale_all_dim must lie in 0 .. 1e.12, not -4.8"),
        ({**FULL, "mscale": 1e200}, "mscale must lie in 0 .. 1e.12, not 1e.200"),
        ({**FULL, "beta_fast": 1e-320}, "beta_fast must lie in"),
        ({**FULL, "beta_slow": 1e308}, "beta_slow must lie in"),
        ({**FULL, "rope_theta": 1e300}, "theta must lie in"),
        ({**FULL, "factor": 1e300}, "factor must lie in"),
        ({**FULL, "original_max_position_embeddings": 10**400}, "original_max_position_embeddings"),
        ({**FULL, "factor": 10**400}, "rope_parameters.factor must be a finite number, not 1000"),
        ([1], r"rope_parameters must be an object, not \[1\]"),
    ],
)
@pytest.mark.parametrize(
    "read, base", [(KimiK26Config.from_json, PLAIN), (DFlashConfig.from_json, DRAFT)]
)
def test_what_is_refused_by_name(read, base, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        read({**base, "rope_parameters": changes})
    assert len(str(error.value)) < 400


def test_theta_in_the_object_that_does_not_count():
    """transformers would take 10000 here."""
    values = {**PLAIN, "rope_scaling": YARN, "rope_parameters": {"rope_theta": 50000.0}}
    with pytest.raises(ValueError, match="rope_theta 50000.0 stands in rope_parameters; write it"):
        KimiK26Config.from_json(values)
    assert KimiK26Config.from_json({**values, "rope_theta": 5e4}).rope.theta == 5e4


def test_an_amplitude_for_plain_rope_is_refused():
    values = {**DRAFTER, "rope_attention_factor": 1.4}
    with pytest.raises(
        ValueError, match="rope_attention_factor is for yarn; the rope type is 'def"
    ):
        DFlashConfig.from_json(values)
    assert DFlashConfig.from_json({**values, "rope_scaling": YARN}).rope.amplitude == 1.4
