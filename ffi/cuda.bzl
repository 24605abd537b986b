"""nvcc_objects: CUDA sources compiled by the nvcc of @local_cuda."""

load("@bazel_skylib//rules:common_settings.bzl", "BuildSettingInfo")
load("@local_cuda//:info.bzl", "CUDA_BIN", "HAS_CUDA", "NVCC_VERSION")
load("@rules_cc//cc:find_cc_toolchain.bzl", "find_cc_toolchain", "use_cc_toolchain")

# Skips a target, rather than failing it, where no toolkit is.
REQUIRES_CUDA = [] if HAS_CUDA else ["@platforms//:incompatible"]

# The first nvcc that knows sm_120.
_BLACKWELL = [12, 8]

def _gencode(arch):
    kind, _, number = arch.partition("_")
    if kind not in ["sm", "compute"] or not number or not number[0].isdigit():
        fail("'%s' is no CUDA architecture: --//ffi:cuda_archs takes names such as sm_120 or compute_120" % arch)
    if int("".join([c for c in number.elems() if c.isdigit()])) >= 100 and NVCC_VERSION < _BLACKWELL:
        fail(("nvcc %d.%d is older than %d.%d, which %s needs: install a newer CUDA toolkit, or build for others " +
              "with --config=hopper or --//ffi:cuda_archs") % tuple(NVCC_VERSION + _BLACKWELL + [arch]))
    return "-gencode=arch=compute_%s,code=%s" % (number, arch)

def _nvcc_objects_impl(ctx):
    toolchain = find_cc_toolchain(ctx)
    gencode = [_gencode(arch) for arch in ctx.attr._archs[BuildSettingInfo].value]
    objects = []
    for src in ctx.files.srcs:
        out = ctx.actions.declare_file("%s/%s.o" % (ctx.label.name, src.basename))
        args = ctx.actions.args()
        args.add("-ccbin", toolchain.compiler_executable)
        args.add_all(["-c", "-x", "cu", "-std=c++17", "-O3", "-DNDEBUG", "-Xcompiler=-fPIC", "-I."])
        args.add_all(gencode)
        args.add(src)
        args.add("-o", out)
        ctx.actions.run(
            arguments = [args],
            executable = CUDA_BIN + "/nvcc",
            inputs = depset([src] + ctx.files.hdrs, transitive = [toolchain.all_files]),
            mnemonic = "Nvcc",
            outputs = [out],
            progress_message = "Compiling %{input} with nvcc",
            use_default_shell_env = True,
        )
        objects.append(out)
    return [DefaultInfo(files = depset(objects))]

nvcc_objects = rule(
    implementation = _nvcc_objects_impl,
    attrs = {
        "hdrs": attr.label_list(allow_files = [".h"]),
        "srcs": attr.label_list(allow_files = [".cu"]),
        "_archs": attr.label(default = "//ffi:cuda_archs"),
    },
    doc = "Position-independent objects, one a source, for the architectures of //ffi:cuda_archs.",
    toolchains = use_cc_toolchain(),
)
