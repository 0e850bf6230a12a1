"""Progress artifacts: who reports never waits for the Prefect server."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from flows import progress


def test_who_reports_does_not_wait_for_a_slow_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reporter may be the event loop that measures an engine; it would wait here for ever."""
    answers, shown = threading.Event(), list[float]()

    class SlowServer:
        def __enter__(self) -> SlowServer:
            return self

        def __exit__(self, *_: object) -> None:
            shown.append(-1.0)

        def create_artifact(self, made: Any) -> SimpleNamespace:
            assert answers.wait(30)
            shown.append(made.data)
            return SimpleNamespace(id=uuid4())

        def update_artifact(self, _: object, change: Any) -> None:
            shown.append(change.data)

    monkeypatch.setattr(progress, "get_client", lambda **_: SlowServer())
    artifact = progress._Artifact("benchmark base chat")
    artifact.show(1, 4)
    artifact.show(2, 4)
    assert shown == []
    answers.set()
    artifact.finish()
    assert shown == [25.0, 50.0, -1.0]
