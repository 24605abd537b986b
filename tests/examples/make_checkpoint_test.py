"""A random checkpoint of make_checkpoint.py: loaded here, and dequantised by NumPy into transformers."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from routing import clear_tokens
from safetensors.numpy import load_file, save_file
from tiny_models import positions_of

from ddtree_jax.models import KimiK26Config, demo, load_target

_SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "make_checkpoint.py"


def _make(*flags):
    return subprocess.run(
        [sys.executable, _SCRIPT, *flags],
        cwd=_SCRIPT.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )


def _tensors(folder):
    """Canonical name to array, through the index."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
    shards = {shard: load_file(folder / shard) for shard in sorted(set(weight_map.values()))}
    assert sum(map(len, shards.values())) == len(weight_map)
    return {n.removeprefix("language_model."): shards[s][n] for n, s in weight_map.items()}


def _dequantised(tensors):
    """Float32 tensors by the format's definition, one nibble at a time."""
    out = {}
    for name, array in tensors.items():
        if name.endswith("weight_packed"):
            stem = name.removesuffix("_packed")
            rows, columns = tensors[f"{stem}_shape"]
            words = array.view(np.uint32)
            q = np.stack([words >> (4 * i) & 15 for i in range(8)], axis=-1).astype(np.float32) - 8
            assert q.size == rows * columns
            scale = tensors[f"{stem}_scale"].astype(np.float32)
            out[stem] = q.reshape(rows, columns) * np.repeat(scale, 32, axis=1)
        elif not name.endswith(("weight_scale", "weight_shape")):
            out[name] = array.astype(np.float32)
    return out


def test_logits_equal_transformers(rng, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", minversion="5.17")
    made, flat = tmp_path / "made", tmp_path / "flat"
    seed = int(rng.integers(2**31))
    done = _make(f"--output={made}", "--layers=3", "--shard_gb=0.002", f"--seed={seed}")
    assert done.returncode == 0, done.stderr
    text = json.loads((made / "config.json").read_text())["text_config"]
    assert text["num_hidden_layers"] == 3

    flat.mkdir()
    save_file(_dequantised(_tensors(made)), flat / "model.safetensors", metadata={"format": "pt"})
    scaling = text.pop("rope_scaling")
    known = {k: v for k, v in text.items() if k not in ("quantization_config", "architectures")}
    rope = {"rope_type": scaling.pop("type"), "rope_theta": known.pop("rope_theta"), **scaling}
    known.pop("model_type"), known.pop("dtype")
    config = transformers.DeepseekV3Config(
        **known, rope_parameters=rope, attn_implementation="eager"
    )
    config.save_pretrained(flat)
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(flat, dtype=torch.float32).eval()
    target = load_target(made, dtype="float32")
    tokens = clear_tokens(rng, target, (2, 40))
    with torch.no_grad():
        want = model(torch.as_tensor(tokens.astype(np.int64)), use_cache=False).logits.numpy()
    got = jax.jit(lambda target, tokens: target(tokens, positions_of(tokens)))(target, tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_seed_decides_and_tokenizer_comes_along(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        done = _make(f"--output={tmp_path / name}", "--layers=2", f"--seed={seed}")
        assert done.returncode == 0, done.stderr
    a, b, c = (
        load_file(tmp_path / name / "model-00001-of-000001.safetensors") for name in ("a", "b", "c")
    )
    assert all(np.array_equal(a[name], b[name]) for name in a)
    head = "language_model.lm_head.weight"
    assert not np.array_equal(a[head], c[head])
    assert (tmp_path / "a" / "tiktoken.model").is_file()
    assert KimiK26Config.from_json(tmp_path / "a").num_hidden_layers == 2


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], ["--output"]),
        (["--output={tmp}"], ["empty"]),
        (["--output={tmp}/new", "--layers=0"], ["--layers", "1 .. 6"]),
        (["--output={tmp}/new", "--shard_gb=0"], ["--shard_gb"]),
        (["--output={tmp}/new", "--shard_gb=inf"], ["--shard_gb", "inf"]),
        (["--output={tmp}/new", "--config={tmp}/none.json"], ["none.json"]),
        (["--output={tmp}/new", "--config={tmp}/huge.json"], ["disk", "--layers"]),
    ],
)
def test_bad_flags_are_one_line(tmp_path, flags, words):
    huge = json.loads((pathlib.Path(demo.TARGET) / "config.json").read_text())
    huge["text_config"]["moe_intermediate_size"] = 2**22
    huge["text_config"]["n_routed_experts"] = 64
    (tmp_path / "huge.json").write_text(json.dumps(huge))
    done = _make(*(flag.format(tmp=tmp_path) for flag in flags))
    assert done.returncode != 0
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "new").exists()
