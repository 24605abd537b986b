"""The Kimi K2.6 target and the DFlash drafter as flax.nnx modules, their checkpoints and the tokenizer."""

from .checkpoint import load_drafter, load_target
from .config import DFlashConfig, KimiK26Config
from .dflash import DFlashDrafter
from .export import save_drafter, save_target
from .kimi_k26 import KimiK26

__all__ = [
    "DFlashConfig",
    "DFlashDrafter",
    "KimiK26",
    "KimiK26Config",
    "load_drafter",
    "load_target",
    "save_drafter",
    "save_target",
]
