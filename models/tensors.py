"""The tensors of a checkpoint folder: safetensors only, headers checked before reading."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable

import numpy as np
from safetensors import SafetensorError, safe_open

from .layout import Source

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2}


def read_index(folder: str | os.PathLike) -> dict[str, str] | None:
    """Stored name to shard as a folder's index says; None without an index.

    Raises:
      ValueError: an index that cannot be read, is empty or names files elsewhere.
    """
    path = os.path.join(folder, INDEX)
    if not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8") as file:
        try:
            stored_in = json.load(file)["weight_map"]
            pairs = {str(name): str(shard) for name, shard in stored_in.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}: no readable weight_map ({error!r})") from error
    if not pairs:
        raise ValueError(f"{path}: the weight_map is empty; download the checkpoint again")
    for shard in pairs.values():
        if os.path.basename(shard) != shard or not shard.endswith(".safetensors"):
            raise ValueError(f"{path}: {shard!r} is not a safetensors file of this folder")
    return pairs


class Tensors:
    """Names, shapes and dtypes of all tensors below `folder`, and their values on demand.

    Args:
      folder: holds `model.safetensors.index.json` and its shards, or one `model.safetensors`.
      canonical: turns a stored name into the one that callers use; None drops the tensor.

    Raises:
      FileNotFoundError: no folder, no weights, or a shard that the index names is missing.
      ValueError: a damaged file, an index that leaves the folder or disagrees with its shards, or
        two tensors of one name.
    """

    def __init__(self, folder: str | os.PathLike, canonical: Callable[[str], str | None]):
        self.folder = os.fspath(folder)
        if not os.path.isdir(self.folder):
            raise FileNotFoundError(
                f"{self.folder}: no such folder; give the one that holds config.json and weights"
            )
        self._files = {}
        self._found = {}
        stored_in = self._index()
        for shard in sorted(set(stored_in.values())) or [SINGLE]:
            self._open(shard, canonical)
        for shard, stored in self._found.values():
            if stored_in and stored_in.get(stored) != shard:
                raise ValueError(
                    f"{os.path.join(self.folder, shard)}: the tensor {stored!r} is here, but not in "
                    f"{INDEX}; the two do not belong together, download the checkpoint again"
                )
        for name, shard in stored_in.items():
            if name not in self._files[shard].keys():
                raise ValueError(
                    f"{os.path.join(self.folder, shard)}: the tensor {name!r} "
                    f"that {INDEX} places here is missing; download the checkpoint again"
                )
        self._left = set(self._found)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._found)

    def check(self, sources: Iterable[Source]):
        """Checks presence, shape and dtype of `sources` from the headers alone.

        Raises:
          ValueError: names the tensor, its file, what was expected and what is there.
        """
        for source in sources:
            if source.name not in self._found:
                raise ValueError(
                    f"{self.folder}: the tensor {source.name!r} is missing; config.json asks "
                    "for it, so config and weights do not belong together or a file is incomplete"
                )
            shard, stored = self._found[source.name]
            header = self._files[shard].get_slice(stored)
            shape, dtype = tuple(header.get_shape()), header.get_dtype()
            where = f"{os.path.join(self.folder, shard)}: the tensor {stored!r}"
            if shape != source.shape:
                raise ValueError(
                    f"{where} has shape {shape}, but config.json makes it {source.shape}; "
                    "config and weights do not belong together"
                )
            if dtype not in source.dtypes:
                raise ValueError(
                    f"{where} is {dtype}, but supported here is {' or '.join(source.dtypes)}"
                )

    def dtype(self, name: str) -> str:
        """safetensors' name of a tensor's dtype."""
        shard, stored = self._found[name]
        return self._files[shard].get_slice(stored).get_dtype()

    def nbytes(self, name: str) -> int:
        """Bytes that a tensor takes in its file."""
        shard, stored = self._found[name]
        header = self._files[shard].get_slice(stored)
        return math.prod(header.get_shape()) * _BYTES.get(header.get_dtype(), 1)

    def take(self, name: str) -> np.ndarray:
        """Reads a tensor and marks it as used."""
        shard, stored = self._found[name]
        self._left.discard(name)
        return self._files[shard].get_tensor(stored)

    def refuse_leftovers(self):
        """Raises a ValueError that lists tensors never taken: the model would silently differ.

        Tensors without a single number are no loss: transformers writes such for "no shared expert".
        """
        self._left = {name for name in self._left if self.nbytes(name)}
        if not self._left:
            return
        shown = [repr(self._found[name][1]) for name in sorted(self._left)]
        more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
        raise ValueError(
            f"{self.folder}: {len(shown)} tensors have no place in the model that config.json "
            f"describes: {', '.join(shown[:8])}{more}"
        )

    def _index(self) -> dict[str, str]:
        """Stored name to shard as the index says; empty for a single file."""
        pairs = read_index(self.folder)
        if pairs is None and not os.path.isfile(os.path.join(self.folder, SINGLE)):
            raise FileNotFoundError(
                f"{self.folder}: neither {SINGLE} nor {INDEX} is here; only safetensors are loaded"
            )
        return pairs or {}

    def _open(self, shard: str, canonical):
        path = os.path.join(self.folder, shard)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path}: the shard is missing; download the checkpoint again")
        try:
            file = safe_open(path, framework="numpy")
            names = list(file.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path}: truncated or not a safetensors file ({error}); download it again"
            ) from error
        self._files[shard] = file
        for stored in names:
            name = canonical(stored)
            if name is None:
                continue
            if name in self._found:
                other = self._found[name]
                raise ValueError(
                    f"{path}: the tensor {stored!r} is also in {other[0]} as {other[1]!r}; keep one"
                )
            self._found[name] = (shard, stored)
