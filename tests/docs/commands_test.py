"""Every command and snippet of the pages is run, or checked as far as can be, or has its reason here.

- Programs: all their flags are read by the programs themselves, and those in `_RUN` are run too, with what it says.
- CMake: run in a folder of its own, without CUDA.
- Other tools: `_TOOLS` says what is looked at, and why they are not run.
- Python: all snippets in one process, a page after the other.

A block of another language, and a tool that `_TOOLS` does not have, fails.
"""

import functools
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
import tomllib

import pages
import programs
import pytest
import quick_compile
from limits import HANG_SECONDS

from ddtree_jax.models import demo

pytestmark = pytest.mark.skipif(
    "TEST_SRCDIR" in os.environ, reason="Bazel lays out only the files that a target names"
)

_PAGES = [page for page in pages.PAGES if not pages.is_log(page)]

#: Programs that are run, by the whole command: flags that come after the page's own. tests/examples runs the others.
_RUN = {
    "examples/generate.py": ("--max_new_tokens=8", "--compilation_cache="),
    "examples/draw_tree.py --budget 8 --rounds 2": ("--rounds=1",),
}

#: Tools that are not run: why, and whether the rest of such a command is right.
_TOOLS = {}


def _tool(name, why):
    """Adds a check to `_TOOLS`."""

    def add(check):
        _TOOLS[name] = (why, check)
        return check

    return add


@_tool("bazel", "not every machine has a Bazel; .ci/bazel runs one")
def _bazel(arguments):
    configs = re.findall(r"^\w+:(\w+) ", _text(".bazelrc"), re.M)
    for argument in arguments:
        if target := re.fullmatch(r"//(\w+):(\w+)", argument):
            assert f'"{target[2]}"' in _text(f"{target[1]}/BUILD.bazel"), argument
        elif config := re.fullmatch(r"--config=(\w+)", argument):
            assert config[1] in configs, argument
    return arguments[0] in ("build", "test", "run")


@_tool("pip", "it downloads, and compiles for minutes; .ci/run installs the package")
def _pip(arguments):
    extras = tomllib.loads(_text("pyproject.toml"))["project"]["optional-dependencies"]
    named = re.search(r"\[(.*)\]", arguments[-1])
    return arguments[0] == "install" and set(named[1].split(",") if named else ()) <= set(extras)


@_tool("pytest", "a test that runs the tests would not end")
def _pytest(arguments):
    assert "slow" not in arguments or "slow: " in _text("pyproject.toml")
    named = [one for one in arguments if one.startswith("tests")]
    return named and all((pages.ROOT / one).exists() for one in named)


@_tool("venv", "it makes the environment that this test runs in")
def _venv(arguments):
    return arguments == [".venv"]


@_tool("ruff", ".ci/run runs it on all files")
def _ruff(arguments):
    return arguments[0] in ("format", "check") and "ruff" in _text(".ci/run")


@_tool("apt-get", "it needs root")
def _apt_get(arguments):
    return arguments[0] in ("update", "install")


@_tool("export", "it changes the shell that it is typed into")
def _export(arguments):
    return re.fullmatch(r"\w+=.+", arguments[0])


def _text(name):
    return (pages.ROOT / name).read_text()


def _commands():
    """(where, words) of every command of the shell blocks; what is set before it counts as none of it."""
    for page in _PAGES:
        for block in pages.blocks(page):
            if block.language != "sh":
                continue
            text = block.text.replace("\\\n", " ")
            for offset, line in enumerate(text.splitlines()):
                words = shlex.split(line, comments=True)
                while words:
                    end = words.index("&&") if "&&" in words else len(words)
                    command, words = words[:end], words[end + 1 :]
                    while "=" in command[0]:
                        command = command[1:]
                    yield f"{page}:{block.line + offset}", command


def _program(words):
    """(program, arguments) of a command that runs one of examples/, or None."""
    if re.search(r"(^|/)python3?$", words[0]) and words[1].startswith("examples/"):
        return words[1], words[2:]
    return None


def _is_cmake(words):
    return words[0] in ("cmake", "ctest")


_COMMANDS = list(_commands())
_PROGRAMS = [(where, *found) for where, words in _COMMANDS if (found := _program(words))]
_OTHERS = [
    (where, words) for where, words in _COMMANDS if not _program(words) and not _is_cmake(words)
]


def test_there_is_no_other_kind_of_block():
    found = {block.language for page in _PAGES for block in pages.blocks(page)}
    assert found == {"sh", "python", "text"}
    assert len(_PROGRAMS) > 15 and len(_OTHERS) > 10


