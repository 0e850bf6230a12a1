"""What a run found: a summary of its tables, one HTML file with the plots inside, two runs compared.

Every number shown is a cell of a table of the store, under the column's own name.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.io
from jinja2 import Environment, FileSystemLoader, select_autoescape

from tasks.errors import InputError
from tasks.plots import acceptance_by_position, lines, stage_bars
from tasks.store.files import write_whole
from tasks.store.inventory import require_parts
from tasks.store.tables import Store

TABLES = ("benchmarks", "acceptance", "replay", "alignment", "losslessness", "servers", "training", "stages")
BENCHMARK_COLUMNS = [
    "arm", "engine", "workload", "concurrency", "repeat", "requests_ok", "requests_failed", "output_tok_s",
    "decode_tok_s", "ttft_ms_p50", "tpot_ms_p50", "e2e_ms_p99", "distinct_4gram_share", "valid", "comparable", "note",
]
POINT = ["arm", "workload", "concurrency"]
COMPARED = ("output_tok_s", "decode_tok_s", "ttft_ms_p50", "tpot_ms_p50", "e2e_ms_p99")


def read_run(store: Store) -> dict[str, pd.DataFrame]:
    """The tables of this run by name, as data frames with declared columns even when empty.

    Raises StoreError if the run has lost a part of them since it ended.
    """
    require_parts(store.root, store.run_id)
    return {name: store.read(name, store.run_id).to_pandas() for name in (*TABLES, "runs")}


def summary(store: Store) -> dict[str, Any]:
    """The numbers of the final table, as plain Python values."""
    frames = read_run(store)
    run = _plain(frames["runs"])[0] if len(frames["runs"]) else {"run_id": store.run_id, "state": "unknown"}
    acceptance, replay, benchmarks = frames["acceptance"], frames["replay"], frames["benchmarks"]
    overall = acceptance[acceptance["category"].isna() & acceptance["position"].isna()]
    predicted = replay[replay["category"].isna() & replay["position"].isna()]
    lossless = frames["losslessness"].groupby(["arm", "verdict"]).size().reset_index(name="prompts")
    return {
        "run_id": store.run_id, "campaign": run.get("campaign"), "state": run["state"], "note": run.get("note"),
        "benchmarks": _plain(benchmarks[BENCHMARK_COLUMNS]),
        "acceptance": _plain(overall[["arm", "engine", "drafter", "extracted_on", "workload", "concurrency",
                                      "num_speculative_tokens", "drafts", "accepted", "accept_length"]]),
        "replay": _plain(predicted[["drafter", "workload", "auxiliary", "accept_length"]]),
        "alignment": _plain(frames["alignment"][["check", "subject", "value", "threshold", "passed"]]),
        "losslessness": _plain(lossless),
        "settings": _plain(frames["servers"].groupby(["arm", "status"]).size().reset_index(name="settings")),
        "stages": _plain(frames["stages"].sort_values("started_at")[
            ["stage", "arm", "wall_s", "cpu_s", "loads", "requests", "executed", "reused"]]),
    }


def write_report(store: Store) -> Path:
    """Write report.html of this run: one file, plots and their script inside."""
    frames = read_run(store)
    facts, run = summary(store), _plain(frames["runs"])[0]
    valid = frames["benchmarks"][frames["benchmarks"]["valid"].eq(True)]
    plots = {
        "Output throughput against concurrency (benchmarks.output_tok_s)":
            lines(valid, "concurrency", "output_tok_s", ["arm", "workload"]),
        "Time to first token (benchmarks.ttft_ms_p50)":
            lines(valid, "concurrency", "ttft_ms_p50", ["arm", "workload"]),
        "Time per output token (benchmarks.tpot_ms_p50)":
            lines(valid, "concurrency", "tpot_ms_p50", ["arm", "workload"]),
        "Acceptance by position, served and replayed (acceptance.accept_rate, replay.accept_rate)":
            acceptance_by_position(frames["acceptance"], frames["replay"]),
        "Training loss (training.loss)": lines(frames["training"], "step", "loss", ["drafter"]),
        "Wall time per stage (stages.wall_s)": stage_bars(frames["stages"]),
    }
    shown = {title: figure for title, figure in plots.items() if figure.data}
    divs = {
        title: plotly.io.to_html(
            figure, full_html=False, include_plotlyjs="inline" if number == 0 else False, default_height="360px"
        )
        for number, (title, figure) in enumerate(shown.items())
    }
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=select_autoescape(default=True))
    html = templates.get_template("report.html.j2").render(
        facts=facts, plots=divs, crossed=_engine_by_engine(facts["acceptance"]),
        versions=json.loads(run["versions_json"]), machine=json.loads(run["machine_json"]),
        servers=_plain(frames["servers"]), by_category=_by_category(frames["acceptance"]),
    )
    path = store.run_dir / "report.html"
    write_whole(path, html)
    return path


def comparison(a: Store, b: Store) -> list[dict[str, Any]]:
    """Metrics of two runs side by side; `change_pct` is null where either side is void or not comparable.

    A metric that a run does not have is null too. Raises InputError if no measurement is common to both.
    """
    left, right = (read_run(s)["benchmarks"] for s in (a, b))
    pairs = left.merge(right, on=POINT, suffixes=("_a", "_b"))
    if pairs.empty:
        raise InputError(
            f"{a.run_id} and {b.run_id} have no arm, workload and concurrency in common: {_points(left)} against "
            f"{_points(right)}; compare runs of the same campaign"
        )
    rows = []
    for key, pair in pairs.groupby(POINT):
        usable = bool(pair[["valid_a", "valid_b", "comparable_a", "comparable_b"]].all().all())
        for metric in COMPARED:
            before, after = (_median(pair[f"{metric}_{side}"]) for side in "ab")
            change = (after / before - 1) * 100 if usable and before and after is not None else None
            found = {"metric": metric, "a": before, "b": after, "change_pct": change}
            rows.append(dict(zip(POINT, key, strict=True)) | found)
    return rows


def _median(values: pd.Series) -> float | None:
    median = float(values.median())
    return None if math.isnan(median) else median


def _points(benchmarks: pd.DataFrame) -> str:
    """What a run measured, shortly."""
    found = sorted({f"{row.arm} {row.workload} C={row.concurrency}" for row in benchmarks.itertuples()})
    return (", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")) or "nothing"


def _plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of plain Python values; null stays null and never becomes NaN."""
    rows: list[dict[str, Any]] = json.loads(frame.to_json(orient="records", date_format="iso", double_precision=10))
    return rows


def _engine_by_engine(acceptance: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Accept length by (extracted_on, engine): does a drafter travel between engines?"""
    crossed: dict[str, dict[str, list[float]]] = {}
    for row in acceptance:
        if row["accept_length"] is not None:
            crossed.setdefault(row["extracted_on"], {}).setdefault(row["engine"], []).append(row["accept_length"])
    return {on: {engine: sum(v) / len(v) for engine, v in served.items()} for on, served in crossed.items()}


def _by_category(acceptance: pd.DataFrame) -> list[dict[str, Any]]:
    rows = acceptance[acceptance["category"].notna() & acceptance["position"].isna()]
    return _plain(rows[["arm", "workload", "category", "concurrency", "accept_length"]])
