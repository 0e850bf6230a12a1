"""The rules of clean on a thousand invented hosts: nothing foreign is touched, everything ours is gone."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.errors import ForeignHolder, MachineError, Survivor, WedgedGpu
from tasks.machine.gpu import GpuHolder, GpuState
from tasks.machine.leases import Lease, LeaseFile, RunFile
from tasks.machine.ownership import TakeOver
from tasks.machine.processes import Identity, Process
from tasks.machine.shm import FileId, Segment
from tasks.machine.sweep import sweep

ME, OTHER, ROOT = 1000, 1001, 0
BOOT = "boot-now"


@dataclass
class FakeHost:
    """A host in memory; it remembers everything that was done to it."""

    uid: int = ME
    pid: int = 10
    name: str = "box"
    boot_id: str = BOOT
    state_folder: str = "/state"
    running: dict[int, Process] = field(default_factory=dict)
    deaf: set[int] = field(default_factory=set)  # ignores SIGTERM
    stuck: set[int] = field(default_factory=set)  # survives SIGKILL too (a hung driver call)
    births: dict[int, Process] = field(default_factory=dict)  # told to end, pid forks this child first
    ends: dict[int, int] = field(default_factory=dict)  # supervisor -> sleeps until it and its group are gone
    group_of: dict[int, set[int]] = field(default_factory=dict)
    lease_files: dict[Path, LeaseFile] = field(default_factory=dict)
    run_files: dict[str, RunFile] = field(default_factory=dict)
    files: dict[str, Segment] = field(default_factory=dict)
    locks: dict[str, int] = field(default_factory=dict)  # path -> inode
    held: dict[int, set[FileId]] = field(default_factory=dict)
    hidden: set[int] = field(default_factory=set)  # their maps cannot be read
    cards: list[GpuState] | None = None
    signalled: list[Identity] = field(default_factory=list)
    removed: list[FileId] = field(default_factory=list)

    def processes(self) -> list[Process]:
        return list(self.running.values())

    def leases(self) -> list[LeaseFile]:
        return list(self.lease_files.values())

    def runs(self) -> dict[str, RunFile]:
        return dict(self.run_files)

    def segments(self) -> list[Segment]:
        return list(self.files.values())

    def size_of(self, file: FileId) -> int | None:
        if self.locks.get(file.path) == file.inode:
            return 0
        segment = self.files.get(file.path)
        return segment.size if segment and segment.inode == file.inode and not segment.link else None

    def holders(self, files: set[FileId], pids: Iterable[int]) -> tuple[dict[FileId, list[int]], set[int]]:
        found: dict[FileId, list[int]] = {}
        for pid in pids:
            for file in files & self.held.get(pid, set()) if pid not in self.hidden else ():
                found.setdefault(file, []).append(pid)
        return found, self.hidden & set(pids)

    def listeners(self, ports: set[int], pids: Iterable[int]) -> dict[int, list[int]]:
        return {}

    def gpus(self) -> list[GpuState] | None:
        if self.cards is None:
            return None
        found = []
        for card in self.cards:
            left = tuple(h for h in card.holders or () if h.pid in self.running)
            freed = sum(h.mib or 0 for h in set(card.holders or ()) - set(left))
            found.append(replace(card, holders=left, used_mib=(card.used_mib or 0) - freed))
        return found

    def send(self, identity: Identity, number: int) -> bool:
        process = self.running.get(identity.pid)
        if process is None or process.identity != identity:
            return False
        if process.uid != self.uid and self.uid != ROOT:
            raise PermissionError(identity)
        self.signalled.append(identity)
        if child := self.births.pop(identity.pid, None):
            self.running[child.pid] = child
        if identity.pid not in self.stuck and (number == signal.SIGKILL or identity.pid not in self.deaf):
            self.die(identity.pid)
        return True

    def die(self, pid: int) -> None:
        self.running.pop(pid, None)
        self.held.pop(pid, None)
        for other in [p for p in self.running.values() if p.ppid == pid]:
            self.running[other.pid] = replace(other, ppid=1)

    def remove(self, file: FileId) -> int | None:
        self.removed.append(file)
        size = self.size_of(file)
        self.files.pop(file.path, None)
        self.locks.pop(file.path, None)
        return size

    def drop(self, path: Path) -> None:
        self.lease_files.pop(path, None)
        self.run_files = {run: f for run, f in self.run_files.items() if f.path != path}

    def sleep(self, seconds: float) -> None:
        for supervisor, left in list(self.ends.items()):
            self.ends[supervisor] = left - 1
            if left <= 0:
                for pid in [*self.group_of[supervisor], supervisor]:
                    self.die(pid)
                del self.ends[supervisor]


class Builder:
    """Invents a host and keeps the truth: which identities and files are ours and must go."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.host = FakeHost()
        self.next_pid, self.next_inode = 100, 1
        self.ours: set[Identity] = set()
        self.leaving: set[Identity] = set()  # supervisors that end by themselves
        self.our_files: set[FileId] = set()
        self.gone_leases: set[Path] = set()
        self.host.running[1] = Process(1, 1, 0, 1, 1, ROOT, "S", "init")
        self.host.running[10] = Process(10, 5, 1, 10, 10, ME, "S", "drafthouse", run="mine")

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def process(self, uid: int = ME, **facts: object) -> Process:
        pid = self.next_pid
        self.next_pid += self.random.randint(1, 3)
        base: dict[str, object] = {"ppid": 1, "group": pid, "session": pid, "name": "python3"}
        made = Process(**{"pid": pid, "start_ticks": self.random.randint(50, 10**6), "uid": uid, "state": "S",
                          **base, **facts})  # type: ignore[arg-type]
        self.host.running[pid] = made
        if self.chance(0.3):
            self.host.deaf.add(pid)
        return made

    def dead(self) -> Identity:
        self.next_pid += 1
        return Identity(self.next_pid - 1, self.random.randint(50, 10**6))

    def segment(self, uid: int = ME, mode: int = 0o600, link: bool = False) -> FileId:
        inode, self.next_inode = self.next_inode, self.next_inode + 1
        name = self.random.choice(["psm_", "sem.mp-", "vllm_offload_", "nccl-", "sgl_", "notes-"])
        made = Segment(f"/dev/shm/{name}{inode:x}", inode, self.random.randint(0, 1 << 30), uid, mode, 60.0, link)
        self.host.files[made.path] = made
        return made.id

    def server(self) -> None:
        kinds = ["live", "orphan", "orphan", "ending", "hung", "other-boot", "torn", "reused", "other-uid"]
        kind = self.random.choice(kinds)
        lease_id, run = f"{self.next_pid:016x}", f"run-{self.random.randint(0, 3)}-{kind}"
        marks = {"run": run, "lease": lease_id, "folder": "/state"}
        flow = self.process(name="drafthouse").identity if kind == "live" else self.dead()
        supervised = kind in ("live", "ending", "hung")
        supervisor = self.process(ppid=flow.pid, **marks) if supervised else None
        reused = kind in ("reused", "other-boot", "torn", "other-uid")
        uid = OTHER if kind == "other-uid" else ME
        engine = self.process(uid, **({} if reused else marks), ppid=supervisor.pid if supervisor else 1)
        engine_id = replace_start(engine.identity) if kind == "reused" else engine.identity
        members, unrecorded = [engine], []
        for _ in range(self.random.randint(0, 4)):
            if reused:
                break
            scrubbed, parent = self.chance(0.4), self.random.choice([engine.pid, supervisor.pid if supervisor else 1])
            child = self.process(ppid=parent, session=engine.pid, **({} if scrubbed else marks))
            (unrecorded if not scrubbed and self.chance(0.3) else members).append(child)
            if self.chance(0.2):
                unrecorded.append(self.process(ppid=child.pid))  # forked after the last look, marker lost
            if self.chance(0.2):
                self.host.births[child.pid] = Process(
                    self.next_pid, 7, child.pid, 1, engine.pid, ME, "S", "late", run, lease_id, "/state"
                )
                self.next_pid += 1
        recorded = [self.segment() for _ in range(self.random.randint(0, 3))]
        if kind == "orphan" and self.chance(0.4):  # its leader is dead already: the session proves nothing then
            self.host.births.pop(engine.pid, None)
            self.host.die(engine.pid)
        if self.chance(0.2):
            recorded.append(self.segment(OTHER))
        lock = FileId(f"/cache/{lease_id}/lock", self.next_inode)
        self.next_inode += 1
        self.host.locks[lock.path] = lock.inode
        held = {f: self.hold(f, members) or self.host.files[f.path].uid != ME for f in recorded}
        lease = Lease(
            lease_id, run, "arm", "boot-before" if kind == "other-boot" else BOOT, "box", ME,
            supervisor.identity if supervisor else self.dead(), flow, engine_id, engine.pid, ["x"], "", 0.0,
            members=[engine_id] + [m.identity for m in members[1:]], segments=recorded, locks=[lock],
        )
        path = Path(f"/state/lease-{lease_id}.json")
        self.host.lease_files[path] = LeaseFile(path, None, "torn") if kind == "torn" else LeaseFile(path, lease)
        if supervisor and kind != "live":
            self.host.group_of[supervisor.pid] = {p.pid for p in [*members, *unrecorded]}
            if kind == "ending":
                self.host.ends[supervisor.pid] = self.random.randint(0, 8)
                self.leaving.add(supervisor.identity)
                for process in members + unrecorded:
                    self.host.births.pop(process.pid, None)
            else:
                self.ours.add(supervisor.identity)
        if kind in ("orphan", "hung", "ending"):
            self.ours |= {p.identity for p in [*members, *unrecorded] if p.pid in self.host.running}
            late = [self.host.births[p.pid] for p in [*members, *unrecorded] if p.pid in self.host.births]
            self.ours |= {child.identity for child in late}
            self.our_files |= {f for f in recorded if not held[f]} | {lock}
            if not any(held.values()):
                self.gone_leases.add(path)
        elif kind in ("reused", "other-uid"):
            self.our_files |= {f for f in recorded if not held[f] and kind == "reused"} | {lock}
            if kind == "other-uid":
                self.our_files |= {f for f in recorded if not held[f]}

    def hold(self, file: FileId, members: list[Process]) -> bool:
        """Some members map it, and perhaps a stranger; True if a stranger does."""
        for process in members:
            if self.chance(0.5) and process.pid in self.host.running:
                self.host.held.setdefault(process.pid, set()).add(file)
        strange = self.chance(0.2) or members[0].uid != ME or members[0].run is None
        if strange:
            self.host.held.setdefault(self.process().pid, set()).add(file)
        return strange

    def strangers(self) -> None:
        for _ in range(self.random.randint(0, 8)):
            self.process(self.random.choice([ME, OTHER, ROOT]))
        for _ in range(self.random.randint(0, 3)):  # another user's drafthouse: its markers are not for us
            self.process(OTHER, run="theirs", lease="f" * 16, folder="/state")
        if self.chance(0.5):
            self.process(run="elsewhere", lease="e" * 16, folder="/other/state")
        if self.chance(0.5):
            worker = self.process(name="drafthouse")
            self.host.run_files["busy"] = RunFile(Path("/state/run-busy.json"), worker.identity, BOOT)
            self.process(run="busy", folder="/state")
        if self.chance(0.5):
            self.ours.add(self.process(run="forgotten", folder="/state").identity)
        for _ in range(self.random.randint(0, 4)):
            self.segment(self.random.choice([ME, OTHER]), link=self.chance(0.2))