@pytest.mark.parametrize("where, words", _OTHERS, ids=[where for where, _ in _OTHERS])
def test_other_tools(where, words):
    words = words[1:] if words[0] == "sudo" else words
    if re.search(r"(^|/)python3?$", words[0]) and words[1] == "-m":
        words = words[2:]
    why, check = _TOOLS[os.path.basename(words[0])]
    assert why and check(words[1:]), f"{where}: {words}"


# Parses command lines by a program's own flags. Arguments: the program, a JSON list of lists of words.
_PARSER = """
import json, os, runpy, sys
from absl import flags

program, lines = sys.argv[1], json.loads(sys.argv[2])
sys.path.insert(0, os.path.dirname(program))
sys.argv = [program]
runpy.run_path(program, run_name="docs")
errors = []
for words in lines:
    try:
        flags.FLAGS.unparse_flags()
        left = flags.FLAGS([program, *words])[1:]
        errors.append(f"no flag: {left}" if left else None)
    except flags.Error as error:
        errors.append(str(error))
print(json.dumps({"flags": list(flags.FLAGS), "errors": errors}))
"""


@functools.cache
def _parsed(program, lines):
    """What a program says of command lines: the names of its flags, and an error or None for each line."""
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "parse.py"
        script.write_text(_PARSER)
        done = programs.run(script, pages.ROOT / program, json.dumps(lines))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _examples():
    return [str(path.relative_to(pages.ROOT)) for path in (pages.ROOT / "examples").rglob("*.py")]


def _check_flags(lines_by_program):
    for program, lines in lines_by_program.items():
        said = _parsed(program, tuple(tuple(words) for _, words in lines))
        wrong = [
            f"{where}: {error}"
            for (where, _), error in zip(lines, said["errors"], strict=True)
            if error
        ]
        assert wrong == [], program


def test_programs_take_the_flags_of_the_commands():
    lines = {}
    for where, program, words in _PROGRAMS:
        assert (pages.ROOT / program).exists(), f"{where}: no {program}"
        lines.setdefault(program, []).append((where, words))
    _check_flags(lines)


def test_an_unknown_flag_is_seen():
    lines = (("--no_such_flag=1",), ("--mode=no_such_mode",), ("--mode=ar",), ("word",))
    unknown, value, sound, word = _parsed("examples/generate.py", lines)["errors"]
    assert "no_such_flag" in unknown and "no_such_mode" in value and "word" in word
    assert sound is None


def test_programs_take_the_flags_of_the_prose():
    """Code spans such as `generate.py --compare`, and `--budget` alone. N stands for a number."""
    lines, alone = {}, []
    for page in _PAGES:
        for span in pages.spans(page):
            words = ["2" if word == "N" else word for word in shlex.split(span, posix=False)]
            named = [one for one in _examples() if one.endswith(f"/{words[0]}") or one == words[0]]
            if named and len(words) > 1:
                lines.setdefault(named[0], []).append((page, words[1:]))
            elif words[0].startswith("--") and page not in _ELSEWHERE:  # flags there are SGLang's
                alone.append((page, words))
    assert len(lines) > 2 and len(alone) > 20
    _check_flags(lines)
    known = {"help"}
    for program in _examples():
        if "__main__" in _text(program):
            known.update(_parsed(program, ())["flags"])
    for page, words in alone:
        for word in words:
            if word.startswith("--config="):
                assert _bazel(["build", word])
            elif word.startswith("--"):
                flag = word[2:].partition("=")[0]
                assert flag in known or flag.removeprefix("no") in known, f"{page}: {word}"


def test_tools_take_the_options_of_the_prose():
    """Code spans such as `cmake -S ffi -B build -DDDTREE_CUDA=ON` and `pip install '.[torch]'`."""
    seen = set()
    for page in _PAGES:
        for span in pages.spans(page):
            words = shlex.split(span, posix=False)
            if _is_cmake(words) and len(words) > 1:
                for name in re.findall(r"-D(\w+)=", span):
                    assert name in _text("ffi/CMakeLists.txt"), f"{page}: {span}"
                seen.add("cmake")
            elif words[0] in _TOOLS and len(words) > 1:
                assert _TOOLS[words[0]][1](shlex.split(span)[1:]), f"{page}: {span}"
                seen.add(words[0])
    assert {"cmake", "pip"} <= seen


