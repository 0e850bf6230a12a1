"""Runs through a real Prefect server and worker: start, retry, cancel, schedule, wrong parameters."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateName,
)
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule
from prefect_kit import PrefectStack, until
from stub_campaign import StubCampaign

from tasks.store.tables import Store

CAMPAIGN = "campaign/campaign"


def run_id_of(run: UUID) -> str:
    return f"small-{run.hex[-12:]}"


def test_a_failed_run_that_is_retried_does_only_what_is_left(prefect: PrefectStack, tmp_path: Path) -> None:
    small = StubCampaign(tmp_path)
    small.broken.touch()
    run = prefect.submit(CAMPAIGN, config=str(small.file), store=str(tmp_path / "store"))
    failed = prefect.finish(run)
    assert failed.state and failed.state.type is StateType.FAILED, prefect.logs(run)
    assert {name for name, state in prefect.tasks(run) if state == "Failed"} == {"benchmark stub-spec chat"}
    before = small.measured(), small.generated(), small.extracted()
    (weights,) = (tmp_path / "store" / "objects" / "drafter").glob("*/model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])  # a finished result that somebody damaged
    (alignment,) = (tmp_path / "store" / "objects" / "alignment").glob("*/alignment.parquet")
    alignment.unlink()

    small.broken.unlink()
    prefect.retry(run)
    done = prefect.finish(run)
    assert done.state and done.state.type is StateType.COMPLETED, prefect.logs(run)
    assert small.generated() == before[1] and small.extracted() == before[2]
    assert len(set(small.generated())) == len(small.generated()) == 8
    assert len(set(small.extracted())) == len(small.extracted())
    assert small.measured() - before[0] == 2 * (4 + 1)  # two points of the arm that failed, warm-up included

    assert weights.read_bytes() == whole and alignment.exists(), "damaged results are seen and made again"
    log = prefect.logs(run)
    assert f"run {run_id_of(run)} continues; it was failed" in log
    for stage in ("regenerate stub-base", "extract stub-extract"):
        assert f"{stage}: all of it was done earlier and is whole" in log

    assert done.name.startswith("tiny-llama: stub-base, stub-extract, stub-spec (small, 20")
    artifacts = prefect.artifacts(run)
    assert {"results", "report"} <= artifacts.keys() and any(key.startswith("progress-") for key in artifacts)
    assert "report.html" in str(artifacts["report"].data)
    runs = Store(tmp_path / "store", "reader").read("runs").to_pylist()
    assert [row["state"] for row in runs] == ["completed"]
    assert "20 stub-base-load1 | stub engine: loaded 100%" in prefect.logs(run)


def test_a_cancelled_run_stops_its_server_and_continues_when_retried(prefect: PrefectStack, tmp_path: Path) -> None:
    small = StubCampaign(tmp_path, step_s=0.2)
    run = prefect.submit(CAMPAIGN, config=str(small.file), store=str(tmp_path / "store"))
    until(lambda: small.measured() > 0, 90, "first answer")
    prefect.cancel(run)
    cancelled = prefect.finish(run, 60)
    assert cancelled.state and cancelled.state.type is StateType.CANCELLED
    until(lambda: not list((prefect.folder / "state" / "drafthouse").glob("lease-*")), 20, "lease gone with its server")
    small.file.write_text(small.file.read_text().replace("'0.2'", "'0.0'"))
    prefect.retry(run)
    done = prefect.finish(run)
    assert done.state and done.state.type is StateType.COMPLETED, prefect.logs(run)


def test_a_schedule_starts_runs_with_its_own_parameters(prefect: PrefectStack) -> None:
    deployment = prefect.client.read_deployment_by_name("clean/clean")
    # Short, since a busy server that misses the first time starts the next one instead.
    every = IntervalSchedule(interval=timedelta(seconds=20), anchor_date=datetime.now(UTC) + timedelta(seconds=4))
    made = prefect.client.create_deployment_schedules(
        deployment.id, [DeploymentScheduleCreate(schedule=every, active=True, parameters={"dry_run": True})]
    )
    try:
        def started() -> list[object]:
            ours = DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id]))
            done = FlowRunFilter(state=FlowRunFilterState(name=FlowRunFilterStateName(any_=["Completed"])))
            runs = prefect.client.read_flow_runs(deployment_filter=ours, flow_run_filter=done)
            return [r for r in runs if r.auto_scheduled]

        found = until(started, 120, "a scheduled run that completed")
        assert found[0].parameters == {"dry_run": True}  # type: ignore[attr-defined]
        assert "cleanup" in prefect.artifacts(found[0].id)  # type: ignore[attr-defined]
    finally:
        prefect.client.delete_deployment_schedule(deployment.id, made[0].id)


def test_nightly_is_deployed_with_cron_parameters_and_tags(prefect: PrefectStack) -> None:
    deployment = prefect.client.read_deployment_by_name("nightly/nightly")
    (schedule,) = deployment.schedules
    assert isinstance(schedule.schedule, CronSchedule) and schedule.schedule.cron == "0 2 * * *"
    assert schedule.parameters == {"config": "demo-cpu", "tolerance_pct": 10.0}
    assert deployment.tags == ["drafthouse", "nightly"]
    names = [automation.name for automation in prefect.client.read_automations()]
    assert "drafthouse: mark dead runs as crashed" in names


def test_deploying_again_changes_nothing_and_adds_nothing(prefect: PrefectStack) -> None:
    before = [d.id for d in prefect.client.read_deployments()], len(prefect.client.read_automations())
    prefect.deploy()
    assert ([d.id for d in prefect.client.read_deployments()], len(prefect.client.read_automations())) == before


@pytest.mark.parametrize(
    ("deployment", "parameters", "says"),
    [
        (CAMPAIGN, {"config": "demo-cpu", "epochs": 3}, "epochs"),
        (CAMPAIGN, {"config": "no-such-campaign"}, "config"),
        ("campaign/campaign-from-fields", {"config": {"name": "x", "strikt": True}}, "strikt"),
        ("nightly/nightly", {"config": "demo-cpu", "window": 1}, "window"),
    ],
)
def test_unknown_and_wrong_parameters_are_refused_when_the_run_is_created(
    prefect: PrefectStack, deployment: str, parameters: dict[str, object], says: str
) -> None:
    with pytest.raises(httpx.HTTPStatusError) as refused:
        prefect.submit(deployment, **parameters)
    assert refused.value.response.status_code in (409, 422)
    assert says in refused.value.response.text


def test_contradictory_parameters_fail_before_anything_is_locked_or_started(prefect: PrefectStack) -> None:
    run = prefect.submit(CAMPAIGN, config="stub", overrides=["arms.stub-extract.tuning.prefix_cache=true"])
    failed = prefect.finish(run, 60)
    assert failed.state and failed.state.type is StateType.FAILED
    assert "arms.1: tuning.prefix_cache must be false for extraction" in str(failed.state.message)
    assert failed.total_run_time < timedelta(seconds=5)  # the remedy is told at once
    assert prefect.tasks(run) == []
