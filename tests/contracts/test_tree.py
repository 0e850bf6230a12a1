"""The tree keeps its shape: small files, small stages, and nothing of one machine in it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGES = (
    "doctor", "clean", "serve", "benchmark", "regenerate", "extract", "align", "train", "replay", "agree", "probe",
    "diagnose", "verdict", "report", "dry_run",
)


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).is_file()]


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_no_source_file_has_300_lines_or_more() -> None:
    sources = [*(ROOT / "flows").rglob("*.py"), *(ROOT / "tasks").rglob("*.py")]
    assert {str(p.relative_to(ROOT)): lines(p) for p in sources if lines(p) >= 300} == {}


def test_no_stage_has_more_than_150_lines() -> None:
    stages = [ROOT / "tasks" / f"{name}.py" for name in STAGES]
    assert {p.name: lines(p) for p in stages if p.exists() and lines(p) > 150} == {}


def test_no_path_of_one_machine_and_no_registry_host_is_in_the_project() -> None:
    wrong = re.compile(r"/(work|root|opt/pypi|opt/wheels)/|files\.pythonhosted|/tmp/w/|pypi\.org")
    texts = [p for p in tracked() if p.suffix in {".py", ".md", ".yaml", ".toml", ".txt", ".json", ".j2", ""}]
    found = {
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in texts
        if path != Path(__file__) and (match := wrong.search(path.read_text(errors="ignore")))
    }
    assert found == set()


def test_engines_import_the_project_without_its_orchestrator() -> None:
    for package in ("tasks", "tasks/engines", "tasks/store"):
        assert (ROOT / package / "__init__.py").read_text() == ""
