"""Agree: does the server accept what replay predicted, position by position?

A drafter that is served with the wrong states still drafts, only a little worse: a speed-up alone does not show it.
Both sides are counts, so both have confidence intervals; a gap beyond them and beyond the tolerance is a fault.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, Final

import pyarrow.parquet as pq

from tasks.config import Campaign
from tasks.errors import SeamMismatch
from tasks.store.refs import BenchmarkRef, ReplayRef
from tasks.store.tables import Store

log = logging.getLogger(__name__)
Row = dict[str, Any]
CONFIDENCE: Final = 0.99
_Z: Final = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


def interval(accepted: int, drafts: int) -> tuple[float, float]:
    """Wilson's interval of a rate (Wilson, 1927)."""
    rate, spread = accepted / drafts, _Z * _Z / drafts
    middle = (rate + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(rate * (1 - rate) / drafts + spread / (4 * drafts))
    return max(0.0, middle - half), min(1.0, middle + half)


def agree(replayed: ReplayRef, served: BenchmarkRef, campaign: Campaign, store: Store) -> None:
    """Compare one speculative benchmark with its replay; writes rows `replay_gap` of table `alignment`.

    Raises SeamMismatch in a strict campaign when the server accepts something else than replay predicts.
    """
    arm, workload = served.arm, served.workload
    accepted = store.read("acceptance", store.run_id).to_pylist()
    live = _counts([r for r in accepted if (r["arm"], r["workload"]) == (arm, workload)])
    # From this replay's own artifact: table `replay` also holds those of the run's other drafters.
    store.require(replayed.kind, replayed.key)
    rates = pq.read_table(store.artifact(replayed.kind, replayed.key) / "replay.parquet").to_pylist()
    predicted = _counts([r for r in rates if r["auxiliary"] == "true"])
    rows = compare(predicted, live, campaign.thresholds.replay_gap, f"{arm} {workload}")
    store.write("alignment", rows, f"agree-{arm}-{workload}")
    store.count("agree", executed=1)
    wrong = [row for row in rows if row["passed"] is False]
    if wrong:
        told = f"{wrong[0]['subject']}: {wrong[0]['detail']}; find the cause with: drafthouse diagnose {store.run_id}"
        if campaign.strict:
            raise SeamMismatch(told)
        log.warning("%s (campaign is not strict)", told)


Counts = dict[int, tuple[int, int]]  # position -> (drafts, accepted)


def _counts(rows: Sequence[Row]) -> Counts:
    """Drafts and accepted tokens per position, summed over concurrencies and repeats."""
    found: Counts = {}
    for row in rows:
        wanted = row["category"] is None and row["position"] is not None
        if wanted and row["drafts"] and row["accepted"] is not None:
            drafts, accepted = found.get(row["position"], (0, 0))
            found[row["position"]] = drafts + row["drafts"], accepted + row["accepted"]
    return found


def compare(predicted: Counts, live: Counts, gap: float, subject: str) -> list[Row]:
    """A row per position and one for the accept length; `passed` null where a side was not counted.

    A position fails if the intervals of both sides do not meet and the rates differ by more than `gap`;
    the accept length fails if its relative gap exceeds `gap` and a position's intervals do not meet.
    """
    if not predicted or not live:
        missing = "replay" if not predicted else "the server"
        return [{"check": "replay_gap", "subject": subject, "threshold": gap, "detail": f"{missing} reports no counts"}]
    rows, apart = [], False
    for position in sorted(predicted.keys() & live.keys()):
        (n, a), (m, b) = predicted[position], live[position]
        ours, theirs = interval(a, n), interval(b, m)
        meet = ours[0] <= theirs[1] and theirs[0] <= ours[1]
        apart = apart or not meet
        distance = b / m - a / n
        rows.append({
            "check": "replay_gap", "subject": f"{subject} position {position}", "value": distance, "threshold": gap,
            "passed": meet or abs(distance) <= gap,
            "detail": f"served {b / m:.3f} [{theirs[0]:.3f}, {theirs[1]:.3f}] of {m} drafts, "
                      f"replayed {a / n:.3f} [{ours[0]:.3f}, {ours[1]:.3f}] of {n}",
        })
    lengths = [1 + sum(a / n for n, a in side.values()) for side in (predicted, live)]
    relative = lengths[1] / lengths[0] - 1
    rows.append({
        "check": "replay_gap", "subject": f"{subject} accept length", "value": relative, "threshold": gap,
        "passed": abs(relative) <= gap or not apart, "detail": f"served {lengths[1]:.3f}, replayed {lengths[0]:.3f}",
    })
    return rows
