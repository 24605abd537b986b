"""The Kimi K2.6 target and the DFlash drafter as flax.nnx modules."""

from .config import DFlashConfig, KimiK26Config
from .dflash import DFlashDrafter
from .kimi_k26 import KimiK26

__all__ = ["DFlashConfig", "DFlashDrafter", "KimiK26", "KimiK26Config"]
