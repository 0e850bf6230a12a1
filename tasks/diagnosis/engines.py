"""Stored states of one engine against those of another: what is left where transformers cannot load the target."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from tasks.diagnosis.case import Case, environment_of, spread
from tasks.diagnosis.causes import Findings
from tasks.errors import ArtifactDamaged
from tasks.reference import token_errors

SAMPLES = 10
Row = dict[str, Any]


def compare_engines(case: Case, findings: Findings, limit: float) -> bool:
    """True if both engines captured the same states, or if there is only one; a note says which.

    Two engines that agree may still share a fault, which this comparison cannot see.
    """
    pairs = _same_texts(case)
    if not pairs:
        findings.notes.append("one engine's states only: they are compared with nothing; extract on a second engine")
        return True
    errors: dict[tuple[int, int], list[float]] = defaultdict(list)  # (point of one, point of the other) -> means
    try:
        for one, other in spread(pairs, SAMPLES):
            _compare(case, one, other, errors)
    except ArtifactDamaged as damage:
        findings.add("unexplained", 0.3, f"shards cannot be read: {damage}")
        return False
    means = {pair: sum(values) / len(values) for pair, values in errors.items()}
    points = sorted({point for point, _ in means})
    worst = max(means[point, point] for point in points)
    compared = f"engine-to-engine comparison of {min(SAMPLES, len(pairs))} samples at points {points}"
    findings.notes.append(f"{compared} instead: worst relative error {worst:.2g}")
    if worst <= limit:
        return True
    nearest = {point: min(points, key=lambda k: means[point, k]) for point in points}
    moved = {point: k for point, k in nearest.items() if k != point and means[point, k] <= limit}
    told = ", ".join(f"point {point} of one engine is point {k} of the other" for point, k in moved.items())
    findings.add(
        "layer_shift" if moved else "unexplained", 0.7 if moved else 0.5,
        f"{compared}: off by {worst:.2g}" + (f"; {told}" if told else ", and no point is another one's"),
    )
    return False


def _same_texts(case: Case) -> list[tuple[Row, Row]]:
    """Index rows of one sample as two environments captured it."""
    rows: dict[str, dict[str, Row]] = defaultdict(dict)
    for row in case.states_index:
        rows[row["sample_key"]][environment_of(row)] = row
    return [(first, second) for first, second, *_ in (list(of.values()) for of in rows.values() if len(of) > 1)]


def _compare(case: Case, one: Row, other: Row, errors: dict[tuple[int, int], list[float]]) -> None:
    first, second = case.states_of(one), case.states_of(other)
    if first.token_ids != second.token_ids:
        raise ArtifactDamaged(f"sample {one['sample_key']}: the engines stored other token ids")
    for i, point in enumerate(first.points):
        for k, candidate in enumerate(second.points):
            errors_T = token_errors(second.states[:, k].float(), first.states[:, i].float())
            errors[point, candidate].append(float(torch.nan_to_num(errors_T, nan=1.0).clamp(max=1).mean()))
