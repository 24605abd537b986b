"""@local_cuda: this machine's CUDA toolkit, or an empty stand-in where there is none.

CUDA_PATH names the toolkit; without it the nvcc on PATH is taken, then /usr/local/cuda.
DDTREE_CUDA is AUTO (use a toolkit that is found), ON (fail without one) or OFF.
"""

_LIBRARY = """\
load("@rules_cc//cc:defs.bzl", "cc_library")

cc_library(
    name = "cudart",
    srcs = ["lib/libcudart_static.a"],
    hdrs = glob(["include/**"]),
    includes = ["include"],
    linkopts = ["-ldl", "-lpthread", "-lrt"],
    visibility = ["//visibility:public"],
)
"""

def _find_home(rctx):
    """The folder of the toolkit, or None."""
    homes = []
    if rctx.getenv("CUDA_PATH"):
        homes.append(rctx.getenv("CUDA_PATH"))
    else:
        nvcc = rctx.which("nvcc")
        if nvcc:
            homes.append(str(nvcc.realpath.dirname.dirname))

            # Where the one on PATH is a script that starts another.
            for line in rctx.execute([nvcc, "--dryrun", "-x", "cu", "/dev/null"]).stderr.split("\n"):
                if line.startswith("#$ TOP="):
                    homes.append(line.removeprefix("#$ TOP="))
        homes.append("/usr/local/cuda")
    for home in [rctx.path(home) for home in homes]:
        if home.get_child("bin/nvcc").exists and home.get_child("include/cuda_runtime.h").exists:
            return home
    return None

def _nvcc_version(rctx, nvcc):
    """[major, minor] of nvcc."""
    done = rctx.execute([nvcc, "--version"])
    for word in done.stdout.replace("\n", " ").split(" "):
        parts = word.removeprefix("V").split(".")
        if word.startswith("V") and len(parts) >= 2 and parts[0].isdigit() and parts[1].isdigit():
            return [int(parts[0]), int(parts[1])]
    fail("%s --version does not tell its version: set CUDA_PATH to a CUDA toolkit, or build with --config=cpu" % nvcc)

def _local_cuda_repo_impl(rctx):
    wanted = rctx.getenv("DDTREE_CUDA") or "AUTO"
    if wanted not in ["AUTO", "ON", "OFF"]:
        fail("DDTREE_CUDA is '%s': set it to AUTO, ON or OFF" % wanted)
    home = _find_home(rctx) if wanted != "OFF" else None
    if wanted == "ON" and not home:
        fail("no nvcc was found: put it on PATH, or set CUDA_PATH to a CUDA toolkit, or build with --config=cpu")
    version = [0, 0]
    if home:
        version = _nvcc_version(rctx, home.get_child("bin/nvcc"))
        libraries = [home.get_child(name) for name in ["lib64", "lib"]]
        libraries = [folder for folder in libraries if folder.get_child("libcudart_static.a").exists]
        if not libraries:
            fail("%s has no libcudart_static.a: install the whole CUDA toolkit, or build with --config=cpu" % home)
        rctx.symlink(home.get_child("include"), "include")
        rctx.symlink(libraries[0], "lib")
    rctx.file("BUILD.bazel", _LIBRARY if home else "")
    rctx.file("info.bzl", "HAS_CUDA = %r\nCUDA_BIN = %r\nNVCC_VERSION = %r\n" % (
        home != None,
        str(home.get_child("bin")) if home else "",
        version,
    ))

_local_cuda_repo = repository_rule(
    implementation = _local_cuda_repo_impl,
    configure = True,
    doc = "Finds the toolkit and writes its place and version to info.bzl.",
    environ = ["CUDA_PATH", "DDTREE_CUDA", "PATH"],
    local = True,
)

def _local_cuda_impl(_mctx):
    _local_cuda_repo(name = "local_cuda")

local_cuda = module_extension(implementation = _local_cuda_impl)
