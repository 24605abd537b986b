"""The mesh that `--mesh N` asks for."""

from __future__ import annotations

import math


def make_mesh(devices: int):
    """The mesh of so many of this host's devices, or None for one.

    Raises:
      ValueError: there are fewer.
    """
    import jax

    seen = jax.local_devices()
    if devices > len(seen):
        raise ValueError(
            f"--mesh must lie in 1 .. {len(seen)}, the devices there are, not {devices}"
        )
    if devices == 1:
        return None
    kinds = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("model",), axis_types=kinds, devices=seen[:devices])


def check_split(target_path, devices: int, ignore_config=()):
    """Refuses a number of devices that the target does not divide by.

    Raises:
      ValueError: such a number, or a config.json that `load_target` would refuse.
    """
    from ddtree_jax.models import KimiK26Config
    from ddtree_jax.models.sharding import split_sizes

    sizes = split_sizes(KimiK26Config.from_json(target_path, ignore=ignore_config))
    wrong = [f"{size} {what}" for what, size in sizes.items() if size % devices]
    if wrong:
        raise ValueError(
            f"--mesh {devices} does not divide the target's {', '.join(wrong)}: give a divisor of "
            f"{math.gcd(*sizes.values())}"
        )
