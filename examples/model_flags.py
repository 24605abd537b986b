"""The flags that say which pair of models to load and how it is held, and the loading of it.

The programs that take them adopt them: `flags.adopt_module_key_flags(model_flags)`.
"""

from __future__ import annotations

import os

import memory
from absl import flags
from one_line_errors import naming

CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Folder of the target; the demo by default.")
DRAFTER = flags.DEFINE_string("drafter", None, "Folder of the drafter; the demo's by default.")
DRAFT_WINDOW = flags.DEFINE_integer(
    "draft_window",
    None,
    "Positions that every layer of the drafter sees before it; what its config says by default.",
    lower_bound=1,
)
IGNORE_CONFIG = flags.DEFINE_multi_string(
    "ignore_config",
    [],
    "A key of either config.json to take as absent; give it again for more.",
)
DTYPE = flags.DEFINE_enum(
    "dtype",
    None,
    ["float32", "bfloat16"],
    "Arithmetic; float32 (in full, no TF32) on a CPU, bfloat16 elsewhere.",
)
PARAM_DTYPE = flags.DEFINE_enum(
    "param_dtype",
    None,
    ["float32", "bfloat16", "stored"],
    "Weights, packed experts aside: stored keeps what is bfloat16 in the checkpoint so, all else is --dtype's. Stored "
    "for float32 on a CPU that has a kernel for it, else --dtype's.",
)
CACHE_DTYPE = flags.DEFINE_enum(
    "cache_dtype",
    None,
    ["float32", "bfloat16", "float8_e4m3fn"],
    "The target's latent cache: --dtype's, which is the default, or float8_e4m3fn for half of bfloat16's bytes. Text "
    "is then the target's over a rounded cache, in every mode.",
)


def check(needs_drafter: bool = True):
    """Refuses folders that are not there, and half a pair, before anything is imported for them.

    Raises:
      FileNotFoundError, ValueError: the message names the flag.
    """
    for flag in (CHECKPOINT, DRAFTER):
        if flag.value is not None and not os.path.isdir(flag.value):
            there = os.path.exists(flag.value)
            problem = "not a folder" if there else "no such folder"
            raise FileNotFoundError(
                f"--{flag.name} {flag.value}: {problem}; give the one that holds config.json"
            )
    if needs_drafter and CHECKPOINT.value is not None and DRAFTER.value is None:
        raise ValueError("--checkpoint needs --drafter DIR beside it")


def paths() -> tuple[str, str | None]:
    """The folders of target and drafter; None where a checkpoint is given without one."""
    from ddtree_jax.models import demo

    if CHECKPOINT.value is None:
        return demo.TARGET, DRAFTER.value or demo.DRAFTER
    return CHECKPOINT.value, DRAFTER.value


def load_pair(needs_drafter: bool = True, mesh=None):
    """Loads the target, and the drafter or None; from now on float32 is multiplied in full.

    Raises:
      OSError, ValueError: as `load_target` and `load_drafter`.
      MemoryError: they do not fit.
    """
    import jax
    from dtypes import dtypes

    from ddtree_jax import models

    kinds = {**dtypes(DTYPE.value, PARAM_DTYPE.value), "ignore_config": IGNORE_CONFIG.value}
    if kinds["dtype"] == "float32":
        # A GPU's own default is TF32, which keeps 10 bits of a number and not 23.
        jax.config.update("jax_default_matmul_precision", "highest")
    target_path, drafter_path = paths()
    short = memory.naming("--checkpoint does not fit: generate.py --dry_run says what it takes")
    with short, naming(CHECKPOINT.name, target_path):
        target = models.load_target(target_path, mesh=mesh, cache_dtype=CACHE_DTYPE.value, **kinds)
    if not needs_drafter:
        return target, None
    short = memory.naming("--drafter does not fit beside the target")
    with short, naming(DRAFTER.name, drafter_path):
        drafter = models.load_drafter(drafter_path, target, window=DRAFT_WINDOW.value, **kinds)
    return target, drafter


def load_tokenizer():
    """The target's tokenizer.

    Raises:
      OSError, ValueError: as `ddtree_jax.models.load_tokenizer`.
    """
    from ddtree_jax import models

    folder, _ = paths()
    with naming(CHECKPOINT.name, folder):
        return models.load_tokenizer(folder)
