"""One campaign per GPU host at a time.

Two locks, since a campaign may come from a Prefect worker or from a shell, as this user or another:

* Prefect's global concurrency limit `gpu:<host>` covers all runs of one Prefect server. Its lease of
  60 s is renewed while the run lives; the server frees it when the run was killed.
* The supervisors' flock of this user covers runs that know nothing of that server. The kernel frees it.

Both are held around the whole campaign. A waiting run says which of them it waits for, and for whom.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final
from uuid import UUID

import httpx
from prefect import get_client, get_run_logger
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate, GlobalConcurrencyLimitUpdate
from prefect.concurrency._asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Running
from prefect.variables import Variable

from flows.local_server import server_outlives_run
from tasks.config import Campaign, EngineName
from tasks.errors import MachineError
from tasks.machine.facts import lock_keys
from tasks.machine.leases import HostLock, state_dir
from tasks.machine.processes import Identity, alive, boot_id, identity_of

LEASE_S: Final = 60.0
POLL_S: Final = 1.0
FREED_BY_SERVER_S: Final = 90.0  # a dead holder's lease has expired and was collected by then
WAITING: Final = "WaitingForGpu"


def host_name() -> str:
    """The GPU host; DRAFTHOUSE_HOST where this process cannot know it (in a container)."""
    return os.environ.get("DRAFTHOUSE_HOST") or platform.node()


@contextmanager
def only_campaign_on_host(campaign: Campaign, run_id: str) -> Iterator[None]:
    """Hold both locks of this host for a campaign."""
    keys = lock_keys(campaign.machine)
    only_stubs = all(arm.engine is EngineName.stub for arm in campaign.arms)
    with locked_host(run_id, [] if only_stubs else keys):
        yield


@contextmanager
def locked_host(run_id: str, keys: Sequence[str] = ()) -> Iterator[None]:
    """Hold Prefect's limit and the flocks `keys`; waits visibly (state `WaitingForGpu`, message, log) for both."""
    waiting = _Waiting()
    with ExitStack() as held:
        _take_limit(held, f"gpu:{host_name()}", run_id, waiting)
        _take_flock(held, list(keys), run_id, waiting)
        waiting.over()
        yield


class _Waiting:
    """Tells what the run waits for: once per reason in its state, and once a minute in its log."""

    def __init__(self) -> None:
        self._reason, self._said_at, self.since = "", 0.0, time.monotonic()
        self._nobody_since: float | None = None

    def nobody_lives_for(self, somebody: bool) -> float:
        """Seconds for which the lock was taken and its holder not alive."""
        now = time.monotonic()
        self._nobody_since = None if somebody else self._nobody_since or now
        return now - (self._nobody_since or now)

    def say(self, reason: str) -> None:
        now = time.monotonic()
        if reason != self._reason:
            _show_state(WAITING, reason)
        if reason != self._reason or now - self._said_at > 60:
            _logger().info("%s", reason)
            self._reason, self._said_at = reason, now

    def over(self) -> None:
        if self._reason:
            _logger().info("the host is free after %.0f s", time.monotonic() - self.since)
            _show_state("Running", None)


def _show_state(name: str, message: str | None) -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, Running(name=name, message=message))


# Prefect's limit -----------------------------------------------------------------------------


def _quiet(record: logging.LogRecord) -> bool:
    """False for Prefect's error a second about a limit that is taken: what fails is raised here as well."""
    return "failed to process item" not in str(record.msg)


_PREFECTS_SERVICE: Final = logging.getLogger("prefect._internal.concurrency")


def _take_limit(held: ExitStack, limit: str, run_id: str, waiting: _Waiting) -> None:
    _create_limit(limit)
    _PREFECTS_SERVICE.addFilter(_quiet)
    while True:
        try:
            held.enter_context(concurrency(limit, occupy=1, strict=True, lease_duration=LEASE_S, max_retries=0))
            break
        except ConcurrencySlotAcquisitionError as error:
            if not _is_taken(error):
                raise
        _wait_for_limit(limit, waiting)
    own = identity_of(os.getpid())
    assert own is not None
    holder = {"run_id": run_id, "flow_run_id": str(flow_run.id), "process": own.to_json(), "boot": boot_id()}
    Variable.set(_variable(limit), holder, overwrite=True)
    held.callback(Variable.unset, _variable(limit))


def _create_limit(limit: str) -> None:
    with get_client(sync_client=True) as client:
        try:
            client.read_global_concurrency_limit_by_name(limit)
        except ObjectNotFound:
            with suppress(ObjectAlreadyExists):  # two runs may ask at the same time
                client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=limit, limit=1))


def _is_taken(error: BaseException) -> bool:
    cause = error.__cause__
    return isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code == httpx.codes.LOCKED


def _wait_for_limit(limit: str, waiting: _Waiting) -> None:
    holder = _holder(limit)
    if holder is None:
        waiting.say(f"waiting for {limit} (Prefect's limit) held by a run that is starting or ending")
    elif _lives(holder):
        waiting.say(f"waiting for {limit} (Prefect's limit) held by run {holder['run_id']}")
    else:
        waiting.say(f"waiting for {limit} (Prefect's limit) held by run {holder['run_id']}, which is dead; "
                    f"the server frees it within {FREED_BY_SERVER_S:.0f} s")
    if waiting.nobody_lives_for(holder is not None and _lives(holder)) > _patience_s(holder):
        _reset(limit)
        return
    time.sleep(POLL_S)


def _holder(limit: str) -> dict[str, Any] | None:
    holder = Variable.get(_variable(limit), default=None)
    return holder if isinstance(holder, dict) else None


def _lives(holder: dict[str, Any]) -> bool:
    return holder["boot"] == boot_id() and alive(Identity.from_json(holder["process"]))


def _patience_s(holder: dict[str, Any] | None) -> float:
    """How long a slot without a living holder is left to the server to free.

    The leases of a run's own server died with it, and a lasting one may have lost them in a restart; but a
    run that a lasting server still thinks running may live where this process cannot see it.
    """
    if not server_outlives_run():
        return 5.0
    if holder is None:
        return 2 * FREED_BY_SERVER_S
    with get_client(sync_client=True) as client:
        try:
            state = client.read_flow_run(UUID(holder["flow_run_id"])).state
        except ObjectNotFound:
            return FREED_BY_SERVER_S
    return FREED_BY_SERVER_S if state is None or state.is_final() else float("inf")


def _reset(limit: str) -> None:
    with get_client(sync_client=True) as client:
        client.update_global_concurrency_limit(limit, GlobalConcurrencyLimitUpdate(active_slots=0))


def _variable(limit: str) -> str:
    return "holder_of_" + re.sub(r"[^a-z0-9]", "_", limit.lower())


# the supervisors' flock ----------------------------------------------------------------------


def _take_flock(held: ExitStack, keys: list[str], run_id: str, waiting: _Waiting) -> None:
    lock = HostLock(state_dir(), keys, run_id)
    held.callback(lock.release)
    while True:
        try:
            lock.acquire()
            return
        except MachineError as taken:
            holder = str(taken).split(";")[0]
            waiting.say(f"waiting for the supervisors' lock: {holder}, started outside this Prefect server")
            time.sleep(POLL_S)


def _logger() -> Any:
    return get_run_logger() if flow_run.id else logging.getLogger(__name__)
