"""What vLLM says of itself, read from logs of real servers: one H200 (0.26.0) and a CPU (0.32.0)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.engines.base import Observed
from tasks.engines.prometheus import parse
from tasks.engines.vllm_settings import REPORTED, from_log, from_metrics, from_server_info, merged

LOGS = Path(__file__).resolve().parents[1] / "fixtures" / "logs"


def log_rows(name: str) -> list[Observed]:
    with (LOGS / name).open(newline="\n", errors="replace") as lines:
        return from_log(lines)


def known(rows: list[Observed]) -> dict[str, str]:
    return {row.setting: row.value for row in merged(rows) if row.value is not None}


H200 = {
    "engine_version": "0.26.0", "dtype": "bfloat16", "kv_dtype": "auto", "quantization": "none", "tensor_parallel": "1",
    "chunked_prefill_size": "8192", "prefix_cache": "false", "attention_backend": "flash_attn", "cuda_graph": "true",
    "cuda_graph.max_batch": "512",
}


def test_a_base_server_on_an_h200() -> None:
    wanted = H200 | {"kv_tokens": "1922048", "cuda_graph.sizes": "51 piecewise, 51 full"}
    assert known(log_rows("vllm-base-h200.log")) == wanted


def test_a_speculative_server_on_an_h200() -> None:
    wanted = H200 | {
        "kv_tokens": "654224", "cuda_graph.sizes": "51 piecewise, 49 full", "speculative.method": "eagle3",
        "speculative.num_speculative_tokens": "3", "speculative.points": "2,15,27",
    }
    assert known(log_rows("vllm-spec-h200.log")) == wanted


def test_an_extraction_server_on_an_h200() -> None:
    wanted = H200 | {
        "kv_tokens": "1799648", "cuda_graph.sizes": "51 piecewise", "speculative.method": "extract_hidden_states",
        "speculative.num_speculative_tokens": "1", "speculative.points": "2,15,27,30",
    }
    assert known(log_rows("vllm-extract-h200.log")) == wanted


def test_metrics_of_an_h200() -> None:
    rows = from_metrics(parse((LOGS / "vllm-base-h200-metrics.txt").read_text()))
    assert known(rows) == {"kv_tokens": "1922048", "prefix_cache": "false", "kv_dtype": "auto"}


def test_an_extraction_server_on_a_cpu_reports_the_same_from_every_source() -> None:
    log = log_rows("vllm-extract-cpu.log")
    metrics = from_metrics(parse((LOGS / "vllm-extract-cpu-metrics.txt").read_text()))
    info = from_server_info(json.loads((LOGS / "vllm-extract-cpu-info.json").read_text()), "0.32.0")
    every = known([*log, *metrics, *info])
    assert every == {
        "engine_version": "0.32.0", "dtype": "float32", "kv_dtype": "auto", "quantization": "none",
        "tensor_parallel": "1", "max_running_requests": "32", "kv_tokens": "26112", "chunked_prefill_size": "64",
        "prefix_cache": "false", "cuda_graph": "false", "custom_all_reduce": "false",
        "speculative.method": "extract_hidden_states", "speculative.num_speculative_tokens": "1",
        "speculative.points": "2,4,5,8", "plugin": "drafthouse 0.1.0", "capture.points": "2,4,5,8",
    }
    for source in (log, metrics, info):
        assert known(source).items() <= every.items()
    assert not any("says" in row.detail for row in merged([*log, *metrics, *info]))


def test_a_server_that_died_while_loading_reports_nothing() -> None:
    rows = merged(log_rows("vllm-no-kv-memory-h200.log"))
    assert [row.setting for row in rows] == list(REPORTED)
    assert all(row.value is None and row.detail for row in rows)


@pytest.mark.parametrize(
    "line",
    [
        "Using some attention backend, we think: FLASH_ATTN",
        "Capturing CUDA graphs (FULL):  50%|#####     | 25/49 [00:01<00:01, 21.57it/s]",
        "GPU KV cache size: plenty",
        "Initializing a V1 LLM engine (v9) with config: dtype is bfloat16, prefix caching: True",
        "Chunked prefill is enabled",
    ],
)
def test_a_line_of_unknown_format_yields_nothing(line: str) -> None:
    assert {row.setting for row in from_log([line])} <= {"engine_version"}


def test_an_unknown_server_info_yields_nothing() -> None:
    for info in ({}, {"vllm_config": "a text"}, {"vllm_config": {"model_config": "a text"}}, {"vllm_config": {}}):
        assert {r.setting for r in from_server_info(info) if r.value is not None} <= {"quantization"}


def test_what_the_log_shows_outweighs_what_was_configured_and_the_other_is_named() -> None:
    info = from_server_info({"vllm_config": {"attention_config": {"backend": "FLASHINFER"}}})
    log = from_log(["Using TRITON_ATTN attention backend out of potential backends: ['TRITON_ATTN']."])
    row = next(r for r in merged([*log, *info]) if r.setting == "attention_backend")
    assert row.value == "triton_attn"
    assert row.source == "log"
    assert row.detail == "log line 1; server_info says flashinfer"


def test_all_reduce_of_several_gpus_is_reported_only_by_what_it_did() -> None:
    config = "Initializing a V1 LLM engine (v0.26.0) with config: x, tensor_parallel_size=2, disable_custom_all_reduce="
    assert "custom_all_reduce" not in known(from_log([f"{config}False"]))
    assert known(from_log([f"{config}True"]))["custom_all_reduce"] == "false"
    off = "Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs."
    assert known(from_log([f"{config}False", off]))["custom_all_reduce"] == "false"
    assert known(from_log([f"{config}False", "Registering 196 cuda graph addresses"]))["custom_all_reduce"] == "true"
    assert known(from_log(["vLLM is using nccl==2.28.9"]))["nccl.version"] == "2.28.9"


def test_engines_of_one_server_that_differ_report_no_cache_size() -> None:
    text = 'vllm:cache_config_info{engine="0",kv_cache_size_tokens="100"} 1\n'
    text += 'vllm:cache_config_info{engine="1",kv_cache_size_tokens="200"} 1\n'
    assert "kv_tokens" not in known(from_metrics(parse(text)))
