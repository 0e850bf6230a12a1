"""Appending rows to a pool: immutable parts, written every few seconds, whole or not there at all."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tasks.store.tables import Store, rows_to_table, write_parquet


class PartWriter:
    """Collects rows of a declared table and appends them to `pool`, also when the block is left by an error."""

    def __init__(self, pool: Path, table: str, store: Store, *, rows: int = 256, seconds: float = 5.0) -> None:
        self.pool, self.table, self.run_id = pool, table, store.run_id
        self.added, self._limit, self._seconds = 0, rows, seconds
        self._rows: list[dict[str, Any]] = []
        self._since = time.monotonic()

    def __enter__(self) -> PartWriter:
        return self

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row; it is on disk a few seconds later."""
        self._rows.append(row)
        self.added += 1
        if len(self._rows) >= self._limit or time.monotonic() - self._since > self._seconds:
            self.flush()

    def flush(self) -> None:
        """Write what was collected as one part."""
        if self._rows:
            name = f"part-{time.time_ns():020d}-{self.run_id}.parquet"
            write_parquet(rows_to_table(self.table, self._rows), self.pool / name)
        self._rows, self._since = [], time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()


def set_aside(pool: Path, run_id: str) -> int:
    """Move the parts that a run wrote out of the readers' sight; returns how many there were."""
    (pool / "rejected").mkdir(exist_ok=True)
    return len([part.rename(pool / "rejected" / part.name) for part in pool.glob(f"part-*-{run_id}.parquet")])
