"""Chat templates are programs: whatever one does ends as its text or as one line that names it."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
from limits import HANG_SECONDS

from ddtree_jax.models.text import template as module
from ddtree_jax.models.text.template import ChatTemplate


@pytest.fixture
def short_limits(monkeypatch):
    """A process with limits that a test reaches soon."""
    module._end()
    monkeypatch.setattr(module, "_CPU_SECONDS", 0.5)
    monkeypatch.setattr(module, "_MEMORY", 2**28)
    yield
    module._end()


def _fails(source, why, **variables):
    with pytest.raises(ValueError) as error:
        ChatTemplate(source, "folder/chat_template.jinja").render(variables)
    message = str(error.value)
    assert message.startswith("folder/chat_template.jinja: the chat template failed: ")
    assert message.isprintable() and len(message) < 400
    assert why in message
    # The next template is rendered as if nothing had been.
    assert ChatTemplate("{{ x }}!", "").render({"x": "é"}) == ["é!"]


def test_renderings_of_one_template():
    template = ChatTemplate(
        "{% for a in x %}\n{% if a == 'é' %}{% break %}{% endif %}{{ a.b }}\n{% endfor %}{{ y|tojson }}",
        "",
    )
    contexts = [
        {"x": [{"b": 1}, "é", {"b": 2}], "y": "é<\ud800"},
        {"x": [], "y": {"b": 1, "a": None}},
    ]
    assert template.render(*contexts) == ['1\n"é<\ud800"', '{"b": 1, "a": null}']
    assert template.variables == {"x", "y"}
    assert template.words == {"é", "b"}


def test_variables_are_those_that_the_caller_can_set():
    source = (
        "{% set own = 1 %}{{ own }}{% if a is defined %}{{ b.c }}{% endif %}{{ range(2) }}"
        "{% for one in d %}{{ one }}{{ loop.index }}{% endfor %}{% set e = e | default(1) %}"
        "{% macro m(f) %}{{ f }}{{ g }}{% endmacro %}{{ raise_exception }}"
    )
    assert ChatTemplate(source, "").variables == {"a", "b", "d", "e", "g"}


LONG = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ x ** (x ** x) }}",
    "{{ ('a' * 10 ** 6) | wordwrap(1) }}",
]


@pytest.mark.parametrize("source", LONG)
def test_a_template_without_an_end(short_limits, source):
    _fails(source, "it does not end within 0.5 seconds", x=9)


LARGE = [
    "{{ 'a' * 10 ** 9 }}",
    "{{ x * 10 ** 9 }}",
    "{{ '%999999999999d' % 1 }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ x | center(10 ** 10) }}",
    "{{ [x] * 10 ** 9 }}",
    "{{ x | tojson(indent=10 ** 10) }}",
]


@pytest.mark.parametrize("source", LARGE)
def test_a_template_that_takes_memory(short_limits, source):
    _fails(source, "takes too much memory", x="a" if "tojson" not in source else [1])


def test_a_long_text():
    source = "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}"
    _fails(source, "it writes more than 16777216 characters")
    (text,) = ChatTemplate("{{ 'é' * 2 ** 24 }}", "").render({})
    assert len(text) == 2**24 and set(text) == {"é"}


ERRORS = [
    ("{{ 1 / 0 }}", "division by zero"),
    ("{{ 'a'.encode('x') }}", "unknown encoding: x"),
    ("{{ '{x}'.format() }}", "'x'"),
    ("{{ '{:q}'.format(1) }}", "Unknown format code 'q'"),
    ("{{ none | dictsort }}", "'NoneType' object has no attribute 'items'"),
    ("{{ 5 | xmlattr }}", "'int' object has no attribute 'items'"),
    ("{{ 'x' | truncate(-5, leeway=1) }}", "expected length"),
    ("{{ cycler().next() }}", "at least one item"),
    ("{{ x.y.z }}", "'x' is undefined"),
    ("{% break %}", "'break' outside loop"),
    ("{% for %}", "(line 1)"),
    ("{{ 1 if", "(line 1)"),
    ("a\n{% include 'x' %}", "no loader"),
    ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
    ("{% if 1 %}" * 200 + "{% endif %}" * 200, "too many levels of indentation"),
    ("{{ " + "(" * 10**5 + ")" * 10**5 + " }}", "nests too deeply"),
    ("{{ " + "[" * 3000 + "]" * 3000 + " }}", "nests too deeply"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nests too deeply"),
    ("{{ raise_exception('a\nb\x1b[31m ' ~ 'c' * 10 ** 4) }}", "a b [31m cc"),
    ("{{ raise_exception(3) }}", "3"),
    ("{{ range(10 ** 9) | list }}", "Range too big"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
    ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "unsafe"),
]


@pytest.mark.parametrize("source, why", ERRORS)
def test_an_error_is_one_line(source, why):
    _fails(source, why, messages=[{"role": "user"}])


@pytest.mark.parametrize("value", [{1, 2}, b"x", object()])
def test_variables_are_json(value):
    with pytest.raises(ValueError, match="^where: its variables are no JSON"):
        ChatTemplate("{{ x }}", "where").render({"x": value})


def test_an_interrupt_leaves_no_answer_behind():
    timer = threading.Timer(
        0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
    )
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ChatTemplate(LONG[0], "").render({})
    timer.join()
    assert ChatTemplate("{{ x }}", "").render({"x": "next"}) == ["next"]


def test_a_process_that_was_ended_is_started_anew():
    assert ChatTemplate("{{ x }}", "").render({"x": 1}) == ["1"]
    module._process._popen.kill()
    module._process._popen.wait()
    assert ChatTemplate("{{ x }}", "").render({"x": 2}) == ["2"]


def test_a_process_that_gets_no_processor(monkeypatch):
    assert ChatTemplate("{{ x }}", "").render({"x": 1}) == ["1"]
    os.kill(module._process._popen.pid, signal.SIGSTOP)
    monkeypatch.setattr(module, "_WALL_SECONDS", 0.2)
    with pytest.raises(ValueError, match="no answer within 0.2 seconds"):
        ChatTemplate("{{ x }}", "").render({"x": "a" * 10**6})
    monkeypatch.undo()
    assert ChatTemplate("{{ x }}", "").render({"x": 2}) == ["2"]


def test_a_process_that_cannot_be_started(monkeypatch):
    module._end()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ValueError, match="^where: the process .* cannot be run .*nowhere"):
        ChatTemplate("{{ x }}", "where").render({"x": 1})


def test_threads_get_their_own_answers():
    got = {}

    def ask(i):
        got[i] = [ChatTemplate("{{ x }}", "").render({"x": (i, j)})[0] for j in range(20)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {i: [f"[{i}, {j}]" for j in range(20)] for i in range(8)}


PARENT = """
import importlib.util, os, signal, sys
spec = importlib.util.spec_from_file_location("template", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
template = module.ChatTemplate("{{ x }}", "")
assert template.render({"x": 1}) == ["1"]
child = module._process._popen.pid
if sys.argv[2] == "fork":
    mine = os.fork()
    if mine == 0:
        right = template.render({"x": 2}) == ["2"] and module._process._popen.pid != child
        sys.exit(0 if right else 1)
    assert template.render({"x": 3}) == ["3"] and module._process._popen.pid == child
    assert os.waitpid(mine, 0)[1] == 0
print(child, os.getsid(child) != os.getsid(0), flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["exit", "fork", "killed"])
def test_the_process_ends_with_its_parent(end):
    done = subprocess.run(
        [sys.executable, "-c", PARENT, module.__file__, end],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert done.returncode == (-signal.SIGKILL if end == "killed" else 0), done.stderr
    assert done.stderr == ""
    child, own_session = done.stdout.split()
    assert own_session == "True"
    deadline = time.monotonic() + 60
    while _lives(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _lives(pid: str) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
