"""What of an engine's log goes into the task's log, and with which level."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.artifacts import plain_rows
from flows.enginelog import EngineLog, level_of


class Kept:
    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []

    def log(self, level: int, text: str, *values: object) -> None:
        self.lines.append((level, text % values))


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("(EngineCore pid=12) WARNING 11-29 16:04:01 [config.py:10] no swap", logging.WARNING),
        (f"INFO 11-29 16:04:01 [core.py:7] {'word ' * 12} ERROR further on is only text", logging.INFO),
        (f"[2026-11-29 16:44:15] {'word ' * 12} ERROR further on is only text", logging.INFO),
        ("[2026-11-29 16:44:15] Load weight begin", logging.INFO),
        ("Traceback (most recent call last):", logging.ERROR),
    ],
)
def test_the_level_is_the_engines_own(line: str, level: int) -> None:
    assert level_of(line, logging.INFO) == level


def test_a_traceback_stays_an_error_to_its_last_line(tmp_path: Path) -> None:
    kept = passed_on(tmp_path, "Traceback (most recent call last):", "  File x", "RuntimeError: out of memory")
    assert [level for level, _ in kept.lines] == [logging.ERROR] * 3


def test_only_new_lines_are_passed_on_and_warnings_are_not_crowded_out(tmp_path: Path) -> None:
    log = tmp_path / "base-load1.log"
    log.write_text("WARNING first\n" + "INFO again\n" * 500)
    source, kept = EngineLog(SimpleNamespace(log=log)), Kept()
    source.pass_on(kept)
    assert kept.lines[0] == (logging.WARNING, "base-load1 | WARNING first") and len(kept.lines) == 21
    source.pass_on(kept)
    assert len(kept.lines) == 21
    source._server.log = tmp_path / "base-load2.log"  # a server that never wrote
    source.pass_on(kept)
    assert len(kept.lines) == 21


def passed_on(folder: Path, *lines: str) -> Kept:
    log = folder / "base-load1.log"
    log.write_text("\n".join(lines))
    kept = Kept()
    EngineLog(SimpleNamespace(log=log)).pass_on(kept)
    return kept


def test_tables_in_the_ui_hold_plain_values_only() -> None:
    import numpy as np
    import pandas as pd

    given = {"a": np.float32(1.23456), "b": np.int64(3), "c": pd.Timestamp("2026-01-01"), "d": float("nan")}
    (row,) = plain_rows([given | {"e": np.bool_(True)}], ["a", "b", "c", "d", "e", "absent"])
    assert row == {"a": 1.235, "b": 3, "c": "2026-01-01 00:00:00", "d": None, "e": True, "absent": None}
    assert [type(v) for v in row.values()] == [float, int, str, type(None), bool, type(None)]
