"""A checkpoint's chat template, rendered in a process of its own.

A template is a program that came with somebody's weights. Jinja's sandbox keeps it from Python's
insides, and nothing else: `9**9**9`, `"a" * 10**9` and a width in a format are single operations that
no counter between Jinja's nodes, no signal handler and no thread can end. The operating system can:
the process has a limit of memory and of processor time, and dies of it alone. It is started without
a fork of this program's threads, speaks lines of JSON through pipes, opens nothing, is in a session of
its own, so that the terminal's signals pass it by, and ends when its input closes, which the end of
this program does however it comes. It stays for the renderings that follow: the first takes about
0.2 s, later ones about a millisecond.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import jinja2
import markupsafe

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "render_process.py")
_CPU_SECONDS = 5.0
_MEMORY = 2**30
_MOST_CHARACTERS = 2**24
# For a process that gets no processor at all, or a machine that gives it very little.
_WALL_SECONDS = 120.0


class ChatTemplate:
    """A jinja template.

    Args:
      source: its text.
      where: the file that holds it, for messages.
    """

    def __init__(self, source: str, where: str):
        self.source = source
        self.where = where
        self._variables: frozenset[str] | None = None
        self._words: frozenset[str] = frozenset()

    @property
    def variables(self) -> frozenset[str]:
        """Names of the variables that it reads."""
        if self._variables is None:
            self.render()
        return self._variables

    @property
    def words(self) -> frozenset[str]:
        """Strings and attributes that it spells: the roles, keys and values that it can test for."""
        if self._variables is None:
            self.render()
        return self._words

    def render(self, *contexts: Mapping[str, Any]) -> list[str]:
        """Its text under each of `contexts`, which hold JSON's types alone.

        Raises:
          ValueError: the template failed, or went beyond a limit; the message names its file.
        """
        request = {"source": self.source, "contexts": contexts}
        try:
            line = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"{self.where}: its variables are no JSON ({error})") from error
        try:
            answer = _ask(line + b"\n")
        except OSError as error:
            raise ValueError(
                f"{self.where}: the process that renders the chat template cannot be run ({error})"
            ) from error
        if "error" in answer:
            raise ValueError(f"{self.where}: the chat template failed: {answer['error']}")
        self._variables = frozenset(answer["variables"])
        self._words = frozenset(answer["words"])
        return answer["texts"]


class _Process:
    """A running `render_process.py`."""

    def __init__(self):
        keep = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        keep.pop("LD_PRELOAD", None)  # a sanitizer's shadow memory does not fit under the limit
        libraries = {os.path.dirname(os.path.dirname(m.__file__)) for m in (jinja2, markupsafe)}
        limits = map(str, (_CPU_SECONDS, _MEMORY, _MOST_CHARACTERS))
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-S", "-B", _PROGRAM, *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            env={**keep, "PYTHONPATH": os.pathsep.join(sorted(libraries))},
        )
        os.set_blocking(self._popen.stdin.fileno(), False)

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def ask(self, line: bytes) -> bytes | None:
        """The answer's line, or None where the process died of the question.

        Raises:
          TimeoutError: neither within `_WALL_SECONDS`.
        """
        deadline = time.monotonic() + _WALL_SECONDS
        left, answer = memoryview(line), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._popen.stdin, selectors.EVENT_WRITE)
            selector.register(self._popen.stdout, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError
                for key, _ in ready:
                    if key.fileobj is self._popen.stdout:
                        piece = os.read(key.fd, 2**20)
                        if not piece:
                            return None
                        answer += piece
                        continue
                    try:
                        left = left[os.write(key.fd, left) :]
                    except BrokenPipeError:
                        left = left[len(left) :]
                    if not left:
                        selector.unregister(self._popen.stdin)
        return bytes(answer)

    def status(self) -> int:
        """Its exit status, when it has died of a question."""
        return self._popen.wait(_WALL_SECONDS)

    def end(self):
        """Ends it, whatever it does."""
        self._popen.stdin.close()
        self._popen.kill()
        self._popen.wait()
        self._popen.stdout.close()

    def leave(self):
        """Lets go of it in a fork of the process that it belongs to."""
        self._popen.stdin.close()
        self._popen.stdout.close()
        self._popen.returncode = 0  # it is not this process's to wait for


_lock = threading.Lock()
_process: _Process | None = None


def _ask(line: bytes) -> dict[str, Any]:
    global _process
    with _lock:
        if _process is not None and not _process.is_alive():
            _end()
        if _process is None:
            _process = _Process()
        answer, status = None, None
        try:
            answer = _process.ask(line)
            if answer is None:
                status = _process.status()
        except (TimeoutError, subprocess.TimeoutExpired):
            return {"error": f"no answer within {_WALL_SECONDS:g} seconds"}
        finally:
            if answer is None:  # interrupted, its answer would be the next question's
                _end()
    if answer is not None:
        return json.loads(answer.decode("utf-8", "surrogatepass"))
    if status == -signal.SIGPROF:
        return {"error": f"it does not end within {_CPU_SECONDS:g} seconds"}
    return {"error": f"the process that renders it ended with status {status}"}


@atexit.register
def _end():
    global _process
    if _process is not None:
        _process.end()
        _process = None


def _forget():
    """A fork starts a process of its own: two would read each other's answers."""
    global _lock, _process
    _lock = threading.Lock()
    if _process is not None:
        _process.leave()
        _process = None


os.register_at_fork(after_in_child=_forget)
