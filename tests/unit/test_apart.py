"""Event loops beside the main thread: results, errors, context, and signals that nobody swallows."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tasks.apart import run_apart

CONTEXT = contextvars.ContextVar("CONTEXT", default="none")


class Stopped(BaseException):
    """As Prefect's TerminationSignal: no Exception."""


@pytest.fixture
def alarm() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_result_error_and_context_come_through() -> None:
    async def told() -> str:
        return CONTEXT.get()

    async def broken() -> None:
        raise ValueError("no")

    CONTEXT.set("of the caller")
    assert run_apart(told()) == "of the caller"
    with pytest.raises(ValueError, match="no"):
        run_apart(broken())


@pytest.mark.usefixtures("alarm")
def test_a_signal_during_callbacks_stops_the_work_and_is_not_swallowed() -> None:
    ended = threading.Event()

    async def busy() -> None:
        loop = asyncio.get_running_loop()

        def callback() -> None:  # an event loop passes on what this raises to its log only
            time.sleep(0.01)
            loop.call_soon(callback)

        loop.call_soon(callback)
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(Stopped):
        run_apart(busy())
    assert ended.is_set()
