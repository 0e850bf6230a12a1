"""Eight faults of the study (`make study-faults`) on the stub campaign, through a real Prefect server and worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from campaign_faults import Fault, Reference, suffer, undisturbed
from prefect_kit import PrefectStack


@pytest.fixture(scope="module")
def reference(prefect: PrefectStack, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return undisturbed(prefect, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("fault", "share"),
    [
        (Fault.kill_flow, 0.25), (Fault.kill_flow, 0.75), (Fault.kill_flow_and_supervisor, 0.45),
        (Fault.kill_engine, 0.2), (Fault.cancel, 0.6), (Fault.sigterm, 0.35), (Fault.disk_full, 0.5),
        (Fault.server_lost, 0.3),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else f"{value:.2f}",
)
def test_a_fault_costs_no_finished_work_and_changes_no_result(
    prefect: PrefectStack, tmp_path: Path, reference: Reference, fault: Fault, share: float
) -> None:
    outcome = suffer(prefect, tmp_path, fault, share, reference)
    assert outcome.struck and outcome.problems == [], outcome
    assert outcome.states[-1] == "Completed"
    if fault is not Fault.server_lost:  # which a run may outlast
        assert len(outcome.states) > 1, "the fault was felt and a retry continued"
