"""What is ours on this host, with the proof for each thing, and what stays and why.

A process is ours by a dead supervisor's lease (pid and start time, or the lease's marker), by our
marker when nobody works on its run any more, or as a child of such a process. A file is ours by the
supervisor's record of its name and inode, when no living process holds it. Everything else stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tasks.machine.gpu import GpuState
from tasks.machine.host import Host
from tasks.machine.leases import Lease, LeaseFile
from tasks.machine.processes import Identity, Process, descendants, user_name
from tasks.machine.shm import LOOK_ALIKES, FileId, Segment


@dataclass(frozen=True)
class Row:
    """One row of the `cleanup` table. action: stopped | removed | kept | refused | survived."""

    kind: str
    what: str
    proof: str
    action: str
    bytes: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class TakeOver:
    """Wider powers on a dedicated box: the named uids' markers, GPU processes and unheld look-alikes count as ours."""

    uids: frozenset[int] = frozenset()


@dataclass
class Picture:
    """One look at the host, sorted into ours and not ours."""

    ours: dict[Identity, tuple[Process, str]] = field(default_factory=dict)  # -> process and proof
    dead: list[LeaseFile] = field(default_factory=list)  # leases whose supervisor and flow are gone
    ending: list[Lease] = field(default_factory=list)  # the flow is gone, the supervisor is at work
    alive: list[Lease] = field(default_factory=list)
    files: dict[FileId, str] = field(default_factory=dict)  # recorded by a dead lease and still there -> proof
    rows: list[Row] = field(default_factory=list)  # what stays, and why
    everybody: list[Process] = field(default_factory=list)


def look(host: Host, take_over: TakeOver | None = None) -> Picture:
    """Sort processes and leases; changes nothing."""
    everybody = [p for p in host.processes() if not p.gone]
    picture = Picture(everybody=everybody)
    living = {p.identity: p for p in everybody}
    for file in host.leases():
        _sort_lease(host, file, living, picture, take_over)
    protected = _protected(host, picture)
    working = {run for run, f in host.runs().items() if f.boot_id == host.boot_id and f.flow in living}
    working |= {lease.run_id for lease in [*picture.alive, *picture.ending]}
    dead_ids = {f.lease.lease_id: f.lease for f in picture.dead if f.lease}
    uids = {host.uid} | (take_over.uids if take_over else frozenset())

    def own(process: Process, proof: str) -> None:
        if process.uid in uids and process.identity not in protected:
            picture.ours.setdefault(process.identity, (process, proof))

    for lease in dead_ids.values():
        for identity in {lease.engine, lease.supervisor, *lease.members} & set(living):
            own(living[identity], f"lease {lease.lease_id} (pid and start time)")
        if lease.engine in living:  # while its leader lives a session number cannot be another session
            for process in everybody:
                if process.session == lease.session:
                    own(process, f"session of lease {lease.lease_id}")
    for process in everybody:
        _sort_marked(host, process, dead_ids, working, picture, own)
    for process, proof in list(picture.ours.values()):
        for child in descendants(process.pid, everybody):
            own(child, f"child of pid {process.pid}, {proof}")
    for lease in dead_ids.values():
        for recorded in [*lease.segments, *lease.locks]:
            if host.size_of(recorded) is not None:
                picture.files[recorded] = f"recorded by lease {lease.lease_id} (name and inode)"
    for lease in picture.alive:
        for recorded in [*lease.segments, *lease.locks]:
            picture.files.pop(recorded, None)
    return picture


def _sort_lease(
    host: Host, file: LeaseFile, living: dict[Identity, Process], picture: Picture, take_over: TakeOver | None
) -> None:
    lease = file.lease
    if lease is None:
        picture.rows.append(Row("lease", str(file.path), "none", "refused", detail=f"{file.problem}; nothing touched"))
    elif lease.boot_id != host.boot_id:
        detail = f"of another boot (host {lease.host}): its pids and inodes mean nothing here"
        if take_over and lease.host == host.name:
            picture.rows.append(Row("lease", lease.lease_id, "written on this host before it was rebooted", "removed"))
            picture.dead.append(LeaseFile(file.path, None, "other boot"))
        else:
            picture.rows.append(Row("lease", lease.lease_id, "none", "refused", detail=f"{detail}; nothing touched"))
    elif lease.uid != host.uid:
        detail = f"written for {user_name(lease.uid)}; nothing touched"
        picture.rows.append(Row("lease", lease.lease_id, "none", "refused", detail=detail))
    elif lease.supervisor not in living:
        picture.dead.append(file)
    elif lease.flow not in living:
        picture.ending.append(lease)
    else:
        picture.alive.append(lease)
        detail = f"arm {lease.arm} of run {lease.run_id}, pid {lease.engine.pid}"
        proof = "its supervisor and its flow are alive"
        picture.rows.append(Row("lease", lease.lease_id, proof, "kept", detail=detail))


def _protected(host: Host, picture: Picture) -> set[Identity]:
    """Ourselves, whoever started us, and every process of a server whose supervisor is alive."""
    by_pid = {p.pid: p for p in picture.everybody}
    found: set[Identity] = set()
    pid = host.pid
    while pid in by_pid and by_pid[pid].identity not in found:
        found.add(by_pid[pid].identity)
        pid = by_pid[pid].ppid
    for lease in [*picture.alive, *picture.ending]:
        found |= {lease.supervisor, lease.flow, lease.engine, *lease.members}
        found |= {p.identity for p in descendants(lease.supervisor.pid, picture.everybody)}
        found |= {p.identity for p in picture.everybody if p.lease == lease.lease_id}
    return found


