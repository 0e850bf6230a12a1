"""What a ready server really is: effective settings against requested ones, hazards, and whether it talks sense."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from tasks.config import Campaign
from tasks.engines.base import Engine, LaunchPlan
from tasks.engines.hazards import hazards
from tasks.engines.settings import mismatches, setting_rows
from tasks.errors import SettingsMismatch
from tasks.launch import nccl_observed, requested
from tasks.sanity import check_sanity
from tasks.store.tables import Store

log = logging.getLogger(__name__)


def check_server(
    engine: Engine, url: str, server_log: Path, plan: LaunchPlan, campaign: Campaign, store: Store, number: int,
    load_s: float,
) -> None:
    """Write the rows of table `servers`, then stop what must not be measured.

    A strict campaign stops at a mismatch (SettingsMismatch), any campaign at a server that talks nonsense
    (LaunchFailed). `load_s` is the time until the first token; it stands beside that of these checks.
    """
    begun = time.monotonic()
    observed = [*engine.effective_settings(url, server_log, plan), *nccl_observed(server_log)]
    asked = requested(engine, plan, engine.command(plan))
    rows = setting_rows(asked, observed, plan.notes)
    # Where a setting was asked for, a contradiction is decided already: match or mismatch by the stronger source.
    decided = {f"hazard.contradiction.{setting}" for setting in asked}
    dangers = [row for row in hazards(observed, plan, campaign) if row["setting"] not in decided]
    facts = {"arm": plan.arm.name, "engine": engine.name, "load": number}
    store.write("servers", [{**facts, **row} for row in [*rows, *dangers]], f"{plan.arm.name}-load{number}")
    for row in dangers:
        log.warning("%s: %s: %s", plan.arm.name, row["setting"], row["detail"])
    wrong = mismatches(rows)
    if wrong and campaign.strict:
        raise SettingsMismatch(f"{plan.arm.name}: {'; '.join(wrong)}; see {server_log}")
    for text in wrong:
        log.warning("%s: %s (campaign is not strict)", plan.arm.name, text)
    check_sanity(engine, url, plan, campaign, store, number)
    times = {"load_s": load_s, "check_s": time.monotonic() - begun}
    store.write("servers", [
        {**facts, "setting": name, "engine_setting": name, "effective": f"{value:.3f}", "source": "clock",
         "status": "observed"}
        for name, value in times.items()
    ], f"{plan.arm.name}-load{number}-times")
