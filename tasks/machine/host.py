"""The host as clean sees it: one interface, so that the rules can be tried on a thousand invented hosts."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from tasks.machine import gpu, leases, processes, shm
from tasks.machine.gpu import GpuState
from tasks.machine.leases import LeaseFile, RunFile
from tasks.machine.processes import Identity, Process
from tasks.machine.shm import FileId, Segment


class Host(Protocol):
    """What clean may look at, and the three things that it may do: signal, remove a file, drop a lease."""

    uid: int
    pid: int
    name: str
    boot_id: str
    state_folder: str

    def processes(self) -> list[Process]: ...
    def leases(self) -> list[LeaseFile]: ...
    def runs(self) -> dict[str, RunFile]: ...
    def segments(self) -> list[Segment]: ...
    def size_of(self, file: FileId) -> int | None: ...
    def holders(self, files: set[FileId], pids: Iterable[int]) -> tuple[dict[FileId, list[int]], set[int]]: ...
    def listeners(self, ports: set[int], pids: Iterable[int]) -> dict[int, list[int]]: ...
    def gpus(self) -> list[GpuState] | None: ...
    def send(self, identity: Identity, number: int) -> bool: ...
    def remove(self, file: FileId) -> int | None: ...
    def drop(self, path: Path) -> None: ...
    def sleep(self, seconds: float) -> None: ...


class ThisHost:
    """The machine at hand. `marked_uids`: whose markers are read, beside our own."""

    def __init__(self, marked_uids: Iterable[int] = ()) -> None:
        self.uid, self.pid, self.name = os.geteuid(), os.getpid(), socket.gethostname()
        self.boot_id = processes.boot_id()
        self.folder = leases.state_dir()
        self.state_folder = str(self.folder)
        self._marked_uids = {self.uid, *marked_uids}

    def processes(self) -> list[Process]:
        return processes.processes(marked_uids=self._marked_uids)

    def leases(self) -> list[LeaseFile]:
        return leases.read_leases(self.folder)

    def runs(self) -> dict[str, RunFile]:
        return leases.read_runs(self.folder)

    def segments(self) -> list[Segment]:
        return shm.segments()

    def size_of(self, file: FileId) -> int | None:
        return shm.still_there(file)

    def holders(self, files: set[FileId], pids: Iterable[int]) -> tuple[dict[FileId, list[int]], set[int]]:
        return shm.holders(files, pids) if files else ({}, set())

    def listeners(self, ports: set[int], pids: Iterable[int]) -> dict[int, list[int]]:
        taken = ports & {port for port, _ in shm.listening()} if ports else set()
        return {port: shm.port_holders(port, pids) for port in taken}

    def gpus(self) -> list[GpuState] | None:
        return gpu.read_gpus()

    def send(self, identity: Identity, number: int) -> bool:
        return processes.send_signal(identity, number)

    def remove(self, file: FileId) -> int | None:
        return shm.remove(file)

    def drop(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
