"""What the log readers make of servers that captured states and served a trained drafter on one H200."""

from __future__ import annotations

from pathlib import Path

from tasks.engines import sglang_settings, vllm_settings

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"


def values(name: str) -> dict[str, str | None]:
    reader = vllm_settings if name.startswith("vllm") else sglang_settings
    with (LOGS / name).open(encoding="utf-8", errors="replace", newline="\n") as lines:
        rows = reader.from_log(lines)
    return {row.setting: row.value for row in reversed(rows)}  # of several the first decides


def test_capture_in_vllm_on_a_gpu_tells_its_points_and_the_backend() -> None:
    told = values("vllm-capture-h200.log")
    assert told["capture.points"] == "2,15,27,30"
    assert told["plugin"] == "drafthouse 0.1.0"
    assert told["attention_backend"] == "flash_attn"
    assert told["speculative.method"] == "extract_hidden_states"
    assert (told["cuda_graph"], told["cuda_graph.sizes"]) == ("true", "51 piecewise")
    assert (told["kv_tokens"], told["dtype"]) == ("2676448", "bfloat16")


def test_capture_in_sglang_on_a_gpu_has_no_prefill_graphs() -> None:
    told = values("sglang-capture-h200.log")
    assert told["capture.points"] == "2,15,27,30"
    assert (told["cuda_graph"], told["cuda_graph.prefill"]) == ("true", "false")
    assert (told["attention_backend"], told["kv_tokens"]) == ("fa3", "3195488")
    assert told["max_running_requests"] == "128"


def test_an_explicit_cap_holds_in_sglang_with_speculation() -> None:
    told = values("sglang-drafter-h200.log")
    assert told["max_running_requests"] == "128"  # unasked, SGLang lowers it to 48
    assert told["cuda_graph.max_batch"] == "128"  # /server_info of the same server says 256
    assert told["attention_backend"] == "fa3"
