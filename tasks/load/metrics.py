"""What a measurement means. n is the server's count of completion tokens, never chunks or re-tokenised text.

TTFT  first chunk with tokens - sent
TPOT  (last - first) / (n - tokens in the first chunk); TPOT(n-1) = (last - first) / (n - 1), as other harnesses
gap   time between two chunks with tokens; with speculation a chunk holds several, so it is no token latency
E2E   last chunk with tokens - sent

A value that could not be measured is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from tasks.load.recorder import Record


def percentile(values: Iterable[float | None], q: float) -> float | None:
    """The q-th percentile [0, 100] of the measured values, linear between neighbours."""
    measured = [v for v in values if v is not None]
    return float(np.percentile(measured, q)) if measured else None


def request_metrics(record: Record) -> dict[str, float | None]:
    """ttft_ms, first_content_ms, tpot_ms, tpot_ms_n1, chunk_gap_ms_p50 and e2e_ms of one answer."""
    answer = record.answer
    if not answer.chunks:
        return dict.fromkeys(("ttft_ms", "first_content_ms", "tpot_ms", "tpot_ms_n1", "chunk_gap_ms_p50", "e2e_ms"))
    first, last = answer.chunks[0].at, answer.chunks[-1].at
    n, _ = answer.completion_tokens
    whole = record.status == "ok"  # a cut answer has a first token, but neither an end nor a count to divide by
    return {
        "ttft_ms": 1e3 * (first - record.sent),
        "first_content_ms": None if answer.first_content is None else 1e3 * (answer.first_content - record.sent),
        "tpot_ms": _per_token(last - first, n, answer.first_chunk_tokens) if whole else None,
        "tpot_ms_n1": _per_token(last - first, n, 1) if whole else None,
        "chunk_gap_ms_p50": percentile(
            (1e3 * (b.at - a.at) for a, b in pairwise(answer.chunks)), 50
        ),
        "e2e_ms": 1e3 * (last - record.sent) if whole else None,
    }


def _per_token(seconds: float, n: int, already: int | None) -> float | None:
    return None if already is None or n <= already else 1e3 * seconds / (n - already)


def _ok(records: Sequence[Record]) -> list[Record]:
    return [r for r in records if r.status == "ok"]


def span(records: Sequence[Record]) -> tuple[int, float]:
    """(output tokens, seconds) of the whole answers, first send to last end; several blocks can be added up."""
    ok = _ok(records)
    if not ok:
        return 0, 0.0
    tokens = sum(r.answer.completion_tokens[0] for r in ok)
    return tokens, max(r.answer.chunks[-1].at for r in ok) - min(r.sent for r in records)


def steady_span(records: Sequence[Record]) -> tuple[float, float] | None:
    """(output tokens, seconds) while the most requests were in flight: without ramp-up and drain.

    The window opens when the largest number in flight is first reached and closes when it is last left.
    A chunk of unknown size counts as an equal share of the tokens that the server reported. None if no
    answer was whole.
    """
    ok = _ok(records)
    if not ok:
        return None
    moves = sorted([(r.sent, 1) for r in records] + [(r.ended, -1) for r in records])  # an end before a send
    in_flight, most, opens, closes = 0, 0, 0.0, 0.0
    for at, move in moves:
        if move < 0 and in_flight == most:
            closes = at
        in_flight += move
        if in_flight > most:
            most, opens = in_flight, at
    tokens = 0.0
    for r in ok:
        share = r.answer.completion_tokens[0] / len(r.answer.chunks)
        known = all(c.tokens is not None for c in r.answer.chunks)
        tokens += sum((c.tokens or 0) if known else share for c in r.answer.chunks if opens < c.at <= closes)
    return (tokens, closes - opens) if closes > opens else None


def rate(tokens: float, seconds: float) -> float | None:
    """Tokens per second, None without time or tokens."""
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def distinct_4gram_share(outputs: Iterable[Sequence[int]]) -> float | None:
    """Distinct 4-grams of token ids over all 4-grams of all outputs: low = text that repeats is easy to draft."""
    grams = [tuple(ids[i : i + 4]) for ids in outputs for i in range(len(ids) - 3)]
    return len(set(grams)) / len(grams) if grams else None


def summary(blocks: Sequence[Sequence[Record]], concurrency: int) -> dict[str, Any]:
    """Latency and throughput columns of `benchmarks` for one measurement, run in one or more blocks."""
    records = [r for block in blocks for r in block]
    spans = [span(block) for block in blocks]
    steady = [s for s in map(steady_span, blocks) if s is not None]
    values = [request_metrics(r) for r in records if r.status == "ok"]
    row: dict[str, Any] = {
        "output_tok_s": rate(sum(t for t, _ in spans), sum(s for _, s in spans)),
        "steady_output_tok_s": rate(sum(t for t, _ in steady), sum(s for _, s in steady)),
        "tpot_ms_n1_p50": percentile((v["tpot_ms_n1"] for v in values), 50),
        "distinct_4gram_share": distinct_4gram_share(
            {r.request.prompt_key: r.answer.token_ids for r in _ok(records) if r.answer.token_ids}.values()
        ),
    }
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        for q in (50, 90, 99):
            row[f"{name}_p{q}"] = percentile((v[name] for v in values), q)
    tpot_ms = row["tpot_ms_p50"]
    row["decode_tok_s"] = 1e3 / tpot_ms if concurrency == 1 and tpot_ms else None
    return row


# speculative counters -------------------------------------------------------------------------


class Counters(Protocol):
    """Cumulative speculative counters of a server (engines.base.SpecCounters); None = not reported."""

    @property
    def drafts(self) -> int | None: ...
    @property
    def accepted(self) -> int | None: ...
    @property
    def per_position(self) -> tuple[int, ...]: ...
    @property
    def engines(self) -> Sequence[Counters]: ...


@dataclass(frozen=True)
class Acceptance:
    """Drafts and accepted draft tokens of a block; `reason` says why something is None or doubtful."""

    drafts: int | None
    accepted: int | None
    per_position: tuple[int, ...] = ()
    reason: str | None = None

    @property
    def accept_length(self) -> float | None:
        """1 + accepted / drafts; None without counts: an idle drafter did not accept 0, it was not asked."""
        return 1 + self.accepted / self.drafts if self.drafts and self.accepted is not None else None


NOT_REPORTED = Acceptance(None, None, reason="not reported")


def counter_difference(before: Counters | None, after: Counters | None) -> Acceptance:
    """What a server counted between two readings, summed over its engines.

    A counter that fell was reset in between: then nothing is known, and the reason says so.
    """
    if before is None or after is None:
        return NOT_REPORTED
    pairs: Sequence[tuple[Counters, Counters]] = [(before, after)]
    if before.engines and after.engines:
        if len(before.engines) != len(after.engines):
            return Acceptance(None, None, reason="the number of engines changed during the measurement")
        pairs = list(zip(before.engines, after.engines, strict=True))
    parts = [_difference(a, b) for a, b in pairs]
    return add_up(parts)


def _difference(before: Counters, after: Counters) -> Acceptance:
    if before.drafts is None or before.accepted is None or after.drafts is None or after.accepted is None:
        return NOT_REPORTED
    width = max(len(before.per_position), len(after.per_position))
    old, new = (c.per_position + (0,) * (width - len(c.per_position)) for c in (before, after))
    positions = tuple(b - a for a, b in zip(old, new, strict=True))
    drafts, accepted = after.drafts - before.drafts, after.accepted - before.accepted
    if min(drafts, accepted, *positions) < 0:
        return Acceptance(None, None, reason="counter reset during the measurement")
    return Acceptance(drafts, accepted, positions)


def per_request_acceptance(specs: Iterable[Mapping[str, Any] | None]) -> Acceptance:
    """Sum of what each request reported of itself (engines.base.Engine.chunk_spec)."""
    known = [s for s in specs if s and s.get("drafts") is not None and s.get("accepted") is not None]
    if not known:
        return NOT_REPORTED
    return add_up([Acceptance(s["drafts"], s["accepted"], tuple(s.get("per_position") or ())) for s in known])


def add_up(parts: Sequence[Acceptance]) -> Acceptance:
    """Sum of blocks or engines; unknown if any of them is."""
    drafts = accepted = 0
    for part in parts:
        if part.drafts is None or part.accepted is None:
            return Acceptance(None, None, reason=part.reason)
        drafts, accepted = drafts + part.drafts, accepted + part.accepted
    if not drafts:
        return Acceptance(0, accepted, reason="no draft step was counted")
    width = max(len(p.per_position) for p in parts)
    positions = tuple(sum(p.per_position[i] for p in parts if i < len(p.per_position)) for i in range(width))
    rises = any(a < b for a, b in pairwise(positions))
    return Acceptance(drafts, accepted, positions, "rates rise with the position: counters doubtful" if rises else None)
