"""Shared by all tests: the tiny target, the store in a folder of its own, engine environments."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect_kit import PrefectStack, prefect_stack

from tasks.store.tables import Store

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "deployments" / "models" / "tiny_llama"
SHARED = ROOT.parent / "shared"


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> None:
    """A shell that starts us in the background has SIGINT ignored, and what we start would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leases and machine locks of the tests: apart from the user's own campaigns and other test runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectStack]:
    """A real Prefect server with our deployments and a worker, shared by the session."""
    with prefect_stack(tmp_path_factory.mktemp("prefect")) as stack:
        yield stack


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store seen by run `run-a`."""
    return Store(tmp_path / "store", "run-a")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Folder of the tiny target that ships in the repository."""
    return TINY / "model"


def environment_python(name: str) -> Path:
    """Interpreter of an engine environment; the test skips with the command that would make it."""
    python = ROOT / ".venvs" / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no engine environment {name}: `make engines`")
    return python
