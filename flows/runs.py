"""One run of a campaign: its row in `runs`, its stages as Prefect tasks, its rows in `stages`."""

from __future__ import annotations

import inspect
import json
import logging
import os
import platform
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run

from flows.continuing import stop_endless_retries, tell_what_continues
from flows.enginelog import EngineLog, HasLog
from flows.interrupt import Interrupted, Interruption, interruptible
from flows.local_server import server_outlives_run
from flows.progress import ProgressBars
from tasks.config import HIDDEN, SECRET_NAME, Campaign, Device
from tasks.reference import compute_on
from tasks.store.files import write_whole
from tasks.store.inventory import remember_parts, reopen_parts
from tasks.store.refs import Ref
from tasks.store.tables import Store

logger = logging.getLogger(__name__)
T = TypeVar("T")
COUNTED = ("loads", "requests", "executed", "reused")  # what stages tell the store; null where a stage tells nothing


class Run:
    """What the flow needs of a run: its config and store, and a way to run a stage as a Prefect task."""

    def __init__(self, config: Campaign, store: Store, interruption: Interruption | None = None) -> None:
        self.config = config
        self.store = store
        self.interruption = interruption or Interruption()
        self.progress = ProgressBars()
        self._engine_logs: list[EngineLog] = []

    def step(self, stage: str, subject: str, function: Callable[..., T], **references: Any) -> T:
        """Run one stage as a Prefect task `<stage> <subject>`; its references are passed by keyword.

        Only references go through Prefect, so that its graph shows what depends on what. Prefect
        caches nothing: a stage knows its own finished work by content key and checks it on disk,
        which a cached Prefect result does not.
        """
        name = f"{stage} {subject}".strip()
        shows_progress = "progress" in inspect.signature(function).parameters

        def run_stage(**given: Any) -> T:
            with self.engine_logs_passed_on(), self.timed(stage, subject), self.progress.bar(name) as bar:

                def report(finished: int, total: int) -> None:
                    self.interruption.check()
                    bar(finished, total)

                try:
                    done = function(**given, **({"progress": report} if shows_progress else {}))
                except Interrupted:
                    self.interruption.check()
                    raise
            self.say_if_reused(stage, name)
            return done

        self.interruption.check()
        named = task(name=stage, task_run_name=name, cache_policy=NO_CACHE)
        result: T = named(run_stage)(**references)
        if isinstance(result, Ref):
            remember_reference(self.store, name, result)
        return result

    def say_if_reused(self, stage: str, name: str) -> None:
        """One log line where a stage found all of its work done earlier."""
        counts = self.store.counts.get(stage, Counter())
        if counts["reused"] and not counts["executed"]:
            get_run_logger().info("%s: all of it was done earlier and is whole, nothing is done again", name)

    @contextmanager
    def logs_of(self, server: HasLog) -> Iterator[None]:
        """While the block runs, what this server logs stands in the log of the task at work."""
        log = EngineLog(server)
        self._engine_logs.append(log)
        try:
            yield
        finally:
            self._engine_logs.remove(log)

    @contextmanager
    def engine_logs_passed_on(self) -> Iterator[None]:
        """Give the task's log what the servers logged meanwhile; a run from a shell has the files at hand."""
        try:
            yield
        finally:
            for log in self._engine_logs if server_outlives_run() else ():
                log.pass_on(get_run_logger())

    @contextmanager
    def timed(self, stage: str, subject: str) -> Iterator[None]:
        """Write the `stages` row of one stage, also when it fails."""
        started, clock, cpu = datetime.now(UTC), time.monotonic(), _cpu_seconds()
        before = Counter(self.store.counts.get(stage, {}))
        detail = None
        try:
            yield
        except BaseException as error:
            detail = f"{type(error).__name__}: {error}"[:2000]
            raise
        finally:
            counts = self.store.counts.get(stage)
            done = {name: counts[name] - before[name] if counts is not None else None for name in COUNTED}
            row = {
                "stage": stage, "arm": subject or None, "started_at": started, "finished_at": datetime.now(UTC),
                "wall_s": time.monotonic() - clock, "cpu_s": _cpu_seconds() - cpu, "detail": detail, **done,
            }
            self.store.write("stages", [row], "-".join([stage, *subject.split()]))


