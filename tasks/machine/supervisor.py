"""A process of its own that starts a server, watches over it and never leaves it behind.

    python -m tasks.machine.supervisor  < one line of JSON, then held open by the flow

The flow keeps the other end of standard input open. When it closes (the flow ended or was killed,
also by kill -9), on SIGTERM or SIGINT, or when the server exits, everything that the server started
is stopped: TERM, wait, KILL, verify. Exit code: the server's own (128 + n for signal n), 75 when
another run holds the GPUs, 127 when the command cannot be started, 70 when something survived.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

from tasks.errors import MachineError
from tasks.machine import shm
from tasks.machine.leases import HostLock, Lease, write_lease
from tasks.machine.processes import (
    LEASE_MARKER,
    RUN_MARKER,
    STATE_MARKER,
    Identity,
    Process,
    alive,
    boot_id,
    descendants,
    identity_of,
    processes,
    stop,
)

EXIT_SURVIVORS: Final = 70
EXIT_LOCKED: Final = 75
EXIT_NOT_STARTED: Final = 127
_SET_CHILD_SUBREAPER: Final = 36  # prctl(2)
_TICK_S: Final = 0.25


@dataclass(frozen=True)
class Spec:
    """What to start; the flow sends it as one line of JSON, so that no secret shows in a command line."""

    lease_id: str
    run_id: str
    arm: str
    argv: list[str]
    env: dict[str, str]
    log: str
    state_dir: str
    flow: list[int]
    ports: list[int]
    gpus: list[str]
    lock_keys: list[str]
    grace_s: float
    lock_wait_s: float = 0.0


class Supervisor:
    """Runs one server to its end; `run()` returns the exit code."""

    def __init__(self, spec: Spec, log: IO[str]) -> None:
        self.spec, self.log = spec, log
        self.folder = Path(spec.state_dir)
        self.flow = Identity.from_json(spec.flow)
        self.stop_reason = ""
        self.exit_code: int | None = None
        me = identity_of(os.getpid())
        assert me is not None
        self.lease = Lease(
            lease_id=spec.lease_id, run_id=spec.run_id, arm=spec.arm, boot_id=boot_id(), host=socket.gethostname(),
            uid=os.geteuid(), supervisor=me, flow=self.flow, engine=Identity(0, 0), session=0, command=spec.argv,
            log=spec.log, started_at=time.time(), gpus=spec.gpus, ports=spec.ports,
        )
        self._shm_names: set[str] = set()
        self._next_scan = 0.0

    def run(self) -> int:
        lock = HostLock(self.folder, self.spec.lock_keys, self.spec.run_id)
        try:
            lock.acquire(self.spec.lock_wait_s)
        except MachineError as error:
            self._say(str(error))
            return EXIT_LOCKED
        # Before the server exists: whoever sees a marked process also finds the lease of its supervisor.
        path = write_lease(self.lease, self.folder)
        try:
            engine = self._start()
        except OSError as error:
            self._say(f"cannot start {self.spec.argv[0]}: {error.strerror or error}")
            path.unlink(missing_ok=True)
            return EXIT_NOT_STARTED
        try:
            self._watch(engine)
        finally:  # whatever happens here, the server does not outlive its supervisor
            # A server that ended by itself has no work left that its orphans could finish.
            grace_s = self.spec.grace_s if self.exit_code is None else min(self.spec.grace_s, 1.0)
            survivors = stop(self._group, grace_s, sleep=self._sleep)
        self._reap()
        engine.returncode = self.exit_code if self.exit_code is not None else -signal.SIGKILL
        for process in survivors:
            self._say(f"{process} survived SIGTERM and SIGKILL (state {process.state})")
        if not survivors and self._remove_leftovers():
            path.unlink(missing_ok=True)
        lock.release()
        if survivors:
            return EXIT_SURVIVORS
        code = engine.returncode
        return code if code >= 0 else 128 - code

    def _start(self) -> subprocess.Popen[bytes]:
        marks = {RUN_MARKER: self.spec.run_id, LEASE_MARKER: self.spec.lease_id, STATE_MARKER: self.spec.state_dir}
        env = {**self.spec.env, **marks}
        engine = subprocess.Popen(
            self.spec.argv, env=env, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True
        )
        self.lease.engine = identity_of(engine.pid) or Identity(engine.pid, 0)
        self.lease.session = engine.pid
        self._observe()
        write_lease(self.lease, self.folder)
        return engine

    def _watch(self, engine: subprocess.Popen[bytes]) -> None:
        """Return when the server has exited or has to stop."""
        wake, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            # A handler and not SIG_IGN: ignored signals would be inherited by what the server starts.
            signal.signal(number, lambda _number, _frame: None)
        while not self.stop_reason:
            ready, _, _ = select.select([0, wake], [], [], _TICK_S)
            if 0 in ready and not os.read(0, 4096):
                self.stop_reason = "the flow closed its end"
            if wake in ready:
                for caught in set(os.read(wake, 4096)) - {signal.SIGCHLD}:
                    self.stop_reason = signal.Signals(caught).name
            self._reap()
            if self.exit_code is not None:
                self.stop_reason = f"the server exited with code {self.exit_code}"
            elif not alive(self.flow):  # its end of the pipe may live on in a forked child of it
                self.stop_reason = "the flow is gone"
            self._observe()
        self._say(f"stopping: {self.stop_reason}")

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self._reap()

    def _reap(self) -> None:
        """Collect dead children: as subreaper this process inherits every orphan of the group."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.lease.engine.pid:
                    self.exit_code = os.waitstatus_to_exitcode(status)

    def _group(self) -> list[Process]:
        everybody = processes()
        mine = {p.identity: p for p in descendants(os.getpid(), everybody)}
        mine |= {p.identity: p for p in everybody if p.lease == self.spec.lease_id}
        mine.pop(self.lease.supervisor, None)
        return [p for p in mine.values() if not p.gone]

    def _observe(self) -> None:
        """Record members, segments, lock files and ports of the group; often while young, rarely later.

        A new name in /dev/shm is a reason to look at once: a crash between two looks leaks unseen.
        """
        now = time.monotonic()
        names = {s.path for s in shm.segments()}
        if now < self._next_scan and names <= self._shm_names:
            return
        self._shm_names = names
        self._next_scan = now + (1.0 if time.time() - self.lease.started_at < 60 else 5.0)
        group = [p for p in descendants(os.getpid(), processes(marked_uids=())) if not p.gone]
        held = shm.holdings(p.pid for p in group)
        before = json.dumps(self.lease.to_json())
        self.lease.members = [p.identity for p in group]
        self.lease.segments = sorted(set(self.lease.segments) | held.segments)
        self.lease.locks = sorted(set(self.lease.locks) | held.locks)
        self.lease.ports = sorted(set(self.lease.ports) | held.ports)
        if json.dumps(self.lease.to_json()) != before:
            self._write_lease()

    def _write_lease(self) -> None:
        try:
            write_lease(self.lease, self.folder)
        except OSError as error:  # a full disk must not end the watch over a running server
            self._say(f"cannot write the lease ({error.strerror or error})")

    def _remove_leftovers(self) -> bool:
        """Remove recorded segments and lock files that nobody holds; True if no record has to stay."""
        files = {f for f in [*self.lease.segments, *self.lease.locks] if shm.still_there(f) is not None}
        held, _ = shm.holders(files, [p.pid for p in processes(marked_uids=())]) if files else ({}, set())
        for file in sorted(files - set(held)):
            freed = shm.remove(file)
            if freed is not None:
                self._say(f"removed {file.path} ({freed} bytes): recorded for this server, held by nobody")
        left = {f for f in files if shm.still_there(f) is not None}
        self.lease.members, self.lease.ports = [], []
        self.lease.segments = [f for f in self.lease.segments if f in left]
        self.lease.locks = [f for f in self.lease.locks if f in left]
        if left:
            self._write_lease()
        return not left

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the disk may be full
            self.log.write(f"drafthouse supervisor: {text}\n")
            self.log.flush()


def launch(spec: Spec) -> subprocess.Popen[bytes]:
    """Start a supervisor; closing its `stdin` stops the server and all that it started."""
    source = str(Path(__file__).resolve().parents[2])
    env: Mapping[str, str] = {**os.environ, "PYTHONPATH": source, RUN_MARKER: spec.run_id, STATE_MARKER: spec.state_dir}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tasks.machine.supervisor"], env=env, stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(spec)).encode() + b"\n")
    process.stdin.flush()
    return process


def _read_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):  # byte by byte: what follows must stay unread, end of file included
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(0)  # the flow died before it said what to start
        line += byte
    return line


def main() -> int:
    body: dict[str, Any] = json.loads(_read_line())
    spec = Spec(**body)
    with Path(spec.log).open("a", buffering=1) as log:
        ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            return Supervisor(spec, log).run()
        except BaseException as error:
            log.write(f"drafthouse supervisor: failed ({type(error).__name__}: {error})\n")
            raise


if __name__ == "__main__":
    sys.exit(main())
