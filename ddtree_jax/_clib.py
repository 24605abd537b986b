"""The C library `libddtree.so` by ctypes: its argument blocks (ffi/ddtree.h), and how it is found and called."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib

ABI_VERSION = 2

#: Values of ddtree_dtype.
F32, BF16, E4M3 = 0, 1, 2
PATHS = {"auto": 0, "portable": 1, "hopper": 2}  # ddtree_path
_NO_CUDA = 4

_POINTER, _BYTES, _SIZE = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
_INT, _FLOAT = ctypes.c_int32, ctypes.c_float
_WORKSPACE = [(_POINTER, "workspace"), (_BYTES, "workspace_bytes")]

#: The fields of each block after its version, in order.
_FIELDS = {
    "draft_topk": [
        (_POINTER, "logits log_probs token_ids"),
        *_WORKSPACE,
        (_SIZE, "rows vocab k"),
        (_INT, "dtype"),
    ],
    "tree_build": [
        (_POINTER, "log_probs token_ids root_tokens budgets"),
        (_POINTER, "tokens parents depths next_token next_sibling ancestors"),
        (_POINTER, "out_log_probs num_nodes"),
        *_WORKSPACE,
        (_SIZE, "batch depth k budget"),
        (_INT, "keep_spine"),
    ],
    "verify_attn": [
        (_POINTER, "query cache ancestors lengths num_nodes layer out"),
        *_WORKSPACE,
        (_SIZE, "layers batch rows nodes heads"),
        (_FLOAT, "scale"),
        (_INT, "dtype path cache_dtype"),
        (_POINTER, "cache_scale"),
    ],
    "append_latents": [
        (_POINTER, "cache latents lengths layer"),
        (_SIZE, "layers batch rows nodes width"),
        (_INT, "dtype cache_dtype"),
        (_POINTER, "cache_scale"),
    ],
    "tree_accept": [
        (_POINTER, "tokens next_token next_sibling num_nodes target_tokens stop_tokens max_new"),
        (_POINTER, "nodes out_tokens num_emitted finished"),
        (_SIZE, "batch max_nodes depth num_stops"),
    ],
    "commit_path": [
        (_POINTER, "cache nodes num_emitted lengths"),
        (_SIZE, "layers batch rows width path"),
        (_INT, "dtype"),
    ],
    "expert_mlp": [
        (_POINTER, "x expert_ids expert_weights gate_up gate_up_scale down down_scale partial out"),
        *_WORKSPACE,
        (_SIZE, "tokens top_k experts hidden inner"),
        (_INT, "dtype"),
    ],
}


def path_number(path: str) -> int:
    """The ddtree_path of this name.

    Raises:
      ValueError: there is none.
    """
    if not isinstance(path, str) or path not in PATHS:
        raise ValueError(f"path must be one of {', '.join(PATHS)}, not {path!r}")
    return PATHS[path]


def _block(name: str) -> type[ctypes.Structure]:
    fields = [("abi_version", ctypes.c_uint32)]
    fields += [(field, kind) for kind, names in _FIELDS[name] for field in names.split()]
    return type(f"ddtree_{name}_args", (ctypes.Structure,), {"_fields_": fields})


#: The argument block of each kernel.
BLOCKS = {name: _block(name) for name in _FIELDS}

#: How many sizes each workspace query takes, and whether a dtype follows them.
_WORKSPACES = {
    "draft_topk": (3, False),
    "tree_build": (4, False),
    "verify_attn": (4, True),
    "expert_mlp": (5, True),
}


def _path() -> str:
    """`$DDTREE_LIB`, or the library that was installed with the package.

    Raises:
      ImportError: neither is there.
    """
    named = os.environ.get("DDTREE_LIB")
    if named:
        return named
    package = __import__(__name__.rpartition(".")[0])
    for folder in package.__path__:
        path = pathlib.Path(folder, "libddtree.so")
        if path.exists():
            return str(path)
    raise ImportError(
        "libddtree.so is missing: install ddtree_jax (pip install .), or build the library alone "
        "(cmake -S ffi -B build -DDDTREE_PYTHON=OFF && cmake --build build) and set DDTREE_LIB to its path"
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The library, loaded once, with its functions declared.

    Raises:
      ImportError: it is missing, does not load, or speaks another version of the ABI.
    """
    path = _path()
    try:
        loaded = ctypes.CDLL(path)
        version = loaded.ddtree_version
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"{path} is no libddtree.so that loads here ({error}): build it again on this machine, or "
            "set DDTREE_LIB to another"
        ) from error
    version.restype = ctypes.c_uint32
    if version() != ABI_VERSION:
        raise ImportError(
            f"{path} speaks version {version()} of the C ABI and ddtree_jax {ABI_VERSION}: build both "
            "from one source"
        )
    loaded.ddtree_error_string.restype = ctypes.c_char_p
    loaded.ddtree_max_nodes.restype = ctypes.c_int64
    for name, block in BLOCKS.items():
        getattr(loaded, f"ddtree_{name}_cpu").argtypes = [ctypes.POINTER(block), _SIZE, _SIZE]
        getattr(loaded, f"ddtree_{name}_cuda").argtypes = [ctypes.POINTER(block), _POINTER]
    loaded.ddtree_expert_mlp_sum_cpu.argtypes = [ctypes.POINTER(BLOCKS["expert_mlp"])]
    for name, (sizes, dtype) in _WORKSPACES.items():
        query = getattr(loaded, f"ddtree_{name}_workspace")
        query.argtypes, query.restype = [_SIZE] * sizes + [_INT] * dtype, ctypes.c_size_t
    return loaded


def check(name: str, status: int) -> None:
    """Raises what a status means: RuntimeError, since the caller's mistakes were found before.

    Raises:
      RuntimeError: any status but DDTREE_OK.
    """
    if status == 0:
        return
    text = library().ddtree_error_string(status).decode()
    if status == _NO_CUDA:
        text += ": install it again with DDTREE_CUDA=ON where nvcc is on PATH, or use tensors on the CPU"
    raise RuntimeError(f"ddtree_{name}: {text}")
