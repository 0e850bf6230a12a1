"""A real SGLang that takes another setting than it was asked for, and says so in its log only."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_kit import campaign
from vllm_kit import make_target

from tasks.errors import SettingsMismatch
from tasks.serve import serving
from tasks.store.tables import Store
from tests.conftest import environment_python

pytestmark = pytest.mark.engine


def test_a_flag_that_sglang_overrules_stops_before_anything_is_measured(tmp_path: Path) -> None:
    """SGLang takes what its memory profile allows instead of `--max-total-tokens` and goes on, healthy."""
    environment_python("sglang-cpu")
    make_target(tmp_path / "llama", constant=True)
    tuning = {"kv_tokens": 4_000_000, "memory_fraction": 0.05}
    whole = campaign(tmp_path / "llama", {"role": "base", "tuning": tuning})
    store = Store(tmp_path / "store", "overruled")
    arm = next(arm for arm in whole.arms if arm.name == "tested")
    with (
        serving(whole, arm, store, before_start=lambda: None) as server,
        pytest.raises(SettingsMismatch, match=r"kv_tokens: asked 4000000, got \d+ \(.*log line \d+"),
    ):
        server.url()
    rows = [row for row in store.read("servers").to_pylist() if row["setting"] == "kv_tokens"]
    assert "mismatch" in {row["status"] for row in rows}
