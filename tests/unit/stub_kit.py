"""A stub engine over real HTTP, for tests of what talks to engines."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from tasks.campaign_file import parse_campaign
from tasks.config import Arm, Campaign, EngineName, Role
from tasks.engines.base import Command, LaunchPlan
from tasks.engines.stub import StubEngine
from tasks.load.mock_server import application, parse

TINY = Path(__file__).resolve().parents[2] / "deployments" / "models" / "tiny_llama"


def campaign(**changes: Any) -> Campaign:
    """A small campaign of stub arms on the tiny target."""
    stub = {"engine": "stub", "tuning": {"max_running_requests": 8}}
    data: dict[str, Any] = {
        "name": "stub-test",
        "target": {"model": str(TINY / "model"), "name": "tiny", "max_model_len": 256},
        "arms": [
            {"name": "base", "role": "base", **stub},
            {"name": "spec", "role": "speculative", **stub,
             "speculative": {"drafter": "/none", "extracted_on": "stub"}},
        ],
        "workloads": [{"name": "chat", "requests": 6, "output_tokens": 12, "concurrencies": [1, 3]}],
        "prompts": {"train_file": str(TINY / "prompts-train.jsonl"), "train_samples": 16,
                    "heldout_file": str(TINY / "prompts-heldout.jsonl"), "heldout_samples": 6},
        "thresholds": {"client_lag_ms": 1e6},  # client and server share a process and a busy machine here
    }
    return parse_campaign({**data, **changes})


@dataclass
class Running:
    """A server that is up, as a stage sees it."""

    arm: Arm
    address: str
    process: subprocess.Popen[bytes] | None = None
    asked: int = 0

    def url(self) -> str:
        self.asked += 1
        return self.address


def arm_of(config: Campaign, name: str, **changes: Any) -> Arm:
    """An arm of the campaign with some fields changed."""
    arm = next(a for a in config.arms if a.name == name)
    return Arm.model_validate({**arm.model_dump(), **changes})


@contextmanager
def stub(arm: Arm, *, capture_dir: Path | None = None, points: tuple[int, ...] = ()) -> Iterator[Running]:
    """The stub engine with the arm's own command line, in a thread of this process: real HTTP, no start-up time."""
    options = parse(command_of(arm, capture_dir, points).argv[3:])
    loop, started = asyncio.new_event_loop(), threading.Event()
    runner = web.AppRunner(application(options), access_log=None, shutdown_timeout=0.2)

    def serve() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(runner.setup())
        loop.run_until_complete(web.TCPSite(runner, options.host, options.port).start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        time.sleep(options.generates_after_s if options.generates_after_s < 1 else 0)
        yield Running(arm, f"http://127.0.0.1:{options.port}")
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)


@contextmanager
def stub_process(arm: Arm) -> Iterator[Running]:
    """The stub engine as serve starts it; it may still be loading, or already have exited."""
    command = command_of(arm)
    process = subprocess.Popen(command.argv, env={**os.environ, **command.env}, stderr=subprocess.PIPE)
    try:
        yield Running(arm, f"http://127.0.0.1:{command.argv[command.argv.index('--port') + 1]}", process)
    finally:
        process.terminate()
        process.wait(10)
        assert process.stderr is not None
        process.stderr.close()


def command_of(arm: Arm, capture_dir: Path | None = None, points: tuple[int, ...] = ()) -> Command:
    """The arm's command on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = campaign()
    plan = LaunchPlan(arm, config.target, config.machine, sys.executable, port, points, capture_dir)
    return StubEngine().command(plan)


def base_arm(**changes: Any) -> Arm:
    """A stub base arm."""
    return Arm.model_validate({"name": "base", "engine": EngineName.stub, "role": Role.base, **changes})
