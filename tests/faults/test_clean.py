"""Clean frees what is provably ours, and nothing else, among real processes and segments."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from faults_kit import FAKE_SERVER, Doomed, is_gone, marked, wait_until
from test_serve import start_flow

from tasks.clean import clean, clean_host
from tasks.config import Campaign
from tasks.machine.leases import Lease, read_leases, register_run, state_dir, write_lease
from tasks.machine.processes import Identity, boot_id, identity_of, read_process
from tasks.machine.shm import FileId
from tasks.store.tables import Store

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to start processes of another user")


def orphan(tmp_path: Path, segment: str, doomed: list[Doomed]) -> Lease:
    """A server whose flow and supervisor were both killed with SIGKILL."""
    flow = start_flow(tmp_path, segment)
    lease_file = read_leases(state_dir())[0]
    lease = lease_file.lease
    assert lease is not None
    wait_until(lambda: segment in lease_file.path.read_text(), "the segment is recorded")
    doomed += [flow, *marked(lease.lease_id)]
    os.kill(lease.supervisor.pid, signal.SIGKILL)
    os.kill(flow.pid, signal.SIGKILL)
    flow.communicate(timeout=60)
    wait_until(lambda: is_gone(lease.supervisor.pid), "the supervisor is gone")
    found = read_leases(state_dir())[0].lease
    assert found is not None
    return found


def sleeper(doomed: list[Doomed], **options: object) -> subprocess.Popen[bytes]:
    process: subprocess.Popen[bytes] = subprocess.Popen(["/bin/sleep", "1000"], **options)  # type: ignore[call-overload]
    doomed.append(process)
    return process


def a_lease(engine: Identity, **changes: object) -> Lease:
    """A lease whose supervisor and flow are gone."""
    facts = {
        "lease_id": "0123456789abcdef", "run_id": "gone", "arm": "base", "boot_id": boot_id(), "uid": os.geteuid(),
        "host": socket.gethostname(), "supervisor": Identity(2**22 + 1, 5), "flow": Identity(2**22 + 2, 5),
        "engine": engine, "session": engine.pid, "command": ["x"], "log": "", "started_at": time.time(), **changes,
    }
    return Lease(**facts)  # type: ignore[arg-type]


def as_user(uid: int, ask: Callable[[], list[list[str]]]) -> list[list[str]]:
    """What `ask` returns in a child process of that user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.write(writing, json.dumps(ask()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    rows: list[list[str]] = json.loads(text)
    return rows


def test_an_orphan_left_by_kill_9_of_flow_and_supervisor_goes_and_its_decoys_stay(
    tmp_path: Path, campaign: Campaign, store: Store, segment_name: str, doomed: list[Doomed]
) -> None:
    lease = orphan(tmp_path, segment_name, doomed)
    left = marked(lease.lease_id)
    assert len(left) >= 4
    port = lease.ports[0]
    decoy = subprocess.Popen([sys.executable, FAKE_SERVER, "0", "--children", "0"], stdout=subprocess.DEVNULL)
    doomed.append(decoy)
    look_alike = Path("/dev/shm", segment_name + "x")
    look_alike.write_bytes(b"somebody's")
    try:
        planned = clean(campaign, "base", store, dry_run=True)
        assert marked(lease.lease_id) == left
        done = clean(campaign, "base", store)
        assert marked(lease.lease_id) == []
        assert read_process(decoy.pid) is not None
        assert look_alike.exists()
        assert not Path("/dev/shm", segment_name).exists()
        assert not list(state_dir().glob("lease-*"))
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    finally:
        look_alike.unlink()
    assert {(r.kind, r.what, r.action) for r in planned.rows} == {(r.kind, r.what, r.action) for r in done.rows}
    rows = store.read("cleanup").to_pylist()
    stopped = [r for r in rows if r["action"] == "stopped" and r["kind"] == "process"]
    assert len(stopped) == 2 * len(left)  # the dry run and the run
    removed = [r for r in rows if r["what"].endswith(segment_name) and r["action"] == "removed"]
    assert [r["bytes"] for r in removed] == [1 << 20, 1 << 20]
    refused = next(r for r in rows if r["what"] == str(look_alike))
    assert (refused["action"], refused["bytes"]) == ("refused", 10)
    assert "recorded by no supervisor of ours" in refused["detail"]


def test_a_process_that_lost_its_marker_is_found_by_the_lease(
    tmp_path: Path, state_home: Path, doomed: list[Doomed]
) -> None:
    state_dir()
    child = sleeper(doomed, env={"PATH": os.environ["PATH"]}, start_new_session=True)
    identity = identity_of(child.pid)
    assert identity is not None
    write_lease(a_lease(Identity(2**22 + 3, 5), members=[identity]), state_home)
    swept = clean_host(grace_s=0.5)
    child.wait(5)
    assert [r.proof for r in swept.of("stopped")] == ["lease 0123456789abcdef (pid and start time)"]


def test_a_reused_pid_is_not_signalled(state_home: Path, doomed: list[Doomed]) -> None:
    state_dir()
    innocent = sleeper(doomed)
    identity = identity_of(innocent.pid)
    assert identity is not None
    earlier = Identity(identity.pid, identity.start_ticks - 100)
    write_lease(a_lease(earlier, members=[earlier]), state_home)
    swept = clean_host(grace_s=0.2)
    assert innocent.poll() is None
    assert swept.of("stopped") == []
    assert not list(state_home.glob("lease-*"))


@pytest.mark.parametrize("jump_s", [-10 * 365 * 86400.0, 10 * 365 * 86400.0])
def test_a_clock_that_jumped_changes_nothing_about_what_is_ours(
    state_home: Path, doomed: list[Doomed], jump_s: float
) -> None:
    """Who a process is hangs on its boot and its start in ticks, not on the time of day."""
    state_dir()
    child, innocent = (sleeper(doomed, start_new_session=True) for _ in range(2))
    identity, other = identity_of(child.pid), identity_of(innocent.pid)
    assert identity is not None and other is not None
    members = [identity, Identity(other.pid, other.start_ticks - 100)]
    write_lease(a_lease(Identity(2**22 + 3, 5), members=members, started_at=time.time() + jump_s), state_home)
    clean_host(grace_s=0.5)
    assert child.wait(5) is not None
    assert innocent.poll() is None
    assert not list(state_home.glob("lease-*"))


def test_a_lease_of_another_boot_and_a_torn_lease_touch_nothing(state_home: Path, doomed: list[Doomed]) -> None:
    state_dir()
    innocent = sleeper(doomed)
    identity = identity_of(innocent.pid)
    assert identity is not None
    whole = write_lease(a_lease(identity), state_home)
    torn = state_home / "lease-torn.json"
    torn.write_text(whole.read_text()[:-20])
    body = json.loads(whole.read_text())
    whole.write_text(json.dumps({**body, "boot_id": "another"}))
    swept = clean_host(grace_s=0.2)
    assert innocent.poll() is None
    assert sorted(r.action for r in swept.rows if r.kind == "lease") == ["refused", "refused"]
    assert whole.exists()
    assert torn.exists()
    details = " ".join(r.detail for r in swept.rows)
    assert "of another boot" in details
    assert "not a whole lease" in details


def test_a_marked_process_goes_only_when_nobody_works_on_its_run(state_home: Path, doomed: list[Doomed]) -> None:
    marker = {**os.environ, "DRAFTHOUSE_RUN": "run-x"}
    worker = sleeper(doomed, env=marker, start_new_session=True)
    me = identity_of(os.getpid())
    assert me is not None
    register_run("run-x", state_dir(), me, boot_id())
    assert clean_host(grace_s=0.2).of("stopped") == []
    assert worker.poll() is None
    register_run("run-x", state_dir(), Identity(2**22 + 4, 9), boot_id())
    elsewhere = sleeper(doomed, env={**marker, "DRAFTHOUSE_STATE": "/another/folder"}, start_new_session=True)
    swept = clean_host(grace_s=2)
    worker.wait(5)
    assert [r.proof for r in swept.of("stopped")] == ["marker of run run-x, on which nobody works any more"]
    assert elsewhere.poll() is None


def test_a_server_whose_flow_lives_is_kept(
    tmp_path: Path, state_home: Path, segment_name: str, campaign: Campaign, store: Store, doomed: list[Doomed]
) -> None:
    flow = start_flow(tmp_path, segment_name)
    doomed.append(flow)
    lease = read_leases(state_home)[0].lease
    assert lease is not None
    before = marked(lease.lease_id)
    swept = clean_host(grace_s=0.2)
    assert marked(lease.lease_id) == before
    assert [(r.what, r.action) for r in swept.rows if r.kind == "lease"] == [(lease.lease_id, "kept")]
    assert Path("/dev/shm", segment_name).exists()
    flow.kill()
    flow.communicate(timeout=60)
    clean_host(grace_s=2)  # its supervisor is at work: clean waits for it
    assert marked(lease.lease_id) == []


def test_a_hung_supervisor_is_replaced(
    tmp_path: Path, state_home: Path, segment_name: str, doomed: list[Doomed], monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = start_flow(tmp_path, segment_name)
    lease = read_leases(state_home)[0].lease
    assert lease is not None
    doomed += [flow, *marked(lease.lease_id)]
    os.kill(lease.supervisor.pid, signal.SIGSTOP)
    flow.kill()
    flow.communicate(timeout=60)
    monkeypatch.setattr("tasks.machine.sweep.ENDING_WAIT_S", 0.5)
    clean_host(grace_s=0.2)
    assert is_gone(lease.supervisor.pid)
    assert marked(lease.lease_id) == []
    assert not list(state_home.glob("lease-*"))


def test_recorded_segments_stay_while_somebody_maps_them(state_home: Path, segment_name: str) -> None:
    state_dir()
    path = Path("/dev/shm", segment_name)
    path.write_bytes(b"\0" * 4096)
    record = FileId(str(path), path.stat().st_ino)
    write_lease(a_lease(Identity(2**22 + 3, 5), segments=[record, FileId(str(path) + "gone", 7)]), state_home)
    with path.open("r+b") as handle, mmap.mmap(handle.fileno(), 4096):
        swept = clean_host(grace_s=0.2)
        assert path.exists()
        row = next(r for r in swept.rows if r.what == str(path))
        assert (row.action, row.detail) == ("kept", f"held by pid {os.getpid()}")
        assert list(state_home.glob("lease-*"))  # the record stays as long as the segment
    assert [r.bytes for r in clean_host(grace_s=0.2).rows if r.what == str(path)] == [4096]
    assert not path.exists()
    assert not list(state_home.glob("lease-*"))


def test_a_name_with_another_inode_and_a_link_stay(state_home: Path, tmp_path: Path, segment_name: str) -> None:
    state_dir()
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    path, link = Path("/dev/shm", segment_name), Path("/dev/shm", segment_name + "-link")
    path.write_bytes(b"new")
    link.symlink_to(notes)
    try:
        records = [FileId(str(path), path.stat().st_ino + 1), FileId(str(link), link.lstat().st_ino)]
        write_lease(a_lease(Identity(2**22 + 3, 5), segments=records), state_home)
        swept = clean_host(grace_s=0.2)
        assert path.exists()
        assert link.is_symlink()
        assert notes.read_text() == "mine"
        assert "a link, never followed" in next(r.detail for r in swept.rows if r.what == str(link))
    finally:
        link.unlink()


def test_a_build_lock_left_by_a_killed_server_goes_and_a_held_one_stays(state_home: Path, tmp_path: Path) -> None:
    state_dir()
    left, held = tmp_path / "kernel" / "lock", tmp_path / "other.lock"
    left.parent.mkdir()
    left.touch()
    held.touch()
    records = [FileId(str(p), p.stat().st_ino) for p in (left, held)]
    write_lease(a_lease(Identity(2**22 + 3, 5), locks=records), state_home)
    with held.open():
        swept = clean_host(grace_s=0.2)
    assert not left.exists()
    assert held.exists()
    assert [(r.kind, r.what) for r in swept.of("removed") if r.kind == "lock"] == [("lock", str(left))]


@as_root
def test_another_users_marked_process_and_recorded_segment_stay(
    state_home: Path, segment_name: str, doomed: list[Doomed]
) -> None:
    state_dir()
    foreign = sleeper(doomed, env={"DRAFTHOUSE_RUN": "run-x"}, user=NOBODY, start_new_session=True)
    identity = identity_of(foreign.pid)
    assert identity is not None
    path = Path("/dev/shm", segment_name)
    path.write_bytes(b"theirs")
    os.chown(path, NOBODY, NOBODY)
    records = [FileId(str(path), path.stat().st_ino)]
    write_lease(a_lease(identity, members=[identity], segments=records), state_home)
    swept = clean_host(grace_s=0.2)
    assert foreign.poll() is None
    assert path.exists()
    assert "belongs to" in next(r.detail for r in swept.rows if r.what == str(path))
    taken = clean_host(grace_s=2, take_over_uids=[NOBODY])  # the operator of a dedicated box named this user
    foreign.wait(5)
    assert not path.exists()
    assert {r.kind for r in taken.of("stopped")} == {"process"}


@as_root
def test_a_clean_of_another_user_touches_nothing_of_root(
    state_home: Path, segment_name: str, doomed: list[Doomed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same program as uid nobody: it cannot read our processes, and says so instead of guessing."""
    mine = sleeper(doomed, env={**os.environ, "DRAFTHOUSE_RUN": "run-x"}, start_new_session=True)
    identity = identity_of(mine.pid)
    assert identity is not None
    path = Path("/dev/shm", segment_name)
    path.write_bytes(b"root's")
    home = Path("/tmp", f"dh-nobody-{os.getpid()}")
    folder = home / "drafthouse"
    folder.mkdir(parents=True)
    try:
        lease = a_lease(identity, uid=NOBODY, members=[identity], segments=[FileId(str(path), path.stat().st_ino)])
        os.chown(write_lease(lease, folder), NOBODY, NOBODY)
        for place in (home, folder):
            os.chown(place, NOBODY, NOBODY)
        monkeypatch.setenv("XDG_STATE_HOME", str(home))
        rows = as_user(NOBODY, lambda: [[r.kind, r.what, r.action, r.detail] for r in clean_host(grace_s=0.2).rows])
        assert mine.poll() is None
        assert path.exists()
        assert ["shm", str(path), "refused"] in [r[:3] for r in rows]
        assert not [r for r in rows if r[0] == "process" and r[2] == "stopped"]
    finally:
        shutil.rmtree(home)
