"""What a drafter's layers see, in every way in which a config.json says it."""

import pytest
from tiny_models import DRAFTER, random_drafter, random_target

from ddtree_jax.models import DFlashConfig, load_drafter, save_drafter

FULL, SLIDING = "full_attention", "sliding_attention"
BASE = {"num_hidden_layers": 3, "num_target_layers": 8}


def layers_of(changes, nested=()):
    values = {**DRAFTER, **BASE, **changes}
    values["dflash_config"] = {**DRAFTER["dflash_config"], **dict(nested)}
    return [(layer.causal, layer.window) for layer in DFlashConfig.from_json(values).layers]


@pytest.mark.parametrize(
    "changes, want",
    [
        ({}, [(False, None)] * 3),
        (
            {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 40},
            [(True, 40), (False, None), (True, 40)],
        ),
        ({"layer_types": [FULL] * 3, "sliding_window": 40}, [(False, None)] * 3),
        (
            {"layer_types": [FULL] * 3, "use_sliding_window": True, "sliding_window": 9},
            [(False, None)] * 3,
        ),
        (
            {"layer_types": [SLIDING] * 3, "sliding_window": 40, "is_causal": False},
            [(False, 40)] * 3,
        ),
        ({"use_sliding_window": True, "sliding_window": 40}, [(True, 40)] * 3),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 40,
                "layer_types": None,
                "causal": False,
            },
            [(False, 40)] * 3,
        ),
        (
            {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2},
            [(False, None), (False, None), (True, 40)],
        ),
        ({"use_sliding_window": False, "sliding_window": 40}, [(False, None)] * 3),
        ({"sliding_windows": [40, None, 7]}, [(True, 40), (False, None), (True, 7)]),
        (
            {"sliding_windows": [40, None, 7], "layer_types": [FULL] * 3, "is_causal": False},
            [(False, 40), (False, None), (False, 7)],
        ),
        ({"draft_window_size": 40}, [(False, 40)] * 3),
        (
            {"draft_window_size": 40, "sliding_windows": [90, None, 7]},
            [(True, 40), (False, 40), (True, 7)],
        ),
        ({"use_swa": True, "swa_window_size": 40}, [(False, 40)] * 3),
        ({"use_swa": True, "swa_window_size": 40, "causal": True}, [(True, 40)] * 3),
        # ModelOpt writes it so, and leaves layer_types full.
        (
            {
                "use_swa": True,
                "swa_window_size": 40,
                "sliding_window": 40,
                "layer_types": [FULL] * 3,
            },
            [(False, 40)] * 3,
        ),
        (
            {"use_swa": True, "swa_window_size": 40, "use_sliding_window": False},
            [(False, 40)] * 3,
        ),
        (
            {"use_swa": True, "swa_window_size": 40, "draft_window_size": 30},
            [(False, 30)] * 3,
        ),
        ({"use_swa": False, "swa_window_size": 40}, [(False, None)] * 3),
    ],
)
def test_windows(changes, want):
    assert layers_of(changes) == want
    assert layers_of({}, changes) == want


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"sliding_window": 40},
            "sliding_window is 40, but neither layer_types nor use_sliding_win",
        ),
        ({"use_sliding_window": True}, "'sliding_window' is missing"),
        (
            {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 28},
            "use_sliding_window is true, but max_window_layers 28 leaves none of 3 layers to slide",
        ),
        ({"use_sliding_window": "yes"}, "use_sliding_window must be true or false, not 'yes'"),
        (
            {"layer_types": [SLIDING] * 3, "sliding_window": 4, "use_sliding_window": False},
            "use_sliding_window is false, but layer_types has sliding_attention",
        ),
        (
            {"use_swa": True, "swa_window_size": 4, "sliding_windows": [4, 4, 4]},
            "sliding_windows contradicts use_swa",
        ),
        ({"sliding_windows": [4]}, "sliding_windows names 1 layers of 3"),
        ({"sliding_windows": [4, 4, "4"]}, "sliding_windows must be a whole number, not '4'"),
        (
            {"sliding_windows": [4, None, None], "layer_types": [FULL, SLIDING, FULL]},
            "sliding_windows contradicts layer_types",
        ),
        (
            {"sliding_windows": [4, 2**40, 4]},
            "window of a layer must be at most 1073741824, not 10",
        ),
        ({"draft_window_size": 0}, "window of a layer must be at least 1, not 0"),
        ({"draft_window_size": 10**400}, "window of a layer must be at most 1073741824, not 1000"),
        ({"draft_window_size": True}, "draft_window_size must be a whole number, not True"),
        (
            {"use_sliding_window": True, "sliding_window": 2**31},
            "sliding_window must be at most 1073741824, not 2147483648",
        ),
        ({"sliding_window": 2**40, "layer_types": [FULL] * 3}, "sliding_window must be at most"),
        ({"swa_window_size": 10**400}, "swa_window_size must be at most 1073741824, not 1000"),
        ({"swa_window_size": "wide"}, "swa_window_size must be a whole number, not 'wide'"),
        ({"layer_types": [[], FULL, FULL]}, r"unknown layer type \[\]"),
    ],
)
def test_windows_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        layers_of(changes)


@pytest.mark.parametrize("number", range(20))
def test_layers_that_slide_in_qwen3(rng, number):
    transformers = pytest.importorskip("transformers", minversion="5.17")
    values = {
        "use_sliding_window": bool(rng.integers(2)),
        "sliding_window": 40,
        "max_window_layers": int(rng.integers(0, 3)),  # with 3 none would slide, which is refused
    }
    if rng.integers(2):
        values["layer_types"] = [SLIDING if i else FULL for i in rng.integers(0, 2, 3)]
        values["use_sliding_window"] = True
    print(values)
    theirs = transformers.Qwen3Config(num_hidden_layers=3, **values)
    want = [theirs.sliding_window if kind == SLIDING else None for kind in theirs.layer_types]
    assert [window for _, window in layers_of(values)] == want


@pytest.mark.parametrize("windows", [[9, 5], [9, None], [None, None], [7, 7]])
def test_windows_are_saved(rng, tmp_path, windows):
    drafter = random_drafter(rng, sliding_windows=windows, is_causal=False)
    save_drafter(drafter, tmp_path)
    got = DFlashConfig.from_json(tmp_path)
    assert got == drafter.config and [layer.window for layer in got.layers] == windows


def test_a_window_by_argument(rng, tmp_path):
    target = random_target(rng)
    changes = {"layer_types": [SLIDING, FULL], "sliding_window": 9}
    save_drafter(random_drafter(rng, **changes, is_causal=True), tmp_path)
    for window, want in ((None, [9, None]), (5, [5, 5]), (70, [70, 70])):
        layers = load_drafter(tmp_path, target, window=window).config.layers
        assert [layer.window for layer in layers] == want
        assert all(layer.causal for layer in layers)
    for window in (0, -1, 2**40, 2.5, True, "9"):
        with pytest.raises(ValueError, match="^window: the window of a layer must be"):
            load_drafter(tmp_path, target, window=window)
