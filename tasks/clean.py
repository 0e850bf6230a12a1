"""Clean: free what earlier runs left behind, as the first thing and before each server start, and nothing else."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from tasks.config import Campaign
from tasks.machine.host import ThisHost
from tasks.machine.leases import register_run, state_dir
from tasks.machine.ownership import Row, TakeOver
from tasks.machine.processes import boot_id, identity_of
from tasks.machine.sweep import Swept, sweep
from tasks.store.tables import Store

log = logging.getLogger(__name__)


def clean(
    campaign: Campaign, arm_name: str | None, store: Store, *, dry_run: bool = False, take_over_uids: Iterable[int] = ()
) -> Swept:
    """Stop and remove what is provably ours; write a `cleanup` row for all that was looked at.

    Without an arm no GPU is needed yet, so none is judged. Raises Survivor, ForeignHolder or WedgedGpu after
    the rows are written; a retry of these changes nothing until somebody has looked.
    """
    swept = clean_host(
        needed_gpus=set(campaign.machine.gpus) if arm_name else None, grace_s=campaign.machine.stop_grace_s,
        dry_run=dry_run, take_over_uids=take_over_uids, run_id=store.run_id,
    )
    rows = [{"arm": arm_name, **_columns(row)} for row in swept.rows]
    part = f"{arm_name}-clean" if arm_name else "clean"
    earlier = len(list((store.root / "tables" / "cleanup" / f"run={store.run_id}").glob(f"{part}*.parquet")))
    store.write("cleanup", rows, f"{part}{earlier + 1}")
    if swept.problem:
        raise swept.problem
    return swept


def clean_host(
    *, needed_gpus: set[int] | None = None, grace_s: float = 10.0, dry_run: bool = False,
    take_over_uids: Iterable[int] = (), run_id: str | None = None,
) -> Swept:
    """The same without a campaign, for `drafthouse clean`: nothing is written, `problem` is not raised."""
    uids = frozenset(take_over_uids)
    if run_id is not None:
        flow = identity_of(os.getpid())
        assert flow is not None
        register_run(run_id, state_dir(), flow, boot_id())
    swept = sweep(
        ThisHost(uids), needed_gpus=needed_gpus, grace_s=grace_s, dry_run=dry_run,
        take_over=TakeOver(uids) if uids else None,
    )
    for row in swept.rows:
        level = logging.INFO if row.action in ("stopped", "removed", "survived") else logging.DEBUG
        log.log(level, "clean: %s %s %s (%s) %s", row.action, row.kind, row.what, row.proof, row.detail)
    return swept


def _columns(row: Row) -> dict[str, object]:
    return {
        "kind": row.kind, "what": row.what, "proof": row.proof, "action": row.action, "bytes": row.bytes,
        "detail": row.detail or None,
    }
