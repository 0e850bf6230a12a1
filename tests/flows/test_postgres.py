"""The same on PostgreSQL, which the tests start themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.client.schemas.objects import StateType
from prefect_kit import free_port, prefect_stack
from stub_campaign import StubCampaign


def postgres_folder() -> Path:
    """Folder of initdb and pg_ctl, which Debian keeps off the PATH."""
    places = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True), shutil.which("initdb")]
    for place in places:
        if place and (Path(place) / "initdb").exists():
            return Path(place)
        if place and Path(place).name == "initdb":
            return Path(place).parent
    pytest.skip("no PostgreSQL: `apt-get install postgresql`")


@pytest.fixture
def database() -> Iterator[str]:
    """URL of a fresh cluster on the loopback; as root it runs as `postgres`, since it refuses root."""
    programs, port = postgres_folder(), free_port()
    folder = Path(tempfile.mkdtemp(prefix="drafthouse-postgres-"))  # pytest's own folders are closed to other users
    who: dict[str, Any] = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
    if who:
        shutil.chown(folder, "postgres", "postgres")

    def control(program: str, *arguments: str) -> None:
        command = [programs / program, "-D", folder / "data", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, **who)

    try:
        control("initdb", "-A", "trust", "-U", "prefect")
        control("pg_ctl", "-w", "-l", f"{folder}/log", "-o", f"-p {port} -h 127.0.0.1 -k {folder} -F", "start")
        yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
        control("pg_ctl", "-m", "fast", "stop")
    finally:
        shutil.rmtree(folder)


def test_a_campaign_runs_and_is_retried_on_postgresql(database: str, tmp_path: Path) -> None:
    small = StubCampaign(tmp_path)
    small.broken.touch()
    with prefect_stack(tmp_path / "stack", database) as stack:
        run = stack.submit("campaign/campaign", config=str(small.file), store=str(tmp_path / "store"))
        failed = stack.finish(run)
        assert failed.state and failed.state.type is StateType.FAILED, stack.logs(run)
        made = small.generated(), small.extracted()
        small.broken.unlink()
        stack.retry(run)
        done = stack.finish(run)
        assert done.state and done.state.type is StateType.COMPLETED, stack.logs(run)
        assert (small.generated(), small.extracted()) == made
    assert "sqlite" not in (tmp_path / "stack" / "server.log").read_text().lower()
    assert not list((tmp_path / "stack").rglob("*.db")), "nothing went to SQLite"


def test_the_driver_for_postgresql_is_installed() -> None:
    assert subprocess.run([sys.executable, "-c", "import asyncpg"]).returncode == 0
