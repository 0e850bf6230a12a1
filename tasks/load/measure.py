"""One measurement on a running server: warm-up, empty caches, counters before and after, and the load between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from tasks.config import Workload
from tasks.load.metrics import Acceptance, Counters, counter_difference
from tasks.load.recorder import Recording, Request, record
from tasks.load.rows import Measured
from tasks.load.stream import Dialect
from tasks.load.workloads import Planned, Point

SETTLE_S: Final = 3.0


class Adapter(Dialect, Protocol):
    """What a measurement asks of an engine (engines.base.Engine)."""

    def completion_body(
        self, model: str, token_ids: list[int], max_tokens: int, *, ignore_eos: bool = False
    ) -> dict[str, Any]: ...

    def spec_counters(self, url: str) -> Counters | None: ...

    def cache_counters(self, url: str) -> tuple[int, int] | None: ...

    def flush_cache(self, url: str) -> None: ...

    def running_requests(self, url: str) -> int | None: ...


def measure(
    adapter: Adapter, url: str, model: str, workload: Workload, point: Point, blocks: Sequence[Sequence[Planned]],
    warmup: Sequence[Planned], *, running_cap: int, baseline_cap: int | None, speculative: bool,
    progress: Callable[[int, int], None] | None = None,
) -> Measured:
    """Run the blocks one after another, greedily. Raises SeamMismatch when the server counts other prompt tokens."""
    load = partial(record, url, concurrency=point.concurrency, dialect=adapter, timeout_s=workload.timeout_s)
    if warmup:
        load(_requests(adapter, model, workload, warmup))
    adapter.flush_cache(url)
    recordings: list[Recording] = []
    acceptances: list[Acceptance] = []
    total = sum(map(len, blocks))
    cache_before = adapter.cache_counters(url)
    for block in blocks:
        before = adapter.spec_counters(url) if speculative else None
        done = sum(len(r.records) for r in recordings)
        report = None if progress is None else partial(_add, progress, done, total)
        running = partial(adapter.running_requests, url)
        recordings.append(load(_requests(adapter, model, workload, block), running=running, progress=report))
        if speculative:
            acceptances.append(counter_difference(before, _settled(adapter, url, before)))
    return Measured(
        workload, point.concurrency, point.repeat, tuple(recordings), tuple(acceptances),
        _hit_share(cache_before, adapter.cache_counters(url), recordings), running_cap, baseline_cap,
    )


def _requests(adapter: Adapter, model: str, workload: Workload, planned: Sequence[Planned]) -> list[Request]:
    exact = workload.output_tokens if workload.ignore_eos else None
    return [
        Request(
            p.request_id, p.prompt_key, p.category, p.token_ids,
            adapter.completion_body(model, list(p.token_ids), workload.output_tokens, ignore_eos=workload.ignore_eos),
            exact,
        )
        for p in planned
    ]


def _add(progress: Callable[[int, int], None], before: int, total: int, done: int, _: int) -> None:
    progress(before + done, total)


def _settled(adapter: Adapter, url: str, before: Counters | None) -> Counters | None:
    """Counters once nothing runs any more: a server may count the last step after its answer has left."""
    deadline = time.monotonic() + SETTLE_S
    while before is not None and adapter.running_requests(url) and time.monotonic() < deadline:
        time.sleep(0.02)
    return adapter.spec_counters(url)


def _hit_share(
    before: tuple[int, int] | None, after: tuple[int, int] | None, recordings: Sequence[Recording]
) -> float | None:
    """Share of prompt tokens found in the prefix cache, from counters or else from each answer's usage."""
    if before is not None and after is not None and after[0] >= before[0] and after[1] >= before[1]:
        looked_up, found = after[0] - before[0], after[1] - before[1]
        return found / looked_up if looked_up else 0.0  # counted and idle: the cache is off
    answers = [r.answer for recording in recordings for r in recording.records if r.status == "ok"]
    if not answers or any(a.cached_tokens is None or a.prompt_tokens is None for a in answers):
        return None
    return sum(a.cached_tokens or 0 for a in answers) / sum(a.prompt_tokens or 0 for a in answers)
