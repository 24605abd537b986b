"""Ctrl-C ends a program at once, in the midst of an import or a compilation too, with one line and status 130.

Python hands a signal to the main thread alone, and only between two of its instructions: XLA compiles for minutes
within one. The C part of its handler writes to a pipe at once, and a thread that waits there ends the process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

_STATUS = 130
_finish: list[Callable[[], str]] = [lambda: "interrupted"]


def at_interrupt(finish: Callable[[], str]):
    """Sets what is called at Ctrl-C, in a thread of its own beside all that runs; it returns the line to print."""
    _finish[0] = finish


def watch():
    """Ends the process at Ctrl-C from now on; once more without waiting for what `at_interrupt` was given."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # It is ignored, as of a program that a shell has put into the background, or watched already.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


def _watch(reader):
    os.read(reader, 1)
    threading.Thread(target=_end, daemon=True).start()
    os.read(reader, 1)
    os._exit(_STATUS)


def _end():
    try:
        line = _finish[0]()
    except OSError as error:
        line = f"interrupted; {error}"
    # Neither a lock that the main thread holds nor a stream that it closes.
    start = "\n" if os.isatty(2) else ""
    try:
        os.write(2, f"{start}{line}\n".encode(errors="replace"))
    finally:
        os._exit(_STATUS)
