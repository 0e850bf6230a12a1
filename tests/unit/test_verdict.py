"""Verdicts against the last runs, and when a nightly is red."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flows import nightly as nightly_flow
from tasks.store.tables import Store
from tasks.verdict import verdict

START = datetime(2026, 1, 1, tzinfo=UTC)


def write_run(root: Path, number: int, tok_s: float, *, key: str = "k", state: str = "completed", **more: Any) -> Store:
    """A run of the day `number` whose base arm made `tok_s` tokens per second."""
    store = Store(root, f"run-{number:02d}")
    versions = json.dumps({"torch": more.pop("torch", "2.13")})
    store.write("runs", [{"run_id": store.run_id, "campaign": "c", "started_at": START + timedelta(days=number),
                          "state": state, "config_key": key, "versions_json": versions}], "run")
    point = {"arm": "base", "workload": "chat", "concurrency": 8, "repeat": 0}
    row = {**point, "output_tok_s": tok_s, "ttft_ms_p50": 1000 / tok_s, "valid": True, "comparable": True, **more}
    store.write("benchmarks", [row], "base")
    store.write("acceptance", [{**point, "accept_length": 2.5, "arm": "spec"}], "spec")
    store.write("servers", [{"arm": "base", "setting": "attention_backend", "effective": "triton"}], "base")
    return store


def found(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {row["metric"]: row["verdict"] for row in rows}


def test_a_slower_run_is_a_regression_in_every_metric_that_got_worse(tmp_path: Path) -> None:
    for day, tok_s in enumerate((100, 102, 98)):
        write_run(tmp_path, day, tok_s)
    rows = verdict(write_run(tmp_path, 9, 80, torch="2.14"))
    assert found(rows) == {"output_tok_s": "regression", "ttft_ms_p50": "regression", "accept_length": "ok"}
    worse = next(row for row in rows if row["metric"] == "output_tok_s")
    assert (worse["expected"], worse["observed"], worse["baseline_runs"]) == (100, 80, 3)
    assert worse["change_pct"] == pytest.approx(-20)
    assert json.loads(worse["suspects_json"])["versions"] == {"torch": ["2.13", "2.14"]}
    assert Store(tmp_path, "reader").read("verdicts").num_rows == 3


def test_faster_is_an_improvement_and_a_little_is_nothing(tmp_path: Path) -> None:
    for day in range(3):
        write_run(tmp_path, day, 100)
    assert found(verdict(write_run(tmp_path, 9, 120)))["output_tok_s"] == "improvement"
    assert found(verdict(write_run(tmp_path, 10, 95)))["output_tok_s"] == "ok"


def test_only_completed_earlier_runs_of_the_same_config_count(tmp_path: Path) -> None:
    write_run(tmp_path, 0, 100)
    write_run(tmp_path, 1, 100, key="another")
    write_run(tmp_path, 2, 100, state="failed")
    write_run(tmp_path, 3, 100, valid=False)
    write_run(tmp_path, 20, 100)
    rows = verdict(write_run(tmp_path, 9, 10))
    assert set(found(rows).values()) == {"not_enough_history"}
    assert next(row for row in rows if row["metric"] == "output_tok_s")["baseline_runs"] == 1


def test_the_window_is_the_last_runs_and_one_outlier_does_not_move_the_median(tmp_path: Path) -> None:
    for day, tok_s in enumerate((500, 500, 500, 100, 100, 1, 100, 100)):
        write_run(tmp_path, day, tok_s)
    row = next(r for r in verdict(write_run(tmp_path, 9, 99), window=5) if r["metric"] == "output_tok_s")
    assert (row["expected"], row["verdict"], row["baseline_runs"]) == (100, "ok", 5)


def test_a_void_measurement_gets_no_verdict(tmp_path: Path) -> None:
    for day in range(3):
        write_run(tmp_path, day, 100)
    assert set(found(verdict(write_run(tmp_path, 9, 10, valid=False)))) == {"accept_length"}


class Nightly:
    """The nightly flow without a server: each measurement takes the next throughput of a list."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, *measured: float) -> None:
        self.root, self.events, self._measured = root, [], list(measured)
        for day in range(3):
            write_run(root, day, 100)
        patch.setattr(nightly_flow, "campaign", self._measure)
        patch.setattr(nightly_flow, "emit_event", lambda event, **facts: self.events.append((event, facts)))
        patch.setattr(nightly_flow, "get_run_logger", lambda: __import__("logging").getLogger("test"))
        self.events: list[tuple[str, dict[str, Any]]]

    def _measure(self, *_: object) -> str:
        number = 30 - len(self._measured)
        return write_run(self.root, number, self._measured.pop(0)).run_id

    def run(self) -> str:
        return nightly_flow.nightly.fn("demo-cpu", str(self.root))


def test_a_nightly_without_a_regression_measures_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    night = Nightly(tmp_path, monkeypatch, 101, 50)
    assert night.run() == "run-28" and night.events == []


def test_a_regression_that_does_not_repeat_is_not_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    night = Nightly(tmp_path, monkeypatch, 50, 101)
    assert night.run() == "run-29" and night.events == []


def test_a_regression_measured_twice_is_red_and_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    night = Nightly(tmp_path, monkeypatch, 50, 55)
    with pytest.raises(nightly_flow.RegressionConfirmed, match=r"output_tok_s of base on chat at C=8: 55, median"):
        night.run()
    ((event, facts),) = night.events
    assert event == "drafthouse.regression" and facts["payload"]["run_id"] == "run-29"
    assert {row["metric"] for row in facts["payload"]["regressions"]} == {"output_tok_s", "ttft_ms_p50"}
    json.dumps(facts["payload"])
