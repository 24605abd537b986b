"""The published K2.6 and its drafter, without their weights: counts of tensors and parameters must agree."""

import math

import jax
import pytest
from flax import nnx
from published_configs import DRAFTER, TEXT

from ddtree_jax.models import DFlashConfig, DFlashDrafter, KimiK26, KimiK26Config
from ddtree_jax.models.layout import drafter_rules, target_rules


def test_target():
    config = KimiK26Config.from_json({"text_config": TEXT, "eos_token_id": 163586})
    target = nnx.eval_shape(lambda: KimiK26(config))
    rules = target_rules(target)
    # The published index lists this many tensors under `language_model.`.
    assert sum(len(rule.sources) + len(rule.constants) for rule in rules) == 208_215
    size = sum(math.prod(p.shape) * p.dtype.itemsize for p in jax.tree.leaves(target))
    assert size / 2**30 == pytest.approx(553.4, abs=0.1)
    assert config.eos_token_ids == (163586,)


def test_drafter():
    drafter = nnx.eval_shape(lambda: DFlashDrafter(DFlashConfig.from_json(DRAFTER)))
    assert sum(math.prod(p.shape) for p in jax.tree.leaves(drafter)) == 3_479_277_056
    assert len(drafter_rules(drafter)) == 69
