"""What SGLang says of itself, read from real servers: 0.5.16 on one H200."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.engines.settings import mismatches, setting_rows
from tasks.engines.sglang_settings import from_log, from_server_info

LOGS = Path(__file__).resolve().parents[1] / "fixtures" / "logs"


def log_values(name: str) -> dict[str, str | None]:
    with (LOGS / f"sglang-{name}-h200.log").open(newline="\n", errors="replace") as lines:
        return {row.setting: row.value for row in from_log(lines)}


def info_values(name: str) -> dict[str, str | None]:
    info = json.loads((LOGS / f"sglang-{name}-h200-info.json").read_text())
    return {row.setting: row.value for row in from_server_info(info)}


def test_the_log_of_a_base_server() -> None:
    assert log_values("base") == {
        "attention_backend": "fa3", "max_running_requests": "4096", "kv_tokens": "1929047",
        "chunked_prefill_size": "8192", "kv_dtype": "bfloat16", "cuda_graph": "true", "cuda_graph.prefill": "true",
        "cuda_graph.max_batch": "256",
    }


def test_the_log_of_a_speculative_server_tells_of_the_silent_cap() -> None:
    told = log_values("spec")
    assert told["max_running_requests"] == "48"
    assert told["cuda_graph"] == "true"
    assert told["cuda_graph.prefill"] == "false"


def test_server_info_of_a_base_server() -> None:
    told = info_values("base")
    assert told["prefix_cache"] == "false"
    assert told["cuda_graph"] == "true"
    assert told["max_running_requests"] is None
    assert told["dtype"] is None  # "auto" says nothing
    assert "speculative.topk" not in told


def test_server_info_of_a_speculative_server() -> None:
    told = info_values("spec")
    assert told["speculative.method"] == "eagle3"
    assert told["speculative.num_speculative_tokens"] == "3"
    assert told["speculative.topk"] == "1"


def test_a_cap_that_was_lowered_is_a_mismatch() -> None:
    info = json.loads((LOGS / "sglang-spec-h200-info.json").read_text())
    with (LOGS / "sglang-spec-h200.log").open(newline="\n", errors="replace") as lines:
        rows = setting_rows({"max_running_requests": "128"}, [*from_server_info(info), *from_log(lines)])
    [wrong] = mismatches(rows)
    assert wrong.startswith("max_running_requests: asked 128, got 48")


@pytest.mark.parametrize(("name", "prefill"), [("on", "true"), ("off", "false")])
def test_prefill_graphs_are_seen_in_the_log(name: str, prefill: str) -> None:
    assert log_values(f"capture-prefill-graphs-{name}")["cuda_graph.prefill"] == prefill


def test_graphs_that_were_configured_are_overruled_by_the_log() -> None:
    """/server_info keeps `disable_cuda_graph` false, and a configured backend, whatever happened to graphs."""
    info = {"disable_cuda_graph": False, "cuda_graph_config": {"decode": {"backend": "full"}}}
    log = ["[t] Cuda graph is disabled because of using torch native attention backend"]
    rows = setting_rows({"cuda_graph": "true"}, [*from_server_info(info), *from_log(log)])
    assert mismatches(rows) == ["cuda_graph: asked true, got false (log: log line 1)"]


def test_a_backend_that_fell_back_is_a_mismatch() -> None:
    info = {"attention_backend": "flashinfer"}
    log = ["server_args={'attention_backend': 'flashinfer'}", "SM120 is unknown, will fallback to triton backend."]
    rows = setting_rows({"attention_backend": "flashinfer"}, [*from_server_info(info), *from_log(log)])
    assert mismatches(rows) == ["attention_backend: asked flashinfer, got triton (log: log line 2)"]


def test_what_was_asked_for_is_never_read_as_what_is() -> None:
    assert from_log(["server_args={'max_total_num_tokens=5, max_running_requests=9'}"]) == []


def test_an_unknown_answer_yields_nothing_known() -> None:
    rows = from_server_info({"cuda_graph_config": "new format", "surprise": 1})
    assert {row.value for row in rows if row.setting != "quantization"} == {None}
