"""What the Prefect server does by itself: mark dead runs as crashed, pass regressions on, retry crashed runs."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from prefect import get_client
from prefect.blocks.webhook import Webhook
from prefect.client.schemas.objects import StateType
from prefect.events import AutomationCore, EventTrigger, ResourceSpecification
from prefect.events.actions import CallWebhook, ChangeFlowRunState
from prefect.events.schemas.automations import Posture
from pydantic import SecretStr

from flows.nightly import EVENT

HEARTBEAT: Final = "prefect.flow-run.heartbeat"
ENDED: Final = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
SILENT_S: Final = 90  # three heartbeats of 30 s
RETRY_AFTER_S: Final = 60  # a retry at once can race with the worker that is still ending the dead run
WEBHOOK_BLOCK: Final = "drafthouse-regression"
ANY_RUN: Final = {"prefect.resource.id": "prefect.flow-run.*"}
PAYLOAD: Final = '{"event": "' + EVENT + '", "payload": {{ event.payload | tojson }}}'
OURS: Final = {"prefect.resource.id": "prefect.tag.drafthouse", "prefect.resource.role": "tag"}


def crash_detection() -> AutomationCore:
    """A run of ours whose heartbeats stop without an end is marked Crashed."""
    return AutomationCore(
        name="drafthouse: mark dead runs as crashed",
        description=f"No heartbeat for {SILENT_S} s although the run has not ended: its process is gone.",
        trigger=EventTrigger(
            match=ResourceSpecification(ANY_RUN), match_related=ResourceSpecification(OURS),
            for_each={"prefect.resource.id"}, after={HEARTBEAT}, expect={HEARTBEAT, *ENDED},
            posture=Posture.Proactive, threshold=1, within=timedelta(seconds=SILENT_S),
        ),
        actions=[ChangeFlowRunState(
            state=StateType.CRASHED,
            message=f"No heartbeat for {SILENT_S} s: the process of this run is gone. Retry continues it.",
        )],
    )


def retry_of_crashed_runs() -> AutomationCore:
    """A run that crashed and on which nothing happened for a minute is scheduled again."""
    return AutomationCore(
        name="drafthouse: retry crashed runs",
        description=f"{RETRY_AFTER_S} s after a crash, so that the old process and its lease are gone.",
        trigger=EventTrigger(
            match=ResourceSpecification(ANY_RUN), match_related=ResourceSpecification(OURS),
            for_each={"prefect.resource.id"}, after={"prefect.flow-run.Crashed"}, expect={"prefect.flow-run.*"},
            posture=Posture.Proactive, threshold=1, within=timedelta(seconds=RETRY_AFTER_S),
        ),
        actions=[ChangeFlowRunState(
            state=StateType.SCHEDULED, name="AwaitingRetry",
            message="Retried after a crash; continues at the unfinished step.",
        )],
    )


def regression_webhook(url: str) -> AutomationCore:
    """A confirmed regression is POSTed as JSON to `url`, which is kept in a Prefect block."""
    block = Webhook(method="POST", url=SecretStr(url))
    block_id = block.save(WEBHOOK_BLOCK, overwrite=True)
    return AutomationCore(
        name="drafthouse: regression to webhook",
        description=f"Event {EVENT}, with run, metrics and suspects in its payload.",
        trigger=EventTrigger(
            match=ResourceSpecification({"prefect.resource.id": "drafthouse.run.*"}), expect={EVENT},
            posture=Posture.Reactive, threshold=1, within=timedelta(0),
        ),
        actions=[CallWebhook(block_document_id=block_id, payload=PAYLOAD)],
    )


def create_or_update(automation: AutomationCore) -> None:
    """Create an automation, or replace the one of the same name."""
    with get_client(sync_client=True) as client:
        existing = client.read_automations_by_name(automation.name)
        if existing:
            client.update_automation(existing[0].id, automation)
        else:
            client.create_automation(automation)
