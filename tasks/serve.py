"""Serve: one arm's server, started when an unfinished step first needs it and stopped with its context."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tasks.config import Arm, Campaign
from tasks.effective import check_server
from tasks.engines.base import LaunchPlan
from tasks.engines.ready import Readiness
from tasks.engines.registry import engine as adapter_of
from tasks.errors import LaunchFailed, ServerLost
from tasks.launch import environment_for, lock_keys, plan_of, shown_variables
from tasks.machine.handle import LOOPBACK, Supervised, choose_port
from tasks.store.tables import Store

log = logging.getLogger(__name__)
Progress = Callable[[float, str], None]


class Server:
    """Lazy handle of one arm's server; made by the flow, never cached, since a cached handle outlives its server."""

    def __init__(
        self, campaign: Campaign, plan: LaunchPlan, store: Store, before_start: Callable[[], None],
        progress: Progress | None, start_as: Callable[[Callable[[], str]], str] | None = None,
    ) -> None:
        self.arm, self.plan, self.loads = plan.arm, plan, 0
        self.log = store.run_dir / f"{plan.arm.name}-load1.log"
        self._campaign, self._store, self._before_start, self._progress = campaign, store, before_start, progress
        self._engine, self._start_as = adapter_of(plan.arm.engine), start_as or (lambda start: start())
        self._running: Supervised | None = None
        self._ready = ""
        self._lock = threading.RLock()

    def url(self) -> str:
        """Base URL of the ready server. The first call starts it and waits for a real token.

        Raises LaunchFailed, SettingsMismatch, PortTaken or MachineError when it does not come up, and
        ServerLost when it was up and died; the next call then starts a new one.
        """
        with self._lock:
            if self._running and self._ready:
                code = self._running.exit_code()
                if code is None:
                    return self._ready
                told = f"exited with code {code} after it was ready; {self.log} ends:\n{self._running.log_tail()}"
                self.stop()
                raise ServerLost(f"{self.arm.name}: {told}")
            try:
                self._before_start()
                self._ready = self._start_as(self._start)
            except BaseException:
                self.stop()
                raise
            return self._ready

    def stop(self) -> None:
        """Stop the whole group and verify; harmless if nothing runs. Raises Survivor."""
        running, self._running, self._ready = self._running, None, ""
        if running:
            running.stop()

    def _start(self) -> str:
        self._engine.check(self.plan)
        if not Path(self.plan.python).exists():
            missing = f"no engine environment at {self.plan.python}; make it with: make engines"
            raise LaunchFailed(f"{self.arm.name}: {missing}")
        self.plan = replace(self.plan, port=choose_port(self._campaign.machine.port))
        command = self._engine.command(self.plan)
        number = len(list(self._store.run_dir.glob(f"{self.arm.name}-load*.log"))) + 1
        self.log = self._store.run_dir / f"{self.arm.name}-load{number}.log"
        shown = {"argv": command.argv, "env": shown_variables(self.plan, command), "notes": self.plan.notes}
        self.log.with_suffix(".command.json").write_text(json.dumps(shown, indent=1))
        self.loads += 1
        self._store.count_load()
        started = time.monotonic()
        self._running = Supervised(
            run_id=self._store.run_id, arm=self.arm.name, argv=command.argv,
            env=environment_for(self.plan, command),
            log=self.log, port=self.plan.port, gpus=[str(g) for g in self.plan.machine.gpus],
            lock_keys=lock_keys(self.plan), grace_s=self.plan.machine.stop_grace_s,
        )
        url = f"http://{LOOPBACK}:{self.plan.port}"
        self._wait_for_token(self._running, url, started + self.plan.machine.ready_timeout_s)
        load_s = time.monotonic() - started
        log.info("%s: ready after %.1f s at %s", self.arm.name, load_s, url)
        check_server(self._engine, url, self.log, self.plan, self._campaign, self._store, number, load_s)
        return url

    def _wait_for_token(self, running: Supervised, url: str, deadline: float) -> None:
        probe, offset = Readiness(self._engine, url, self.plan.target.name), 0
        while time.monotonic() < deadline:
            offset = self._report_progress(offset)
            if (code := running.exit_code()) is not None:
                raise running.why_ended() or LaunchFailed(
                    f"{self.arm.name}: exited with code {code} while loading; {self.log} ends:\n{running.log_tail()}"
                )
            if probe.ready(deadline - time.monotonic()):
                return
            time.sleep(0.1)
        limit = f"{self.plan.machine.ready_timeout_s:g} s (machine.ready_timeout_s)"
        raise LaunchFailed(
            f"{self.arm.name}: no token within {limit}: {probe.reason}; {self.log} ends:\n{running.log_tail()}"
        )

    def _report_progress(self, offset: int) -> int:
        try:
            with self.log.open("rb") as stream:
                stream.seek(offset)
                new = stream.read()
        except OSError:
            return offset
        whole = new[: new.rfind(b"\n") + 1]
        for line in whole.decode(errors="replace").splitlines():
            told = self._engine.load_progress(line)
            if told and self._progress:
                self._progress(*told)
        return offset + len(whole)


@contextmanager
def serving(
    campaign: Campaign, arm: Arm, store: Store, *, before_start: Callable[[], None], capture_dir: Path | None = None,
    drafter_dir: Path | None = None, probe_dir: Path | None = None, progress: Progress | None = None,
    start_as: Callable[[Callable[[], str]], str] | None = None,
) -> Iterator[Server]:
    """A lazy server of `arm`, stopped with all that it started when the block ends, however it ends."""
    plan = plan_of(campaign, arm, capture_dir, drafter_dir)
    if probe_dir is not None:
        plan = replace(plan, env={**plan.env, "DRAFTHOUSE_PROBE_DIR": str(probe_dir)})
    server = Server(campaign, plan, store, before_start, progress, start_as)
    try:
        yield server
    finally:
        server.stop()
