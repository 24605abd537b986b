"""Loading the extensions."""

import pytest

from ddtree_jax import _ffi


def test_newer_headers_are_refused_in_one_sentence():
    major, minor = _ffi._runtime_ffi_version()
    for built in ((major, minor + 1), (major + 1, 0)):
        with pytest.raises(ImportError) as caught:
            _ffi.check_ffi_version("_cpu", built, (major, minor))
        message = str(caught.value)
        assert f"built against XLA FFI API {built[0]}.{built[1]}" in message
        assert f"{major}.{minor} of the installed jaxlib" in message
        assert "rebuild" in message and "\n" not in message


def test_the_installed_extension_fits():
    built = tuple(_ffi.cpu.ffi_api_version)
    _ffi.check_ffi_version("_cpu", built, _ffi._runtime_ffi_version())
    _ffi.check_ffi_version("_cpu", (0, 1), (0, 3))


def test_every_kernel_is_registered():
    names = "append_latents commit_path draft_topk tree_accept tree_build verify_attn".split()
    assert {f"ddtree_{name}" for name in names} <= set(_ffi.cpu.registrations())


def test_workspace_needs_the_extension(monkeypatch):
    monkeypatch.setattr(_ffi, "cuda", None)
    with pytest.raises(NotImplementedError, match="DDTREE_CUDA=ON"):
        _ffi.workspace_bytes("draft_topk_workspace", 1, 2, 3)


def _import_that_raises(monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(_ffi.importlib, "import_module", fail)


def test_only_the_missing_extension_itself_means_that_it_was_not_built(monkeypatch):
    missing = ModuleNotFoundError("No module named x", name="ddtree_jax._cuda")
    _import_that_raises(monkeypatch, missing)
    assert _ffi._load("_cuda") is None
    other = ModuleNotFoundError("No module named 'other'", name="other")
    _import_that_raises(monkeypatch, other)
    with pytest.raises(ImportError, match="_cuda does not load .No module named 'other'."):
        _ffi._load("_cuda")


@pytest.mark.parametrize("name, remedy", [("_cpu", "rebuilt"), ("_cuda", "DDTREE_CUDA=OFF")])
@pytest.mark.parametrize(
    "error",
    [
        ImportError("/x.so: undefined symbol:\n  _ZN3foo"),
        OSError("libcuda.so.1: driver too old"),
        RuntimeError("driver version is insufficient"),
    ],
)
def test_an_extension_that_does_not_load_is_one_line(monkeypatch, error, name, remedy):
    _import_that_raises(monkeypatch, error)
    with pytest.raises(ImportError) as caught:
        _ffi._load(name)
    message = str(caught.value)
    assert message.startswith(f"ddtree_jax.{name} does not load (") and remedy in message
    assert str(error).split()[-1] in message and "\n" not in message
