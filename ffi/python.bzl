"""Rules over the interpreter of @local_python: a laid-out package, programs, pytest files.

They are here, and not in a module, because the interpreter and everything installed beside it are the user's own.
"""

load("@local_cuda//:info.bzl", "CUDA_BIN")
load("@local_python//:info.bzl", "PYTHON")

_PackageInfo = provider(
    doc = "A Python package laid out for import.",
    fields = {"folder": "the folder for PYTHONPATH, in runfiles, below the main repository"},
)

# A pip install of the package, an editable one above all, is found before PYTHONPATH by a finder of its own. This one
# comes first, in child processes too.
_SITE = """\
import sys
from importlib.machinery import PathFinder


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "{name}":
            return PathFinder.find_spec(name, path, target)


sys.meta_path.insert(0, _Finder)
"""

_PRELUDE = """\
#!/usr/bin/env bash
set -euo pipefail
runfiles=${{TEST_SRCDIR:-${{RUNFILES_DIR:-$0.runfiles}}}}
runfiles=$(cd "$runfiles" && pwd)
root=$runfiles/{workspace}
export PYTHONPATH=$root/{folder}:$root/examples:$root/tests PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
if [ -n "{cuda}" ]; then export PATH=$PATH:{cuda}; fi
"""

_PROGRAM = _PRELUDE + """\
cd "${{BUILD_WORKING_DIRECTORY:-$PWD}}"
exec {python} "$root/{main}" "$@"
"""

_PYTEST = _PRELUDE + """\
cd "$root"
export HOME=${{TEST_TMPDIR:-$HOME}}
exec {python} -m pytest -q -p no:cacheprovider --rootdir="$root" --junitxml="${{XML_OUTPUT_FILE:-/dev/null}}" \\
  ${{TESTBRIDGE_TEST_ONLY:+-k "$TESTBRIDGE_TEST_ONLY"}} "$root/{main}" "$@"
"""

def _python_package_impl(ctx):
    folder = ctx.label.name + ".site"
    site = ctx.actions.declare_file(folder + "/sitecustomize.py")
    ctx.actions.write(site, _SITE.format(name = ctx.label.name))
    outs = [site]
    for target, prefix in ctx.attr.srcs.items():
        for file in target[DefaultInfo].files.to_list():
            inside = file.short_path.removeprefix(file.owner.package + "/")
            out = ctx.actions.declare_file("/".join([folder, prefix, inside]))
            ctx.actions.symlink(output = out, target_file = file)
            outs.append(out)
    path = ctx.label.package + "/" + folder if ctx.label.package else folder
    return [
        DefaultInfo(files = depset(outs), runfiles = ctx.runfiles(files = outs)),
        _PackageInfo(folder = path),
    ]

python_package = rule(
    implementation = _python_package_impl,
    attrs = {
        "srcs": attr.label_keyed_string_dict(
            allow_files = True,
            doc = "Files, and the folder below PYTHONPATH that takes the place of their Bazel package.",
        ),
    },
    doc = "Lays files out as the installed Python package NAME, in NAME.site.",
)

def _launcher(ctx, template, main):
    package = ctx.attr.package
    script = ctx.actions.declare_file(ctx.label.name + ".sh")
    ctx.actions.write(script, template.format(
        cuda = CUDA_BIN,
        folder = package[_PackageInfo].folder,
        main = main.short_path,
        python = PYTHON,
        workspace = ctx.workspace_name,
    ), is_executable = True)
    runfiles = ctx.runfiles(files = [main] + ctx.files.data)
    runfiles = runfiles.merge_all([target[DefaultInfo].default_runfiles for target in ctx.attr.data + [package]])
    return [DefaultInfo(executable = script, files = depset([script]), runfiles = runfiles)]

def _python_program_impl(ctx):
    return _launcher(ctx, _PROGRAM, ctx.file.main)

python_program = rule(
    implementation = _python_program_impl,
    attrs = {
        "data": attr.label_list(allow_files = True),
        "main": attr.label(allow_single_file = [".py"], mandatory = True),
        "package": attr.label(mandatory = True, providers = [_PackageInfo]),
    },
    doc = "A program for `bazel run`; it starts in the folder that bazel was called from.",
    executable = True,
)

def _pytest_test_impl(ctx):
    return _launcher(ctx, _PYTEST, ctx.file.src)

pytest_test = rule(
    implementation = _pytest_test_impl,
    attrs = {
        "data": attr.label_list(allow_files = True),
        "package": attr.label(mandatory = True, providers = [_PackageInfo]),
        "src": attr.label(allow_single_file = [".py"], mandatory = True),
    },
    doc = "One file of tests under pytest.",
    test = True,
)
