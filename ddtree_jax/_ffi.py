"""Loads the native extensions and registers their handlers with XLA; the only file that knows both."""

from __future__ import annotations

import importlib
import pathlib
import re
from types import ModuleType

import jax

_PLATFORMS = {"_cpu": "cpu", "_cuda": "CUDA"}


def _runtime_ffi_version() -> tuple[int, int]:
    """(major, minor) of the FFI API that the installed jaxlib speaks, read from its own header."""
    header = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return int(numbers["MAJOR"]), int(numbers["MINOR"])


def check_ffi_version(name: str, built: tuple[int, int], runtime: tuple[int, int]) -> None:
    """Refuses an extension built against newer headers: registering it would disable XLA's backend.

    Raises:
      ImportError: in one sentence, with the remedy.
    """
    if built[0] != runtime[0] or built > runtime:
        raise ImportError(
            f"ddtree_jax.{name} was built against XLA FFI API {built[0]}.{built[1]}, which is newer "
            f"than the {runtime[0]}.{runtime[1]} of the installed jaxlib: rebuild ddtree_jax against "
            "jaxlib 0.10.2, or install a newer jaxlib"
        )


def _load(name: str) -> ModuleType | None:
    """The extension, with its handlers registered; None where it was not built.

    Raises:
      ImportError: it is there and does not load, in one sentence.
    """
    full_name = f"ddtree_jax.{name}"
    try:
        module = importlib.import_module(full_name)
        built = tuple(module.ffi_api_version)
        handlers = module.registrations()
    except ModuleNotFoundError as error:
        if error.name == full_name:
            return None
        raise _unloadable(name, error) from error
    except Exception as error:  # An undefined symbol, a driver too old: whatever a loader can say.
        raise _unloadable(name, error) from error
    check_ffi_version(name, built, _runtime_ffi_version())
    for target, handler in handlers.items():
        jax.ffi.register_ffi_target(target, handler, platform=_PLATFORMS[name])
    return module


def _unloadable(name: str, error: Exception) -> ImportError:
    remedy = "install ddtree_jax again so that it is rebuilt on this machine"
    if name == "_cuda":
        remedy += ", with DDTREE_CUDA=OFF to do without it"
    return ImportError(
        f"ddtree_jax.{name} does not load ({' '.join(str(error).split())}): {remedy}"
    )


cpu = _load("_cpu")
if cpu is None:
    raise ImportError(
        "ddtree_jax's extension _cpu is missing: install the package (pip install .), and start Python "
        "outside of its source folder unless the install is editable"
    )
#: The CUDA extension, or None where it was not built.
cuda = _load("_cuda")


def workspace_bytes(function: str, *sizes: int) -> int:
    """Bytes of scratch that a CUDA kernel needs, by the extension's function of that name.

    Raises:
      NotImplementedError: this build has no CUDA extension.
    """
    if cuda is None:
        raise NotImplementedError(
            "this build of ddtree_jax has no CUDA kernels: install it again where nvcc is on PATH, "
            "with DDTREE_CUDA=ON"
        )
    return getattr(cuda, function)(*sizes)
