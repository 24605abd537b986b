"""Runs Python files as programs, each in a process of its own: a copy of one that has already imported JAX.

To import JAX takes longer than most of what a test asks of a program. So one process imports it, starts nothing, and
forks for every program: the copy gets the program's arguments, environment, folder and streams, and ends as a process
that Python started on that file would end.

    done = programs.run(script, "--flag", env={"XLA_FLAGS": flags})

is subprocess.run([sys.executable, script, "--flag"], capture_output=True, text=True) with those variables besides the
test's own. What is read while JAX is imported (JAX_* variables) is as at the first call.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import pathlib
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback

from limits import HANG_SECONDS


def run(
    script, *arguments, env=(), cwd=None, paths=(), timeout=HANG_SECONDS
) -> subprocess.CompletedProcess:
    """Runs a file to its end.

    Args:
      script: its path.
      arguments: of the command line.
      env: variables besides the test's own.
      cwd: the folder to run in; the test's own by default.
      paths: folders to import from beside the file's own.
      timeout: seconds; the limit against hanging by default.

    Raises:
      subprocess.TimeoutExpired: it took longer, and was killed.
    """
    command = [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        streams = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        order = {
            "command": command,
            "env": {**os.environ, **dict(env)},
            "cwd": str(cwd or os.getcwd()),
            "paths": list(map(str, paths)),
            "streams": streams,
            "timeout": timeout,
        }
        server = _server()
        try:
            print(json.dumps(order), file=server.stdin, flush=True)
            code = json.loads(server.stdout.readline())
        except BaseException:
            # Its next answer would be taken for another program's.
            _server.cache_clear()
            server.kill()
            raise
        out, err = (pathlib.Path(stream).read_text() for stream in streams)
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout, out, err)
    return subprocess.CompletedProcess(command, code, out, err)


@functools.cache
def _server():
    server = subprocess.Popen(
        [sys.executable, __file__],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def _next_program():
    """Forks for each order that comes in; returns it in the copy, and None in the first process at the end."""
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            return order
        ending = os.pidfd_open(child)
        ended, _, _ = select.select([ending], [], [], order["timeout"])
        os.close(ending)
        if not ended:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps(code if ended else None), flush=True)
    return None


def _become(order):
    """This process goes on as one that Python started for the program, and ends."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(order["streams"], 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.argv = order["command"]
    sys.path[:1] = [os.path.dirname(sys.argv[0]), *order["paths"]]
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    # To take all modules apart, as Python does at its end, would copy the memory that is shared with the first process.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import ddtree_jax.models  # noqa: F401  with all that a program's start waits for

    gc.freeze()
    order = _next_program()
    if order is not None:
        _become(order)
