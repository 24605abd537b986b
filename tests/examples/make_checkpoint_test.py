"""A random checkpoint of make_checkpoint.py: loaded here, and dequantised by NumPy into transformers."""

import json
import pathlib

import jax
import numpy as np
import programs
import pytest
import quick_compile
from published_configs import FOLDERS, toy
from routing import clear_tokens
from safetensors.numpy import load_file, save_file
from tiny_models import positions_of

from ddtree_jax.models import KimiK26Config, demo, load_target

_SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "make_checkpoint.py"
_LINEAR = ("proj_with_mqa.weight", "shared_experts.up_proj.weight", "0.mlp.down_proj.weight")
# What says how weights are stored, where code is and what rope_parameters repeats.
_NOT_FOR_TRANSFORMERS = (
    "architectures",
    "auto_map",
    "model_type",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
)


def _make(*flags):
    return programs.run(_SCRIPT, *flags, env={"XLA_FLAGS": quick_compile.XLA_FLAGS})


def _tensors(folder):
    """Stored name to torch tensor, through the index."""
    from safetensors.torch import load_file

    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > 2
    shards = {shard: load_file(folder / shard) for shard in sorted(set(weight_map.values()))}
    assert sum(map(len, shards.values())) == len(weight_map)
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _dequantised(tensors):
    """Float32 tensors by the formats' definitions: int4 one nibble at a time, fp8 by torch."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("weight_packed"):
            stem = name.removesuffix("_packed")
            rows, columns = tensors[f"{stem}_shape"].tolist()
            words = tensor.numpy().view(np.uint32)
            q = np.stack([words >> (4 * i) & 15 for i in range(8)], axis=-1).astype(np.float32) - 8
            assert q.size == rows * columns
            scale = tensors[f"{stem}_scale"].float().numpy()
            out[stem] = q.reshape(rows, columns) * np.repeat(scale, 32, axis=1)
        elif f"{name}_scale_inv" in tensors:
            scale = tensors[f"{name}_scale_inv"]
            for axis in (0, 1):
                scale = scale.repeat_interleave(128, axis).narrow(axis, 0, tensor.shape[axis])
            out[name] = (tensor.float() * scale).numpy()
        elif not name.endswith(("weight_scale", "weight_shape", "weight_scale_inv")):
            out[name] = tensor.float().numpy()
    return out


@pytest.mark.parametrize(
    "kind",
    # The slow ones differ from the others in numbers alone.
    [
        pytest.param(kind, marks=pytest.mark.slow) if kind in ("K2-Instruct-0905", "K2.5") else kind
        for kind in FOLDERS
    ],
)
def test_logits_equal_transformers(rng, tmp_path, kind):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", minversion="5.17")
    made, flat = tmp_path / "made", tmp_path / "flat"
    flat.mkdir()
    (flat / "config.json").write_text(json.dumps(toy(kind)))
    seed = int(rng.integers(2**31))
    done = _make(
        f"--config={flat / 'config.json'}",
        f"--output={made}",
        "--layers=3",
        "--shard_gb=0.0005",
        f"--seed={seed}",
    )
    assert done.returncode == 0, done.stderr
    text = json.loads((made / "config.json").read_text())
    prefix = "language_model." if "text_config" in text else ""
    text = text.get("text_config", text)
    assert text["num_hidden_layers"] == 3

    stored = _tensors(made)
    dtypes = {str(stored[n].dtype) for n in stored if n.endswith(_LINEAR)}
    assert dtypes == ({"torch.float8_e4m3fn"} if "Instruct" in kind else {"torch.bfloat16"})
    tensors = {n.removeprefix(prefix): t for n, t in _dequantised(stored).items()}
    assert all(n.startswith(("model.", "lm_head.")) for n in tensors)
    save_file(tensors, flat / "model.safetensors", metadata={"format": "pt"})
    scaling = dict(text["rope_scaling"])
    rope = {"rope_type": scaling.pop("type"), "rope_theta": text["rope_theta"], **scaling}
    config = transformers.DeepseekV3Config(
        **{k: v for k, v in text.items() if k not in _NOT_FOR_TRANSFORMERS},
        rope_parameters=rope,
        attn_implementation="eager",
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
        (["--output={tmp}/new", "--layers=0"], ["--layers", "1 .. 4"]),
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
