"""`drafthouse deploy`: deployments/prefect.yaml on the Prefect server, with work pool, forms and automations."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import httpx
import yaml
from prefect import Flow, get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, WorkPoolCreate
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_URL

from flows import automations
from flows.form import CAMPAIGNS, form_schema
from tasks.errors import ConfigError, InputError

PREFECT_YAML: Final = CAMPAIGNS.parent / "prefect.yaml"


def deploy(store: Path, *, webhook: str | None = None, retry_crashed: bool = False) -> list[str]:
    """Create or update all deployments and automations; returns `flow/deployment` names.

    `store` becomes the default of every form. Raises InputError if no Prefect server answers.
    """
    url = PREFECT_API_URL.value()
    if not url:
        raise InputError("PREFECT_API_URL: not set; start `prefect server start` and set it to its /api address")
    wanted = yaml.safe_load(PREFECT_YAML.read_text())["deployments"]
    try:
        with get_client(sync_client=True) as client:
            for pool in sorted({deployment["work_pool"]["name"] for deployment in wanted}):
                _create_pool(client, pool)
            names = [_create_deployment(client, deployment, store.resolve()) for deployment in wanted]
        automations.create_or_update(automations.crash_detection())
        if retry_crashed:
            automations.create_or_update(automations.retry_of_crashed_runs())
        if webhook:
            automations.create_or_update(automations.regression_webhook(webhook))
    except httpx.TransportError as error:
        where = f"PREFECT_API_URL: no Prefect server answers at {url}"
        raise InputError(f"{where} ({error}); start it or correct the address") from error
    return names


def _create_pool(client: SyncPrefectClient, name: str) -> None:
    try:
        client.create_work_pool(WorkPoolCreate(name=name, type="process"))
    except ObjectAlreadyExists:
        return


def _create_deployment(client: SyncPrefectClient, wanted: Mapping[str, Any], store: Path) -> str:
    function = flow_of(wanted["entrypoint"])
    form, defaults = dict(wanted["form"]), dict(wanted.get("parameters") or {})
    if "store" in form:
        form["store"] = form["store"] | {"default": str(store)}
        defaults["store"] = str(store)
    schema = form_schema(function.fn, form)
    client.create_deployment(
        client.create_flow(function), wanted["name"], description=wanted["description"], tags=wanted["tags"],
        entrypoint=wanted["entrypoint"], parameters=defaults, parameter_openapi_schema=schema,
        enforce_parameter_schema=True, work_pool_name=wanted["work_pool"]["name"],
        job_variables=wanted["work_pool"]["job_variables"],
        schedules=[_schedule(schedule) for schedule in wanted.get("schedules") or ()],
    )
    return f"{function.name}/{wanted['name']}"


def flow_of(entrypoint: str) -> Flow[..., Any]:
    """The flow at `package.module.name`."""
    module, _, name = entrypoint.rpartition(".")
    found = getattr(import_module(module), name, None)
    if not isinstance(found, Flow):
        raise ConfigError(f"entrypoint: {entrypoint} is not a flow")
    return found


def _schedule(wanted: Mapping[str, Any]) -> DeploymentScheduleCreate:
    cron = CronSchedule(cron=wanted["cron"], timezone=wanted["timezone"])
    return DeploymentScheduleCreate(
        schedule=cron, active=wanted["active"], parameters=wanted["parameters"], slug=wanted["slug"]
    )
