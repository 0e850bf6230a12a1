"""The command line: every failure is one line, and with --json one JSON value as well."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from test_verdict import write_run
from typer.testing import CliRunner

from flows import cli_tools
from flows.cli import app
from tasks.errors import EngineError
from tasks.machine.ownership import Row
from tasks.machine.sweep import Swept
from tasks.store.inventory import remember_parts
from tests.unit.stub_kit import base_arm, stub

STUB = str(Path(__file__).resolve().parents[2] / "deployments" / "campaigns" / "stub.yaml")


def drafthouse(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def refused(*arguments: str) -> str:
    """The one line that a failing command prints; with --json the same in its JSON."""
    plain, as_json = drafthouse(*arguments), drafthouse(*arguments, "--json")
    assert (plain.exit_code, as_json.exit_code) == (1, 1), plain.output
    assert plain.stdout == ""
    (line,) = plain.stderr.splitlines()
    told = json.loads(as_json.stdout)["error"]
    assert line == f"{told['kind']}: {told['message']}"
    return line


@pytest.fixture
def no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("a request was sent")

    monkeypatch.setattr("tasks.engines.reach.ask", asked)


@pytest.mark.parametrize("command", [
    ["run", STUB], ["run", STUB, "--dry-run"], ["nightly", STUB], ["doctor"], ["report"], ["compare", "a", "b"],
    ["align"], ["diagnose"], ["serve", STUB, "--arm", "stub-base"], ["deploy"],
])
def test_a_store_that_is_a_file_is_one_line_from_every_command(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refused(*command, "--store", str(tmp_path / "file"))
    assert line.startswith(f"StoreError: {tmp_path / 'file'}: the store has to be a folder")


@pytest.mark.parametrize(
    "command", [["run", STUB], ["nightly", STUB], ["doctor"], ["serve", STUB, "--arm", "stub-base"]]
)
def test_a_store_that_cannot_be_written_is_one_line_before_anything_starts(command: list[str]) -> None:
    assert "StoreError: /proc/store: cannot write" in refused(*command, "--store", "/proc/store")


@pytest.mark.parametrize(("options", "says"), [
    ("--requests 0", "--requests 0: has to be 1 or more"),
    ("--requests -5 --input-tokens 0", "--requests -5: has to be 1 or more"),
    ("--input-tokens 0", "--input-tokens 0: has to be 1 or more"),
    ("--output-tokens 1", "--output-tokens 1: has to be 2 or more"),
    ("--vocab-size 0", "--vocab-size 0: has to be 1 or more"),
    ("-c 4 -c 0", "--concurrency 0: has to be 1 or more"),
    ("--engine x", "--engine x: one of vllm"),
])
@pytest.mark.usefixtures("no_requests")
def test_wrong_numbers_are_one_line_before_any_request(options: str, says: str) -> None:
    assert says in refused("bench", "--url", "http://127.0.0.1:1", "--model", "m", *options.split())


@pytest.mark.usefixtures("no_requests")
def test_what_only_pydantic_refuses_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_tools, "at_least", lambda *_, **__: None)
    line = refused("bench", "--url", "http://127.0.0.1:1", "--model", "m", "--requests", "0", "--output-tokens", "1")
    assert line.startswith("InputError: output_tokens: ")
    assert "; requests: Input should be greater than or equal to 1 (got 0)" in line


@pytest.mark.parametrize("option", [["--window", "0"], ["--tolerance-pct", "-1"], ["--tolerance-pct", "nan"]])
def test_a_nightly_without_a_window_or_with_a_wrong_tolerance_is_refused(option: list[str], tmp_path: Path) -> None:
    assert f"InputError: {' '.join(option)}" in refused("nightly", STUB, *option, "--store", str(tmp_path))


@pytest.fixture
def other_server() -> Iterator[tuple[str, dict[str, tuple[int, bytes]]]]:
    """An HTTP server that is no engine: 404 everywhere but for what a test puts into `answers`."""
    answers: dict[str, tuple[int, bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, b""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", answers
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "url", ["not-a-url", "", "http://", "ftp://host", "http://host:99999", "http://ho st", "localhost:80"]
)
def test_what_is_no_address_is_said_to_be_none(url: str) -> None:
    assert "not an http(s) address" in refused("bench", "--url", url, "--model", "m")


def test_an_address_without_a_server_is_said_to_have_none() -> None:
    line = refused("bench", "--url", "http://127.0.0.1:1", "--model", "m")
    assert line == (
        "EngineError: no server answers at http://127.0.0.1:1 (ConnectionError); start it or correct --url"
    )


@pytest.mark.parametrize(("answer", "says"), [
    (None, "not as vllm does (404 at /v1/models); is it another server?"),
    ((200, b"<html>"), "not as vllm does (no list of models at /v1/models)"),
    ((200, b'["x"]'), "not as vllm does (no list of models at /v1/models)"),
    ((200, b'{"data": [{"id": "m", "owned_by": "sglang"}]}'), "as sglang and not as vllm; add --engine sglang"),
    ((503, b""), "is not ready (503 at /v1/models)"), ((401, b""), "wants a key (401 at /v1/models)"),
])
def test_another_server_is_told_from_the_engine(
    other_server: tuple[str, dict[str, tuple[int, bytes]]], answer: tuple[int, bytes] | None, says: str
) -> None:
    url, answers = other_server
    if answer:
        answers["/v1/models"] = answer
    line = refused("bench", "--url", url, "--model", "m")
    assert line.startswith(f"EngineError: {url} answers, but ")
    assert says in line


def test_a_server_of_the_engine_is_measured_also_when_its_address_ends_in_v1() -> None:
    with stub(base_arm()) as server:
        small = "--requests 2 --output-tokens 4 --input-tokens 4 --vocab-size 100 -c 1 --engine stub --json"
        done = drafthouse("bench", "--url", f"{server.address}/v1/", "--model", "target", *small.split())
    rows = json.loads(done.stdout)
    assert [row["requests_ok"] for row in rows] == [2], done.stderr


def two_runs(root: Path, **second: Any) -> tuple[str, str]:
    return write_run(root, 1, 100).run_id, write_run(root, 2, 110, **second).run_id


def test_runs_with_nothing_in_common_are_not_compared(tmp_path: Path) -> None:
    a, b = two_runs(tmp_path, arm="other")
    line = refused("compare", a, b, "--store", str(tmp_path))
    assert "have no arm, workload and concurrency in common: base chat C=8 against other chat C=8" in line
    write_run(tmp_path, 3, 1)
    (tmp_path / "tables" / "benchmarks" / "run=run-03" / "base.parquet").unlink()
    assert "base chat C=8 against nothing" in refused("compare", a, "run-03", "--store", str(tmp_path))


def test_a_metric_that_both_lack_is_a_dash_and_null(tmp_path: Path) -> None:
    a, b = two_runs(tmp_path)
    shown = drafthouse("compare", a, b, "--store", str(tmp_path))
    assert (shown.exit_code, "nan" in shown.stdout, "+10.0 %" in shown.stdout) == (0, False, True)
    (line,) = [line for line in shown.stdout.splitlines() if "tpot_ms_p50" in line]
    assert line.count("–") == 3
    as_json = drafthouse("compare", a, b, "--store", str(tmp_path), "--json").stdout
    found = json.loads(as_json, parse_constant=pytest.fail)
    row = next(row for row in found if row["metric"] == "tpot_ms_p50")
    assert (row["a"], row["b"], row["change_pct"]) == (None, None, None)


def test_report_and_compare_of_a_run_that_lost_a_part_fail(tmp_path: Path) -> None:
    a, b = two_runs(tmp_path)
    remember_parts(tmp_path, a)
    (tmp_path / "tables" / "benchmarks" / f"run={a}" / "base.parquet").unlink()
    for command in (["report", a], ["compare", a, b], ["diagnose", a]):
        assert "base.parquet: missing, the run ended with 1 row in it" in refused(*command, "--store", str(tmp_path))


def swept(monkeypatch: pytest.MonkeyPatch, others: int, problem: EngineError | None = None) -> None:
    rows = [Row("shm", f"/dev/shm/psm_{i}", "none", "refused", 1, "no name that we know") for i in range(others)]
    ours = [Row("process", "pid 7 (python)", "marker of run r", "stopped"),
            Row("lease", "lease-[1]", "none", "refused", detail="cannot be read; nothing touched")]
    monkeypatch.setattr("tasks.clean.clean_host", lambda **_: Swept([*ours, *rows], problem))


def test_clean_shows_what_is_ours_and_counts_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    swept(monkeypatch, 300)
    shown = drafthouse("clean", "--dry-run")
    assert "300 entries of others left alone (--all lists them)" in shown.stdout
    assert "psm_" not in shown.stdout
    assert "pid 7" in shown.stdout and "lease-[1]" in shown.stdout
    everything = drafthouse("clean", "--dry-run", "--all").stdout
    assert everything.count("psm_") == 300 and "left alone" not in everything
    assert len(json.loads(drafthouse("clean", "--dry-run", "--json").stdout)["rows"]) == 302


def test_json_stays_one_value_when_a_command_fails_after_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    swept(monkeypatch, 1, EngineError("look at it"))
    done = drafthouse("clean", "--json")
    assert json.loads(done.stdout)["problem"] == "look at it"
    assert (done.exit_code, done.stderr) == (1, "EngineError: look at it\n")
