"""A file that is written whole at the end, and tried at the start."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile

from one_line_errors import naming


def output_file(flag: str, name: str | None) -> pathlib.Path | None:
    """The file to write at the end, tried now so that a long run is not lost to a bad path; None for none.

    Raises:
      OSError, ValueError: it cannot be written; the message names the flag.
    """
    if name is None:
        return None
    path = pathlib.Path(name)
    if path.is_dir():
        raise ValueError(f"--{flag} {name} is a folder: name a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--{flag} {name}: the folder {path.parent} does not exist")
    with naming(flag, name):
        path = path.resolve()
        if _is_replaced(path):
            with tempfile.TemporaryFile(dir=path.parent):
                pass  # What is there stays until the new one is whole.
        elif not os.access(path, os.W_OK):
            raise PermissionError(f"{name}: not writable")
    return path


def write(flag: str, path: pathlib.Path, text: str):
    """Writes all of `text` or leaves what was there.

    Raises:
      OSError: the message names the flag.
    """
    with naming(flag, path):
        if not _is_replaced(path):
            path.write_text(text, encoding="utf-8")
            return
        whole = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            whole.write_text(text, encoding="utf-8")
            if path.exists():
                shutil.copymode(path, whole)
            os.replace(whole, path)
        finally:
            whole.unlink(missing_ok=True)


def _is_replaced(path: pathlib.Path) -> bool:
    """Whether a file is put in the place of `path`; a pipe or a device is written to as it is."""
    return path.is_file() or not path.exists()
