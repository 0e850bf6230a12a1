"""The flow's side of a supervised server: start it, look whether it lives, stop all of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tasks.errors import MachineError, PortTaken, Survivor
from tasks.machine import shm
from tasks.machine.leases import Lease, new_lease_id, read_leases, register_run, state_dir
from tasks.machine.processes import (
    LEASE_MARKER,
    Identity,
    Process,
    boot_id,
    identity_of,
    processes,
    read_process,
    send_signal,
    stop,
)
from tasks.machine.supervisor import EXIT_LOCKED, EXIT_SURVIVORS, Spec, launch

LOOPBACK: Final = "127.0.0.1"
# Of the shell that starts a campaign, these would reach into the engine: another environment's packages,
# NCCL settings that no arm asked for, and credentials of the control plane.
_NOT_INHERITED: Final = re.compile(r"NCCL_|PREFECT_|PYTHON(PATH|HOME|STARTUP)$|VIRTUAL_ENV|CUDA_VISIBLE_DEVICES$")


def choose_port(wanted: int | None) -> int:
    """`wanted` if it is free, else a free port of the loopback; raises PortTaken with the holder."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, wanted or 0))
        except OSError as error:
            holder = _holder_of(wanted or 0)
            raise PortTaken(f"port {wanted} is taken by {holder}; stop it or choose another") from error
        port: int = probe.getsockname()[1]
        return port


def _holder_of(port: int) -> str:
    everybody = {p.pid: p for p in processes()}
    held = [str(everybody[pid]) for pid in shm.port_holders(port, everybody)]
    return ", ".join(held) or "a process that this user cannot see"


def server_environment(python: str, *variables: Mapping[str, str]) -> dict[str, str]:
    """Environment of a server: the caller's without what would leak into it, then `variables` in order."""
    env = {k: v for k, v in os.environ.items() if not _NOT_INHERITED.match(k)}
    env["PATH"] = os.pathsep.join([str(Path(python).parent), env.get("PATH", os.defpath)])
    env["PYTHONUNBUFFERED"] = "1"
    for more in variables:
        env.update(more)
    return env


class Supervised:
    """One server under its supervisor."""

    def __init__(
        self, *, run_id: str, arm: str, argv: tuple[str, ...], env: dict[str, str], log: Path, port: int,
        gpus: list[str], lock_keys: list[str], grace_s: float, lock_wait_s: float = 10.0,
    ) -> None:
        self.log, self.grace_s, self.folder = log, grace_s, state_dir()
        flow = identity_of(os.getpid())
        assert flow is not None
        register_run(run_id, self.folder, flow, boot_id())
        self.lease_id = new_lease_id()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = log.stat().st_size if log.exists() else 0
        self._supervisor: subprocess.Popen[bytes] = launch(
            Spec(
                lease_id=self.lease_id, run_id=run_id, arm=arm, argv=list(argv), env=env, log=str(log.resolve()),
                state_dir=str(self.folder), flow=flow.to_json(), ports=[port], gpus=gpus, lock_keys=lock_keys,
                grace_s=grace_s, lock_wait_s=lock_wait_s,
            )
        )

    def exit_code(self) -> int | None:
        """None while the server lives, else its exit code (negative if its supervisor was killed)."""
        return self._supervisor.poll()

    def log_tail(self, lines: int = 12) -> str:
        """Last log lines, for an error message."""
        try:
            with self.log.open(errors="replace") as stream:
                stream.seek(self._log_start)
                return "\n".join(line.rstrip() for line in deque(stream, lines))
        except OSError:
            return "(no log)"

    def why_ended(self) -> Exception | None:
        """MachineError if it ended because another run holds the machine, else None."""
        if self.exit_code() == EXIT_LOCKED:
            return MachineError(self.log_tail(1).removeprefix("drafthouse supervisor: "))
        return None

    def lease(self) -> Lease | None:
        """The lease as it is on disk now."""
        return next((f.lease for f in read_leases(self.folder) if f.lease and f.lease.lease_id == self.lease_id), None)

    def stop(self) -> None:
        """Stop everything that the server started, and verify; raises Survivor that names what is left."""
        if self._supervisor.stdin and not self._supervisor.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._supervisor.stdin.close()
        try:
            self._supervisor.wait(self.grace_s + 15)
        except subprocess.TimeoutExpired:  # hung or stopped by a debugger: its work is done from here
            self._supervisor.kill()
            self._supervisor.wait()
        left = self._left()
        if left:
            left = stop(self._left, self.grace_s)
        if left or self._supervisor.returncode == EXIT_SURVIVORS:
            names = ", ".join(map(str, left)) or self.log_tail(3)
            raise Survivor(f"{names} outlived SIGTERM and SIGKILL; see {self.log}")

    def _left(self) -> list[Process]:
        lease = self.lease()
        known = set(lease.members) | {lease.engine} if lease else set()
        return [p for p in processes() if (p.identity in known or p.lease == self.lease_id) and not p.gone]


def interrupt(supervisor: Identity) -> bool:
    """Ask a supervisor of this user to stop its server, as `drafthouse` does on cancel."""
    process = read_process(supervisor.pid)
    return bool(process and process.identity == supervisor) and send_signal(supervisor, signal.SIGTERM)


__all__ = ["LEASE_MARKER", "LOOPBACK", "Supervised", "choose_port", "interrupt", "server_environment"]