def replace_start(identity: Identity) -> Identity:
    return Identity(identity.pid, identity.start_ticks + 1)


def invent(seed: int) -> Builder:
    builder = Builder(seed)
    for _ in range(builder.random.randint(0, 5)):
        builder.server()
    builder.strangers()
    return builder


@settings(max_examples=1000, deadline=None, database=None)
@given(st.integers(0, 2**32))
def test_nothing_foreign_is_touched_and_everything_ours_is_gone(seed: int) -> None:
    built = invent(seed)
    host = built.host
    before = {p.identity for p in host.processes()}
    files_before = {s.id for s in host.segments()} | {FileId(p, i) for p, i in host.locks.items()}
    still = not host.group_of and not host.births  # nothing changes between the two looks but by clean itself
    planned = sweep(host, dry_run=True)
    assert (host.signalled, host.removed) == ([], [])
    done = sweep(host, grace_s=1.0)
    left = {p.identity for p in host.processes()}
    assert set(host.signalled) <= built.ours, "signalled a stranger"
    assert set(host.removed) <= built.our_files, "removed a stranger's file"
    assert before - left <= built.ours | built.leaving, "a stranger is gone"
    assert not left & built.ours, "ours survived"
    files_left = {s.id for s in host.segments()} | {FileId(p, i) for p, i in host.locks.items()}
    assert files_before - files_left == built.our_files
    assert built.gone_leases.isdisjoint(host.lease_files)
    assert done.problem is None
    if still:
        assert {(r.kind, r.what, r.action) for r in done.rows} == {(r.kind, r.what, r.action) for r in planned.rows}


