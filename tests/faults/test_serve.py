"""A server is ready only when it serves, fails early when it dies, and never outlives its flow."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from faults_kit import Doomed, FakeEngine, campaign_with, is_gone, marked, wait_until

from tasks.config import Arm, Campaign
from tasks.engines.base import Observed
from tasks.errors import LaunchFailed, MachineError, PortTaken, ServerLost, SettingsMismatch
from tasks.machine.leases import HostLock, Lease, read_leases
from tasks.serve import Server, serving
from tasks.store.tables import Store

Cleans = list[int]


def nothing() -> None:
    pass


def test_the_server_starts_only_when_its_address_is_asked_for(
    fake_engine: FakeEngine, campaign: Campaign, arm: Arm, store: Store
) -> None:
    cleans: Cleans = []
    seen: list[tuple[float, str]] = []
    with serving(
        campaign, arm, store, before_start=lambda: cleans.append(1), progress=lambda f, what: seen.append((f, what))
    ) as server:
        assert server.loads == 0
        assert cleans == []
        assert requests.get(server.url() + "/health", timeout=5).status_code == 200
        assert server.url() == server.url()
        assert (server.loads, cleans, seen) == (1, [1], [(1.0, "listening")])
        pid = _lease_pid(server)
        assert "fake server pid" in server.log.read_text()
        command = json.loads(server.log.with_suffix(".command.json").read_text())
        assert command["argv"][-1] == str(server.plan.port)
    assert is_gone(pid)


def test_an_unused_server_never_starts(fake_engine: FakeEngine, campaign: Campaign, arm: Arm, store: Store) -> None:
    with serving(campaign, arm, store, before_start=nothing) as server:
        pass
    assert server.loads == 0
    assert not list(store.run_dir.glob("*.log"))


def test_ready_only_after_a_real_token(fake_engine: FakeEngine, campaign: Campaign, arm: Arm, store: Store) -> None:
    fake_engine.arguments = ("--health-after", "0.6", "--token-after", "1.2")
    started = time.monotonic()
    with serving(campaign, arm, store, before_start=nothing) as server:
        server.url()
        assert time.monotonic() - started >= 1.2


def test_healthy_without_a_token_fails_at_the_limit_with_the_reason(
    fake_engine: FakeEngine, tmp_path: Path, arm: Arm, store: Store
) -> None:
    fake_engine.arguments = ("--token-after", "600")
    campaign = campaign_with(tmp_path, ready_timeout_s=5)
    with serving(campaign, arm, store, before_start=nothing) as server, pytest.raises(LaunchFailed) as failure:
        server.url()
    assert "no token within 5 s (machine.ready_timeout_s): /health answers 200 but" in str(failure.value)


def test_an_early_exit_fails_at_once_with_its_code_and_last_log_lines(
    fake_engine: FakeEngine, campaign: Campaign, arm: Arm, store: Store
) -> None:
    fake_engine.arguments = ("--health-after", "600", "--exit-after", "0.3", "--exit-code", "3")
    started = time.monotonic()
    with serving(campaign, arm, store, before_start=nothing) as server, pytest.raises(LaunchFailed) as failure:
        server.url()
    assert time.monotonic() - started < campaign.machine.ready_timeout_s / 2
    assert "exited with code 3 while loading" in str(failure.value)
    assert "CUDA error: something went wrong" in str(failure.value)


def test_an_early_exit_is_told_at_once_though_its_children_ignore_sigterm(
    fake_engine: FakeEngine, tmp_path: Path, arm: Arm, store: Store
) -> None:
    fake_engine.arguments = ("--health-after", "600", "--exit-after", "0.5", "--children", "2")
    campaign = campaign_with(tmp_path, stop_grace_s=60, ready_timeout_s=50)
    started = time.monotonic()
    early = pytest.raises(LaunchFailed, match="code 1 while")
    with serving(campaign, arm, store, before_start=nothing) as server, early:
        server.url()
    assert time.monotonic() - started < 30


def test_a_supervisor_that_cannot_write_its_lease_still_stops_its_server(
    fake_engine: FakeEngine, campaign: Campaign, arm: Arm, store: Store, state_home: Path
) -> None:
    fake_engine.arguments = ("--children", "1")
    with serving(campaign, arm, store, before_start=nothing) as server:
        server.url()
        lease_id = _lease_id(server)
        wait_until(lambda: len(_lease_of(server).members) == 2, "both processes are in the lease")
        shutil.rmtree(state_home)
        os.kill(marked(lease_id)[-1], signal.SIGKILL)  # a change that the supervisor would write down
        wait_until(lambda: "cannot write the lease" in server.log.read_text(), "the supervisor noticed")
        assert requests.get(server.url() + "/health", timeout=5).status_code == 200
    assert marked(lease_id) == []


def test_a_dead_server_is_never_handed_out_and_the_next_call_starts_a_new_one(
    fake_engine: FakeEngine, campaign: Campaign, arm: Arm, store: Store
) -> None:
    with serving(campaign, arm, store, before_start=nothing) as server:
        server.url()
        os.kill(_lease_pid(server), signal.SIGKILL)
        with pytest.raises(ServerLost, match="after it was ready"):
            wait_until(lambda: server.url() and False, "the loss is noticed")
        assert requests.get(server.url() + "/health", timeout=5).status_code == 200
        assert server.loads == 2
        assert server.log.name == "base-load2.log"


@pytest.mark.parametrize("leave", [RuntimeError("stage failed"), KeyboardInterrupt()])
def test_the_whole_group_goes_however_the_block_ends(
    fake_engine: FakeEngine, campaign: Campaign, arm: Arm, store: Store, leave: BaseException
) -> None:
    fake_engine.arguments = ("--children", "2", "--ignore-term")
    lease_id = ""
    with pytest.raises(type(leave)), serving(campaign, arm, store, before_start=nothing) as server:
        server.url()
        lease_id = _lease_id(server)
        assert len(marked(lease_id)) == 3
        raise leave
    assert marked(lease_id) == []


def test_a_port_that_is_taken_is_named_with_its_holder(
    fake_engine: FakeEngine, tmp_path: Path, arm: Arm, store: Store
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        campaign = campaign_with(tmp_path, port=taken.getsockname()[1])
        with serving(campaign, arm, store, before_start=nothing) as server, pytest.raises(PortTaken) as failure:
            server.url()
    assert f"pid {os.getpid()}" in str(failure.value)


def test_a_missing_environment_says_how_to_make_it(
    fake_engine: FakeEngine, tmp_path: Path, arm: Arm, store: Store
) -> None:
    campaign = campaign_with(tmp_path, environments=[{"name": "stub-cpu", "python": str(tmp_path / "no/python")}])
    to_be_made = pytest.raises(LaunchFailed, match="make engines")
    with serving(campaign, arm, store, before_start=nothing) as server, to_be_made:
        server.url()


def test_a_setting_that_did_not_take_effect_stops_a_strict_campaign_before_anybody_gets_the_address(
    fake_engine: FakeEngine, campaign: Campaign, arm: Arm, store: Store
) -> None:
    fake_engine.wanted = {"attention_backend": "flashinfer", "max_running_requests": "32", "nccl.NCCL_ALGO": "Ring"}
    fake_engine.said = [
        Observed("attention_backend", "attention_backend", "flashinfer", "server_info"),
        Observed("attention_backend", "log line", "triton", "log", "log line 812"),
        Observed("max_running_requests", "max_num_seqs", "32.0", "metrics"),
        Observed("kv_tokens", "max_total_num_tokens", "4096", "log"),
    ]
    with serving(campaign, arm, store, before_start=nothing) as server, pytest.raises(SettingsMismatch) as failure:
        server.url()
    assert "attention_backend: asked flashinfer, got triton (log: log line 812)" in str(failure.value)
    written = store.read("servers").to_pylist()
    rows = {(r["setting"], r["source"]): r["status"] for r in written if r["status"] != "hazard"}
    assert rows == {
        ("attention_backend", "server_info"): "observed", ("attention_backend", "log"): "mismatch",
        ("max_running_requests", "metrics"): "match", ("kv_tokens", "log"): "observed",
        ("nccl.NCCL_ALGO", None): "not_reported",
    }


def test_another_run_does_not_get_the_machine(fake_engine: FakeEngine, tmp_path: Path, state_home: Path) -> None:
    state_home.mkdir(parents=True)
    first, second, third = (HostLock(state_home, ["gpu-0", "gpu-1"], run) for run in ("run-a", "run-a", "run-b"))
    first.acquire()
    second.acquire()  # arms side by side of one run share it
    with pytest.raises(MachineError, match="gpu-0 is used by run run-a"):
        third.acquire()
    first.release()
    with pytest.raises(MachineError):
        third.acquire()
    second.release()
    third.acquire()
    third.release()


FLOW = """
import sys, time
from pathlib import Path
import tasks.serve
sys.path.insert(0, {root!r})
from faults_kit import Doomed, FakeEngine, campaign_with
from tasks.serve import serving
from tasks.store.tables import Store
engine = FakeEngine()
engine.arguments = ("--children", "2", "--double-fork", "--ignore-term", "--segment", {segment!r})
tasks.serve.adapter_of = lambda _: engine
campaign = campaign_with(Path({tmp!r}))
with serving(campaign, campaign.arms[0], Store({tmp!r} + "/store", "run-a"), before_start=lambda: None) as server:
    print(server.url(), flush=True)
    time.sleep(1e9)
