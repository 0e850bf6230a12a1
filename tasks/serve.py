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

from tasks.config import Arm, Campaign, Device, EngineName
from tasks.engines.base import Command, LaunchPlan
from tasks.engines.ready import Readiness
from tasks.engines.registry import engine as adapter_of
from tasks.engines.settings import mismatches, setting_rows
from tasks.errors import InputError, LaunchFailed, ServerLost, SettingsMismatch
from tasks.machine.handle import LOOPBACK, Supervised, choose_port, server_environment
from tasks.store.tables import Store

log = logging.getLogger(__name__)
Progress = Callable[[float, str], None]

class Server:
    """Lazy handle of one arm's server; made by the flow, never cached, since a cached handle outlives its server."""

    def __init__(
        self, campaign: Campaign, plan: LaunchPlan, store: Store, before_start: Callable[[], None],
        progress: Progress | None,
    ) -> None:
        self.arm, self.plan, self.loads = plan.arm, plan, 0
        self.log = store.run_dir / f"{plan.arm.name}-load1.log"
        self._campaign, self._store, self._before_start, self._progress = campaign, store, before_start, progress
        self._engine = adapter_of(plan.arm.engine)
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
                self._ready = self._start()
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
        self._before_start()
        self.plan = replace(self.plan, port=choose_port(self._campaign.machine.port))
        command = self._engine.command(self.plan)
        number = len(list(self._store.run_dir.glob(f"{self.arm.name}-load*.log"))) + 1
        self.log = self._store.run_dir / f"{self.arm.name}-load{number}.log"
        shown = {"argv": command.argv, "env": {**self.plan.env, **command.env}}
        self.log.with_suffix(".command.json").write_text(json.dumps(shown, indent=1))
        self.loads += 1
        started = time.monotonic()
        self._running = Supervised(
            run_id=self._store.run_id, arm=self.arm.name, argv=command.argv,
            env=_environment(self._campaign, self.plan, command),
            log=self.log, port=self.plan.port, gpus=[str(g) for g in self.plan.machine.gpus],
            lock_keys=_lock_keys(self.plan), grace_s=self.plan.machine.stop_grace_s,
        )
        url = f"http://{LOOPBACK}:{self.plan.port}"
        self._wait_for_token(self._running, url, started + self.plan.machine.ready_timeout_s)
        log.info("%s: ready after %.1f s at %s", self.arm.name, time.monotonic() - started, url)
        self._check_settings(url, number)
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

    def _check_settings(self, url: str, number: int) -> None:
        """Write requested and effective settings; a strict campaign stops at a mismatch, before any measurement."""
        requested = self._engine.requested_settings(self.plan)
        rows = setting_rows(requested, self._engine.effective_settings(url, self.log, self.plan))
        facts = {"arm": self.arm.name, "engine": self._engine.name, "load": number}
        self._store.write("servers", [{**facts, **row} for row in rows], f"{self.arm.name}-load{number}")
        wrong = mismatches(rows)
        if wrong and self._campaign.strict:
            raise SettingsMismatch(f"{self.arm.name}: {'; '.join(wrong)}; see {self.log}")
        for text in wrong:
            log.warning("%s: %s (campaign is not strict)", self.arm.name, text)


@contextmanager
def serving(
    campaign: Campaign, arm: Arm, store: Store, *, before_start: Callable[[], None], capture_dir: Path | None = None,
    drafter_dir: Path | None = None, progress: Progress | None = None,
) -> Iterator[Server]:
    """A lazy server of `arm`, stopped with all that it started when the block ends, however it ends."""
    server = Server(campaign, plan_of(campaign, arm, capture_dir, drafter_dir), store, before_start, progress)
    try:
        yield server
    finally:
        server.stop()


def plan_of(campaign: Campaign, arm: Arm, capture_dir: Path | None, drafter_dir: Path | None) -> LaunchPlan:
    """Everything that the arm's command depends on; the port is chosen at launch."""
    points: tuple[int, ...] = ()
    if capture_dir is not None:
        points = tuple(sorted({*campaign.drafter.points, num_hidden_layers(Path(campaign.target.model))}))
    if arm.speculative and drafter_dir is None and arm.speculative.drafter != "own":
        drafter_dir = Path(arm.speculative.drafter)
    return LaunchPlan(
        arm=arm, target=campaign.target, machine=campaign.machine, python=campaign.machine.environment_of(arm).python,
        port=campaign.machine.port or 0, engine_points=points, capture_dir=capture_dir, drafter_dir=drafter_dir,
    )


def num_hidden_layers(model: Path) -> int:
    """N of a model folder; wrappers such as Kimi-K2.5 keep it in `text_config`."""
    try:
        config = json.loads((model / "config.json").read_text())
        return int(config.get("text_config", config)["num_hidden_layers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{model}/config.json: no num_hidden_layers to be read ({error})") from error


def _environment(campaign: Campaign, plan: LaunchPlan, command: Command) -> dict[str, str]:
    own = {v.name: v.value for v in campaign.machine.environment_of(plan.arm).variables}
    tuned = {v.name: v.value for v in plan.arm.tuning.variables}
    return server_environment(plan.python, own, plan.env, command.env, tuned)


def _lock_keys(plan: LaunchPlan) -> list[str]:
    if plan.arm.engine is EngineName.stub:
        return []
    return [f"gpu-{g}" for g in plan.machine.gpus] if plan.machine.device is Device.cuda else ["cpu"]
