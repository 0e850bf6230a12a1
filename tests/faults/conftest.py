"""Fixtures of the fault tests: everything that a test starts ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults_kit import Doomed, FakeEngine, campaign_with

import tasks.serve
from tasks.config import Arm, Campaign


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    monkeypatch.setattr(tasks.serve, "adapter_of", lambda _name: engine)
    return engine


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leases and locks of each test in a folder of their own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "drafthouse"


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    return campaign_with(tmp_path)


@pytest.fixture
def arm(campaign: Campaign) -> Arm:
    return campaign.arms[0]


@pytest.fixture
def doomed() -> Iterator[list[Doomed]]:
    """Processes that the test started and that must not outlive it."""
    started: list[Doomed] = []
    yield started
    for process in started:
        if isinstance(process, subprocess.Popen):
            process.kill()
            process.communicate()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@pytest.fixture
def segment_name() -> Iterator[str]:
    name = f"psm_dhtest{os.getpid()}{time.monotonic_ns() % 1000000}"
    yield name
    Path("/dev/shm", name).unlink(missing_ok=True)
