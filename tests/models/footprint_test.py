"""Footprints against loaded models, hand-made sums and the table in docs/hardware.md."""

import functools
import json
import math
import pathlib

import jax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from published_configs import DRAFTER, FOLDERS, TEXT

from ddtree_jax.models import KimiK26, KimiK26Config, demo, load_drafter, load_target
from ddtree_jax.models.footprint import RESERVE, Footprint, footprint
from ddtree_jax.models.sharding import ShardingRules

_HARDWARE = pathlib.Path(__file__).parents[2] / "docs" / "hardware.md"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The published pair's folders, which no test changes."""
    return _published(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def size_of(published):
    """The published pair's footprint with a cache of a dtype. To lay out 61 layers takes a second."""
    return functools.cache(lambda cache_dtype=None: footprint(*published, cache_dtype=cache_dtype))


def _published(folder):
    target, drafter = folder / "target", folder / "drafter"
    for folder, config in ((target, {"text_config": TEXT}), (drafter, DRAFTER)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    return target, drafter


def _nbytes(model):
    return sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))


@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_takes_what_is_said(dtype, cache_dtype):
    size = footprint(demo.TARGET, demo.DRAFTER, dtype=dtype, cache_dtype=cache_dtype)
    target = load_target(demo.TARGET, dtype=dtype, cache_dtype=cache_dtype)
    drafter = load_drafter(demo.DRAFTER, target, dtype=dtype)
    assert size.experts + size.rest == _nbytes(target)
    assert size.drafter == _nbytes(drafter)
    caches = target.init_cache(3, 50), drafter.init_cache(3, 50)
    assert size.row * 150 == sum(x.nbytes for x in jax.tree.leaves(caches))
    assert footprint(demo.TARGET, dtype=dtype).drafter == 0


def test_an_e4m3_cache_takes_a_byte_a_number(published, size_of):
    half = size_of("float8_e4m3fn")
    assert size_of().row - half.row == 61 * 576
    assert f"{half.row:,} bytes" in _HARDWARE.read_text()
    with pytest.raises(
        ValueError, match="cache_dtype must be the model's bfloat16 or float8_e4m3fn"
    ):
        footprint(*published, cache_dtype="float32")


def test_published_sizes(size_of):
    size = size_of()
    # 60 layers of 384 experts of three matrices, half a byte a weight and two for each 32.
    assert size.experts == 60 * 384 * (3 * 7168 * 2048 // 2 + 3 * 7168 * 2048 // 32 * 2)
    assert size.drafter == 2 * 3_479_277_056
    assert size.row == 2 * (61 * 576 + 6 * 2 * 8 * 128)


def test_published_size_of_fp8(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FOLDERS["K2-Instruct"]))
    size = footprint(tmp_path)
    # A byte a weight, and four for each 128 x 128 of them.
    assert size.experts == 60 * 384 * (3 * 7168 * 2048 + 3 * 56 * 16 * 4)
    # The published file of 1,026.4 billion numbers has its other layers in fp8 too; here they are bfloat16.
    assert size.rest / 1e9 == pytest.approx(23.4, abs=0.1)
    assert f"{size.experts / 1e9:,.1f} GB" in _HARDWARE.read_text()


def test_context_is_what_the_weights_leave():
    size = Footprint(
        experts=700, rest=200, whole=20, drafter=100, row=10, max_context=1000, vocab_size=5
    )
    assert size.per_device(3) == 334
    # A mesh splits 880 of the 1,000.
    assert size.per_device(3, mesh=True) == 120 + 294
    assert size.context(4, RESERVE + 340 + 90, nodes=3, mesh=True) == 1
    assert size.context(4, RESERVE + 340 + 89, nodes=3, mesh=True) == 0
    # Of 99 bytes three nodes' logits take 60 and the rows of two of them 20.
    assert size.context(4, RESERVE + 250 + 99, nodes=3) == 1
    assert size.context(4, RESERVE + 250 + 99 + 60, batch=2, nodes=3) == 0
    assert size.context(4, RESERVE + 250 + 2 * 99, batch=2, nodes=3) == 1
    assert size.context(4, RESERVE + 249) == 0
    assert size.context(4, RESERVE * 9) == 1000


@pytest.mark.parametrize("layers", [0, 4, 62, 71])
def test_index_of_another_depth(tmp_path, layers):
    published = _published(tmp_path)
    names = [f"language_model.model.layers.{i}.input_layernorm.weight" for i in range(layers)]
    names.append("vision_tower.encoder.layers.60.weight")
    index = {"weight_map": dict.fromkeys(names, "a.safetensors")}
    (published[0] / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"tensors of {layers} layers, but config.json has 61"):
        footprint(*published)


def test_a_drafter_of_another_target(tmp_path):
    published = _published(tmp_path)
    (published[1] / "config.json").write_text(json.dumps({**DRAFTER, "vocab_size": 200000}))
    with pytest.raises(ValueError, match="made for a target of vocab_size 200000.*163840"):
        footprint(*published)


@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
def test_table_in_the_docs(size_of, cache_dtype):
    size = size_of(cache_dtype)
    rows = [line for line in _HARDWARE.read_text().splitlines() if line[:3] in ("| 8", "| 1")]
    assert len(rows) == 6
    for row in rows[3:] if cache_dtype else rows[:3]:
        machine, share, *contexts = (cell.strip() for cell in row.strip("|").split("|"))
        devices, each = (int(part.split()[0]) for part in machine.split(" x "))
        assert share == f"{size.per_device(devices) / 1e9:.1f}"
        for batch, cell in zip((1, 4, 16, 64), contexts, strict=True):
            assert cell == f"{size.context(devices, each * 10**9, batch=batch):,}"


def test_what_a_mesh_keeps_whole_is_in_the_docs(published, size_of):
    target = nnx.eval_shape(lambda: KimiK26(KimiK26Config.from_json(published[0])))
    drafter = size_of().drafter
    held = {}
    for devices in (1, 8, 16):
        mesh = AbstractMesh((devices,), ("model",), axis_types=(AxisType.Auto,))
        shardings = ShardingRules().shardings(target, mesh)
        held[devices] = drafter + sum(
            math.prod(shardings[path].shard_shape(tuple(parameter.shape)))
            * parameter.dtype.itemsize
            for path, parameter in nnx.to_flat_state(nnx.state(target))
        )
    assert held == {n: size_of().per_device(n, mesh=True) for n in held}
    assert held[1] == size_of().weights
    whole = (8 * held[8] - held[1]) / 7 - drafter
    text = " ".join(_HARDWARE.read_text().split())
    assert (
        f"keeps {whole / 1e9:.1f} GB of the target and the drafter's {drafter / 1e9:.1f} GB replicated"
        in text
    )
    assert f"{held[8] / 1e9:.1f} GB on each of 8 and {held[16] / 1e9:.1f} GB on each of 16" in text
    counts = []
    for cache_dtype, batch in ((None, 1), ("float8_e4m3fn", 1), (None, 4)):
        row = size_of(cache_dtype).row
        left = 96 * 10**9 - RESERVE - held[8] - batch * 17 * 163840 * 4
        counts.append(f"{left // (row * batch) - 16:,}")
        said = size_of(cache_dtype).context(8, 96 * 10**9, batch=batch, mesh=True)
        assert counts[-1] == f"{said:,}"
    one, one_e4m3, four = counts
    assert f"one request then has {one} positions ({one_e4m3} with e4m3 latents)" in text
    assert f"4 have {four} each" in text
