"""The folder in which a second start finds the programs that the first compiled."""

from __future__ import annotations

import os
import tempfile
import warnings

from one_line_errors import note

_VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def keep(flag: str, folder: str | None) -> str | None:
    """Lets JAX keep programs in `folder`, or where the environment says; says so if that cannot be.

    Args:
      flag: that gave the folder.
      folder: empty for nowhere.

    Returns:
      Where new programs are kept; None for nowhere.
    """
    named = os.environ.get(_VARIABLE)
    name, where = (f"--{flag}", folder) if named is None else (_VARIABLE, named)
    if not where:
        return None
    where = os.path.expanduser(where)
    problem = None
    try:
        os.makedirs(where, exist_ok=True)
        with tempfile.TemporaryFile(dir=where):
            pass
    except OSError as error:
        problem = error.strerror

    import jax

    if problem is None:
        jax.config.update("jax_compilation_cache_dir", where)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        return where
    readable = os.path.isdir(where) and os.access(where, os.R_OK | os.X_OK)
    jax.config.update("jax_compilation_cache_dir", where if readable else None)
    # It would be one for each program.
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache")
    if readable:
        effect = "programs are taken from it, and new ones are lost at the end"
    else:
        effect = "programs are compiled anew at every start"
    note(f"{name} {where}: {problem}: {effect}")
    return None
