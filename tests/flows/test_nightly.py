"""A nightly through the server and worker: a campaign inside it, a verdict beside it."""

from __future__ import annotations

from pathlib import Path

from prefect.client.schemas.objects import StateType
from prefect_kit import PrefectStack
from stub_campaign import StubCampaign

from tasks.store.tables import Store


def test_a_nightly_measures_and_judges(prefect: PrefectStack, tmp_path: Path) -> None:
    small = StubCampaign(tmp_path, samples=4)
    run = prefect.submit("nightly/nightly", config=str(small.file), store=str(tmp_path / "store"))
    done = prefect.finish(run)
    assert done.state and done.state.type is StateType.COMPLETED, prefect.logs(run)
    verdicts = Store(tmp_path / "store", "reader").read("verdicts").to_pylist()
    assert {(row["arm"], row["concurrency"]) for row in verdicts} >= {("stub-base", 1), ("stub-spec", 2)}
    assert {row["verdict"] for row in verdicts} == {"not_enough_history"}
    assert "not_enough_history" in str(prefect.artifacts(run)["verdict"].data)
