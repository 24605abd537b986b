"""libddtree.so as other programs find it: built without Python, its C and C++ tests, and what it exports."""

import pathlib
import re
import shutil
import subprocess

import pytest
from limits import HANG_SECONDS

import ddtree_jax

_ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("nm") is None, reason="needs a compiler")


def _run(*command, **kwargs):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=HANG_SECONDS, **kwargs
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def _declared():
    """Every function of the header, and the version that its symbols carry."""
    text = (_ROOT / "ffi" / "ddtree.h").read_text()
    code = re.sub(r"//.*", "", text)
    names = set(re.findall(r"^[\w *]+[ *](ddtree_\w+)\(", code, re.M))
    return names, re.search(r"DDTREE_ABI_VERSION = (\d+)", text)[1]


def _exported(library):
    """(symbol, version) of every defined dynamic symbol."""
    lines = _run("nm", "-D", "--defined-only", library).splitlines()
    return {tuple(line.split()[-1].partition("@@")[::2]) for line in lines}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    folder = tmp_path_factory.mktemp("build")
    options = ["-DDDTREE_PYTHON=OFF", "-DDDTREE_TESTS=ON", "-DDDTREE_CUDA=OFF"]
    _run("cmake", "-S", _ROOT / "ffi", "-B", folder, *options)
    _run("cmake", "--build", folder, "--parallel", "2")
    return folder


def test_its_own_tests_pass(build):
    text = _run("ctest", "--test-dir", build, "--output-on-failure", "--no-tests=error")
    assert "c_abi_test" in text and "fuzz_test" in text
    if pathlib.Path("/usr/include/gtest/gtest.h").exists():
        assert "golden_test" in text


def _assert_exports_the_header(library):
    names, version = _declared()
    assert {"ddtree_tree_build_cpu", "ddtree_tree_build_cuda", "ddtree_error_string"} <= names
    node = f"DDTREE_{version}"
    # The version itself is listed as a symbol.
    assert _exported(library) == {(name, node) for name in names} | {(node, "")}


def test_it_exports_what_the_header_declares(build):
    _assert_exports_the_header(build / "libddtree.so")


def test_the_installed_one_exports_the_same():
    (installed,) = _installed("libddtree.so")
    _assert_exports_the_header(installed)


def test_a_c_program_links_to_what_is_installed(tmp_path):
    (library,), (header,) = _installed("libddtree.so"), _installed("include/ddtree.h")
    source = (_ROOT / "tests" / "ffi" / "c_abi_test.c").read_text()
    assert '#include "ffi/ddtree.h"' in source
    (tmp_path / "main.c").write_text(source.replace("ffi/ddtree.h", "ddtree.h"))
    flags = ["-std=c99", "-Wall", "-Werror", "-pedantic", f"-I{header.parent}"]
    link = [f"-L{library.parent}", f"-Wl,-rpath,{library.parent}", "-lddtree", "-lm"]
    _run("cc", *flags, tmp_path / "main.c", "-o", tmp_path / "main", *link)
    assert _run(tmp_path / "main") == "all checks passed\n"


def test_extensions_export_their_module_alone():
    for extension in _installed("_cpu*.so") + _installed("_cuda*.so"):
        assert [name for name, _ in _exported(extension)] == [
            f"PyInit_{extension.name.split('.')[0]}"
        ]


def _installed(pattern):
    return [path for folder in ddtree_jax.__path__ for path in pathlib.Path(folder).glob(pattern)]
