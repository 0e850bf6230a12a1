"""Processes by proof: who they are, whether they are ours, and how they are stopped.

A pid alone proves nothing, since the kernel reuses pids; pid and start time together name one
process of one boot. Signals go through a pidfd, so that a pid that is reused between looking and
signalling is never hit.
"""

from __future__ import annotations

import os
import pwd
import signal
import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

RUN_MARKER: Final = "DRAFTHOUSE_RUN"
LEASE_MARKER: Final = "DRAFTHOUSE_LEASE"
STATE_MARKER: Final = "DRAFTHOUSE_STATE"  # the folder with that lease: a clean of another folder knows nothing of it
PROC: Final = Path("/proc")
GONE_STATES: Final = frozenset("ZXx")  # a zombie holds no memory, port or file any more


@dataclass(frozen=True, order=True)
class Identity:
    """One process of this boot; `start_ticks` is its start time in clock ticks since boot."""

    pid: int
    start_ticks: int

    def to_json(self) -> list[int]:
        return [self.pid, self.start_ticks]

    @classmethod
    def from_json(cls, value: Any) -> Identity:
        pid, start_ticks = value
        return cls(int(pid), int(start_ticks))


@dataclass(frozen=True)
class Process:
    """What /proc says of a process; `run`, `lease` and `folder` are our markers, None if absent or unreadable."""

    pid: int
    start_ticks: int
    ppid: int
    group: int
    session: int
    uid: int
    state: str
    name: str
    run: str | None = None
    lease: str | None = None
    folder: str | None = None

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.start_ticks)

    @property
    def gone(self) -> bool:
        return self.state in GONE_STATES

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name}, {user_name(self.uid)})"


def user_name(uid: int) -> str:
    """Login name of a uid, or the number where nobody has that name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def boot_id() -> str:
    """Random name of this boot of this host: two hosts that share a home never share it."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def read_process(pid: int, *, marked_uids: Container[int] | None = None) -> Process | None:
    """The process that has this pid now, or None. Markers are read for `marked_uids`, by default our own uid."""
    folder = PROC / str(pid)
    try:
        text = (folder / "stat").read_text(errors="replace")
        uid = folder.stat().st_uid
    except OSError:
        return None
    # The name may hold spaces and parentheses: it ends at the last one.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    if len(fields) < 20:
        return None
    state, ppid, group, session, start = fields[0], fields[1], fields[2], fields[3], fields[19]
    wanted = uid == os.geteuid() if marked_uids is None else uid in marked_uids
    marks = _markers(folder) if wanted else {}
    return Process(
        pid, int(start), int(ppid), int(group), int(session), uid, state, name, marks.get(RUN_MARKER),
        marks.get(LEASE_MARKER), marks.get(STATE_MARKER),
    )


def _markers(folder: Path) -> dict[str, str]:
    try:
        raw = (folder / "environ").read_bytes()
    except OSError:
        return {}
    if b"DRAFTHOUSE_" not in raw:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if entry.startswith(b"DRAFTHOUSE_"))
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}


def processes(*, marked_uids: Container[int] | None = None) -> list[Process]:
    """All processes that /proc shows; `marked_uids=()` leaves the markers unread and costs half."""
    pids = [int(entry) for entry in os.listdir(PROC) if entry.isdigit()]  # noqa: PTH208 - names only, no stat
    return [p for p in (read_process(pid, marked_uids=marked_uids) for pid in pids) if p is not None]


def identity_of(pid: int) -> Identity | None:
    """Identity of a living process."""
    process = read_process(pid, marked_uids=())
    return process.identity if process and not process.gone else None


def alive(identity: Identity) -> bool:
    """True while exactly this process lives; a zombie is dead."""
    return identity_of(identity.pid) == identity


def descendants(root: int, everybody: Iterable[Process]) -> list[Process]:
    """All processes below pid `root`, without it."""
    children: dict[int, list[Process]] = {}
    for process in everybody:
        children.setdefault(process.ppid, []).append(process)
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += [p.pid for p in below]
    return found


def send_signal(identity: Identity, number: int) -> bool:
    """Signal exactly this process; False if it is gone or its pid is another process now.

    Raises PermissionError if it belongs to somebody else.
    """
    try:
        handle = os.pidfd_open(identity.pid)
    except (ProcessLookupError, OSError) as error:
        if isinstance(error, PermissionError):
            raise
        return False
    try:
        if not alive(identity):  # checked after the handle is open: it cannot become another process now
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def stop(
    find: Callable[[], list[Process]], grace_s: float, *, kill_wait_s: float = 5.0,
    send: Callable[[Identity, int], bool] = send_signal, sleep: Callable[[float], None] = time.sleep,
) -> list[Process]:
    """SIGTERM to all that `find` finds, wait, SIGKILL to what is left, wait; returns the survivors.

    `find` is asked again and again, so children born meanwhile are stopped too.
    """
    told: set[Identity] = set()
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, kill_wait_s)):
        told.clear()
        waited = 0.0
        while True:
            left = [p for p in find() if not p.gone]
            if not left:
                return []
            for process in left:
                if process.identity not in told:
                    told.add(process.identity)
                    send(process.identity, number)
            if waited >= wait_s:
                break
            pause = min(0.05 if waited < 1 else 0.2, max(wait_s - waited, 0.01))
            sleep(pause)
            waited += pause
    return [p for p in find() if not p.gone]
