"""Any JSON value in any place of a config.json: a config, or one line that names file and key."""

import json

import pytest
from published_configs import FP8, INT4
from tiny_models import DRAFTER, TARGET, YARN

from ddtree_jax.models import DFlashConfig, KimiK26Config
from ddtree_jax.models.common.fields import Fields, number, whole

VALUES = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    2**31,
    2**63,
    -(2**63),
    10**400,
    -(10**400),
    0.5,
    -0.0,
    1e-320,
    1e-45,
    1e39,
    1e300,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    "3",
    "yarn",
    "\ud800",
    [],
    [3],
    [[[]]],
    [None],
    [10**400],
    {},
    {"a": 1},
    {"type": "yarn"},
    {"full_attention": {}},
    json.loads("[" * 500 + "]" * 500),
)
_ROPE = {**YARN, "truncate": True, "attention_factor": 1.0, "rope_theta": 1e4}
_MORE = {
    "rope_parameters": _ROPE,
    "original_max_position_embeddings": 64,
    "rope_attention_factor": 1.0,
    "partial_rotary_factor": 1.0,
}
FULL_TARGET = {
    "model_type": "kimi_k25",
    "text_config": {
        **TARGET,
        **_MORE,
        "quantization_config": INT4,
        "moe_layer_freq": 1,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
    },
    "vision_config": {},
    "eos_token_id": 3,
}
FULL_DRAFTER = {
    **DRAFTER,
    **_MORE,
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 4,
    "sliding_windows": [4, 4],
    "use_sliding_window": True,
    "max_window_layers": 0,
    "is_causal": False,
    "causal": False,
    "use_swa": False,
    "swa_window_size": 4,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 2.0,
    "dflash_config": {"mask_token_id": 49, "target_layer_ids": [2, 0], "draft_window_size": 4},
}


def places(values, path=()):
    """The path of every value in a JSON value."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@pytest.mark.parametrize(
    "read, base",
    [
        (KimiK26Config.from_json, FULL_TARGET),
        (KimiK26Config.from_json, {**TARGET, "quantization_config": FP8}),
        (DFlashConfig.from_json, FULL_DRAFTER),
    ],
)
def test_any_value_in_any_place(read, base):
    read(base)
    refused = 0
    for place in places(base):
        changed = json.loads(json.dumps(base))
        inner = changed
        for key in place[:-1]:
            inner = inner[key]
        for value in VALUES:
            inner[place[-1]] = value
            try:
                config = read(changed)
            except ValueError as error:
                refused += 1
                message = str(error)
                assert message.startswith("config"), (place, value, message)
                assert "\n" not in message and len(message) < 600, (place, value)
                continue
            # What was read can be computed with.
            rope = config.rope
            assert 0 < rope.amplitude < 1e15 and rope.softmax_factor >= 1
    assert refused > 100


@pytest.mark.parametrize("value, want", [(3, 3), (3.0, 3), (-2, -2), (1e300, int(1e300))])
def test_whole(value, want):
    assert whole(value) == want and type(whole(value)) is int


@pytest.mark.parametrize("value", [True, "3", 3.5, float("nan"), float("inf"), None, [3], {}])
def test_what_is_not_whole(value):
    with pytest.raises(ValueError, match="must be a whole number, not"):
        whole(value)


@pytest.mark.parametrize("value, want", [(3, 3.0), (0.5, 0.5), (10**300, 1e300), (5e-324, 5e-324)])
def test_number(value, want):
    assert number(value) == want and type(number(value)) is float


@pytest.mark.parametrize("value", [True, "3", 10**400, float("nan"), float("-inf"), None, [3.0]])
def test_what_is_no_number(value):
    with pytest.raises(ValueError, match="must be a finite number, not") as error:
        number(value)
    assert len(str(error.value)) < 200


def test_a_section_names_its_path():
    fields = Fields({"a": {"b": {"c": "x"}}}, "file", ignore=("a.b.d",))
    with pytest.raises(ValueError, match="^file: a.b.c must be a whole number, not 'x'$"):
        fields.section("a").section("b").whole("c")
    with pytest.raises(ValueError, match="^file: the key 'a.b.e' is missing$"):
        fields.section("a").section("b").need("e")


@pytest.mark.parametrize("key", ["a\nb", "\ud800", "x" * 10**6, "", "\x00\x1b[31m"])
@pytest.mark.parametrize("at", [(), ("rope_scaling",), ("quantization_config", "config_groups")])
def test_keys_of_any_text(tmp_path, key, at):
    values = json.loads(json.dumps({**TARGET, "quantization_config": INT4}))
    inner = values
    for one in at:
        inner = inner[one]
    inner[key] = 3
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError) as error:
        KimiK26Config.from_json(path)
    message = str(error.value)
    assert message.startswith(str(path)) and message.isprintable()
    assert len(message) < len(str(path)) + 600


def test_a_number_of_five_thousand_digits(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TARGET).replace("512", "5" * 5000))
    with pytest.raises(ValueError, match="config.json: not valid JSON"):
        KimiK26Config.from_json(path)


def test_a_byte_order_mark_is_taken_off(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(TARGET).encode())
    assert KimiK26Config.from_json(path) == KimiK26Config.from_json(TARGET)
