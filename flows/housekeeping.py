"""Small flows that one starts from the Prefect UI: clean this host, and write a report again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_table_artifact
from prefect.runtime import flow_run

from flows.artifacts import plain_rows, publish_results
from flows.lock import locked_host
from flows.runs import let_stages_speak
from tasks.clean import clean_host
from tasks.report import write_report
from tasks.store.tables import Store, find_run


@flow(name="clean", flow_run_name="clean (dry run: {dry_run})")
def clean(dry_run: bool = True) -> int:
    """Stop and remove what earlier runs left on this worker's host; returns how many things it freed.

    Waits for a running campaign. Raises Survivor, ForeignHolder or WedgedGpu where somebody has to look.
    """
    let_stages_speak()
    with locked_host(f"clean-{flow_run.id}"):
        swept = clean_host(dry_run=dry_run)
    rows: list[dict[str, Any]] = [vars(row) for row in swept.rows]
    columns = ("action", "kind", "what", "proof", "bytes", "detail")
    create_table_artifact(key="cleanup", table=plain_rows(rows, columns), description=f"dry run: {dry_run}")
    if swept.problem:
        raise swept.problem
    return sum(row["action"] in ("stopped", "removed") for row in rows)


@flow(name="report", flow_run_name="report of {run_id}")
def report(run_id: str = "last", store: str = "store") -> str:
    """Write report.html of a run again and show its results."""
    found = Store(Path(store), find_run(Path(store), run_id))
    path = write_report(store=found)
    publish_results(found)
    get_run_logger().info("report: %s", path)
    return str(path)
