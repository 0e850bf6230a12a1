"""Nightly: a pinned campaign, judged against its own last runs. Red only for a regression seen twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.events import emit_event
from prefect.runtime import flow_run

from flows.artifacts import publish_verdict
from flows.campaign import campaign
from tasks.config import Campaign
from tasks.errors import MeasurementInvalid
from tasks.store.tables import Store
from tasks.verdict import verdict

EVENT = "drafthouse.regression"
Rows = list[dict[str, Any]]


class RegressionConfirmed(MeasurementInvalid):
    """Two runs in a row were worse than the last runs by more than the tolerance."""


@flow(name="nightly", persist_result=True, validate_parameters=False)
def nightly(
    config: Campaign | str, store: str = "store", overrides: Sequence[str] = (), window: int = 7,
    tolerance_pct: float = 10.0,
) -> str:
    """Measure, compare with the median of the last runs, and measure again before calling it a regression.

    Returns the run id of the last measurement. Raises RegressionConfirmed when the second measurement
    is worse at the same point too; a regression that does not repeat is logged and the flow completes.
    """
    first = campaign(config, store, overrides)
    suspected = regressions(judge(first, store, window, tolerance_pct))
    if not suspected:
        return first
    get_run_logger().warning("measuring again: %s", "; ".join(map(in_words, suspected)))
    second = campaign(config, store, overrides)
    again = regressions(judge(second, store, window, tolerance_pct))
    confirmed = [row for row in again if point_of(row) in map(point_of, suspected)]
    if not confirmed:
        get_run_logger().info("not confirmed by a second measurement: %s", "; ".join(map(in_words, suspected)))
        return second
    announce(second, confirmed)
    raise RegressionConfirmed(f"{second}: {'; '.join(map(in_words, confirmed))}")


def judge(run_id: str, store: str, window: int, tolerance_pct: float) -> Rows:
    """Verdict of one run, in the table `verdicts` and in the UI."""
    rows = verdict(Store(Path(store), run_id), window=window, tolerance_pct=tolerance_pct)
    publish_verdict(rows, run_id)
    return rows


def regressions(rows: Rows) -> Rows:
    return [row for row in rows if row["verdict"] == "regression"]


def point_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a verdict is about."""
    return tuple(row[name] for name in ("metric", "arm", "workload", "concurrency"))


def in_words(row: dict[str, Any]) -> str:
    return (
        f"{row['metric']} of {row['arm']} on {row['workload']} at C={row['concurrency']}: {row['observed']:.4g}, "
        f"median of the last {row['baseline_runs']} runs {row['expected']:.4g} ({row['change_pct']:+.1f} %)"
    )


def announce(run_id: str, confirmed: Rows) -> None:
    """The event that automations (a webhook, say) listen for."""
    emit_event(
        EVENT, resource={"prefect.resource.id": f"drafthouse.run.{run_id}", "prefect.resource.name": run_id},
        related=[{"prefect.resource.id": f"prefect.flow-run.{flow_run.id}", "prefect.resource.role": "flow-run"}],
        payload={"run_id": run_id, "text": [in_words(row) for row in confirmed], "regressions": confirmed},
    )