"""


def start_flow(tmp_path: Path, segment: str) -> subprocess.Popen[str]:
    """A flow in a process of its own, with its server up."""
    root = str(Path(__file__).resolve().parent)
    script = FLOW.format(root=root, tmp=str(tmp_path), segment=segment)
    flow = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert flow.stdout is not None
    assert flow.stdout.readline().startswith("http://")
    return flow


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killing_the_flow_stops_its_server_and_double_forked_children(
    tmp_path: Path, state_home: Path, segment_name: str, doomed: list[Doomed], number: signal.Signals
) -> None:
    flow = start_flow(tmp_path, segment_name)
    doomed.append(flow)
    lease = read_leases(state_home)[0].lease
    assert lease is not None
    assert len(marked(lease.lease_id)) >= 4
    wait_until(lambda: segment_name in (state_home / lease.file_name).read_text(), "the segment is recorded")
    flow.send_signal(number)
    flow.communicate(timeout=60)
    wait_until(lambda: not marked(lease.lease_id), "the group is gone")
    wait_until(lambda: not list(state_home.glob("lease-*")), "the lease is gone")
    assert not Path("/dev/shm", segment_name).exists()


def _lease_id(server: Server) -> str:
    assert server._running is not None
    return server._running.lease_id


def _lease_of(server: Server) -> Lease:
    assert server._running is not None
    lease = server._running.lease()
    assert lease is not None
    return lease


def _lease_pid(server: Server) -> int:
    return _lease_of(server).engine.pid
