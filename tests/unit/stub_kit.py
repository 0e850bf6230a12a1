"""A stub engine over real HTTP, for tests of what talks to engines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.config import Arm, Campaign, EngineName, Role, parse_campaign
from tasks.engines.base import LaunchPlan
from tasks.engines.ready import Readiness
from tasks.engines.stub import StubEngine

TINY = Path(__file__).resolve().parents[2] / "deployments" / "models" / "tiny_llama"


def campaign(**changes: Any) -> Campaign:
    """A small campaign of stub arms on the tiny target."""
    stub = {"engine": "stub", "tuning": {"max_running_requests": 8}}
    data: dict[str, Any] = {
        "name": "stub-test",
        "target": {"model": str(TINY / "model"), "name": "tiny", "max_model_len": 256},
        "arms": [
            {"name": "base", "role": "base", **stub},
            {"name": "spec", "role": "speculative", "speculative": {"drafter": "/none", "extracted_on": "stub"}, **stub},
        ],
        "workloads": [{"name": "chat", "requests": 6, "output_tokens": 12, "concurrencies": [1, 3]}],
        "prompts": {"train_file": str(TINY / "prompts-train.jsonl"), "train_samples": 16,
                    "heldout_file": str(TINY / "prompts-heldout.jsonl"), "heldout_samples": 6},
    }
    return parse_campaign({**data, **changes})


@dataclass
class Running:
    """A server that is up, as a stage sees it."""

    arm: Arm
    address: str
    process: subprocess.Popen[bytes]
    asked: int = 0

    def url(self) -> str:
        self.asked += 1
        return self.address


def arm_of(config: Campaign, name: str, **changes: Any) -> Arm:
    """An arm of the campaign with some fields changed."""
    arm = next(a for a in config.arms if a.name == name)
    return Arm.model_validate({**arm.model_dump(), **changes})


@contextmanager
def stub(arm: Arm, *options: str, capture_dir: Path | None = None, points: tuple[int, ...] = ()) -> Iterator[Running]:
    """Start the stub engine for an arm as serve would, and stop it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = campaign()
    plan = LaunchPlan(arm, config.target, config.machine, sys.executable, port, points, capture_dir)
    command = StubEngine().command(plan)
    process = subprocess.Popen([*command.argv, *options], env={**os.environ, **command.env}, stderr=subprocess.PIPE)
    url = f"http://127.0.0.1:{port}"
    try:
        ready = Readiness(StubEngine(), url, config.target.name)
        deadline = time.monotonic() + 20
        while not ready.ready(5) and process.poll() is None and arm.fault != "silent" and time.monotonic() < deadline:
            time.sleep(0.02)
        yield Running(arm, url, process)
    finally:
        process.terminate()
        process.wait(10)
        if process.stderr is not None:
            process.stderr.close()


def base_arm(**changes: Any) -> Arm:
    """A stub base arm."""
    return Arm.model_validate({"name": "base", "engine": EngineName.stub, "role": Role.base, **changes})
