"""Sends requests in a closed loop and records what each answer did, on a monotonic clock.

A closed loop of C keeps C requests in flight: the next one is sent when one ends.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp

from tasks.apart import run_apart
from tasks.errors import SeamMismatch
from tasks.load.stream import AnswerReader, Dialect, SseDecoder

LAG_PERIOD_S: Final = 0.01
WATCH_PERIOD_S: Final = 0.5  # each sample costs the server an answer


@dataclass(frozen=True)
class Request:
    """One request as it will be sent."""

    request_id: str
    prompt_key: str
    category: str | None
    token_ids: tuple[int, ...]
    body: dict[str, Any]
    exact_tokens: int | None = None  # completion tokens that the answer must have (ignore_eos)


@dataclass(frozen=True)
class Record:
    """What happened to a request. Times are seconds of one monotonic clock; `sent_at` is UTC."""

    request: Request
    sent: float
    sent_at: datetime
    ended: float
    status: str
    detail: str | None
    answer: AnswerReader


@dataclass
class Recording:
    """All records of one measurement, in order of sending, and how well the client kept up."""

    records: list[Record] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    running_seen: list[int] = field(default_factory=list)  # sampled gauge of running requests


def record(
    url: str, requests: Sequence[Request], concurrency: int, dialect: Dialect, *, timeout_s: float,
    running: Callable[[], int | None] | None = None, progress: Callable[[int, int], None] | None = None,
) -> Recording:
    """Send `requests` in order with `concurrency` in flight and wait for all answers.

    Failures are records with a status, never exceptions. Raises SeamMismatch when the server counts
    other prompt tokens than were sent.
    """
    with _no_collection():
        return run_apart(_record(url, requests, concurrency, dialect, timeout_s, running, progress))


@contextmanager
def _no_collection() -> Iterator[None]:
    """A full garbage collection of a process that has torch and Prefect in it stops the event loop for 0.2 s."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


async def _record(
    url: str, requests: Sequence[Request], concurrency: int, dialect: Dialect, timeout_s: float,
    running: Callable[[], int | None] | None, progress: Callable[[int, int], None] | None,
) -> Recording:
    recording = Recording()
    waiting = iter(requests)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20
    ) as session:

        async def slot() -> None:
            for request in waiting:  # all slots draw from the same iterator
                answered = await send(session, url + dialect.endpoint, request, dialect, timeout_s)
                _check_prompt(answered)
                recording.records.append(answered)
                if progress is not None:
                    progress(len(recording.records), len(requests))

        watchers = [asyncio.create_task(_watch_lag(recording.lags_s))]
        if running is not None:
            watchers.append(asyncio.create_task(_watch_running(running, recording.running_seen)))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(requests))):
                    group.create_task(slot())
            if not recording.lags_s:  # over before the first sample: wait for it
                await asyncio.sleep(2 * LAG_PERIOD_S)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
    recording.records.sort(key=lambda r: r.sent)
    return recording


async def send(
    session: aiohttp.ClientSession, url: str, request: Request, dialect: Dialect, timeout_s: float
) -> Record:
    """One request; every transport fault becomes a status of the record."""
    answer = AnswerReader(dialect)
    status: str
    detail: str | None
    sent_at, sent = datetime.now(UTC), time.perf_counter()
    try:
        async with asyncio.timeout(timeout_s), session.post(url, json=request.body) as response:
            if response.status != 200:
                text = (await response.text(errors="replace"))[:500]
                status, detail = "http_error", f"HTTP {response.status}: {text}"
            else:
                decoder = SseDecoder()
                async for received in response.content.iter_any():
                    at = time.perf_counter()
                    for data in decoder.feed(received):
                        answer.feed(data, at)
                status, detail = answer.outcome()
    except TimeoutError:
        status, detail = "timeout", f"no end after {timeout_s:g} s"
    except (aiohttp.ClientError, OSError) as error:
        status = "truncated" if answer.chunks else "http_error"
        detail = f"{type(error).__name__}: {error}"
    n, _ = answer.completion_tokens
    if status == "ok" and request.exact_tokens not in (None, n):
        status, detail = "truncated", f"asked for exactly {request.exact_tokens} tokens, got {n}"
    return Record(request, sent, sent_at, time.perf_counter(), status, detail, answer)


def _check_prompt(record: Record) -> None:
    counted, ours = record.answer.prompt_tokens, len(record.request.token_ids)
    if counted is not None and counted != ours:
        raise SeamMismatch(
            f"prompt_tokens: sent {ours} token ids, the server counted {counted} ({record.request.request_id}): does "
            "it apply a chat template or add a begin-of-text token?"
        )


async def _watch_lag(lags_s: list[float]) -> None:
    while True:
        asleep = time.perf_counter()
        await asyncio.sleep(LAG_PERIOD_S)
        lags_s.append(max(time.perf_counter() - asleep - LAG_PERIOD_S, 0.0))


async def _watch_running(running: Callable[[], int | None], seen: list[int]) -> None:
    period_s = 0.02
    while True:
        await asyncio.sleep(period_s)
        period_s = min(2 * period_s, WATCH_PERIOD_S)
        try:
            value = await asyncio.to_thread(running)
        except OSError:  # a busy server may not answer this one: a sample less
            continue
        if value is not None:
            seen.append(value)
