"""Ctrl-C and SIGTERM that nobody can swallow.

Both reach a flow as an exception that their handler raises wherever the main thread stands. If that is a destructor
which the garbage collector runs, Python prints the exception and goes on. So a stage that begins or reports progress
looks whether a signal came, and raises once more.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Told to a thread beside the main one. An event loop would not survive a KeyboardInterrupt."""


class Interruption:
    """Whether somebody asked this process to stop; `arrived` is a pipe of signal numbers."""

    def __init__(self, arrived: int | None = None) -> None:
        self._arrived, self._number = arrived, 0

    def check(self) -> None:
        """Raise what the signal raised, or Interrupted beside the main thread; nothing without a signal."""
        if not self._asked_to_stop():
            return
        if threading.current_thread() is not threading.main_thread():
            raise Interrupted
        handler = signal.getsignal(self._number)
        if callable(handler):
            handler(self._number, None)

    def _asked_to_stop(self) -> bool:
        try:
            numbers = b"" if self._arrived is None else os.read(self._arrived, 1024)
        except BlockingIOError:
            numbers = b""
        self._number = next((number for number in numbers if number in STOPS), self._number)
        return bool(self._number)


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """While the block runs in the main thread, SIGINT and SIGTERM are noted.

    Their handlers stay: Prefect takes a cancelled run for crashed if SIGTERM's is not its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Interruption()
        return
    arrived, writing = os.pipe()
    os.set_blocking(arrived, False)
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield Interruption(arrived)
    finally:
        signal.set_wakeup_fd(before)
        os.close(writing)
        os.close(arrived)
