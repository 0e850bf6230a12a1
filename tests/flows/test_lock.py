"""One campaign per GPU host: who waits, for whom, and for how long."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from prefect_kit import ROOT, PrefectStack, until

from tasks.machine.leases import HostLock

HOLDER = Path(__file__).with_name("holder.py")


class Holder:
    """A run in a process of its own that takes the lock and keeps it."""

    def __init__(self, stack: PrefectStack, host: str, run_id: str, seconds: float, **env: str | None) -> None:
        self.log = stack.folder / f"{host}-{run_id}.log"
        wanted = stack.env | {"DRAFTHOUSE_HOST": host, "PYTHONPATH": str(ROOT), **{k: v for k, v in env.items() if v}}
        for name in [k for k, v in env.items() if v is None]:
            wanted.pop(name, None)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, HOLDER, run_id, str(seconds)], env=wanted, stdout=log, stderr=log
            )

    def text(self) -> str:
        return self.log.read_text()

    def held_at(self, timeout_s: float) -> float:
        """Time at which it got the lock."""
        def times() -> list[str]:
            return [line.split()[1] for line in self.text().splitlines() if line.startswith("held ")]

        return float(until(times, timeout_s, f"lock; {self.text()[-1500:]}")[0])


@contextmanager
def holders() -> Iterator[list[Holder]]:
    started: list[Holder] = []
    try:
        yield started
    finally:
        for holder in started:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(holder.process.pid).children(recursive=True):
                    child.kill()  # its own server, where it has one
            holder.process.kill()
            holder.process.wait()


@pytest.fixture(scope="module")
def next_run(prefect: PrefectStack) -> Iterator[tuple[Holder, float]]:
    """A run that waits for one that was killed, and when that was; the other tests use the time until it is freed."""
    with holders() as started:
        killed = Holder(prefect, "host-b", "killed-run", 600)
        started.append(killed)
        killed.held_at(60)
        waiting = Holder(prefect, "host-b", "next-run", 0, XDG_STATE_HOME=str(prefect.folder / "other-user"))
        started.append(waiting)
        until(lambda: "held by run killed-run" in waiting.text(), 60, "message")
        killed.process.kill()
        at = time.time()
        until(lambda: "killed-run, which is dead" in waiting.text(), 15, "that the holder is dead")
        yield waiting, at


@pytest.mark.usefixtures("next_run")
def test_the_second_campaign_waits_visibly_and_starts_when_the_first_ends(prefect: PrefectStack) -> None:
    with holders() as started:
        first = Holder(prefect, "host-a", "first-run", 600)
        started.append(first)
        first.held_at(60)
        second = Holder(prefect, "host-a", "second-run", 0)
        started.append(second)
        until(lambda: "waiting for gpu:host-a (Prefect's limit) held by run first-run" in second.text(), 60, "message")
        assert "failed to process item" not in second.text()  # Prefect's error a second would bury ours
        assert prefect.runs_in("WaitingForGpu")
        first.process.send_signal(signal.SIGINT)
        first.process.wait(60)
        released = time.time()
        assert second.held_at(30) - released < 5
        assert second.process.wait(60) == 0


def test_a_run_from_a_shell_is_told_apart(prefect: PrefectStack) -> None:
    """Its lock is the kernel's: it says so, and goes on as soon as that is free."""
    lock = HostLock(prefect.folder / "state" / "drafthouse", ["cpu"], "shell-run")
    lock.folder.mkdir(parents=True, exist_ok=True)
    lock.acquire()
    try:
        with holders() as started:
            waiting = Holder(prefect, "host-c", "worker-run", 0)
            started.append(waiting)
            says = "waiting for the supervisors' lock: cpu is used by run shell-run, started outside"
            until(lambda: says in waiting.text(), 60, "message")
            lock.release()
            released = time.time()
            assert waiting.held_at(30) - released < 5
    finally:
        lock.release()


def test_a_killed_run_with_its_own_ephemeral_server_does_not_block_the_next(
    prefect: PrefectStack, tmp_path: Path
) -> None:
    """An ephemeral server collects no leases, and it died with its run."""
    own = {"PREFECT_API_URL": None, "PREFECT_HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path),
           "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120", "PREFECT_LOGGING_TO_API_ENABLED": "false"}
    with holders() as started:
        first = Holder(prefect, "host-d", "killed-run", 600, **own)
        started.append(first)
        first.held_at(120)
        server = psutil.Process(first.process.pid).children(recursive=True)
        assert server, "the ephemeral server is a child of the run"
        for process in [first.process, *server]:
            process.kill()
        first.process.wait()
        second = Holder(prefect, "host-d", "next-run", 0, **own)
        started.append(second)
        second.held_at(120)
        assert second.process.wait(60) == 0


def test_a_killed_holder_frees_the_host_within_90_seconds(next_run: tuple[Holder, float]) -> None:
    waiting, killed_at = next_run
    assert waiting.held_at(95) - killed_at < 90
