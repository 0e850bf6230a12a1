"""A real Prefect server and worker for tests: own PREFECT_HOME, free ports, everything stopped by pid."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import psutil
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateName,
    LogFilter,
    LogFilterFlowRunId,
    TaskRunFilter,
    TaskRunFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling, Scheduled

ROOT = Path(__file__).resolve().parents[1]
BIN = ROOT / ".venv" / "bin"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], timeout_s: float, what: str, every_s: float = 0.2) -> Any:
    """Wait for a true value and return it."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(every_s)
    return value


def _alive(infrastructure: str | None) -> bool:
    """Does a run's process (`host:pid`) live? Its last logs arrive as it ends, after the final state."""
    with contextlib.suppress(psutil.NoSuchProcess, ValueError):
        return psutil.Process(int((infrastructure or "").rpartition(":")[2])).status() != psutil.STATUS_ZOMBIE
    return False


class PrefectStack:
    """One server and one worker of its own pool; `store` is the store that its runs use."""

    def __init__(self, folder: Path, database: str | None = None) -> None:
        self.folder, self.store = folder, folder / "store"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._database = database
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.client = SyncPrefectClient(f"{self.url}/api").__enter__()

    @property
    def env(self) -> dict[str, str]:
        """Environment of every process of the stack."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "DRAFTHOUSE_"))}
        storage = "prefect.server.concurrency.lease_storage.filesystem"
        return kept | {
            "PREFECT_HOME": str(self.folder / "prefect"), "PREFECT_API_URL": f"{self.url}/api",
            "PREFECT_SERVER_UI_API_URL": f"{self.url}/api", "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false", "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": storage,
            "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "5",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5", "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_RUNNER_POLL_FREQUENCY": "1", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
            "PREFECT_LOGGING_EXTRA_LOGGERS": "tasks,flows", "XDG_STATE_HOME": str(self.folder / "state"),
            "DRAFTHOUSE_HOST": "testhost", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default",
            **({"PREFECT_SERVER_DATABASE_CONNECTION_URL": self._database} if self._database else {}),
        }

    def start_server(self) -> None:
        self._start("server", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        until(self._healthy, 120, f"server on {self.url}; see {self.folder}/server.log")

    def _healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/api/health", timeout=2).status_code == 200
        return False

    def deploy(self, *options: str) -> str:
        said = self.command("deploy", "--store", str(self.store), *options)
        self.pause_schedules()
        return said

    def pause_schedules(self) -> None:
        """At two o'clock the nightly would measure the whole demo beside the tests."""
        for deployment in self.client.read_deployments():
            for schedule in deployment.schedules:
                # Prefect 3.9.1 forgets parameters that an update does not name.
                self.client.update_deployment_schedule(
                    deployment.id, schedule.id, active=False, parameters=schedule.parameters
                )

    def command(self, *arguments: str, check: bool = True) -> str:
        """Run `drafthouse ...` against this server and return what it printed."""
        done = subprocess.run(
            [BIN / "drafthouse", *arguments], env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=300
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start_worker(self) -> subprocess.Popen[bytes]:
        return self._start("worker", "prefect", "worker", "start", "--pool", "gpu-hosts", "--name", "tests")

    def _start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [BIN / program, *arguments]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, env=self.env, cwd=self.folder, stdout=log, stderr=log)
        self._processes[name] = process
        return process

    def stop(self, name: str, number: int = signal.SIGTERM, timeout_s: float = 30) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        for name in ("worker", "server"):
            self.stop(name)
        self.client.__exit__()

    # runs -------------------------------------------------------------------------------------

    def submit(self, deployment: str, **parameters: Any) -> UUID:
        found = self.client.read_deployment_by_name(deployment)
        return self.client.create_flow_run_from_deployment(found.id, parameters=parameters).id

    def runs_of(self, deployment: UUID) -> list[FlowRun]:
        """Without the hundred that the scheduler makes of a nightly deployment some seconds after it was created."""
        ours = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
        return self.client.read_flow_runs(deployment_filter=ours, limit=200)

    def runs_in(self, state: str) -> list[FlowRun]:
        named = FlowRunFilter(state=FlowRunFilterState(name=FlowRunFilterStateName(any_=[state])))
        return self.client.read_flow_runs(flow_run_filter=named, limit=200)

    def run(self, flow_run: UUID) -> FlowRun:
        return self.client.read_flow_run(flow_run)

    def state(self, flow_run: UUID) -> str:
        state = self.run(flow_run).state
        assert state is not None
        return str(state.name)

    def finish(self, flow_run: UUID, timeout_s: float = 150) -> FlowRun:
        """Wait for the end of a run."""
        def ended() -> FlowRun | None:
            run = self.run(flow_run)
            return run if run.state and run.state.is_final() else None

        try:
            found: FlowRun = until(ended, timeout_s, f"end of {flow_run}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs(flow_run)[-4000:]}") from None
        until(lambda: not _alive(found.infrastructure_pid), 60, f"process {found.infrastructure_pid} to end")
        return found

    def retry(self, flow_run: UUID, timeout_s: float = 120) -> list[str]:
        """Press the UI's Retry button until the run starts; returns the ends that came over a retry.

        Some seconds after a cancelled flow has said so itself, Prefect's worker says it once more, over a retry that
        came in between.
        """
        before, again, deadline = self.run(flow_run).run_count, list[str](), time.monotonic() + timeout_s
        self._press_retry(flow_run)
        while (seen := self.run(flow_run)).run_count == before:
            if seen.state and seen.state.is_final():
                again.append(str(seen.state.name))
                self._press_retry(flow_run)
            if time.monotonic() > deadline:
                states = [f"{s.timestamp:%X} {s.name}" for s in self.client.read_flow_run_states(flow_run)]
                said = (self.folder / "worker.log").read_text()[-3000:]
                raise AssertionError(f"the retry did not start: {states}; the worker: {said}")
            time.sleep(0.2)
        return again

    def _press_retry(self, flow_run: UUID) -> None:
        self.client.set_flow_run_state(flow_run, Scheduled(name="AwaitingRetry"), force=True)

    def cancel(self, flow_run: UUID) -> None:
        """What the UI's Cancel button does."""
        self.client.set_flow_run_state(flow_run, Cancelling())

    def logs(self, flow_run: UUID) -> str:
        chosen = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]))
        lines = []
        while rows := self.client.read_logs(chosen, limit=200, offset=len(lines)):
            lines += [f"{row.level} {row.message}" for row in rows]
        return "\n".join(lines)

    def tasks(self, flow_run: UUID) -> list[tuple[str, str]]:
        """(name, state) of a run's tasks in the order of their start."""
        chosen = TaskRunFilter(flow_run_id=TaskRunFilterFlowRunId(any_=[flow_run]))
        runs = self.client.read_task_runs(task_run_filter=chosen, limit=200)
        return [(r.name, r.state_name or "") for r in sorted(runs, key=lambda r: str(r.start_time))]

    def artifacts(self, flow_run: UUID) -> dict[str, Any]:
        """Artifacts of a run by key; the newest where there are several."""
        chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
        found = self.client.read_artifacts(artifact_filter=chosen, limit=200)
        return {str(a.key): a for a in sorted(found, key=lambda a: str(a.created))}


@contextlib.contextmanager
def prefect_stack(folder: Path, database: str | None = None) -> Iterator[PrefectStack]:
    """A server with our deployments and a worker."""
    folder.mkdir(parents=True, exist_ok=True)
    stack = PrefectStack(folder, database)
    try:
        stack.start_server()
        stack.deploy()
        stack.start_worker()
        yield stack
    finally:
        stack.close()
