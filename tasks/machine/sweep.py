"""Free what is provably ours, verify that it is gone, and say what stays."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from tasks.errors import DrafthouseError, ForeignHolder, MachineError, Survivor, WedgedGpu
from tasks.machine import processes
from tasks.machine.host import Host
from tasks.machine.ownership import Picture, Row, TakeOver, judge_gpus, look, sort_files
from tasks.machine.processes import Identity, Process
from tasks.machine.shm import FileId

GPU_SETTLE_S = 15.0  # the driver frees memory and forgets load a little after the process is gone

ENDING_WAIT_S = 12.0  # beyond the grace time, for a supervisor whose flow is gone


@dataclass
class Swept:
    """What was done or, in a dry run, would be done; `problem` is the error that stops the step."""

    rows: list[Row] = field(default_factory=list)
    problem: DrafthouseError | None = None

    def of(self, action: str) -> list[Row]:
        return [row for row in self.rows if row.action == action]


def sweep(
    host: Host, *, needed_gpus: set[int] | None = None, grace_s: float = 10.0, dry_run: bool = False,
    take_over: TakeOver | None = None,
) -> Swept:
    """One clean of this host. Raises nothing for what it finds: the caller writes the rows, then raises `problem`."""
    picture = look(host, take_over)
    if picture.ending and not dry_run:
        picture = _wait_for_ending(host, picture, grace_s, take_over)
    _add_gpu_processes(host, picture, needed_gpus or set(), take_over)
    swept = Swept(list(picture.rows))
    ports = {port for f in picture.dead if f.lease for port in f.lease.ports}
    listening = host.listeners(ports, [p.pid for p in picture.everybody])
    survivors = [] if dry_run else _stop_ours(host, picture, grace_s, take_over)
    left = {p.identity for p in survivors}
    for identity, (process, proof) in sorted(picture.ours.items()):
        action = "survived" if identity in left else "stopped"
        swept.rows.append(Row("process", str(process), proof, action))
    _ports(host, picture, swept, listening, dry_run)
    stay = _files(host, picture, swept, dry_run, take_over)
    _leases(host, picture, swept, left, stay, dry_run)
    _gpus(host, picture, swept, needed_gpus or set(), dry_run)
    if survivors:
        names = ", ".join(map(str, survivors))
        what = "outlived SIGTERM and SIGKILL: a driver call may hang; an operator has to look"
        swept.problem = Survivor(f"{names} {what}")
    return swept


def _wait_for_ending(host: Host, picture: Picture, grace_s: float, take_over: TakeOver | None) -> Picture:
    """Let supervisors whose flow is gone finish; one that does not is hung, and its server is stopped from here."""
    waited = 0.0
    while picture.ending and waited < grace_s + ENDING_WAIT_S:
        host.sleep(0.25)
        waited += 0.25
        picture = look(host, take_over)
    hung = {lease.supervisor for lease in picture.ending}
    if hung:
        processes.stop(
            lambda: [p for p in host.processes() if p.identity in hung and p.uid == host.uid], 0.0, send=host.send,
            sleep=host.sleep,
        )
        picture = look(host, take_over)
    return picture


def _add_gpu_processes(host: Host, picture: Picture, needed: set[int], take_over: TakeOver | None) -> None:
    if not take_over:
        return
    by_pid = {p.pid: p for p in picture.everybody}
    live = {i for lease in picture.alive for i in (lease.engine, *lease.members)}
    for gpu in host.gpus() or []:
        for holder in gpu.holders or ():
            process = by_pid.get(holder.pid)
            if process is None or (needed and gpu.index not in needed) or holder.graphics or process.identity in live:
                continue
            if process.uid in take_over.uids:
                picture.ours.setdefault(process.identity, (process, f"--take-over: holds {gpu}, owner named"))


def _stop_ours(host: Host, picture: Picture, grace_s: float, take_over: TakeOver | None) -> list[Process]:
    chosen = dict(picture.ours)

    def find() -> list[Process]:
        # A new look each time: children that were born meanwhile are ours too.
        again = look(host, take_over)
        picture.ours.update({i: v for i, v in again.ours.items() if i not in picture.ours})
        wanted = set(chosen) | set(again.ours)
        return [p for p in again.everybody if p.identity in wanted]

    return processes.stop(find, grace_s, send=host.send, sleep=host.sleep) if chosen else []


def _ports(host: Host, picture: Picture, swept: Swept, before: dict[int, list[int]], dry_run: bool) -> None:
    ours = {identity.pid for identity in picture.ours}
    now = before if dry_run else host.listeners(set(before), [p.pid for p in host.processes()])
    for port, pids in sorted(before.items()):
        others = [pid for pid in (now.get(port) or []) if pid not in ours or not dry_run]
        freed = bool(set(pids) & ours) and not others and (dry_run or port not in now)
        if freed:
            swept.rows.append(Row("port", str(port), "listened on by a process of ours", "stopped"))
        else:
            names = ", ".join(f"pid {pid}" for pid in others) or "a process that this user cannot see"
            swept.rows.append(Row("port", str(port), "none", "refused", detail=f"in a dead lease, now used by {names}"))


def _files(
    host: Host, picture: Picture, swept: Swept, dry_run: bool, take_over: TakeOver | None
) -> set[FileId]:
    """Remove recorded files that nobody holds; returns those that stay."""
    after = picture
    if not dry_run and picture.ours:  # only what nobody holds after the stop goes
        after = look(host, take_over)
        after.files.update({f: proof for f, proof in picture.files.items() if host.size_of(f) is not None})
    going, rows = sort_files(host, after, take_over)
    swept.rows += rows
    segments = {s.id for s in host.segments()}
    stay = set(after.files) - set(going)
    for file, (proof, size) in going.items():
        kind = "shm" if file in segments else "lock"
        freed = size if dry_run else host.remove(file)
        if freed is None:
            stay.add(file)
            detail = "changed or locked between looking and removing"
            swept.rows.append(Row(kind, file.path, proof, "kept", size, detail))
        else:
            swept.rows.append(Row(kind, file.path, proof, "removed", freed))
    return stay


def _leases(
    host: Host, picture: Picture, swept: Swept, left: set[Identity], stay: set[FileId], dry_run: bool
) -> None:
    """A lease goes only when its group and everything that it recorded is gone."""
    for file in picture.dead:
        lease = file.lease
        if lease is not None:  # those without are of an earlier boot, under --take-over, and have their row
            marked = {i for i, (p, _) in picture.ours.items() if p.lease == lease.lease_id}
            survived = ({lease.engine, *lease.members} | marked) & left
            remaining = [f.path for f in [*lease.segments, *lease.locks] if f in stay]
            if survived or remaining:
                detail = f"still there: {', '.join(remaining) or 'processes of it'}"
                swept.rows.append(Row("lease", lease.lease_id, "its supervisor is gone", "kept", detail=detail))
                continue
            swept.rows.append(Row("lease", lease.lease_id, "its supervisor and its group are gone", "removed"))
        if not dry_run:
            host.drop(file.path)
    living = {p.identity for p in picture.everybody}
    for run, run_file in host.runs().items():
        if run_file.boot_id == host.boot_id and run_file.flow not in living:
            if not dry_run:
                host.drop(run_file.path)
            swept.rows.append(Row("lease", f"run {run}", "its flow is gone", "removed"))


def _gpus(host: Host, picture: Picture, swept: Swept, needed: set[int], dry_run: bool) -> None:
    if not needed:
        return
    # The flow itself trains on a GPU, and a CUDA context lives as long as its process.
    stopping = {os.getpid(), *(i.pid for i in picture.ours if dry_run)}
    waited = 0.0
    while True:
        gpus = host.gpus()
        if gpus is None:
            what = ", ".join(map(str, sorted(needed)))
            swept.rows.append(Row("gpu", what, "none", "refused", detail="unknown: NVML does not answer"))
            told = f"GPU {what}: NVML does not answer, so nobody knows whether it is free; check the driver"
            swept.problem = MachineError(told)
            return
        picture.everybody = [p for p in host.processes() if not p.gone]
        judged = judge_gpus(gpus, needed, picture, stopping)
        if dry_run or waited >= GPU_SETTLE_S or not (judged.wedged or judged.foreign):
            break
        if judged.foreign and not picture.ours:
            break
        host.sleep(0.5)
        waited += 0.5
    swept.rows += judged.rows
    if missing := ", ".join(map(str, sorted(needed - {g.index for g in gpus}))):
        swept.problem = MachineError(f"GPU {missing} is not on this host: NVML lists {len(gpus)}; see machine.gpus")
    if judged.foreign:
        swept.problem = ForeignHolder("; ".join(judged.foreign) + "; wait for it, choose other GPUs, or ask its owner")
    if judged.wedged:
        swept.problem = WedgedGpu("; ".join(judged.wedged))
