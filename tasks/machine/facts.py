"""What a campaign's launches depend on in the machine: declared, or read from this host once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tasks.config import Device, Interconnect, Machine
from tasks.errors import MachineError
from tasks.machine.gpu import GpuState, read_gpus
from tasks.machine.topology import Acs, Topology, read_acs, read_topology

UNREAD = Acs("unknown", reason="this host has no such GPUs")


@dataclass(frozen=True)
class Facts:
    """Of the GPUs that a campaign uses; None or `unknown` = nobody knows, never a guess."""

    interconnect: Interconnect | None
    acs: Acs
    capability: tuple[int, int] | None
    gpu_memory_gib: float | None
    declared: bool  # by the campaign, on a host that does not have these GPUs


@lru_cache(maxsize=1)
def _host() -> tuple[list[GpuState] | None, Topology, Acs]:
    gpus = read_gpus()
    if not gpus:
        return gpus, Topology(0, problem="NVML lists no GPU"), UNREAD
    return gpus, read_topology(), read_acs()


def facts_of(machine: Machine) -> Facts:
    """Facts of the machine's GPUs; raises MachineError where declaration and host disagree."""
    if machine.device is Device.cpu:
        return Facts(Interconnect.single, UNREAD, None, None, False)
    return judge(machine, *_host())


def judge(machine: Machine, gpus: list[GpuState] | None, topology: Topology, acs: Acs) -> Facts:
    """The same for a host that is given; pure."""
    declared = None if machine.interconnect is Interconnect.auto else machine.interconnect
    capability = _capability(machine.compute_capability)
    used = [g for g in gpus or [] if not machine.gpus or g.index in machine.gpus]
    if not used:
        return Facts(declared, acs, capability, machine.gpu_memory_gib, True)
    found = topology.interconnect([g.index for g in used])
    if declared and found and declared is not found:
        told = f"declared {declared}, this host has {found}; correct it or leave it out"
        raise MachineError(f"machine.interconnect: {told}")
    on_host = {g.capability for g in used} - {None}
    if capability and on_host and on_host != {capability}:
        shown = ", ".join(sorted(f"{c[0]}.{c[1]}" for c in on_host if c))
        raise MachineError(f"machine.compute_capability: declared {machine.compute_capability}, this host has {shown}")
    if len(on_host) > 1:
        raise MachineError("machine.gpus: GPUs of different compute capability; choose equal ones")
    memory = min((g.total_mib for g in used if g.total_mib), default=None)
    return Facts(
        found or declared, acs, capability or next(iter(on_host), None),
        memory / 1024 if memory else machine.gpu_memory_gib, False,
    )


def lock_keys(machine: Machine) -> list[str]:
    """What only one run at a time may use: GPU UUIDs (`gpu-<index>` where NVML does not tell), or `cpu`."""
    if machine.device is Device.cpu:
        return ["cpu"]
    uuids = {gpu.index: gpu.uuid for gpu in read_gpus() or []}
    return [uuids.get(index, f"gpu-{index}") for index in machine.gpus or sorted(uuids)]


def _capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, _, minor = text.partition(".")
    return int(major), int(minor)