def gpu(index: int, *holders: GpuHolder, used: int | None = 4, load: int | None = 0) -> GpuState:
    return GpuState(index, f"GPU-{index}", "RTX PRO 6000", 97887, used, load, holders)


def test_a_wedged_gpu_stops_the_step_before_launch_and_again_on_every_retry() -> None:
    host = FakeHost(cards=[*(gpu(i) for i in range(3)), gpu(3, used=624, load=100), *(gpu(i) for i in range(4, 8))])
    for _ in range(2):
        swept = sweep(host, needed_gpus=set(range(8)))
        assert isinstance(swept.problem, WedgedGpu)
        assert "GPU 3" in str(swept.problem)
        assert "624 MiB" in str(swept.problem)
        assert "operator" in str(swept.problem)
        assert "GPU 2" not in str(swept.problem)
    assert host.signalled == []
    assert sweep(host, needed_gpus={0, 1}).problem is None  # a campaign that does not need it runs


def test_foreign_holders_of_a_needed_gpu_are_named_and_desktops_ignored() -> None:
    builder = Builder(1)
    builder.server = lambda: None  # type: ignore[method-assign]
    host = builder.host
    stale = builder.process(run="forgotten", folder="/state", name="python3")
    colleague = builder.process(OTHER, name="python3")
    desktop = builder.process(ROOT, name="Xorg")
    host.cards = [
        gpu(0, GpuHolder(stale.pid, 900), GpuHolder(desktop.pid, 40, graphics=True), used=940),
        gpu(1, GpuHolder(colleague.pid, 31000), used=31000),
    ]
    alone = sweep(host, needed_gpus={0}, grace_s=1.0)
    assert alone.problem is None
    assert set(host.signalled) == {stale.identity}
    both = sweep(host, needed_gpus={0, 1}, grace_s=1.0)
    assert isinstance(both.problem, ForeignHolder)
    assert f"pid {colleague.pid} (python3, uid {OTHER}): 31000 MiB" in str(both.problem)
    assert set(host.signalled) == {stale.identity}
    named = FakeHost(**{**vars(host), "uid": ROOT})
    taken = sweep(named, needed_gpus={0, 1}, grace_s=1.0, take_over=TakeOver(frozenset({OTHER})))
    assert colleague.identity in named.signalled
    assert taken.problem is None


