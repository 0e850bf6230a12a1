"""What NVML answers, as recorded on one H200 (driver 580.159.04), and what is made of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.machine import gpu


class IdleH200:
    """An idle card: the first form of the memory question counts the driver's own reserve as used."""

    nvmlMemory_v2 = 33554472

    def __init__(self, knows_v2: bool = True) -> None:
        self.knows_v2 = knows_v2

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, device: int, version: int | None = None) -> SimpleNamespace:
        if version is None:
            return SimpleNamespace(total=150754820096, free=150109880320, used=644939776)
        if not self.knows_v2:
            raise RuntimeError("Function Not Found")
        return SimpleNamespace(total=150754820096, reserved=644939776, free=150109880320, used=0)

    def nvmlDeviceGetUtilizationRates(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=0)

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> list[Any]:
        return []

    def __getattr__(self, name: str) -> Any:
        def unsupported(*_: Any) -> None:
            raise RuntimeError("Not Supported")

        return unsupported


def read(monkeypatch: pytest.MonkeyPatch, card: IdleH200) -> gpu.GpuState:
    @contextmanager
    def nvml() -> Iterator[Any]:
        yield card

    monkeypatch.setattr(gpu, "nvml", nvml)
    (state,) = gpu.read_gpus() or []
    return state


def test_an_idle_card_is_not_wedged_by_what_the_driver_reserves(monkeypatch: pytest.MonkeyPatch) -> None:
    state = read(monkeypatch, IdleH200())
    assert (state.used_mib, state.total_mib) == (0, 143771)
    assert not state.wedged


def test_an_old_driver_still_tells_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, IdleH200(knows_v2=False)).used_mib == 615
