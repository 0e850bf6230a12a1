"""Real processes to be watched, stopped and cleaned up, and a campaign around them: helpers of the fault tests."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.campaign_file import parse_campaign
from tasks.config import Campaign, EngineEnvironment
from tasks.engines.base import Command, Completion, Engine, LaunchPlan, Observed, SpecCounters
from tasks.machine.processes import read_process

FAKE_SERVER = str(Path(__file__).with_name("fake_server.py"))


class FakeEngine(Engine):
    """Adapter of fake_server.py; `arguments`, `wanted` and `said` are set by the test."""

    name = "stub"

    def __init__(self) -> None:
        self.arguments: tuple[str, ...] = ()
        self.wanted: dict[str, str] = {}
        self.said: list[Observed] = []

    def check(self, plan: LaunchPlan) -> None:
        pass

    def command(self, plan: LaunchPlan) -> Command:
        return Command((plan.python, FAKE_SERVER, str(plan.port), *self.arguments), {})

    def load_progress(self, line: str) -> tuple[float, str] | None:
        return (1.0, "listening") if line.startswith("fake server pid") else None

    def versions(self, where: EngineEnvironment) -> dict[str, str]:
        return {}

    def effective_settings(self, url: str, log: Path, plan: LaunchPlan) -> list[Observed]:
        return self.said

    def requested_settings(self, plan: LaunchPlan) -> dict[str, str]:
        return self.wanted

    def completion_body(self, model: str, token_ids: list[int], max_tokens: int, **_: Any) -> dict[str, Any]:
        return {"model": model, "prompt": token_ids, "max_tokens": max_tokens}

    def parse_completion(self, body: dict[str, Any]) -> Completion:
        choice = body["choices"][0]
        return Completion(choice["token_ids"], body["usage"]["prompt_tokens"], choice["finish_reason"])

    def spec_counters(self, url: str) -> SpecCounters | None:
        return None

    def flush_cache(self, url: str) -> None:
        pass

    def running_requests(self, url: str) -> int | None:
        return None

    def layer_ids(self, model_class: str, num_layers: int, points: tuple[int, ...]) -> list[int]:
        return list(points)


Doomed = int | subprocess.Popen[bytes] | subprocess.Popen[str]


def campaign_with(tmp_path: Path, **machine: Any) -> Campaign:
    return parse_campaign(
        {
            "name": "faults",
            "target": {"model": str(tmp_path)},
            "machine": {"stop_grace_s": 0.5, "ready_timeout_s": 60, **machine},
            "arms": [{"name": "base", "engine": "stub", "role": "base"}],
            "workloads": [{"name": "w"}],
            "prompts": {"train_file": "a", "heldout_file": "b"},
        }
    )


def wait_until(true: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    process = read_process(pid)
    return process is None or process.gone


def marked(lease_id: str) -> list[int]:
    """Living processes that carry the marker of a lease."""
    pids = [int(p) for p in os.listdir("/proc") if p.isdigit()]
    found = [read_process(pid) for pid in pids]
    return [p.pid for p in found if p and p.lease == lease_id and not p.gone]
