"""Links, anchors and file names: of the pages, and of the code's comments that send a reader to a page."""

import importlib
import os
import pathlib
import re

import pages
import pytest

needs_all_files = pytest.mark.skipif(
    "TEST_SRCDIR" in os.environ, reason="Bazel lays out only the files that a target names"
)

_FOLDERS = ("ddtree_jax", "docs", "examples", "ffi", "models", "tests", ".ci")


def _check(page, link):
    """What is wrong with a link of a page, or None."""
    name, _, anchor = link.partition("#")
    if re.match(r"https?://", name):
        return None
    path = os.path.normpath(os.path.join(os.path.dirname(page), name)) if name else page
    if path.startswith("..") or not (pages.ROOT / path).exists():
        return f"{page}: no file {link}"
    if anchor and (path not in pages.PAGES or anchor not in pages.anchors(path)):
        return f"{page}: no heading {link}"
    return None


@needs_all_files
@pytest.mark.parametrize("page", pages.PAGES)
def test_links_lead_somewhere(page):
    assert [wrong for link in pages.links(page) if (wrong := _check(page, link))] == []


def test_the_check_sees_what_is_wrong():
    assert _check("docs/index.md", "kernels.md#rules-for-all-kernels") is None
    assert _check("docs/kernels/verify_attn.md", "../concepts.md#ties") is None
    assert "no heading" in _check("docs/index.md", "kernels.md#no-such-rules")
    assert "no file" in _check("docs/index.md", "no_such_page.md")
    assert "no file" in _check("README.md", "../README.md")


def test_headings_become_github_s_anchors():
    found = pages.anchors("docs/log/2026-11-30-step-and-machinery.md")
    assert "a-round-besides-its-models" in found
    assert "draft_topk" in pages.anchors("docs/log/2026-11-30-small-kernels.md")


def test_the_map_names_every_page():
    linked = {
        os.path.normpath(os.path.join("docs", link.partition("#")[0]))
        for link in pages.links("docs/index.md")
    }
    assert set(pages.PAGES) - linked == {"docs/index.md"}


def _files(page):
    """The code spans of a page that name a file or a folder of the project."""
    for span in pages.spans(page):
        name = span.removeprefix("./").rstrip("/")
        if re.fullmatch(r"[\w./*-]+", name) and name.split("/")[0] in _FOLDERS and "/" in span:
            yield name


@needs_all_files
@pytest.mark.parametrize("page", [page for page in pages.PAGES if not pages.is_log(page)])
def test_files_named_exist(page):
    assert [name for name in _files(page) if not any(pages.ROOT.glob(name))] == []


def test_files_are_looked_for():
    named = {name for page in pages.PAGES for name in _files(page)}
    assert {"ffi/ddtree.h", "docs/log", ".ci/run"} <= named


@pytest.mark.parametrize("page", [page for page in pages.PAGES if not pages.is_log(page)])
def test_python_names_exist(page):
    """Spans such as `ddtree_jax.models` or `ddtree_jax.long_experts.long_expert_mlp`."""
    for span in pages.spans(page):
        if not re.fullmatch(r"ddtree_jax(\.\w+)+", span):
            continue
        if span == "ddtree_jax.torch":  # imports torch, which need not be here
            assert (pages.ROOT / "ddtree_jax" / "torch.py").exists()
            continue
        try:
            importlib.import_module(span)
        except ModuleNotFoundError:
            module, _, name = span.rpartition(".")
            assert hasattr(importlib.import_module(module), name), f"{page}: no {span}"


def _sources():
    for folder in _FOLDERS:
        for path in (pages.ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".cc", ".cu", ".h", ".c", ".bzl", ".bazel", ".txt"):
                yield path
    yield from (pages.ROOT / ".ci" / name for name in ("run", "bazel"))


@needs_all_files
def test_comments_name_pages_that_exist():
    mentions = []
    for path in _sources():
        if path == pathlib.Path(__file__):
            continue
        for name in re.findall(r"\bdocs/[\w/.-]+\.md(?:#[\w-]+)?", path.read_text()):
            mentions.append(name)
            assert _check("README.md", name) is None, f"{path.relative_to(pages.ROOT)}: {name}"
    assert len(mentions) > 5


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_the_pages_that_all_read_are_short(page):
    assert len((pages.ROOT / page).read_text().splitlines()) <= 150
