"""What a finished run shows in the Prefect UI: results and verdict as tables, links to the report and the store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows.local_server import server_outlives_run
from tasks.report import summary
from tasks.store.tables import Store

SHOWN = ("arm", "workload", "concurrency", "requests_ok", "requests_failed", "output_tok_s", "decode_tok_s",
         "ttft_ms_p50", "tpot_ms_p50", "accept_length", "valid", "note")


def publish_results(store: Store) -> None:
    """Artifacts `results` and `report`; none where no Prefect server would keep them."""
    if not server_outlives_run():
        return
    facts = summary(store)
    lengths = {(r["arm"], r["workload"], r["concurrency"]): r["accept_length"] for r in facts["acceptance"]}
    rows = [
        {**row, "accept_length": lengths.get((row["arm"], row["workload"], row["concurrency"]))}
        for row in facts["benchmarks"]
    ]
    create_table_artifact(
        key="results", table=plain_rows(rows, SHOWN),
        description=f"Measurements of run {store.run_id}: tok/s, ms, accept length in tokens per step",
    )
    report = store.run_dir / "report.html"
    create_markdown_artifact(
        key="report", description=f"Report and store of run {store.run_id}",
        markdown=f"# {store.run_id}\n\n" + "".join(
            f"* {name}: [{path}]({_link(path, store.root)})\n"
            for name, path in (("report", report), ("store", store.root), ("engine logs", store.run_dir))
        ) + "\nLinks open on a machine that sees these folders; set `DRAFTHOUSE_STORE_URL` where they are served.\n",
    )


def publish_verdict(verdicts: Sequence[Mapping[str, Any]], run_id: str) -> None:
    """Artifact `verdict`: every compared metric, regressions first."""
    if not server_outlives_run():
        return
    columns = ("verdict", "metric", "arm", "workload", "concurrency", "expected", "observed", "change_pct",
               "baseline_runs", "suspects_json")
    ordered = sorted(verdicts, key=lambda row: (row["verdict"] != "regression", row["metric"]))
    create_table_artifact(key="verdict", table=plain_rows(ordered, columns), description=f"Verdict on run {run_id}")


def plain_rows(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of plain Python values, which is all that Prefect's tables accept; numbers to four digits."""
    return [{column: _plain(row.get(column)) for column in columns} for row in rows]


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):  # a numpy scalar
        value = value.item()
    if isinstance(value, float):
        return None if value != value else float(f"{value:.4g}")
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _link(path: Path, root: Path) -> str:
    served = os.environ.get("DRAFTHOUSE_STORE_URL")
    return f"{served.rstrip('/')}/{path.relative_to(root)}" if served else path.resolve().as_uri()
