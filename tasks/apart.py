"""Coroutines for synchronous stages, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from threading import Event, Thread
from typing import Any, TypeVar

T = TypeVar("T")


def run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it to its end and return its result; what a signal raises here meanwhile cancels it and goes on.

    Prefect turns SIGTERM into an exception in the main thread. An event loop that ran there would hand it to
    whatever callback was at work, which swallows it: the flow would go on as if nobody had stopped it.
    """
    loop = asyncio.new_event_loop()
    task, done, ended = loop.create_task(coroutine), Future[T](), Event()

    def work() -> None:
        try:
            done.set_result(loop.run_until_complete(task))
        except BaseException as error:
            done.set_exception(error)
        finally:
            try:
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.run_until_complete(loop.shutdown_default_executor())
                loop.close()
            finally:
                ended.set()

    # Progress and logs look for their run in the context.
    Thread(target=contextvars.copy_context().run, args=(work,), name="requests").start()
    try:
        ended.wait()  # no join: one that an exception interrupts takes the thread for ended
    except BaseException:
        with suppress(RuntimeError):  # it ended just now
            loop.call_soon_threadsafe(task.cancel)
        ended.wait()
        raise
    return done.result()
