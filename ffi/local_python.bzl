"""@local_python: the Python to build for, with nanobind and the XLA FFI headers of its jaxlib.

PYTHON_BIN names the interpreter; without it the active virtual environment's is taken, then the python3 on PATH.
DDTREE_XLA_INCLUDE names another folder of XLA FFI headers, such as an older jaxlib's, so that what is built runs there.
"""

_LIBRARIES = """\
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(["python/**/*.h"]),
    includes = ["python"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h", "nanobind/ext/robin_map/include/**/*.h"]),
    textual_hdrs = glob(["nanobind/src/*.cpp", "nanobind/src/*.h"], exclude = ["nanobind/src/nb_combined.cpp"]),
    copts = ["-O3", "-fvisibility=hidden", "-fno-strict-aliasing", "-w"],
    defines = ["NB_COMPACT_ASSERTIONS", "NB_DOMAIN=ddtree_jax"],
    includes = ["nanobind/include", "nanobind/ext/robin_map/include"],
    linkstatic = True,
    deps = [":headers"],
)

cc_library(
    name = "xla_ffi",
    hdrs = glob(["xla/xla/ffi/api/*.h"]),
    includes = ["xla"],
)
"""

_REMEDY = "or set PYTHON_BIN to the python of an environment that has jax and nanobind"

def _find_python(rctx):
    """The interpreter's path."""
    if rctx.getenv("PYTHON_BIN"):
        return rctx.getenv("PYTHON_BIN")
    if rctx.getenv("VIRTUAL_ENV"):
        return rctx.getenv("VIRTUAL_ENV") + "/bin/python"
    python = rctx.which("python3")
    if not python:
        fail("no python3 is on PATH: set PYTHON_BIN to the python of an environment that has jax and nanobind")
    return str(python)

def _probe(rctx, python):
    """What probe_python.py prints of the interpreter."""
    if not rctx.path(python).exists:
        fail("there is no %s: set PYTHON_BIN to the python of an environment that has jax and nanobind" % python)
    done = rctx.execute([python, rctx.path(Label("//ffi:probe_python.py"))])
    if done.return_code != 0 or not done.stdout.startswith("{"):
        fail("%s does not run: %s" % (python, " ".join(done.stderr.split())))
    found = json.decode(done.stdout)
    if found["version"] < [3, 11]:
        fail("%s is Python %d.%d, and ddtree_jax needs 3.11 or newer: set PYTHON_BIN to a newer one" %
             tuple([python] + found["version"]))
    for module in ["jax", "jaxlib", "nanobind"]:
        if not found[module]:
            fail("%s has no %s: install it there (%s -m pip install jax nanobind), %s" %
                 (python, module, python, _REMEDY))
    if not rctx.path(found["include"]).get_child("Python.h").exists:
        fail("%s has no Python.h in %s: install Python's development files, %s" % (python, found["include"], _REMEDY))
    return found

def _ffi_version(rctx, folder):
    """[major, minor] of the XLA FFI headers in a folder."""
    header = rctx.path(folder).get_child("xla", "ffi", "api", "c_api.h")
    if not header.exists:
        fail("%s has no XLA FFI headers (xla/ffi/api/c_api.h): install jaxlib 0.10.2 or newer, %s" % (folder, _REMEDY))
    version = {}
    for line in rctx.read(header).split("\n"):
        words = [word for word in line.split(" ") if word]
        if len(words) == 3 and words[0] == "#define" and words[1].startswith("XLA_FFI_API_M") and words[2].isdigit():
            version[words[1]] = int(words[2])
    return [version["XLA_FFI_API_MAJOR"], version["XLA_FFI_API_MINOR"]]

def _local_python_repo_impl(rctx):
    python = _find_python(rctx)
    found = _probe(rctx, python)
    runtime = found["jaxlib"] + "/include"
    headers = rctx.getenv("DDTREE_XLA_INCLUDE") or runtime
    built, runs = _ffi_version(rctx, headers), _ffi_version(rctx, runtime)
    if built[0] != runs[0] or built > runs:
        fail(("the XLA FFI headers in %s are of API %d.%d, newer than the %d.%d of %s's jaxlib, which would refuse " +
              "what is built: unset DDTREE_XLA_INCLUDE, or install a newer jaxlib") %
             tuple([headers] + built + runs + [python]))
    rctx.symlink(found["include"], "python")
    rctx.symlink(found["nanobind"], "nanobind")
    rctx.symlink(headers, "xla")
    rctx.file("BUILD.bazel", _LIBRARIES)
    rctx.file("info.bzl", "PYTHON = %r\nEXTENSION_SUFFIX = %r\n" % (python, found["suffix"]))

_local_python_repo = repository_rule(
    implementation = _local_python_repo_impl,
    configure = True,
    doc = "Finds the interpreter and writes its path to info.bzl.",
    environ = ["DDTREE_XLA_INCLUDE", "PATH", "PYTHON_BIN", "VIRTUAL_ENV"],
    local = True,
)

def _local_python_impl(_mctx):
    _local_python_repo(name = "local_python")

local_python = module_extension(implementation = _local_python_impl)
