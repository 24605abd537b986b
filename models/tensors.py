"""The tensors of a checkpoint folder: safetensors only, headers checked before reading."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from .common.fields import some
from .layout import Source
from .unplaced import why_left, why_missing

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: safetensors' name of a dtype to NumPy's.
DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "U16": np.uint16,
        "I16": np.int16,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "U32": np.uint32,
        "I32": np.int32,
        "F32": np.float32,
        "U64": np.uint64,
        "I64": np.int64,
        "F64": np.float64,
        "C64": np.complex64,
    }.items()
}


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


def stored_names(folder: str | os.PathLike) -> tuple[str, list[str]] | None:
    """The file that lists a folder's tensors, and their stored names; None where there is no such file.

    Raises:
      ValueError: that file cannot be read.
    """
    pairs = read_index(folder)
    if pairs is not None:
        return os.path.join(folder, INDEX), list(pairs)
    path = os.path.join(folder, SINGLE)
    if not os.path.isfile(path):
        return None
    with _opened(path) as file:
        return path, list(file.keys())


@contextlib.contextmanager
def _opened(path: str):
    """A safetensors file, with its name in front of what is wrong with its header."""
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path}: truncated or not a safetensors file ({error}); download it again"
        ) from error


@dataclasses.dataclass(frozen=True)
class _Entry:
    """Where a tensor lies: its file, its name and what is there, from the file's header."""

    shard: str
    stored: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


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
        self._maps = {}
        self._found: dict[str, _Entry] = {}
        stored_in = self._index()
        shards = sorted(set(stored_in.values())) or [SINGLE]
        self._refuse_missing(shards)
        stored = {shard: self._open(shard, canonical) for shard in shards}
        for entry in self._found.values():
            if stored_in and stored_in.get(entry.stored) != entry.shard:
                raise ValueError(
                    f"{os.path.join(self.folder, entry.shard)}: the tensor {entry.stored!r} is here, "
                    f"but not in {INDEX}; the two do not belong together, download the checkpoint again"
                )
        for name, shard in stored_in.items():
            if name not in stored[shard]:
                raise ValueError(
                    f"{os.path.join(self.folder, shard)}: the tensor {name!r} "
                    f"that {INDEX} places here is missing; download the checkpoint again"
                )
        self._names = frozenset(self._found)
        self._left = set(self._found)

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def check(self, sources: Iterable[Source]):
        """Checks presence, shape and dtype of `sources` from the headers alone; they have a place from now on.

        Raises:
          ValueError: names the tensor, its file, what was expected and what is there.
        """
        for source in sources:
            if source.name not in self._found:
                instead = why_missing(source.name, self.names, self.dtype) or (
                    "; config.json asks for it, so config and weights do not belong together or a "
                    "file is incomplete"
                )
                raise ValueError(f"{self.folder}: the tensor {source.name!r} is missing{instead}")
            entry = self._found[source.name]
            where = f"{os.path.join(self.folder, entry.shard)}: the tensor {entry.stored!r}"
            if entry.shape != source.shape:
                raise ValueError(
                    f"{where} has shape {entry.shape}, but config.json makes it {source.shape}; "
                    "config and weights do not belong together"
                )
            if entry.dtype not in source.dtypes:
                raise ValueError(
                    f"{where} is {entry.dtype}, but supported here is {' or '.join(source.dtypes)}"
                )
            self._left.discard(source.name)

    def dtype(self, name: str) -> str:
        """safetensors' name of a tensor's dtype."""
        return self._found[name].dtype

    def nbytes(self, name: str) -> int:
        """Bytes that a tensor takes in its file."""
        return self._found[name].nbytes

    def take(self, name: str) -> np.ndarray:
        """A tensor where it lies in its file's memory map, read only."""
        entry = self._found[name]
        raw = self._maps[entry.shard][entry.begin : entry.begin + entry.nbytes]
        return raw.view(DTYPES[entry.dtype]).reshape(entry.shape)

    def refuse_leftovers(self):
        """Raises a ValueError that lists tensors without a place: the model would silently differ.

        What was checked has its place, though a process of a mesh reads no more than its devices' share. Tensors
        without a single number are no loss: transformers writes such for "no shared expert".
        """
        left = {name for name in self._left if self.nbytes(name)}
        if not left:
            return
        names, why = why_left(left)
        shown = some([self._found[name].stored for name in names])
        raise ValueError(
            f"{self.folder}: {len(names)} tensors have no place in the model that config.json "
            f"describes: {shown}{why}"
        )

    def _index(self) -> dict[str, str]:
        """Stored name to shard as the index says; empty for a single file."""
        pairs = read_index(self.folder)
        if pairs is None and not os.path.isfile(os.path.join(self.folder, SINGLE)):
            raise FileNotFoundError(
                f"{self.folder}: neither {SINGLE} nor {INDEX} is here; only safetensors are loaded"
            )
        return pairs or {}

    def _refuse_missing(self, shards: list[str]):
        """Names the shards that an unfinished download lacks."""
        missing = [s for s in shards if not os.path.isfile(os.path.join(self.folder, s))]
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise FileNotFoundError(
                f"{self.folder}: {', '.join(missing[:8])}{more}: {len(missing)} of {len(shards)} shards "
                "are missing; finish the download"
            )

    def _open(self, shard: str, canonical) -> set[str]:
        """Notes where the tensors of a shard lie; returns their stored names."""
        path = os.path.join(self.folder, shard)
        with _opened(path) as file:
            names = file.offset_keys()
            headers = [file.get_slice(name) for name in names]
        entries, begin = [], 0
        for stored, header in zip(names, headers, strict=True):
            dtype = header.get_dtype()
            if dtype not in DTYPES:
                raise ValueError(
                    f"{path}: the tensor {stored!r} is {dtype}, which is not supported"
                )
            entries.append(_Entry(shard, stored, dtype, tuple(header.get_shape()), begin))
            begin += entries[-1].nbytes
        # safetensors has checked that the tensors fill the file to its end without a hole.
        start = os.path.getsize(path) - begin
        self._maps[shard] = np.memmap(path, np.uint8, "r")
        for entry in entries:
            name = canonical(entry.stored)
            if name is None:
                continue
            if name in self._found:
                other = self._found[name]
                raise ValueError(
                    f"{path}: the tensor {entry.stored!r} is also in {other.shard} as "
                    f"{other.stored!r}; keep one"
                )
            self._found[name] = dataclasses.replace(entry, begin=start + entry.begin)
        return set(names)
