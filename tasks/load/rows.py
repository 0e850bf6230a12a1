"""Records of one measurement as rows of the tables `requests`, `benchmarks` and `acceptance`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.config import Thresholds, Workload, WorkloadKind
from tasks.load.metrics import Acceptance, add_up, per_request_acceptance, percentile, request_metrics, summary
from tasks.load.recorder import Record, Recording

PREFIX_HIT_LIMIT = 0.01  # of a random load, which shares no prefix: more means a warm cache
HIDDEN_CAP_SHARE = 0.75  # running at most this share of what was in flight, seen often, is a cap and no chance


@dataclass(frozen=True)
class Measured:
    """One measurement: its recordings block by block and what the server counted meanwhile."""

    workload: Workload
    concurrency: int
    repeat: int
    recordings: tuple[Recording, ...]
    acceptances: tuple[Acceptance, ...]  # per block, from counters; empty = per request or no speculation
    prefix_hit_share: float | None
    running_cap: int
    baseline_cap: int | None

    @property
    def records(self) -> list[Record]:
        """All records, in order of sending."""
        return [record for recording in self.recordings for record in recording.records]

    @property
    def ok(self) -> int:
        """Whole answers."""
        return sum(r.status == "ok" for r in self.records)

    @property
    def failures(self) -> Counter[str]:
        """Failed requests by kind."""
        return Counter(r.status for r in self.records if r.status != "ok")

    def failed(self) -> str:
        """Failed requests by kind and the first one's detail."""
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.failures.items()))
        first = next(r for r in self.records if r.status != "ok")
        return f"{kinds} of {len(self.records)} requests (first: {first.detail})"


def request_rows(measured: Measured, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per request; `facts` are the columns that all share."""
    rows = []
    for record in measured.records:
        answer, request = record.answer, record.request
        n, source = answer.completion_tokens
        spec = per_request_acceptance([answer.spec])
        rows.append(
            {**facts, "category": request.category, "request_id": request.request_id, "prompt_key": request.prompt_key,
             "sent_at": record.sent_at, **request_metrics(record), "prompt_tokens": len(request.token_ids),
             "completion_tokens": n if answer.chunks else None, "first_chunk_tokens": answer.first_chunk_tokens,
             "chunks": len(answer.chunks), "token_source": source if answer.chunks else None, "status": record.status,
             "finish_reason": answer.finish_reason, "detail": record.detail,
             "spec_accept_length": (answer.spec or {}).get("accept_length") or spec.accept_length}
        )
    return rows


def benchmark_row(measured: Measured, facts: Mapping[str, Any], limits: Thresholds) -> dict[str, Any]:
    """The measurement's row; `valid` and `comparable` are False with the reason in `note`."""
    lag_ms = percentile((1e3 * lag for r in measured.recordings for lag in r.lags_s), 99)
    peaks = [max(r.running_seen) for r in measured.recordings if r.running_seen]
    peak = max(peaks) if peaks else None
    void = _void(measured, lag_ms, limits)
    uneven = _uneven(measured, peak)
    return {
        **facts, **summary([r.records for r in measured.recordings], measured.concurrency),
        "requests_ok": measured.ok, "requests_failed": sum(measured.failures.values()),
        "failures_json": json.dumps(measured.failures, sort_keys=True), "client_lag_ms_p99": lag_ms,
        "wall_s": sum(_wall_s(r.records) for r in measured.recordings), "prefix_hit_share": measured.prefix_hit_share,
        "running_requests_peak": peak, "running_requests_cap": measured.running_cap, "valid": not void,
        "comparable": not uneven, "note": "; ".join([*void, *uneven]) or None,
    }


def _wall_s(records: Sequence[Record]) -> float:
    return max(r.ended for r in records) - min(r.sent for r in records) if records else 0.0


def _void(measured: Measured, lag_ms: float | None, limits: Thresholds) -> list[str]:
    reasons = []
    if measured.failures:
        reasons.append(measured.failed())
    if lag_ms is not None and lag_ms > limits.client_lag_ms:
        reasons.append(f"the client's event loop lagged {lag_ms:.0f} ms (p99), limit {limits.client_lag_ms:g}")
    hit = measured.prefix_hit_share
    if measured.workload.kind is WorkloadKind.random and hit is not None and hit > PREFIX_HIT_LIMIT:
        reasons.append(f"{hit:.1%} of a random load's prompt tokens were found in the prefix cache")
    return reasons


def _uneven(measured: Measured, peak: int | None) -> list[str]:
    reasons, cap = [], measured.running_cap
    if measured.concurrency > cap:
        reasons.append(f"{measured.concurrency} in flight, but the server runs {cap} at most")
    if measured.baseline_cap not in (None, cap):
        reasons.append(f"runs {cap} requests at most, its baseline {measured.baseline_cap}")
    for recording in measured.recordings:
        in_flight = min(measured.concurrency, len(recording.records), cap)
        if len(recording.running_seen) >= 20 and peak is not None and peak <= HIDDEN_CAP_SHARE * in_flight:
            reasons.append(f"{in_flight} in flight, but never more than {peak} were seen running: a hidden cap?")
            break
    return reasons


def total_acceptance(measured: Measured) -> tuple[Acceptance, str]:
    """(all blocks together, source: counters | requests)."""
    per_request = per_request_acceptance([r.answer.spec for r in measured.records])
    if per_request.drafts is not None and not any(a.drafts is not None for a in measured.acceptances):
        return per_request, "requests"
    return add_up(measured.acceptances), "counters"


def acceptance_rows(measured: Measured, facts: Mapping[str, Any], k: int) -> list[dict[str, Any]]:
    """Rows for all requests and for each category, each with position null = all and a row per position."""
    total, source = total_acceptance(measured)
    groups: list[tuple[str | None, Acceptance]] = [(None, total)]
    if source == "requests":
        for category in dict.fromkeys(r.request.category for r in measured.records):
            of_it = [r.answer.spec for r in measured.records if r.request.category == category]
            groups.append((category, per_request_acceptance(of_it)))
    elif measured.workload.by_category:
        blocks = zip(measured.recordings, measured.acceptances, strict=True)
        groups += [(recording.records[0].request.category, acceptance) for recording, acceptance in blocks]
    rows = []
    for category, acceptance in groups[:1] + [g for g in groups[1:] if g[0] is not None]:
        common = {**facts, "category": category, "num_speculative_tokens": k, "source": source}
        drafts, accepted = acceptance.drafts, acceptance.accepted
        share = accepted / (drafts * k) if drafts and accepted is not None else None
        rows.append(
            {**common, "drafts": drafts, "accepted": accepted, "accept_rate": share,
             "accept_length": acceptance.accept_length, "reason": acceptance.reason}
        )
        rows += [
            {**common, "position": i, "drafts": drafts, "accepted": n, "accept_rate": n / drafts}
            for i, n in enumerate(acceptance.per_position) if drafts
        ]
    return rows
