"""Text to token ids and back, and chats to token ids by a checkpoint's own template."""

from .bpe import PATTERN
from .loading import load_tokenizer
from .specials import SHOWN, SPECIAL_OFFSETS
from .tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "PATTERN",
    "SHOWN",
    "SPECIAL_OFFSETS",
    "StreamDecoder",
    "Tokenizer",
    "load_tokenizer",
]
