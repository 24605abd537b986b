"""How every program starts and ends: flags, --help, errors of one line, and statuses.

0: done, or --help. 1: an error. 130: Ctrl-C. 141: whoever read the output has gone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import interrupt
from absl import app, flags, logging
from one_line_errors import note, one_line_errors, show


def run(main: Callable[[], None], *, hint: str = "every flag starts with --"):
    """Runs `main` with the command line's flags and ends the process.

    Args:
      main: what to do; a ValueError, TypeError, OSError or MemoryError of it becomes one line.
      hint: the way round an argument that is no flag.
    """
    interrupt.watch()
    sys.stdout.reconfigure(errors="replace")
    warnings.showwarning = _note
    with one_line_errors(TypeError):
        app.run(lambda argv: _main(argv, main, hint), flags_parser=_parse)


def _main(argv: list[str], main: Callable[[], None], hint: str):
    if len(argv) > 1:
        raise ValueError(f"unexpected argument {argv[1]!r}: {hint}")
    logging.set_verbosity(logging.WARNING)  # JAX tells at INFO which backends this machine lacks.
    with one_line_errors(TypeError):
        main()


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        guess = str(error).partition(". ")[2].replace(" ?", "?")
        text = f"error: --{error.flagname}: no such flag. {guess}"
        raise SystemExit(text.rstrip(". ")) from error
    except flags.Error as error:
        raise SystemExit("error: " + str(error).removeprefix("flag ")) from error
    except SystemExit:
        # absl has printed help, after which it ends with 1.
        show("")
        raise SystemExit(0) from None


_seen = set()


def _note(message, category, filename, lineno, file=None, line=None):
    """A library's warning as one line, the first that a place of it gives."""
    if (filename, lineno) not in _seen:
        _seen.add((filename, lineno))
        note(" ".join(str(message).split()))