def remember_reference(store: Store, step: str, reference: Ref) -> None:
    """Keep what a step of this run made or reused, for commands that look at the run later."""
    path = store.run_dir / "references.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known[step] = {"kind": reference.kind, **reference.model_dump(mode="json")}
    write_whole(path, json.dumps(known, indent=1))


def references_of(store: Store) -> list[Ref]:
    """References of a run's finished steps, in order."""
    path = store.run_dir / "references.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    kinds = {kind.kind: kind for kind in Ref.__subclasses__()}
    return [kinds[facts.pop("kind")].model_validate(facts) for facts in known.values()]


@contextmanager
def recorded(config: Campaign, store: Store) -> Iterator[Run]:
    """Keep the `runs` row true: running, then completed, failed or cancelled (a dead run stays running
    until the next run finds that its process is gone and marks it crashed)."""
    let_stages_speak()
    on_gpu = config.machine.device is Device.cuda and torch.cuda.is_available()
    compute_on(f"cuda:{(config.machine.gpus or (0,))[0]}" if on_gpu else "cpu")
    if on_gpu:  # what is left for the CPU is small, and all cores on small tensors mostly wait for each other
        torch.set_num_threads(config.machine.cpu_threads or min(4, torch.get_num_threads()))
    stop_endless_retries(flow_run.run_count or 1)
    mark_abandoned_runs(store)
    tell_what_continues(store)
    row: dict[str, Any] = {
        "run_id": store.run_id, "campaign": config.name, "started_at": datetime.now(UTC), "state": "running",
        "config_key": config.key, "config_json": _without_secrets(config), "versions_json": json.dumps(_versions()),
        "machine_json": json.dumps(_machine()),
    }
    reopen_parts(store.root, store.run_id)
    store.write("runs", [row], "run")
    state, note = "failed", None
    try:
        with interruptible() as interruption:
            yield Run(config, store, interruption)
            interruption.check()
        state = "completed"
    except (KeyboardInterrupt, TerminationSignal, SystemExit):
        state, note = "cancelled", "stopped from outside; the next run continues where this one stopped"
        raise
    except BaseException as error:
        note = f"{type(error).__name__}: {error}"[:2000]
        raise
    finally:
        try:
            remember_parts(store.root, store.run_id)  # first: a run that says completed has its list
        finally:
            store.write("runs", [row | {"state": state, "finished_at": datetime.now(UTC), "note": note}], "run")


def let_stages_speak() -> None:
    """What stages log as information belongs in the run's log, where a server keeps one; Prefect would drop it."""
    for name in ("flows", "tasks") if server_outlives_run() else ():
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(logging.INFO)


def mark_abandoned_runs(store: Store) -> None:
    """Runs whose process is gone did not end as they wished: state `crashed`."""
    for row in store.read("runs").to_pylist():
        if row["state"] != "running" or row["run"] == store.run_id:
            continue
        machine = json.loads(row["machine_json"])
        if machine["host"] == platform.node() and not _alive(machine["pid"], machine["process_started"]):
            crashed = {k: v for k, v in row.items() if k != "run"} | {"state": "crashed", "note": "its process is gone"}
            Store(store.root, row["run"]).write("runs", [crashed], "run")
            logger.warning("run %s crashed earlier; its finished work is reused", row["run"])


def _alive(pid: int, started: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - started) < 1
    except psutil.NoSuchProcess:
        return False


def _without_secrets(config: Campaign) -> str:
    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            if SECRET_NAME.search(str(value.get("name", ""))) and "value" in value:
                return value | {"value": HIDDEN}
            return {k: clean(v) for k, v in value.items()}
        return [clean(v) for v in value] if isinstance(value, list) else value

    return json.dumps(clean(config.model_dump(mode="json")), sort_keys=True)


def _versions() -> dict[str, str]:
    names = ("drafthouse", "prefect", "torch", "transformers", "pyarrow", "pandas")
    return {name: version(name) for name in names} | {"python": platform.python_version()}


def _machine() -> dict[str, Any]:
    return {
        "host": platform.node(), "pid": os.getpid(), "process_started": psutil.Process().create_time(),
        "cores": os.cpu_count(), "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "cpu": _cpu_model(), "load_1m": os.getloadavg()[0],
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _cpu_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
