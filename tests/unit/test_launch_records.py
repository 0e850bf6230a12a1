"""What a launch leaves in records: secrets reach the server and never a file."""

from __future__ import annotations

from pathlib import Path

from tasks.campaign_file import load_campaign
from tasks.engines.base import Command
from tasks.launch import environment_for, plan_of, shown_variables

STUB = Path(__file__).resolve().parents[2] / "deployments" / "campaigns" / "stub.yaml"


def test_a_token_reaches_the_server_and_no_record() -> None:
    variables = "[{name: HF_TOKEN, value: hunter2}, {name: OMP_NUM_THREADS, value: '3'}]"
    campaign = load_campaign(STUB, [f"arms.stub-base.tuning.variables={variables}"])
    plan = plan_of(campaign, campaign.arms[0], None, None)
    command = Command(("server",), {"TOKENIZERS_PARALLELISM": "false"})
    assert environment_for(plan, command)["HF_TOKEN"] == "hunter2"
    shown = shown_variables(plan, command)
    assert shown["HF_TOKEN"] == "***"
    assert (shown["OMP_NUM_THREADS"], shown["TOKENIZERS_PARALLELISM"]) == ("3", "false")
