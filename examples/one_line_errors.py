"""How the programs end when something is wrong with what they were given."""

from __future__ import annotations

import contextlib
import sys


@contextlib.contextmanager
def one_line_errors(*also: type[Exception]):
    """Ends the program with one line, "error: ...", for a ValueError, an OSError or one of `also`."""
    try:
        yield
    except (ValueError, OSError, *also) as error:
        sys.exit("error: " + " ".join(str(error).split()))
