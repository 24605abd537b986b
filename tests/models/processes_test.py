"""A mesh over two processes, as over two hosts: each reads its own part, and both say what one device says."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
from limits import HANG_SECONDS
from tiny_models import random_drafter, random_target

from ddtree_jax.models import save_drafter, save_target

_TESTS = pathlib.Path(__file__).parents[1]
_PROCESS = """
import sys

import jax
import numpy as np

number, address = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, number)
import quick_compile
from ddtree_jax import DecodeConfig, ddtree_decode
from ddtree_jax.models import load_drafter, load_target, tensors

mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
read = set()
take = tensors.Tensors.take
tensors.Tensors.take = lambda self, name: read.add(name) or take(self, name)
target = load_target("target", dtype="float32", mesh=mesh)
np.save(f"read{number}", sorted(read))
drafter = load_drafter("drafter", target)
inputs = np.load("inputs.npz")
decode = quick_compile.jit(ddtree_decode, static_argnames="config")
config = DecodeConfig(max_new_tokens=12, budget=6)
np.save(f"mesh{number}", decode(target, drafter, inputs["tokens"], inputs["lengths"], config=config).tokens)
if number == 0:
    alone = load_target("target", dtype="float32")
    drafter = load_drafter("drafter", alone)
    result = decode(alone, drafter, inputs["tokens"], inputs["lengths"], config=config)
    np.save("alone", result.tokens)
"""


def test_two_processes_load_and_decode_what_one_device_does(rng, tmp_path):
    target = {"vocab_size": 16, "num_attention_heads": 4, "n_routed_experts": 4}
    target["num_hidden_layers"] = 2
    drafter = {"vocab_size": 16, "num_target_layers": 2}
    drafter["dflash_config"] = {"mask_token_id": 15, "target_layer_ids": [1, 0]}
    save_target(random_target(rng, experts="int4", **target), tmp_path / "target")
    save_drafter(random_drafter(rng, **drafter), tmp_path / "drafter")
    lengths = rng.integers(1, 9, 2).astype(np.int32)
    tokens = rng.integers(0, 16, (2, 8)).astype(np.int32)
    np.savez(tmp_path / "inputs.npz", tokens=tokens, lengths=lengths)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    paths = [str(_TESTS), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = ""  # one device a process
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS, str(number), address],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=HANG_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)[-4000:]
    alone = np.load(tmp_path / "alone.npy")
    for number in range(2):
        np.testing.assert_array_equal(np.load(tmp_path / f"mesh{number}.npy"), alone)
    read = [set(np.load(tmp_path / f"read{number}.npy").tolist()) for number in range(2)]
    kinds = ("weight_packed", "weight_scale")
    experts = [{n for n in names if ".experts." in n and n.endswith(kinds)} for names in read]
    # Whole experts on their own device: each process read the one half, and no tensor of the other's.
    assert experts[0] and len(experts[0]) == len(experts[1]) and not experts[0] & experts[1]
