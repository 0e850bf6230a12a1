"""Ctrl-C and SIGTERM that nobody can swallow.

Both reach a flow as an exception that their handler raises wherever the main thread stands. If that is a destructor
which the garbage collector runs, Python prints the exception and goes on. So the handler also remembers, and a stage
that begins or reports progress raises once more.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


class Interrupted(BaseException):
    """Told to a thread beside the main one. An event loop would not survive a KeyboardInterrupt."""


class Interruption:
    """Whether somebody asked this process to stop."""

    def __init__(self) -> None:
        self._again: Callable[[], Any] | None = None

    def check(self) -> None:
        """Raise what the first signal raised, or Interrupted beside the main thread; nothing without a signal."""
        if self._again is None:
            return
        if threading.current_thread() is not threading.main_thread():
            raise Interrupted
        self._again()

    def remembering(self, handler: Handler) -> Handler:
        """The handler, which then also remembers that it was called."""

        def handle(number: int, frame: FrameType | None) -> None:
            self._again = lambda: handler(number, None)
            handler(number, frame)

        return handle


@contextmanager
def interruptible() -> Iterator[Interruption]:
    """While the block runs in the main thread, SIGINT and SIGTERM are remembered."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if callable(handler):  # neither ignored nor left to the kernel
            signal.signal(number, interruption.remembering(handler))
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