def _sort_marked(
    host: Host, process: Process, dead: dict[str, Lease], working: set[str], picture: Picture, own: Any
) -> None:
    if process.run is None:
        return
    if process.lease in dead:
        own(process, f"marker of lease {process.lease}, whose supervisor is gone")
    elif process.folder not in (None, host.state_folder):
        detail = f"leases of run {process.run} are in another folder; clean there (XDG_STATE_HOME)"
        picture.rows.append(Row("process", str(process), "marker", "kept", detail=detail))
    elif process.run not in working:
        own(process, f"marker of run {process.run}, on which nobody works any more")


def sort_files(
    host: Host, picture: Picture, take_over: TakeOver | None = None
) -> tuple[dict[FileId, tuple[str, int]], list[Row]]:
    """Files to remove (-> proof, bytes) once ours are stopped, and rows for all that stay."""
    candidates, rows, segments = dict(picture.files), [], {s.id: s for s in host.segments()}
    live = {f for lease in [*picture.alive, *picture.ending] for f in lease.segments}
    for segment in segments.values():
        if segment.id not in candidates and segment.id not in live:
            if take_over and segment.uid in take_over.uids and LOOK_ALIKES.match(_name(segment)) and not segment.link:
                candidates[segment.id] = f"--take-over of {user_name(segment.uid)}, held by nobody"
            else:
                rows.append(_refused(segment))
    stopping = {identity.pid for identity in picture.ours}
    # Root could hold anything in spite of a file's mode, but system services map no segment of an engine.
    of_root = {p.pid for p in picture.everybody if p.uid == 0}
    uids = {host.uid} | (take_over.uids if take_over else frozenset())
    held, unreadable = host.holders(set(candidates), [p.pid for p in picture.everybody]) if candidates else ({}, set())
    going: dict[FileId, tuple[str, int]] = {}
    for file, proof in sorted(candidates.items()):
        kind = "shm" if file in segments else "lock"
        others = [pid for pid in held.get(file, []) if pid not in stopping]
        known = segments.get(file)
        if known and known.uid not in uids:
            detail = f"belongs to {user_name(known.uid)}"
            rows.append(Row(kind, file.path, "none", "refused", known.size, detail))
        elif others:
            names = ", ".join(f"pid {pid}" for pid in others)
            rows.append(Row(kind, file.path, proof, "kept", host.size_of(file), f"held by {names}"))
        elif known and known.mode & 0o066 and (hidden := len(unreadable - stopping - of_root)):
            detail = f"mode {known.mode:04o} and {hidden} processes cannot be read: one may hold it"
            rows.append(Row(kind, file.path, proof, "refused", known.size, detail))
        elif (size := host.size_of(file)) is not None:
            going[file] = (proof, size)
    return going, rows


def _name(segment: Segment) -> str:
    return segment.path.rpartition("/")[2]


def _refused(segment: Segment) -> Row:
    known = "looks like an engine's" if LOOK_ALIKES.match(_name(segment)) else "no name that we know"
    what = "a link, never followed" if segment.link else f"{known}, recorded by no supervisor of ours"
    detail = f"{what}; owner {user_name(segment.uid)}, {segment.size} bytes, {segment.age_s / 3600:.1f} h old"
    return Row("shm", segment.path, "none", "refused", segment.size, detail)


@dataclass(frozen=True)
class GpuJudgement:
    """What needed GPUs say: rows, and the sentences that stop the step."""

    rows: list[Row]
    foreign: list[str]
    wedged: list[str]


def judge_gpus(gpus: Iterable[GpuState], needed: set[int], picture: Picture, stopping: set[int]) -> GpuJudgement:
    """Holders of needed GPUs that are not ours, and needed GPUs that nobody holds and that are not free.

    Graphics processes (a desktop) are ignored. `stopping`: pids that are ours and about to go.
    """
    result = GpuJudgement([], [], [])
    by_pid = {p.pid: p for p in picture.everybody}
    live = {i.pid for lease in [*picture.alive, *picture.ending] for i in (lease.engine, *lease.members)}
    for gpu in gpus:
        if gpu.index not in needed:
            continue
        if gpu.wedged:
            told = f"{gpu} has {gpu.used_mib} MiB in use and {gpu.load_pct} % load but no visible process"
            result.wedged.append(f"{told}: an operator has to look (reset or reboot); it is never reset from here")
            wedged = "wedged: memory or load without a process"
            result.rows.append(Row("gpu", str(gpu), "NVML", "refused", _bytes(gpu.used_mib), wedged))
        for holder in gpu.holders or ():
            if holder.graphics or holder.pid in stopping or holder.pid in live:
                continue
            who = str(by_pid.get(holder.pid, f"pid {holder.pid} (not visible here)"))
            held = "an unknown amount" if holder.mib is None else f"{holder.mib} MiB"
            result.foreign.append(f"{gpu} is held by {who}: {held}")
            result.rows.append(Row("gpu", str(gpu), "NVML", "refused", _bytes(holder.mib), f"held by {who}: {held}"))
    return result


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib << 20
