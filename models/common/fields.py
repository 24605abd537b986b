"""The values of a config.json: each is checked where it is read, and none is passed over."""

from __future__ import annotations

import contextlib
import json
import math
import os
import reprlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

_REQUIRED = object()
_SHOWN = 8  # names in a message
_LONGEST = 160  # characters of one of them


def read_json(path_or_dict: str | os.PathLike | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The object and a name for messages. A folder stands for the config.json in it.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not JSON, or not an object.
    """
    if isinstance(path_or_dict, Mapping):
        return dict(path_or_dict), "config"
    path = os.fspath(path_or_dict)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file; a checkpoint folder holds a config.json")
    # Some editors put a byte-order mark in front; "utf-8-sig" takes it off.
    with open(path, encoding="utf-8-sig") as file:
        try:
            values = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object, found a {type(values).__name__}")
    return values, path


def ignored_keys(keys: Collection[str]) -> frozenset[str]:
    """Keys that a caller wants taken as absent, as `Fields` has them: without the name of what they are read with."""
    keys = (keys,) if isinstance(keys, str) else keys
    parts = ("text_config.", "dflash_config.")
    return frozenset(key.removeprefix(parts[0]).removeprefix(parts[1]) for key in keys)


class Fields:
    """A JSON object of a config.json, read key by key; what was not read is refused at the end.

    A key whose value is null counts as absent, unless a method says otherwise.

    Args:
      values: the object.
      where: the file, for messages.
      path: of the object in the file, such as "rope_scaling."; in front of its keys in messages.
      ignore: keys to take as absent, nested ones by their path, such as "rope_scaling.truncate";
        `ignored_keys` makes it.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        *,
        path: str = "",
        ignore: frozenset[str] = frozenset(),
    ):
        self.values = {key: v for key, v in values.items() if path + key not in ignore}
        self.where = where
        self._path, self._ignore = path, ignore
        self._known: set[str] = set()

    def name(self, key: str) -> str:
        """The key as messages and `ignore` say it."""
        return self._path + key

    def error(self, key: str, wrong: str) -> ValueError:
        """What is wrong with the value of a key, with file and key in front."""
        return ValueError(f"{self.where}: {label(self.name(key))} {wrong}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is."""
        self._known.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """The value as it is, null too; the key must be there."""
        self._known.add(key)
        if key not in self.values:
            raise ValueError(f"{self.where}: the key '{label(self.name(key))}' is missing")
        return self.values[key]

    def whole(self, key: str, default: Any = _REQUIRED) -> Any:
        """The whole number at `key`; without a default the key must be there."""
        return self._convert(key, default, whole)

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """The finite number at `key`, a float; without a default the key must be there."""
        return self._convert(key, default, number)

    def flag(self, key: str, default: Any = _REQUIRED) -> Any:
        """True or false at `key`; a string that says so is not it."""
        return self._convert(key, default, _flag)

    def text(self, key: str, default: Any = _REQUIRED) -> Any:
        """The string at `key`."""
        return self._convert(key, default, _text)

    def list(self, key: str, default: Any = _REQUIRED) -> Any:
        """The list at `key`."""
        return self._convert(key, default, _list)

    def section(self, key: str) -> Fields | None:
        """The object at `key`, as fields of its own; None where there is none."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, not {shown(value)}")
        return Fields(value, self.where, path=self.name(key) + ".", ignore=self._ignore)

    def only(self, key: str, *served: Any):
        """Refuses any value of `key` but those served; a missing key is fine."""
        if self.get(key) is not None:
            self.must(key, *served)

    def must(self, key: str, *served: Any):
        """Refuses any value of `key` but those served; a missing key too, and null."""
        value = self.need(key)
        # True is 1 to Python, but not in JSON.
        if not any(isinstance(value, bool) == isinstance(s, bool) and value == s for s in served):
            choices = " or ".join(repr(s) for s in served) or "null"
            raise self.error(key, f"is {shown(value)}, but only {choices} is supported")

    def harmless(self, *keys: str):
        """Keys that say nothing about what is computed here."""
        self._known.update(keys)

    def finish(self):
        """Refuses the keys that nobody asked for: one that is not understood may change results."""
        left = [k for k, value in self.values.items() if k not in self._known and value is not None]
        if left:
            names = [self.name(key) for key in left]
            one = label(names[0]) if len(names) == 1 else "with each of them"
            raise ValueError(
                f"{self.where}: {some(names)}: not understood, and it could change results; if it "
                f"does not, pass --ignore_config {one}"
            )

    def _convert(self, key: str, default: Any, convert) -> Any:
        value = self.need(key) if default is _REQUIRED else self.get(key)
        if value is None and default is not _REQUIRED:
            return default
        try:
            return convert(value)
        except ValueError as error:
            raise self.error(key, str(error)) from error


def whole(value: Any) -> int:
    """A JSON number without a fraction; nothing else becomes an integer quietly."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or isinstance(value, float) and not value.is_integer():
        raise ValueError(f"must be a whole number, not {shown(value)}")
    return int(value)


def number(value: Any) -> float:
    """A JSON number that a float holds."""
    with contextlib.suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    raise ValueError(f"must be a finite number, not {shown(value)}")


def whole_numbers(value: Any) -> tuple[int, ...]:
    """One whole number or a list of them."""
    return tuple(map(whole, value)) if isinstance(value, list | tuple) else (whole(value),)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {shown(value)}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a string, not {shown(value)}")
    return value


def _list(value: Any) -> list:
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list, not {shown(value)}")
    return list(value)


def shown(value: Any) -> str:
    """A value for a message, cut short: a number may have a thousand digits."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def label(name: str) -> str:
    """A key or a tensor's name for a message: one line, and not without end."""
    text = name if name.isprintable() else repr(name)[1:-1]
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}...{text[-20:]}"


def some(names: Collection[str]) -> str:
    """The first few of many names, for a message."""
    names = [f"'{label(name)}'" for name in names]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def check_bounds(config: Any, bounds: Mapping[str, tuple[float, float]]):
    """Refuses sizes that no model has before anything is allocated by them.

    Args:
      config: an object with the sizes as attributes; None is not checked.
      bounds: lowest and highest value by the attribute's name.

    Raises:
      ValueError: names the attribute, its range and its value.
    """
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name} must lie in {low} .. {high}, not {shown(value)}")


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Puts the file's name in front of what is wrong with one of its values."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        if str(error).startswith(where.split(" (")[0]):
            raise
        raise ValueError(f"{where}: {error}") from error
