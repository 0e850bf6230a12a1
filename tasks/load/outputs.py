"""What was answered, token by token, and how two arms' answers are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.load.recorder import Record
from tasks.store.tables import write_parquet

SCHEMA: Final = pa.schema(
    [
        ("prompt_key", pa.string()), ("category", pa.string()), ("prompt_token_ids", pa.list_(pa.int32())),
        ("output_token_ids", pa.list_(pa.int32())), ("concurrency", pa.int64()), ("repeat", pa.int64()),
    ]
)
SEVERITY: Final = {"identical": 0, "near_tie": 1, "different": 2}
Row = dict[str, Any]


def output_rows(records: Iterable[Record], concurrency: int, repeat: int) -> list[Row]:
    """A row per whole answer whose token ids are known."""
    return [
        {"prompt_key": r.request.prompt_key, "category": r.request.category,
         "prompt_token_ids": list(r.request.token_ids), "output_token_ids": r.answer.token_ids,
         "concurrency": concurrency, "repeat": repeat}
        for r in records if r.status == "ok" and r.answer.token_ids is not None
    ]


def write_outputs(rows: Sequence[Row], path: Path) -> None:
    """Write rows atomically."""
    write_parquet(pa.Table.from_pylist(list(rows), schema=SCHEMA), path)


def read_outputs(path: Path) -> list[Row]:
    """Rows of an outputs file."""
    rows: list[Row] = pq.read_table(path).to_pylist()
    return rows


def one_per_prompt(rows: Iterable[Row]) -> list[Row]:
    """The first answer to each prompt, in order."""
    return list({row["prompt_key"]: row for row in reversed(list(rows))}.values())[::-1]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two answers differ (the shorter one's length if it is a prefix), or None."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def compare(
    rows: Sequence[Row], base_rows: Sequence[Row], margin: Callable[[list[int]], float], near_tie_margin: float
) -> list[Row]:
    """Losslessness of every answer, a row per prompt with the worst verdict of its answers.

    An answer is compared with the base arm's at the same concurrency and repeat, else with its first.
    `margin(token_ids)` = log-probability margin of the two best next tokens. verdict: identical; near_tie
    = the first difference stands at a margin of at most `near_tie_margin`; different; null = the base arm
    has no whole answer to compare with.
    """
    first = {row["prompt_key"]: row for row in reversed(list(base_rows))}
    exact = {(row["prompt_key"], row["concurrency"], row["repeat"]): row for row in base_rows}
    worst: dict[str, Row] = {}
    margins: dict[tuple[int, ...], float] = {}
    for row in rows:
        key = row["prompt_key"]
        base = exact.get((key, row["concurrency"], row["repeat"])) or first.get(key)
        found: Row = {"prompt_key": key, "category": row["category"]}
        if base is not None:
            found |= _verdict(row, base, margin, margins, near_tie_margin)
        if key not in worst or _severity(found) > _severity(worst[key]):
            worst[key] = found
    return list(worst.values())


def _verdict(
    row: Mapping[str, Any], base: Mapping[str, Any], margin: Callable[[list[int]], float],
    margins: dict[tuple[int, ...], float], near_tie_margin: float,
) -> Row:
    at = first_difference(row["output_token_ids"], base["output_token_ids"])
    if at is None:
        return {"identical": True, "verdict": "identical"}
    common = (*base["prompt_token_ids"], *base["output_token_ids"][:at])
    if common not in margins:
        margins[common] = margin(list(common))
    verdict = "near_tie" if margins[common] <= near_tie_margin else "different"
    return {"identical": False, "first_difference": at, "top2_margin": margins[common], "verdict": verdict}


def _severity(row: Mapping[str, Any]) -> int:
    return SEVERITY.get(row.get("verdict") or "", -1)
