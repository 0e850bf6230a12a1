"""Trouble around a run: its process dies and nobody presses Retry, the server answers 503, a host has two workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.schemas.objects import StateType
from prefect_kit import BIN, PrefectStack, until
from stub_campaign import StubCampaign

from flows.automations import retry_of_crashed_runs
from tasks.store.tables import Store

CAMPAIGN = "campaign/campaign"


def runs_row(store: Path) -> dict[str, Any] | None:
    with suppress(OSError):
        return next(iter(Store(store, "reader").read("runs").to_pylist()), None)
    return None


def test_a_crashed_run_is_retried_by_itself_once_nothing_happens_on_it(prefect: PrefectStack, tmp_path: Path) -> None:
    automation = retry_of_crashed_runs()
    trigger = automation.trigger.model_copy(update={"within": timedelta(seconds=10)})  # type: ignore[union-attr]
    made = prefect.client.create_automation(automation.model_copy(update={"trigger": trigger}))
    try:
        small = StubCampaign(tmp_path, step_s=0.02)
        run = prefect.submit(CAMPAIGN, config=str(small.file), store=str(tmp_path / "store"))
        row = until(lambda: runs_row(tmp_path / "store"), 90, "a row in `runs`")
        until(lambda: small.measured() > 0, 90, "first answer")
        os.kill(json.loads(row["machine_json"])["pid"], signal.SIGKILL)
        crashed = prefect.finish(run, 120)
        assert crashed.state and crashed.state.type is StateType.CRASHED
        until(lambda: prefect.run(run).run_count > 1, 120, "a retry that nobody asked for")
        done = prefect.finish(run)
        assert done.state and done.state.type is StateType.COMPLETED, prefect.logs(run)
    finally:
        prefect.client.delete_automation(made)


@contextmanager
def locked_database(behind: str) -> Iterator[tuple[str, threading.Event, list[int]]]:
    """A server that passes everything on, and answers 503 while the event is set; counts those answers."""
    locked, refused = threading.Event(), list[int]()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if locked.is_set():
                refused.append(1)
                status, kind, answer = 503, "application/json", b'{"detail": "database is locked"}'
            else:
                kept = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "accept-encoding")}
                passed = httpx.request(self.command, behind + self.path, content=body, headers=kept, timeout=60)
                status, kind, answer = passed.status_code, passed.headers.get("content-type", ""), passed.content
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = pass_on

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", locked, refused
        finally:
            server.shutdown()
            thread.join()


def test_a_server_whose_database_is_locked_for_seconds_costs_the_run_nothing(
    prefect: PrefectStack, tmp_path: Path
) -> None:
    small = StubCampaign(tmp_path, step_s=0.02)
    with locked_database(prefect.url) as (url, locked, refused):
        env = prefect.env | {"PREFECT_API_URL": f"{url}/api", "DRAFTHOUSE_HOST": "host-503"}
        command = [BIN / "drafthouse", "run", str(small.file), "--store", str(tmp_path / "store"), "--json"]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log)
        try:
            until(lambda: small.measured() > 0, 120, f"first answer; see {tmp_path / 'log'}")
            locked.set()
            time.sleep(4)
            locked.clear()
            out, _ = process.communicate(timeout=180)
        finally:
            process.kill()
            process.wait()
    assert refused, "the run never spoke to the server meanwhile"
    assert process.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    assert json.loads(out)["state"] == "completed"
    assert len(set(small.generated())) == len(small.generated()) == 8


@pytest.fixture
def second_worker(prefect: PrefectStack) -> Iterator[None]:
    with (prefect.folder / "second-worker.log").open("wb") as log:
        command = [BIN / "prefect", "worker", "start", "--pool", "gpu-hosts", "--name", "second"]
        process = subprocess.Popen(command, env=prefect.env, cwd=prefect.folder, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.usefixtures("second_worker")
def test_two_workers_on_one_host_still_run_one_campaign_at_a_time(prefect: PrefectStack, tmp_path: Path) -> None:
    small = [StubCampaign(tmp_path / name, step_s=0.02) for name in "ab"]
    stores = [tmp_path / name / "store" for name in "ab"]
    runs = [
        prefect.submit(CAMPAIGN, config=str(campaign.file), store=str(store))
        for campaign, store in zip(small, stores, strict=True)
    ]
    for run in runs:
        done = prefect.finish(run, 240)
        assert done.state and done.state.type is StateType.COMPLETED, prefect.logs(run)
    used = []
    for store in stores:
        stages = Store(store, "reader").read("stages").to_pylist()
        used.append((min(row["started_at"] for row in stages), max(row["finished_at"] for row in stages)))
    (_, first_ended), (second_began, _) = sorted(used)
    assert second_began >= first_ended
