"""The Kimi K2.6 target and the DFlash drafter as flax.nnx modules, with their file formats."""

from .checkpoint import load_drafter, load_target
from .deepseek_v3.config import KimiK26Config
from .dflash.config import DFlashConfig
from .dflash.model import DFlashDrafter
from .export import save_drafter, save_target
from .kimi_k26 import KimiK26
from .text import Tokenizer, load_tokenizer

__all__ = [
    "DFlashConfig",
    "DFlashDrafter",
    "KimiK26",
    "KimiK26Config",
    "Tokenizer",
    "load_drafter",
    "load_target",
    "load_tokenizer",
    "save_drafter",
    "save_target",
]
