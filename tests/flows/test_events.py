"""A confirmed regression reaches a webhook through the server's automation."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prefect_kit import ROOT, PrefectStack, until

ANNOUNCE = """
import sys
from prefect import flow
from flows.nightly import announce

@flow
def red():
    row = {"metric": "output_tok_s", "arm": "base", "workload": "chat", "concurrency": 8, "observed": 50.0,
           "expected": 100.0, "baseline_runs": 7, "change_pct": -50.0, "suspects_json": '{"versions": {}}'}
    announce("run-1", [row])

red()
"""


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[bytes]]]:
    """A web server that keeps what is POSTed to it."""
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/regression", received
        server.shutdown()
        thread.join()


def test_a_regression_is_posted_with_run_metrics_and_suspects(
    prefect: PrefectStack, webhook: tuple[str, list[bytes]]
) -> None:
    url, received = webhook
    prefect.deploy("--webhook", url, "--retry-crashed")
    names = {automation.name for automation in prefect.client.read_automations()}
    assert {"drafthouse: regression to webhook", "drafthouse: retry crashed runs"} <= names
    subprocess.run([sys.executable, "-c", ANNOUNCE], env=prefect.env | {"PYTHONPATH": str(ROOT)}, check=True)
    until(lambda: received, 30, "a POST")
    body = json.loads(received[0])
    assert body["event"] == "drafthouse.regression" and body["payload"]["run_id"] == "run-1"
    assert body["payload"]["regressions"][0]["change_pct"] == -50.0
    (text,) = body["payload"]["text"]
    assert text == "output_tok_s of base on chat at C=8: 50, median of the last 7 runs 100 (-50.0 %)"
    for automation in prefect.client.read_automations():
        if automation.name == "drafthouse: retry crashed runs":  # the fault tests retry by hand
            prefect.client.delete_automation(automation.id)
