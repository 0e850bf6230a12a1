"""Faults on a running campaign, and what must hold after each: driven by the tests and by the study."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
import pyarrow.parquet as pq
from prefect.client.schemas.objects import StateType
from prefect_kit import PrefectStack, until
from stub_campaign import RealCampaign, StubCampaign

from tasks.machine.leases import read_leases
from tasks.machine.processes import RUN_MARKER, processes
from tasks.store.keys import file_checksum
from tasks.store.tables import Store

STEP_S = 0.02  # pause of the stub between chunks, so that faults hit measurements too
RETRIES = 3


class Fault(StrEnum):
    kill_flow = "kill -9 of the flow"
    kill_flow_and_supervisor = "kill -9 of flow and supervisor"
    kill_engine = "kill -9 of the engine"
    cancel = "cancel from the API"
    sigterm = "SIGTERM to the flow"
    disk_full = "no byte can be written any more"
    server_lost = "kill -9 of the Prefect server, back after 5 s"
    kill_worker = "kill -9 of worker and flow"


@dataclass
class Finished:
    """What was done when the fault had struck: nothing of it may be done again."""

    at: float
    prompts: set[tuple[int, ...]]
    states: set[str]
    files: dict[Path, tuple[int, int]]  # of finished artifacts and measurements -> inode, time of change


@dataclass
class Outcome:
    """One fault and what came of it."""

    fault: Fault
    share: float
    struck: bool = False
    states: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Decoys:
    """A process and a file that look like an engine's and are not ours."""

    def __init__(self) -> None:
        self.file = Path("/dev/shm") / f"psm_{uuid.uuid4().hex[:8]}"
        self.file.write_bytes(b"somebody else's")
        code = "import time; time.sleep(36000)"
        self.process = subprocess.Popen([sys.executable, "-c", code, "tasks.load.mock_server", "vllm.entrypoints"])

    def problems(self) -> list[str]:
        found = [] if self.process.poll() is None else ["a process of somebody else was killed"]
        return found + ([] if self.file.exists() else ["a file of somebody else was removed"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.file.unlink(missing_ok=True)


class FaultRun:
    """One campaign through a real server and worker, with one fault."""

    def __init__(self, stack: PrefectStack, folder: Path, engine: str) -> None:
        self.stack, self.folder = stack, folder
        self.campaign = StubCampaign(folder, step_s=STEP_S) if engine == "stub" else RealCampaign(folder, engine)
        self.root = folder / "store"
        self.state = stack.folder / "state" / "drafthouse"

    def start(self) -> UUID:
        """Submit and wait until the flow is at work."""
        run = self.stack.submit("campaign/campaign", config=str(self.campaign.file), store=str(self.root))
        until(lambda: self._row(), 90, "a row in `runs`")
        return run

    def _row(self) -> dict[str, Any] | None:
        with suppress(OSError):
            return next(iter(Store(self.root, "reader").read("runs").to_pylist()), None)
        return None

    def wait_for(self, share: float, reference: Reference) -> None:
        """Until that share of an undisturbed run's stages is done, and that far into the next one.

        Stages and not seconds, since other load makes a run several times slower.
        """
        done, into = divmod(share * reference.stages, 1)
        while len(self._stages()) < done and (self._row() or {}).get("state") == "running":
            time.sleep(0.02)
        time.sleep(into * reference.seconds / reference.stages)

    def _stages(self) -> list[Path]:
        return list(self.root.glob("tables/stages/*/*.parquet"))

    def strike(self, run: UUID, fault: Fault) -> bool:
        """Do what the fault says; False if the run had ended before there was something to hit."""
        row, lease = self._row(), None
        assert row is not None
        flow = json.loads(row["machine_json"])["pid"]
        needs_server = fault in (Fault.kill_engine, Fault.kill_flow_and_supervisor)
        while row["state"] == "running" and needs_server and lease is None:
            time.sleep(0.05)
            row = self._row() or row
            lease = next((f.lease for f in read_leases(self.state) if f.lease and f.lease.engine.start_ticks), None)
        if row["state"] != "running":
            return False
        if fault is Fault.kill_flow:
            _signal(flow, signal.SIGKILL)
        elif fault is Fault.kill_flow_and_supervisor:
            assert lease is not None
            _signal(lease.supervisor.pid, signal.SIGKILL)
            _signal(flow, signal.SIGKILL)
        elif fault is Fault.kill_engine:
            assert lease is not None
            _signal(lease.engine.pid, signal.SIGKILL)
        elif fault is Fault.cancel:
            self.stack.cancel(run)
        elif fault is Fault.sigterm:
            _signal(flow, signal.SIGTERM)
        elif fault is Fault.disk_full:
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                psutil.Process(flow).rlimit(resource.RLIMIT_FSIZE, (0, 0))
        elif fault is Fault.server_lost:
            self.stack.stop("server", signal.SIGKILL)
            time.sleep(5)
            self.stack.start_server()
        elif fault is Fault.kill_worker:
            self.stack.stop("worker", signal.SIGKILL)
            _signal(flow, signal.SIGKILL)
            self.stack.start_worker()
        return True

    def to_completion(self, run: UUID, outcome: Outcome) -> Finished | None:
        """Wait for the end and retry, as a person would in the UI, until the run completes."""
        finished = None
        for attempt in range(1, RETRIES + 2):
            state = self.stack.finish(run, 900).state
            assert state is not None
            outcome.states.append(f"{state.name}")
            finished = finished or self.finished()
            if state.type is StateType.COMPLETED:
                return finished
            if attempt <= RETRIES:
                time.sleep(2)  # the worker is still ending the dead run
                try:
                    outcome.states += [f"{name} again" for name in self.stack.retry(run)]
                except AssertionError as error:
                    outcome.problems.append(str(error))
                    return finished
        outcome.problems.append(f"not completed after {RETRIES} retries: {state.message}")
        return finished

    # what was done, what came out ----------------------------------------------------------------

    def finished(self) -> Finished:
        """Samples in the pools, artifacts and measurements on disk, right now."""
        prompts, states = set(), set()
        for path in self.root.glob("pools/responses/*/*.parquet"):
            with suppress(OSError, ValueError):
                for row in pq.read_table(path, columns=["token_ids", "prompt_tokens"]).to_pylist():
                    prompts.add(tuple(row["token_ids"][: row["prompt_tokens"]]))
        for path in self.root.glob("pools/states/*/*/checked.jsonl"):
            states |= {json.loads(line)["sample_key"] for line in path.read_text().splitlines() if line.endswith("}")}
        files = [*self.root.glob("objects/*/*/manifest.json"), *self.root.glob("runs/*/benchmark/*/c*-r*.json")]
        changed = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}
        return Finished(time.time(), prompts, states, changed)

    def done_twice(self, finished: Finished) -> list[str]:
        """Finished work that was done again afterwards, by its side effects."""
        later = [line for line in self.campaign.answered() if line["at"] > finished.at]
        again = [tuple(x["prompt"]) for x in later if not x["stream"] and not x["sample_key"]]
        found = [f"response generated again: {p[:4]}..." for p in again if p in finished.prompts]
        found += [f"states captured again: {x['sample_key']}" for x in later if x["sample_key"] in finished.states]
        for path, before in finished.files.items():
            if not path.exists() or (path.stat().st_ino, path.stat().st_mtime_ns) != before:
                found.append(f"made again: {path.relative_to(self.root)}")
        return found

    def results(self) -> dict[str, Any]:
        """What a campaign finds, without times and names that differ between runs."""
        store = Store(self.root, "reader")
        tables = {name: store.read(name).to_pylist() for name in (
            "responses", "states_index", "benchmarks", "requests", "replay", "losslessness", "alignment", "training")}
        weights = sorted(file_checksum(path) for path in self.root.glob("objects/drafter/*/model.safetensors"))
        points = ("arm", "workload", "concurrency", "repeat", "requests_ok", "requests_failed", "valid")
        return {
            "responses": sorted((r["sample_key"], tuple(r["token_ids"])) for r in tables["responses"]),
            "states": sorted((r["sample_key"], r["tokens"], r["checksum"]) for r in tables["states_index"]),
            "drafter": weights,
            "training": [(r["step"], r["tokens"], r["loss"]) for r in sorted(tables["training"], key=_step)],
            "replay": sorted(str((r["workload"], r["position"], r["accept_rate"])) for r in tables["replay"]),
            "benchmarks": sorted(str([r[p] for p in points]) for r in tables["benchmarks"]),
            "requests": sorted(str((r["arm"], r["concurrency"], r["prompt_key"])) for r in tables["requests"]),
            "losslessness": sorted((r["prompt_key"], r["verdict"]) for r in tables["losslessness"]),
            "alignment": sorted(str((r["check"], r["subject"], r["passed"])) for r in tables["alignment"]),
        }

    def left_over(self) -> list[str]:
        """Processes and leases of ours that outlived the run."""
        ours = [p for p in processes() if p.folder == str(self.state) and p.run]
        found = [f"process {p.pid} of run {p.run} ({RUN_MARKER})" for p in ours if p.pid != os.getpid()]
        return found + [f"lease {lease.path.name}" for lease in read_leases(self.state)]


def _step(row: dict[str, Any]) -> int:
    return int(row["step"])


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass
class Reference:
    """An undisturbed run."""

    seconds: float
    stages: int
    results: dict[str, Any]


def undisturbed(stack: PrefectStack, folder: Path, engine: str = "stub") -> Reference:
    """Run the campaign once without a fault."""
    run = FaultRun(stack, folder, engine)
    outcome = Outcome(Fault.cancel, 1.0)
    run.to_completion(run.start(), outcome)
    assert outcome.states == ["Completed"], outcome
    row = run._row()
    assert row is not None
    seconds = (row["finished_at"] - row["started_at"]).total_seconds()
    return Reference(seconds, len(run._stages()), run.results())


def suffer(
    stack: PrefectStack, folder: Path, fault: Fault, share: float, reference: Reference, engine: str = "stub"
) -> Outcome:
    """One campaign with `fault` after `share` of an undisturbed run's stages; retried until it completes."""
    begun = time.monotonic()
    outcome, decoys = Outcome(fault, share), Decoys()
    run = FaultRun(stack, folder, engine)
    try:
        flow_run = run.start()
        run.wait_for(share, reference)
        outcome.struck = run.strike(flow_run, fault)
        finished = run.to_completion(flow_run, outcome)
        if finished:
            outcome.problems += run.done_twice(finished)
        now = run.results()
        outcome.problems += [f"{k} differ from an undisturbed run" for k, v in reference.results.items() if now[k] != v]
        outcome.problems += run.left_over() + decoys.problems()
    finally:
        decoys.close()
        outcome.seconds = time.monotonic() - begun
    return outcome
