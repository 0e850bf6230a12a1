"""A Prefect server for one run from the shell, when the user has none.

Prefect's own temporary server lives in the terminal's process group: Ctrl-C would kill it before the
flow has said goodbye to it, and the flow would then wait for it for minutes. This one is started
under the same supervisor as the engines: a session of its own, stopped when this process ends.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

from tasks.errors import InputError, LaunchFailed
from tasks.machine.handle import LOOPBACK, Supervised, choose_port, server_environment
from tasks.machine.leases import state_dir

START_LIMIT_S = 180  # a busy laptop needs a minute for the first start, which also makes the database


_OWN = "DRAFTHOUSE_OWN_PREFECT_SERVER"


def server_outlives_run() -> bool:
    """True with a server of the user's, which has a UI and keeps what it is told; False with one for this run only."""
    return bool(os.environ.get("PREFECT_API_URL")) and _OWN not in os.environ


@contextmanager
def prefect_server() -> Iterator[None]:
    """Use the server of PREFECT_API_URL, or one of our own for the duration of the block."""
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    if "PREFECT_API_URL" in os.environ:
        _require_answer(os.environ["PREFECT_API_URL"])
        yield
        return
    port = choose_port(None)
    argv = (sys.executable, "-m", "prefect", "server", "start", "--host", LOOPBACK, "--port", str(port), "--no-ui")
    inherited = {k: v for k, v in os.environ.items() if k.startswith("PREFECT_")}
    server = Supervised(
        run_id=f"prefect-{uuid.uuid4().hex[:12]}", arm="prefect-server", argv=argv, port=port, gpus=[], lock_keys=[],
        env=server_environment(sys.executable, inherited), log=state_dir() / f"prefect-server-{port}.log", grace_s=10,
    )
    try:
        _wait_until_healthy(server, f"http://{LOOPBACK}:{port}/api/health")
        os.environ["PREFECT_API_URL"] = f"http://{LOOPBACK}:{port}/api"
        os.environ[_OWN] = "1"
        try:
            yield
        finally:
            _send_what_is_queued()
    finally:
        os.environ.pop("PREFECT_API_URL", None)
        os.environ.pop(_OWN, None)
        server.stop()
        Path(server.log).unlink(missing_ok=True)


def _require_answer(api: str) -> None:
    try:
        requests.get(f"{api}/health", timeout=10)
    except requests.RequestException as error:
        what = f"PREFECT_API_URL: no Prefect server answers at {api} ({type(error).__name__})"
        raise InputError(f"{what}; start it, or unset it") from None


def _wait_until_healthy(server: Supervised, url: str) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    session = requests.Session()
    session.trust_env = False  # a proxy of the user's must not stand between us and the loopback
    while time.monotonic() < deadline:
        if (code := server.exit_code()) is not None:
            raise LaunchFailed(f"Prefect's server exited with code {code}:\n{server.log_tail()}")
        try:
            if session.get(url, timeout=2).ok:
                return
        except requests.RequestException:
            time.sleep(0.1)
    raise LaunchFailed(f"Prefect's server was not healthy after {START_LIMIT_S} s; see {server.log}")


def _send_what_is_queued() -> None:
    """Prefect sends logs and events from threads, which would try a stopped server for minutes at exit."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    APILogWorker.drain_all(timeout=10)
    EventsWorker.drain_all(timeout=10)