def _run(program, *arguments):
    done = programs.run(
        pages.ROOT / program, *arguments, env={"XLA_FLAGS": quick_compile.XLA_FLAGS}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", _RUN)
def test_the_programs_run(command):
    program, *words = command.split()
    assert (program, words) in [(one, list(rest)) for _, one, rest in _PROGRAMS], "not in the pages"
    text = _run(program, *words, *_RUN[command])
    if "generate" in program:
        assert demo.prompts()[0].strip()[:40] in text and "tokens/s" in text
    else:
        assert "round 1: 9 nodes" in text and "#8" in text


def test_every_dry_run():
    """With the demo for the folders, all of whose context fits: DIR is the target's, then the drafter's."""
    dry = [(program, words) for _, program, words in _PROGRAMS if "--dry_run" in words]
    assert len(dry) >= 2
    for program, words in dry:
        folders = iter(_demo())
        text = _run(program, *(str(next(folders)) if word == "DIR" else word for word in words))
        assert "8 x 96" in text and "4,096" in text, text


def _demo():
    return pathlib.Path(demo.TARGET), pathlib.Path(demo.DRAFTER)


def test_make_checkpoint(tmp_path):
    """With the demo's config.json for the page's, and a folder of the test's for DIR."""
    (words,) = {
        tuple(words) for _, program, words in _PROGRAMS if program.endswith("make_checkpoint.py")
    }
    config, output = _demo()[0] / "config.json", tmp_path / "out"
    changed = {"--config=config.json": f"--config={config}", "--output=DIR": f"--output={output}"}
    assert set(changed) < set(words)
    _run("examples/make_checkpoint.py", *(changed.get(word, word) for word in words))
    config = json.loads((output / "config.json").read_text())
    assert config["text_config"]["num_hidden_layers"] == 2


def test_cmake(tmp_path):
    """Each block's build, without CUDA; the tests of the library are built and run by tests/ffi/c_library_test.py."""
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    texts = {
        tuple(block.text.splitlines())
        for page in _PAGES
        for block in pages.blocks(page)
        if block.language == "sh" and "cmake " in block.text
    }
    built = 0
    for lines in texts:
        if any("-DDDTREE_TESTS=ON" in line for line in lines):
            assert "ctest" in _text("tests/ffi/c_library_test.py")
            continue
        for line in lines:
            words = [str(tmp_path) if word == "build" else word for word in shlex.split(line)]
            if "-S" in words:
                words.append("-DDDTREE_CUDA=OFF")
            else:
                words += ["--parallel", "2"]
            done = subprocess.run(
                words, cwd=pages.ROOT, capture_output=True, text=True, timeout=HANG_SECONDS
            )
            assert done.returncode == 0, done.stdout + done.stderr
        library = tmp_path / "libddtree.so"
        assert library.exists() and library.stat().st_size > 50_000
        built += 1
    assert built == 1


#: Snippets that are run elsewhere, on stand-in tensors.
_ELSEWHERE = {"docs/sglang_integration.md": "tests/docs/sglang_integration_test.py"}

# Runs snippets, a page's in one namespace. Argument: a file of JSON, [[page, [[line, text], ...]], ...].
_SNIPPETS = """
import contextlib, io, json, sys
import jax

pages, cache = json.load(open(sys.argv[1])), sys.argv[2]
jax.config.update("jax_compilation_cache_dir", cache)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
printed = {}
for page, blocks in pages:
    names, out = {"__name__": page}, io.StringIO()
    with contextlib.redirect_stdout(out):
        for line, text in blocks:
            exec(compile("\\n" * (line - 1) + text, page, "exec"), names)
    printed[page] = out.getvalue()
print(json.dumps(printed))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the snippets of each page print. "DIR" and "DRAFTER_DIR" are the demo's folders."""
    folder, work = tmp_path_factory.mktemp("snippets"), []
    target, drafter = map(str, _demo())
    for page in _PAGES:
        found = [block for block in pages.blocks(page) if block.language == "python"]
        if page in _ELSEWHERE or not found:
            continue
        texts = [
            (
                block.line,
                block.text.replace('"DIR"', repr(target)).replace('"DRAFTER_DIR"', repr(drafter)),
            )
            for block in found
        ]
        work.append((page, texts))
    (folder / "pages.json").write_text(json.dumps(work))
    (folder / "snippets.py").write_text(_SNIPPETS)
    done = programs.run(
        folder / "snippets.py",
        folder / "pages.json",
        folder / "cache",
        env={"XLA_FLAGS": quick_compile.XLA_FLAGS},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_snippets_run(printed):
    assert set(printed) == {"README.md", "docs/usage.md", "docs/checkpoints.md"}
    text = printed["README.md"].removesuffix("\n")
    prompt = "def read_lines(path):\n"
    assert text.startswith(prompt) and len(text) > len(prompt) + 10
    # The same text from usage.md, whole and then as it streams.
    usage = printed["docs/usage.md"]
    assert usage.startswith(text + "\n") and text.removeprefix(prompt) in usage[len(text) :]
    # Two draws of one prompt, numbered, differ.
    first, second = usage.rsplit(prompt, 2)[1:]
    assert first != second


def test_what_runs_elsewhere_does():
    for page, test in _ELSEWHERE.items():
        assert pathlib.Path(page).name in _text(test)
