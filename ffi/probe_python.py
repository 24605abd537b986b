"""Prints, as JSON, what local_python.bzl needs to know of the interpreter that runs this; any Python 3 can."""

import importlib.util
import json
import os
import sys
import sysconfig


def _folder(module):
    spec = importlib.util.find_spec(module)
    return (
        list(spec.submodule_search_locations)[0] if spec and spec.submodule_search_locations else ""
    )


def _main():
    found = {module: _folder(module) for module in ("jax", "jaxlib", "nanobind")}
    found["version"] = list(sys.version_info[:2])
    found["include"] = sysconfig.get_paths()["include"]
    found["suffix"] = sysconfig.get_config_var("EXT_SUFFIX")
    print(json.dumps(found))


# PYTHONPATH and the folder of this file say nothing of the environment.
sys.path = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
_main()