def test_no_nvml_is_unknown_and_not_free() -> None:
    swept = sweep(FakeHost(cards=None), needed_gpus={0})
    assert isinstance(swept.problem, MachineError)
    assert "NVML does not answer" in str(swept.problem)


def test_a_process_that_survives_is_named() -> None:
    builder = Builder(2)
    stuck = builder.process(run="forgotten", folder="/state", name="hung-driver")
    builder.host.stuck.add(stuck.pid)
    swept = sweep(builder.host, grace_s=1.0)
    assert isinstance(swept.problem, Survivor)
    assert f"pid {stuck.pid} (hung-driver" in str(swept.problem)
    assert [r.what for r in swept.of("survived")] == [str(stuck)]


def test_a_readable_segment_stays_while_another_users_process_cannot_be_read() -> None:
    builder = Builder(3)
    record = builder.segment(mode=0o666)
    lease = Lease("a" * 16, "r", "arm", BOOT, "box", ME, builder.dead(), builder.dead(), builder.dead(), 5, ["x"], "",
                  0.0, segments=[record])
    path = Path("/state/lease-a.json")
    builder.host.lease_files[path] = LeaseFile(path, lease)
    hidden = builder.process(OTHER)
    builder.host.hidden.add(hidden.pid)
    row = next(r for r in sweep(builder.host).rows if r.what == record.path)
    assert row.action == "refused"
    assert "1 processes cannot be read" in row.detail
    builder.host.die(hidden.pid)
    assert next(r for r in sweep(builder.host).rows if r.what == record.path).action == "removed"


@pytest.mark.parametrize("take_over", [False, True])
def test_look_alikes_of_a_named_uid_go_only_when_the_operator_takes_over(take_over: bool) -> None:
    builder = Builder(4)
    builder.host.uid = ROOT
    theirs, notes = None, None
    while theirs is None or notes is None:
        made = builder.segment(OTHER)
        if "notes" in made.path:
            notes = made
        else:
            theirs = made
    mapped = builder.segment(OTHER)
    builder.host.held[builder.process(OTHER).pid] = {mapped}
    sweep(builder.host, take_over=TakeOver(frozenset({OTHER})) if take_over else None)
    assert (theirs in builder.host.removed) is take_over
    assert notes not in builder.host.removed
    assert mapped not in builder.host.removed


def test_the_flow_itself_may_hold_the_gpu_that_it_trains_on() -> None:
    builder = Builder(1)
    builder.host.cards = [gpu(0, GpuHolder(os.getpid(), 600), used=600)]
    assert sweep(builder.host, needed_gpus={0}, grace_s=0.1).problem is None
