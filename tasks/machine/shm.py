"""What processes hold open or mapped: /dev/shm segments, lock files and listening ports.

A name such as `psm_*` belongs to Python itself and proves nothing. What counts is the pair of name
and inode that the supervisor saw in its own group, and that no living process holds it any more.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tasks.machine.processes import PROC

SHM: Final = Path("/dev/shm")  # noqa: S108 - the kernel's own place
LOOK_ALIKES: Final = re.compile(
    r"psm_|sem\.mp-|sem\.loky|.*vllm|.*nccl|sgl_|sglang|torch_|mori_|flashinfer", re.IGNORECASE
)
_MAP_LINE: Final = re.compile(r"^\S+ \S+ \S+ (\S+):(\S+) (\d+)\s+(/.*)$")
_LOCK_NAME: Final = re.compile(r"(?:\.lock|^lock|\.lck)$")


@dataclass(frozen=True, order=True)
class FileId:
    """A file by path and inode: the same path with another inode is another file."""

    path: str
    inode: int


@dataclass(frozen=True)
class Segment:
    """A file in /dev/shm as it is now; a link is listed and never followed or removed."""

    path: str
    inode: int
    size: int
    uid: int
    mode: int
    age_s: float
    link: bool = False

    @property
    def id(self) -> FileId:
        return FileId(self.path, self.inode)


@dataclass
class Holdings:
    """What a group of processes holds; `unreadable` processes may hold anything."""

    segments: set[FileId] = field(default_factory=set)
    locks: set[FileId] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)
    unreadable: set[int] = field(default_factory=set)


def segments(folder: Path = SHM) -> list[Segment]:
    """Regular files and links in /dev/shm."""
    found, now = [], time.time()
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return []
    for entry in entries:
        try:
            info = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
            age_s, link = max(now - info.st_mtime, 0.0), stat.S_ISLNK(info.st_mode)
            found.append(Segment(entry.path, info.st_ino, info.st_size, info.st_uid, info.st_mode & 0o777, age_s, link))
    return found


def holdings(pids: Iterable[int], *, ports: bool = True) -> Holdings:
    """Segments mapped or open, lock files open and TCP ports listened on by these processes."""
    found, sockets = Holdings(), set()
    for pid in pids:
        try:
            for path, inode in _mapped_shm(pid):
                found.segments.add(FileId(path, inode))
            for target, inode in _open_files(pid):
                if target.startswith("socket:["):
                    sockets.add(inode)
                elif target.startswith(f"{SHM}/"):
                    found.segments.add(FileId(target, inode))
                elif _LOCK_NAME.search(target.rpartition("/")[2]):
                    found.locks.add(FileId(target, inode))
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            found.unreadable.add(pid)
    if ports and sockets:
        found.ports = {port for port, inode in listening() if inode in sockets}
    return found


def holders(wanted: set[FileId], pids: Iterable[int]) -> tuple[dict[FileId, list[int]], set[int]]:
    """Which of `pids` map or open each wanted file, and the pids that could not be read."""
    found: dict[FileId, list[int]] = {}
    unreadable: set[int] = set()
    for pid in pids:
        held = holdings([pid], ports=False)
        unreadable |= held.unreadable
        for file in wanted & (held.segments | held.locks):
            found.setdefault(file, []).append(pid)
    return found, unreadable


def _mapped_shm(pid: int) -> list[tuple[str, int]]:
    text = (PROC / str(pid) / "maps").read_text(errors="replace")
    if str(SHM) not in text:
        return []
    found = set()
    for line in text.splitlines():
        match = _MAP_LINE.match(line)
        if match and match[4].startswith(f"{SHM}/") and not match[4].endswith(" (deleted)"):
            found.add((match[4], int(match[3])))
    return sorted(found)


def _open_files(pid: int) -> list[tuple[str, int]]:
    folder, found = PROC / str(pid) / "fd", []
    for name in os.listdir(folder):  # noqa: PTH208 - names only
        try:
            target = os.readlink(folder / name)  # noqa: PTH115 - the link is often no path
            if target.startswith("socket:["):
                found.append((target, int(target[8:-1])))
            elif target.startswith("/") and not target.endswith(" (deleted)"):
                base = target.rpartition("/")[2]
                if target.startswith(f"{SHM}/") or _LOCK_NAME.search(base):
                    info = os.stat(folder / name)  # noqa: PTH116 - through the descriptor: the file that is really open
                    if stat.S_ISREG(info.st_mode):
                        found.append((target, info.st_ino))
        except OSError:
            continue
    return found


def listening() -> list[tuple[int, int]]:
    """(port, socket inode) of every listening TCP socket."""
    found = []
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            if columns[3] == "0A":  # LISTEN
                found.append((int(columns[1].rpartition(":")[2], 16), int(columns[9])))
    return found


def port_holders(port: int, pids: Iterable[int]) -> list[int]:
    """Pids among `pids` that listen on `port`."""
    return [pid for pid in pids if port in holdings([pid]).ports]


def still_there(file: FileId) -> int | None:
    """Size in bytes if this very file is still under its name, else None; links are not followed."""
    try:
        info = os.lstat(file.path)
    except OSError:
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) and info.st_ino == file.inode else None


def remove(file: FileId) -> int | None:
    """Unlink this very file; bytes freed, or None if it is another file now or somebody locks it.

    The lock is held while unlinking, so that nobody can take a lock on a file that is about to go.
    """
    try:
        handle = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        info = os.fstat(handle)
        if info.st_ino != file.inode or not stat.S_ISREG(info.st_mode):
            return None
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(file.path)  # noqa: PTH108
        return info.st_size
    except OSError:
        return None
    finally:
        os.close(handle)
