"""Leases and locks of this user on this host: `$XDG_STATE_HOME/drafthouse`, whatever the store.

A lease is what a supervisor writes about the server that it started, so that a later clean can prove
what is ours after flow and supervisor were killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tasks.errors import MachineError
from tasks.machine.processes import Identity
from tasks.machine.shm import FileId

LEASE_VERSION: Final = 1


def state_dir() -> Path:
    """Folder of this user's leases and locks, made with mode 0700."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    folder = Path(base) / "drafthouse"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


@dataclass
class Lease:
    """Facts about one supervised server; `members` are all processes ever seen in its group."""

    lease_id: str
    run_id: str
    arm: str
    boot_id: str
    host: str
    uid: int
    supervisor: Identity
    flow: Identity
    engine: Identity
    session: int
    command: list[str]
    log: str
    started_at: float
    gpus: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    members: list[Identity] = field(default_factory=list)
    segments: list[FileId] = field(default_factory=list)
    locks: list[FileId] = field(default_factory=list)

    @property
    def file_name(self) -> str:
        return f"lease-{self.lease_id}.json"

    def to_json(self) -> dict[str, Any]:
        """JSON form; identities and files become pairs."""
        body = dict(vars(self))
        body["version"] = LEASE_VERSION
        for name in ("supervisor", "flow", "engine"):
            body[name] = body[name].to_json()
        body["members"] = [m.to_json() for m in sorted(self.members)]
        for name in ("segments", "locks"):
            body[name] = [[f.path, f.inode] for f in sorted(body[name])]
        return body

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Lease:
        """Raises ValueError, KeyError or TypeError for anything that is not a whole lease."""
        if body.pop("version") != LEASE_VERSION:
            raise ValueError("another version of drafthouse wrote it")
        for name in ("supervisor", "flow", "engine"):
            body[name] = Identity.from_json(body[name])
        body["members"] = [Identity.from_json(m) for m in body["members"]]
        for name in ("segments", "locks"):
            body[name] = [FileId(str(path), int(inode)) for path, inode in body[name]]
        return cls(**body)


def write_lease(lease: Lease, folder: Path) -> Path:
    """Write atomically; a reader sees the old lease or the new one, never half of one."""
    path = folder / lease.file_name
    temporary = folder / f".{lease.file_name}.{os.getpid()}.tmp"
    with temporary.open("w") as stream:
        json.dump(lease.to_json(), stream)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    return path


@dataclass(frozen=True)
class LeaseFile:
    """A lease file and what is in it, or why it cannot be used."""

    path: Path
    lease: Lease | None
    problem: str = ""


def read_leases(folder: Path) -> list[LeaseFile]:
    """Every lease file of the folder; a torn or foreign one carries its problem and no lease."""
    found = []
    for path in sorted(folder.glob("lease-*.json")):
        try:
            if path.lstat().st_uid != os.geteuid():
                raise ValueError(f"owned by uid {path.lstat().st_uid}")
            found.append(LeaseFile(path, Lease.from_json(json.loads(path.read_text()))))
        except FileNotFoundError:
            continue  # its supervisor ended meanwhile
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            found.append(LeaseFile(path, None, f"not a whole lease ({type(error).__name__}: {error})"))
    return found


class HostLock:
    """An flock that supervisors of one run share and other runs do not get.

    `keys` are GPU UUIDs, or `cpu` for the whole host. Released by the kernel when the holder dies.
    """

    def __init__(self, folder: Path, keys: list[str], run_id: str) -> None:
        self.folder, self.keys, self.run_id = folder, sorted(set(keys)), run_id
        self._handles: list[int] = []

    def acquire(self, wait_s: float = 0.0) -> None:
        """Take all locks in order; raises MachineError that names the run that holds one."""
        deadline = time.monotonic() + wait_s
        for key in self.keys:
            path = self.folder / f"lock-{re.sub(r'[^A-Za-z0-9-]', '_', key)}"
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            while not self._try(handle):
                if time.monotonic() >= deadline:
                    holder = _read_all(handle) or "an unknown run"
                    os.close(handle)
                    self.release()
                    raise MachineError(f"{key} is used by run {holder}; wait for it or stop it, then run again")
                time.sleep(0.1)
            self._handles.append(handle)

    def _try(self, handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if _read_all(handle) != self.run_id:
                return False
        else:
            os.ftruncate(handle, 0)
            os.pwrite(handle, self.run_id.encode(), 0)
        try:
            # Shared from here on: other supervisors of the same run (arms side by side) may join.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        return _read_all(handle) == self.run_id  # another run may have come between the two calls

    def release(self) -> None:
        while self._handles:
            os.close(self._handles.pop())


def _read_all(handle: int) -> str:
    return os.pread(handle, 4096, 0).decode(errors="replace")


def new_lease_id() -> str:
    return uuid.uuid4().hex[:16]


def register_run(run_id: str, folder: Path, flow: Identity, boot: str) -> None:
    """Say that `flow` works on `run_id` now, so that no other clean takes its processes for orphans."""
    path = folder / f"run-{re.sub(r'[^A-Za-z0-9._=-]', '_', run_id)}.json"
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps({"run_id": run_id, "flow": flow.to_json(), "boot_id": boot}))
    temporary.replace(path)


@dataclass(frozen=True)
class RunFile:
    """Which process works on a run."""

    path: Path
    flow: Identity
    boot_id: str


def read_runs(folder: Path) -> dict[str, RunFile]:
    """Run id -> who works on it; unreadable files are left out, they protect nothing."""
    found = {}
    for path in folder.glob("run-*.json"):
        try:
            body = json.loads(path.read_text())
            found[str(body["run_id"])] = RunFile(path, Identity.from_json(body["flow"]), str(body["boot_id"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found
