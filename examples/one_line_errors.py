"""How the programs end when something is wrong with what they were given."""

from __future__ import annotations

import contextlib
import os
import sys

_CLOSED_PIPE = 141  # as a shell says of a program that SIGPIPE ended


@contextlib.contextmanager
def one_line_errors(*also: type[Exception]):
    """Ends the program with one line, "error: ...", for a ValueError, an OSError, want of memory or one of `also`.

    Where nobody reads what it prints any more, it ends without a word and with status 141.
    """
    try:
        yield
        show("")
    except BrokenPipeError:
        _drop_output()
        sys.exit(_CLOSED_PIPE)
    except (ValueError, OSError, MemoryError, *also) as error:
        if isinstance(error, OSError) and error.strerror and error.filename is None:
            error = _of_output(error)  # A file would have a name.
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError):
            text = text or "out of memory"
        sys.exit(f"error: {text}")


@contextlib.contextmanager
def naming(flag: str, path):
    """Puts the flag that gave `path` in front of what the system says of a file.

    Raises:
      OSError: in place of one that is raised inside; a broken pipe's is no BrokenPipeError.
    """
    try:
        yield
    except OSError as error:
        raise OSError(f"--{flag} {_told(error, os.fspath(path))}") from error


def show(text: str):
    """Prints `text` as it is, at once.

    Raises:
      BrokenPipeError: nobody reads it.
      OSError: it cannot be written; says so of the standard output.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _of_output(error) from error


def note(text: str):
    """Prints one line for whoever watches."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def _told(error: OSError, path: str) -> str:
    """What went wrong, behind the path that was given and the file below it that is meant."""
    if error.strerror is None:
        text = str(error)
        return text if text.startswith(path) else f"{path}: {text}"
    file = str(error.filename)
    return f"{file if file.startswith(os.path.join(path, '')) else path}: {error.strerror}"


def _of_output(error: OSError) -> OSError:
    _drop_output()
    return OSError(f"the standard output: {error.strerror}")


def _drop_output():
    """Lets go of what could not be written, which would fail again at Python's end, with lines of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
