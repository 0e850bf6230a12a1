"""GPUs as NVML reports them: identity, memory, load and who holds them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

WEDGED_MIB: Final = 300  # a context alone takes about this much; idle drivers report far less as used
WEDGED_LOAD_PCT: Final = 50


@dataclass(frozen=True)
class GpuHolder:
    """A process on a GPU; `mib` None = NVML does not tell (inside a container, for example)."""

    pid: int
    mib: int | None
    graphics: bool = False


@dataclass(frozen=True)
class GpuState:
    """One GPU now; None = not reported, never 0."""

    index: int
    uuid: str
    name: str
    total_mib: int | None
    used_mib: int | None
    load_pct: int | None
    holders: tuple[GpuHolder, ...] | None
    capability: tuple[int, int] | None = None
    bus_id: str = ""

    @property
    def wedged(self) -> bool:
        """Memory or load without any visible process: only a reset or a reboot helps, and only an operator may."""
        if self.holders is None or self.holders:
            return False
        return (self.used_mib or 0) >= WEDGED_MIB or (self.load_pct or 0) >= WEDGED_LOAD_PCT

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.uuid})"


@contextmanager
def nvml() -> Iterator[Any]:
    """The NVML module, initialised; None where there is no driver."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pynvml warns about its own packaging
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no driver, no permission, no library: all mean that NVML tells nothing
            yield None
            return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _ask(call: Any, *arguments: Any) -> Any:
    """NVML's answer or None; each question may be unsupported on its own (MIG, vGPU, containers)."""
    try:
        return call(*arguments)
    except Exception:
        return None


def read_gpus() -> list[GpuState] | None:
    """All GPUs, or None when NVML is not there: unknown is not the same as none."""
    with nvml() as n:
        if n is None:
            return None
        return [_read(n, index) for index in range(_ask(n.nvmlDeviceGetCount) or 0)]


def _read(n: Any, index: int) -> GpuState:
    device = n.nvmlDeviceGetHandleByIndex(index)
    memory = _memory(n, device)
    load = _ask(n.nvmlDeviceGetUtilizationRates, device)
    compute = _ask(n.nvmlDeviceGetComputeRunningProcesses, device)
    graphics = _ask(n.nvmlDeviceGetGraphicsRunningProcesses, device) or []
    pci = _ask(n.nvmlDeviceGetPciInfo, device)
    holders = None
    if compute is not None:
        computing = {p.pid for p in compute}
        holders = tuple(
            [GpuHolder(p.pid, _mib(p.usedGpuMemory)) for p in compute]
            + [GpuHolder(p.pid, _mib(p.usedGpuMemory), True) for p in graphics if p.pid not in computing]
        )
    return GpuState(
        index, _text(_ask(n.nvmlDeviceGetUUID, device)) or f"gpu-{index}", _text(_ask(n.nvmlDeviceGetName, device)),
        _mib(memory.total) if memory else None, _mib(memory.used) if memory else None, load.gpu if load else None,
        holders, _ask(n.nvmlDeviceGetCudaComputeCapability, device), _text(pci.busId) if pci else "",
    )


def _memory(n: Any, device: Any) -> Any:
    """NVML's second form: the first counts what the driver keeps for itself, 615 MiB of an idle H200, as used."""
    return _ask(n.nvmlDeviceGetMemoryInfo, device, n.nvmlMemory_v2) or _ask(n.nvmlDeviceGetMemoryInfo, device)


def _mib(count: int | None) -> int | None:
    return None if count is None else int(count) >> 20


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")


def driver_version() -> str | None:
    """Of the NVIDIA driver; None where there is none."""
    with nvml() as n:
        return None if n is None else _text(_ask(n.nvmlSystemGetDriverVersion)) or None
