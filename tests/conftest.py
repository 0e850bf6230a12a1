"""Shared by all tests: the tiny target, the store in a folder of its own, engine environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.store.tables import Store

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "deployments" / "models" / "tiny_llama"
SHARED = ROOT.parent / "shared"


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
