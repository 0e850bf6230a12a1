"""Verdict: this run's numbers against the median of the last runs of the same campaign."""

from __future__ import annotations

import json
from typing import Any, Final

import pandas as pd

from tasks.store.inventory import require_parts
from tasks.store.tables import Store

HIGHER_IS_BETTER: Final = {
    "output_tok_s": True, "decode_tok_s": True, "accept_length": True, "ttft_ms_p50": False, "tpot_ms_p50": False,
}
POINT: Final = ["arm", "workload", "concurrency"]


def verdict(store: Store, *, window: int = 7, min_runs: int = 3, tolerance_pct: float = 10.0) -> list[dict[str, Any]]:
    """Compare every metric at every benchmark point, write `verdicts` rows and return them.

    The baseline is the median over the last `window` completed runs of the same config (same config key)
    that began before this one. A metric that is worse by more than `tolerance_pct` percent is a
    `regression`, better by more an `improvement`; fewer than `min_runs` runs that hold a usable value
    are `not_enough_history`. Void and not comparable measurements count on neither side.
    Raises StoreError if one of these runs has lost a part of its tables.
    """
    baseline = _earlier_runs(store)[-window:]
    history = _values(store, [run["run_id"] for run in baseline])
    observed = _values(store, [store.run_id])
    rows = []
    for (metric, *point), now in observed.groupby(["metric", *POINT]):
        mine = history[(history["metric"] == metric) & (history[POINT] == point).all(axis=1)]
        rows.append(
            {"metric": metric, **dict(zip(POINT, point, strict=True)), "baseline_runs": len(mine)}
            | _judge(str(metric), float(now["value"].iloc[0]), mine["value"], min_runs, tolerance_pct)
        )
    suspects = json.dumps(_what_changed(store, baseline))
    for row in rows:
        row["suspects_json"] = suspects if row["verdict"] == "regression" else None
    store.write("verdicts", rows, "verdict")
    return rows


def _judge(metric: str, observed: float, history: pd.Series, min_runs: int, tolerance_pct: float) -> dict[str, Any]:
    if len(history) < min_runs:
        return {"expected": None, "observed": observed, "change_pct": None, "verdict": "not_enough_history"}
    expected = float(history.median())
    change = (observed / expected - 1) * 100 if expected else None
    gain = 0.0 if change is None else change if HIGHER_IS_BETTER[metric] else -change
    found = "regression" if gain < -tolerance_pct else "improvement" if gain > tolerance_pct else "ok"
    return {"expected": expected, "observed": observed, "change_pct": change, "verdict": found}


def _earlier_runs(store: Store) -> list[dict[str, Any]]:
    runs = sorted(store.read("runs").to_pylist(), key=lambda row: row["started_at"])
    own = next(row for row in runs if row["run_id"] == store.run_id)
    return [
        row for row in runs
        if row["config_key"] == own["config_key"] and row["state"] == "completed"
        and row["started_at"] < own["started_at"]
    ]


def _values(store: Store, runs: list[str]) -> pd.DataFrame:
    """One row per metric, point and run: the median over repeats."""
    frames = [_values_of_run(store, run) for run in runs]
    return pd.concat(frames) if frames else pd.DataFrame(columns=["metric", *POINT, "value"])


def _values_of_run(store: Store, run: str) -> pd.DataFrame:
    require_parts(store.root, run)
    benchmarks = store.read("benchmarks", run).to_pandas()
    usable = benchmarks[benchmarks["valid"].eq(True) & benchmarks["comparable"].eq(True)]
    acceptance = store.read("acceptance", run).to_pandas()
    overall = acceptance[acceptance["category"].isna() & acceptance["position"].isna()]
    measured = [m for m in HIGHER_IS_BETTER if m in usable.columns]
    long = pd.concat(
        [usable.melt(POINT, measured, "metric", "value"), overall.melt(POINT, ["accept_length"], "metric", "value")]
    ).dropna(subset=["value"])
    values: pd.DataFrame = long.groupby(["metric", *POINT], as_index=False)["value"].median()
    return values


def _what_changed(store: Store, baseline: list[dict[str, Any]]) -> dict[str, Any]:
    """Versions and effective settings that differ from the newest run of the baseline: where to look first."""
    if not baseline:
        return {}
    before, now = baseline[-1]["run_id"], store.run_id
    versions = [json.loads(store.read("runs", run).to_pylist()[0]["versions_json"]) for run in (before, now)]
    settings = [
        {f"{row['arm']}.{row['setting']}": row["effective"] for row in store.read("servers", run).to_pylist()}
        for run in (before, now)
    ]
    return {
        "compared_with": before,
        "versions": _differences(*versions), "settings": _differences(*settings),
    }


def _differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    names = sorted(before.keys() | now.keys())
    return {name: [before.get(name), now.get(name)] for name in names if before.get(name) != now.get(name)}
