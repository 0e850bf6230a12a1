"""What a retry says before it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows import continuing
from tasks.errors import MachineError
from tasks.store.tables import Store


def test_a_retry_names_how_the_run_ended_and_which_code_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path, "run-1")
    caplog.set_level("INFO", "flows.continuing")
    monkeypatch.setattr(continuing, "_code", lambda: {"tasks/train.py": "a", "tasks/align.py": "b"})
    continuing.tell_what_continues(store)
    assert caplog.text == ""
    store.write("runs", [{"run_id": "run-1", "state": "failed", "note": "ServerLost: base"}], "run")
    continuing.tell_what_continues(store)
    assert "run run-1 continues; it was failed (ServerLost: base)" in caplog.text and "code changed" not in caplog.text
    monkeypatch.setattr(continuing, "_code", lambda: {"tasks/train.py": "c", "tasks/align.py": "b"})
    continuing.tell_what_continues(store)
    assert "code changed since this run began (tasks/train.py)" in caplog.text
    assert "finished stages, samples and measurements are kept" in caplog.text


def test_the_code_of_the_project_is_what_is_remembered(tmp_path: Path) -> None:
    store = Store(tmp_path, "run-1")
    continuing.tell_what_continues(store)
    assert {"tasks/align.py", "flows/campaign.py"} <= json.loads((store.run_dir / "code.json").read_text()).keys()


def test_a_run_that_always_crashes_is_not_retried_for_ever() -> None:
    continuing.stop_endless_retries(continuing.MAX_STARTS)
    with pytest.raises(MachineError, match="started 20 times and never completed"):
        continuing.stop_endless_retries(continuing.MAX_STARTS + 1)
