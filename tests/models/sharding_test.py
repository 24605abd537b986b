"""Loading onto a mesh of eight CPU devices: what lies where, and that a plain pass gives the same."""

import pathlib

import jax
import programs
import pytest
import quick_compile
from jax.sharding import AxisType
from tiny_models import random_target

from ddtree_jax.models.sharding import ShardingRules, split_sizes

_ON_EIGHT = """
import pathlib
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import AxisType
from published_configs import FP8
from routing import clear_tokens
from tiny_models import TARGET, positions_of, random_target
from ddtree_jax.models import load_target, save_target
from fp8_folder import random_tensors, write

rng = np.random.default_rng({seed})
sizes = dict(num_attention_heads=8, vocab_size=48, n_routed_experts=12, intermediate_size=96)
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
save_target(random_target(rng, experts="int4", **sizes), "int4")
config = {{**TARGET, **sizes, "quantization_config": FP8}}
write(pathlib.Path("fp8"), config, random_tensors(rng, config))
run = jax.jit(lambda target, tokens: target(tokens, positions_of(tokens)))
for folder, held in (("int4", None), ("fp8", None), ("int4", "stored"), ("fp8", "bfloat16")):
    plain = load_target(folder, dtype="float32", param_dtype=held)
    split = load_target(folder, dtype="float32", param_dtype=held, mesh=mesh)
    assert split.lm_head.kernel[...].dtype == (jnp.bfloat16 if held else jnp.float32)
    parts = dict(nnx.to_flat_state(nnx.state(split)))
    sizes_of = dict()
    for path, whole in nnx.to_flat_state(nnx.state(plain)):
        got = parts[path][...]
        np.testing.assert_array_equal(np.asarray(got), np.asarray(whole[...]), str(path))
        assert got.dtype == whole[...].dtype and len(got.addressable_shards) == 8
        sizes_of[".".join(map(str, path))] = got.addressable_shards[0].data.shape
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(whole[...])[shard.index])
    want = {{
        "embed_tokens": (12, 64),
        "lm_head.kernel": (64, 12),
        "norm.weight": (64,),
        "layers.0.self_attn.q_a_proj.kernel": (64, 32),
        "layers.0.self_attn.q_b_proj.kernel": (32, 2 * 80),
        "layers.0.self_attn.kv_a_proj_with_mqa.kernel": (64, 576),
        "layers.0.self_attn.kv_b_proj.k_up": (2, 16, 512),
        "layers.0.self_attn.kv_b_proj.v_up": (2, 512, 24),
        "layers.0.self_attn.o_proj.kernel": (2 * 24, 64),
        "layers.0.mlp.up_proj.kernel": (64, 24),
        "layers.0.mlp.down_proj.kernel": (24, 64),
        "layers.1.mlp.gate.kernel": (64, 12),
        "layers.1.mlp.shared_experts.down_proj.kernel": (8, 64),
    }}
    if folder == "int4":
        want["layers.2.mlp.experts.gate_up_packed"] = (3, 64, 8)
        want["layers.2.mlp.experts.down_scale"] = (3, 64, 1)
    else:
        want["layers.2.mlp.experts.gate_up_fp8"] = (3, 64, 64)
        want["layers.2.mlp.experts.down_scale_inv"] = (3, 1, 1)
    assert want.items() <= sizes_of.items(), sizes_of
    tokens = clear_tokens(rng, plain, (2, 19))
    want = run(plain, tokens)
    np.testing.assert_allclose(run(split, tokens), want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))
print("equal")
"""


def test_on_eight_devices(rng, tmp_path):
    tests = pathlib.Path(__file__).resolve().parents[1]
    program = tmp_path / "on_eight.py"
    program.write_text(_ON_EIGHT.format(seed=rng.integers(2**32)))
    flags = f"{quick_compile.XLA_FLAGS} --xla_force_host_platform_device_count=8"
    paths = [tests, tests.parent / "examples"]
    done = programs.run(program, paths=paths, env={"XLA_FLAGS": flags}, cwd=tmp_path)
    assert done.stdout.strip() == "equal", done.stderr


def _mesh(name="model", kind=AxisType.Auto):
    return jax.make_mesh((1,), (name,), axis_types=(kind,))


@pytest.mark.parametrize(
    "mesh, message",
    [
        ("2", "mesh must be a jax.sharding.Mesh, not a str"),
        (_mesh(kind=AxisType.Explicit), "the mesh's axes must be Auto"),
        (_mesh("x"), r"the mesh has the axes \('x',\), but no 'model'"),
    ],
)
def test_meshes_that_are_refused(rng, mesh, message):
    with pytest.raises(ValueError, match=message):
        ShardingRules().shardings(random_target(rng), mesh)


@pytest.mark.parametrize("dense, shared", [(1, 1), (0, 0), (3, 1)])
def test_split_sizes_are_those_that_a_mesh_must_divide(rng, dense, shared):
    target = random_target(
        rng,
        vocab_size=48,
        num_attention_heads=12,
        n_routed_experts=24,
        first_k_dense_replace=dense,
        n_shared_experts=shared,
    )
    sizes = split_sizes(target.config)
    assert len(sizes) == 2 + (dense > 0) + (dense < 3) * (1 + shared)
    for devices in (*range(1, 13), 24, 32, 48):
        mesh = jax.sharding.AbstractMesh((devices,), ("model",), axis_types=(AxisType.Auto,))
        if all(size % devices == 0 for size in sizes.values()):
            ShardingRules().shardings(target, mesh)
        else:
            with pytest.raises(ValueError, match="does not split"):
                ShardingRules().shardings(target, mesh)


def test_an_axis_that_does_not_split_is_named(rng):
    mesh = jax.sharding.AbstractMesh((4,), ("model",), axis_types=(AxisType.Auto,))
    whole = ShardingRules(vocab=None, heads=None, inner=None, experts=None)
    for path, sharding in whole.shardings(random_target(rng), mesh).items():
        assert not any(sharding.spec), path
    with pytest.raises(
        ValueError, match=r"k_up \(3, 16, 512\) does not split: 3 is not a multiple"
    ):
        ShardingRules(vocab=None).shardings(random_target(rng), mesh)
