"""Clean, doctor and NCCL profiles on real GPUs; everything is skipped where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.clean import clean_host
from tasks.config import Interconnect
from tasks.engines.base import Observed
from tasks.errors import ForeignHolder
from tasks.launch import nccl_observed
from tasks.machine.doctor import examine, lines
from tasks.machine.gpu import GpuState, read_gpus
from tasks.machine.nccl import LOGGING, PROFILES
from tasks.machine.topology import read_topology

pytestmark = pytest.mark.gpu
GPUS = read_gpus() or []
needs_gpu = pytest.mark.skipif(not GPUS, reason="no GPU")
HOLD = """
import time, torch
x = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda:0")
print("up", flush=True)
time.sleep(600)
"""
REDUCE = """
import os, sys
import torch, torch.distributed as dist
rank = int(sys.argv[1])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)
x = torch.ones(7168, dtype=torch.bfloat16, device="cuda")
dist.all_reduce(x)
assert x[0].item() == 2
dist.destroy_process_group()
"""


def used_mib(index: int = 0) -> int:
    gpu = next(g for g in read_gpus() or [] if g.index == index)
    assert gpu.used_mib is not None
    return gpu.used_mib


@pytest.fixture
def holder(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process that holds 1 GiB of GPU 0; marked as ours if the test asks for it."""
    env = {**os.environ, **({"DRAFTHOUSE_RUN": "gone"} if getattr(request, "param", True) else {})}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.communicate()


@needs_gpu
def test_nvml_tells_what_the_checks_need() -> None:
    for gpu in GPUS:
        assert gpu.uuid.startswith("GPU-")
        assert gpu.capability is not None
        assert gpu.total_mib is not None
        assert gpu.holders is not None
        assert not gpu.wedged
    topology = read_topology()
    assert topology.gpus == len(GPUS)
    assert topology.interconnect() in (Interconnect.single, Interconnect.nvlink, Interconnect.pcie)
    assert any(gpu.name in line for gpu in GPUS for line in lines(examine()))


@needs_gpu
def test_our_orphan_on_a_gpu_goes_and_its_memory_comes_back(holder: subprocess.Popen[str]) -> None:
    before = used_mib()
    assert before >= 1024
    swept = clean_host(needed_gpus={0}, grace_s=2.0)
    holder.wait(10)
    assert swept.problem is None
    assert used_mib() <= before - 1024


@needs_gpu
@pytest.mark.parametrize("holder", [False], indirect=True)
def test_a_foreign_holder_is_named_and_left_alone(holder: subprocess.Popen[str]) -> None:
    swept = clean_host(needed_gpus={0}, grace_s=0.5)
    assert isinstance(swept.problem, ForeignHolder)
    assert f"pid {holder.pid}" in str(swept.problem)
    assert holder.poll() is None


@pytest.mark.skipif(len(GPUS) < 2, reason="needs two GPUs")
@pytest.mark.parametrize("profile", ["none", "pcie-no-nvlink", "p2p-off"])
def test_the_variables_of_a_profile_are_seen_in_nccls_own_log(profile: str, tmp_path: Path) -> None:
    wanted = dict(PROFILES[profile].variables)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("NCCL_")}
    env = inherited | wanted | LOGGING | {"NCCL_NVLS_ENABLE": "0"}
    port, log = str(20000 + time.time_ns() % 10000), tmp_path / "log"
    with log.open("w") as stream:
        ranks = [
            subprocess.Popen([sys.executable, "-c", REDUCE, str(rank), port], env=env, stdout=stream, stderr=stream)
            for rank in range(2)
        ]
        assert [rank.wait(120) for rank in ranks] == [0, 0], log.read_text()[-2000:]
    seen: list[Observed] = nccl_observed(log)
    values = {o.setting.removeprefix("nccl."): o.value for o in seen}
    assert {name: values.get(name) for name in wanted} == wanted
    assert values["path"] == ("SHM" if profile == "p2p-off" else "P2P")
    states: list[GpuState] = read_gpus() or []
    assert len(states) >= 2
