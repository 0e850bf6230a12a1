"""vLLM's command lines, refusals, requests and counters, without a server."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.config import Arm, Device, Machine, Target
from tasks.engines import vllm_check
from tasks.engines.base import LaunchPlan, SpecCounters
from tasks.engines.prometheus import parse
from tasks.engines.registry import engine
from tasks.engines.vllm import VllmEngine, counters_from
from tasks.errors import CaptureLost, EngineError, NotSupported

ENGINE = VllmEngine()
REGISTRY = """_MODELS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("mistral", "MistralForCausalLM"),
    "GPT2LMHeadModel": ("gpt2", "GPT2LMHeadModel"),
}"""


REAL_ENVIRONMENT = vllm_check.environment


@pytest.fixture(autouse=True)
def engine_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with sources of three model classes, of which one inherits what it needs from another file."""
    folder = tmp_path / "vllm"
    models = folder / "model_executor" / "models"
    models.mkdir(parents=True)
    (models / "registry.py").write_text(REGISTRY)
    (models / "llama.py").write_text("class LlamaForCausalLM(Module, SupportsEagle3):\n    pass\n")
    (models / "mistral.py").write_text("from .llama import LlamaForCausalLM as L\nclass MistralForCausalLM(L): pass\n")
    (models / "gpt2.py").write_text("class GPT2LMHeadModel(Module):\n    pass\n")
    found = {"vllm": "0.32.0", "torch": "2.13.0", "drafthouse": vllm_check.version("drafthouse"), "folder": str(folder)}
    monkeypatch.setattr(vllm_check, "environment", lambda python, variables=(): found)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_config(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def write_config(folder: Path, **changes: Any) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def plan(model: Path, role: str = "base", device: str = "cpu", tuning: Any = None, **more: Any) -> LaunchPlan:
    arm: dict[str, Any] = {"name": "arm", "engine": "vllm", "role": role, "tuning": tuning or {}}
    if role == "speculative":
        arm["speculative"] = {"drafter": "somewhere", "num_speculative_tokens": 3}
    extracting = {"engine_points": (1, 2, 8), "capture_dir": model / "pool"} if role == "extraction" else {}
    return LaunchPlan(
        arm=Arm.model_validate(arm), target=Target(model=str(model)), machine=Machine(device=Device(device)),
        python="/opt/env/bin/python", port=1234, **{**extracting, **more},
    )


def drafter(tmp_path: Path, ids: list[int] | None) -> Path:
    folder = tmp_path / "drafter"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"eagle_aux_hidden_state_layer_ids": ids} if ids else {}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_the_registry_knows_this_engine() -> None:
    assert isinstance(engine(ENGINE.name), VllmEngine)  # type: ignore[arg-type]


def test_every_setting_of_the_campaign_is_on_the_command_line(model: Path) -> None:
    tuning = {"max_running_requests": 7, "chunked_prefill_size": 64, "kv_cache_gib": 0.5, "prefix_cache": True,
              "variables": [{"name": "A_B", "value": "c"}], "extra_args": ["--scheduling-policy", "fcfs"]}
    made = ENGINE.command(plan(model, tuning=tuning))
    assert made.argv[:5] == ("/opt/env/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1")
    assert flag(made.argv, "--max-num-seqs") == "7"
    assert flag(made.argv, "--max-num-batched-tokens") == "64"
    assert flag(made.argv, "--kv-cache-memory-bytes") == str(1 << 29)
    assert flag(made.argv, "--dtype") == "float32"
    assert {"--enforce-eager", "--enable-prefix-caching", "--enable-chunked-prefill"} <= set(made.argv)
    assert made.argv[-2:] == ("--scheduling-policy", "fcfs")
    assert made.env["VLLM_PLUGINS"] == "drafthouse"
    assert made.env["VLLM_NO_USAGE_STATS"] == made.env["HF_HUB_OFFLINE"] == "1"


def test_both_arms_of_a_comparison_carry_the_cap_even_when_it_is_the_default(model: Path, tmp_path: Path) -> None:
    base = ENGINE.command(plan(model)).argv
    spec = ENGINE.command(plan(model, "speculative", drafter_dir=drafter(tmp_path, [1, 2, 3]))).argv
    assert flag(base, "--max-num-seqs") == flag(spec, "--max-num-seqs") == "32"


def test_extraction_captures_the_points_and_n_with_the_prefix_cache_off(model: Path) -> None:
    made = ENGINE.command(plan(model, "extraction", engine_points=(1, 2)))
    spec = json.loads(flag(made.argv, "--speculative-config"))
    assert spec["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 8]
    transfer = json.loads(flag(made.argv, "--kv-transfer-config"))
    assert transfer["kv_connector_extra_config"] == {"capture_dir": str(model / "pool")}
    assert "--no-enable-prefix-caching" in made.argv
    assert made.env["DRAFTHOUSE_MEND_CPU_SAMPLING"] == "1"
    assert ENGINE.requested_settings(plan(model, "extraction"))["prefix_cache"] == "false"


def test_the_cpu_mend_is_asked_for_only_on_cpus_and_only_with_speculation(model: Path, tmp_path: Path) -> None:
    assert ENGINE.command(plan(model)).env["DRAFTHOUSE_MEND_CPU_SAMPLING"] == "0"
    on_gpu = plan(model, "speculative", "cuda", drafter_dir=drafter(tmp_path, [1, 2, 3]))
    assert "DRAFTHOUSE_MEND_CPU_SAMPLING" not in ENGINE.command(on_gpu).env
    assert "--enforce-eager" not in ENGINE.command(on_gpu).argv


@pytest.mark.parametrize(("device", "size", "one_process"), [("cpu", 1, True), ("cpu", 2, False), ("cuda", 1, False)])
def test_worker_and_engine_core_share_a_process_on_a_cpu_alone(
    model: Path, device: str, size: int, one_process: bool
) -> None:
    made = ENGINE.command(plan(model, device=device, tuning={"tensor_parallel": size}))
    assert ("--distributed-executor-backend" in made.argv) is one_process
    assert ("VLLM_ENABLE_V1_MULTIPROCESSING" in made.env) is one_process


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("profile", "variables", "explicit", "off"),
    [
        ("pcie-no-nvlink", [], None, True), ("p2p-off", [], None, True), ("nvlink", [], None, False),
        ("none", [{"name": "NCCL_P2P_DISABLE", "value": "1"}], None, True),
        ("none", [{"name": "NCCL_P2P_DISABLE", "value": "0"}], None, False), ("nvlink", [], False, True),
    ],
)
def test_all_reduce_flag_and_peer_access_agree(
    model: Path, size: int, profile: str, variables: list[dict[str, str]], explicit: bool | None, off: bool
) -> None:
    tuning = {"tensor_parallel": size, "nccl_profile": profile, "variables": variables, "custom_all_reduce": explicit}
    made = plan(model, device="cuda", tuning=tuning)
    assert ("--disable-custom-all-reduce" in ENGINE.command(made).argv) is (off and size > 1)
    asked = ENGINE.requested_settings(made).get("custom_all_reduce")
    assert asked == ("false" if off and size > 1 else None)


def test_all_reduce_with_peer_access_off_is_a_contradiction(model: Path) -> None:
    tuning = {"tensor_parallel": 2, "nccl_profile": "p2p-off", "custom_all_reduce": True}
    with pytest.raises(NotSupported, match="peer access"):
        ENGINE.check(plan(model, device="cuda", tuning=tuning))
    by_variable = plan(model, device="cuda", tuning=tuning | {"nccl_profile": "none"})
    with pytest.raises(NotSupported, match="peer access"):
        ENGINE.check(replace(by_variable, env={"NCCL_P2P_DISABLE": "1"}))


def test_a_sound_plan_of_each_role_passes(model: Path, tmp_path: Path) -> None:
    ENGINE.check(plan(model))
    ENGINE.check(plan(model, "extraction"))
    ENGINE.check(plan(model, "speculative", drafter_dir=drafter(tmp_path, [2, 4, 5])))
    write_config(model, architectures=["MistralForCausalLM"])
    ENGINE.check(plan(model, "extraction"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": None}, "names no `architectures`"),
        ({"architectures": ["GPT2LMHeadModel"]}, "cannot expose hidden states"),
        ({"architectures": ["NoSuchModel"]}, "cannot expose hidden states"),
        ({"kv_lora_rank": 512}, "through SGLang"),
        ({"text_config": {"num_hidden_layers": 8, "kv_lora_rank": 512}}, "through SGLang"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_hidden_layers": 4}, "from 0 to 4"),
    ],
)
def test_a_target_that_cannot_be_extracted_from_is_refused(model: Path, changes: dict[str, Any], text: str) -> None:
    write_config(model, **changes)
    with pytest.raises(NotSupported, match=text):
        ENGINE.check(plan(model, "extraction"))


def test_missing_and_empty_model_folders_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match=r"no readable config\.json"):
        ENGINE.check(plan(tmp_path / "missing"))
    (model / "model.safetensors").write_bytes(b"")
    with pytest.raises(NotSupported, match="no weights"):
        ENGINE.check(plan(model))
    (model / "model.safetensors").write_bytes(b"weights")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(NotSupported, match=r"lacks 1 weight files, first model-00002\.safetensors"):
        ENGINE.check(plan(model))


@pytest.mark.parametrize("points", [(), (1, 1, 2), (-1, 2, 3), (1, 2, 9)])
def test_points_that_the_target_does_not_have_are_refused(model: Path, points: tuple[int, ...]) -> None:
    with pytest.raises(NotSupported, match="distinct hidden_states indices from 0 to 8"):
        ENGINE.check(plan(model, "extraction", engine_points=points))


def test_an_extraction_server_takes_neither_drafter_nor_prefix_cache(model: Path, tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="takes no drafter"):
        ENGINE.check(plan(model, "extraction", drafter_dir=drafter(tmp_path, [1, 2, 3])))
    made = plan(model, "extraction")
    cached = made.arm.model_copy(update={"tuning": made.arm.tuning.model_copy(update={"prefix_cache": True})})
    with pytest.raises(NotSupported, match="cached tokens have no states"):
        ENGINE.check(replace(made, arm=cached))
    with pytest.raises(NotSupported, match="capture folder"):
        ENGINE.check(replace(made, capture_dir=None))


@pytest.mark.parametrize(("layers", "passes"), [*((n, False) for n in (1, 2, 4, 5, 6)), (7, True), (28, True)])
def test_a_drafter_without_ids_needs_a_target_deep_enough_for_the_default(
    model: Path, tmp_path: Path, layers: int, passes: bool
) -> None:
    write_config(model, num_hidden_layers=layers)
    made = plan(model, "speculative", drafter_dir=drafter(tmp_path, None))
    if passes:
        ENGINE.check(made)
    else:
        with pytest.raises(NotSupported, match="set eagle_aux_hidden_state_layer_ids"):
            ENGINE.check(made)


@pytest.mark.parametrize("ids", [[5, 4, 2], [2, 2, 5], [1, 2], [2, 4, 9]])
def test_drafter_ids_that_vllm_would_reorder_or_drop_are_refused(model: Path, tmp_path: Path, ids: list[int]) -> None:
    with pytest.raises(NotSupported, match=r"its config\.json says points"):
        ENGINE.check(plan(model, "speculative", drafter_dir=drafter(tmp_path, ids)))
    with pytest.raises(NotSupported):
        ENGINE.layer_ids("LlamaForCausalLM", 8, tuple(ids)) if len(ids) == 3 else ENGINE.layer_ids("L", 1, tuple(ids))


def test_another_plugin_or_an_old_engine_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict(vllm_check.environment("any"))
    monkeypatch.setattr(vllm_check, "environment", lambda *_: found | {"drafthouse": "0.0.1"})
    with pytest.raises(NotSupported, match=r"has drafthouse 0\.0\.1"):
        ENGINE.check(plan(model))
    monkeypatch.setattr(vllm_check, "environment", lambda *_: found | {"vllm": "0.9.2"})
    with pytest.raises(NotSupported, match="older than"):
        ENGINE.check(plan(model))


def test_an_interpreter_that_is_missing_or_has_no_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotSupported, match="make it with: make engines"):
        REAL_ENVIRONMENT(str(tmp_path / "python"))
    with pytest.raises(NotSupported, match="vLLM is not installed"):
        REAL_ENVIRONMENT(sys.executable)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(NotSupported, match="does not work"):
        REAL_ENVIRONMENT(str(broken))


@pytest.mark.parametrize(
    ("tuning", "text"),
    [
        ({"extra_args": ["--enable-prefix-caching"]}, "--enable-prefix-caching belongs"),
        ({"extra_args": ["--max_num_seqs=48"]}, "--max-num-seqs belongs"),
        ({"attention_backend": "FLASHINFER"}, "only one on a CPU"), ({"cuda_graph": True}, "no CUDA graphs on a CPU"),
        ({"kv_tokens": 1000}, "not a multiple"),
    ],
)
def test_settings_that_would_be_ignored_or_doubled_are_refused(model: Path, tuning: dict[str, Any], text: str) -> None:
    with pytest.raises(NotSupported, match=text):
        ENGINE.check(plan(model, tuning=tuning))


def test_no_seed_and_no_hidden_default_in_a_request() -> None:
    body = ENGINE.completion_body("target", [1, 2], 5, temperature=0.5, sample_key="key", stream=False)
    assert "seed" not in body
    assert (body["top_k"], body["repetition_penalty"], body["top_p"]) == (-1, 1.0, 1.0)
    assert body["kv_transfer_params"] == {"drafthouse_sample_key": "key"}
    assert "stream_options" not in body
    assert ENGINE.completion_body("target", [1], 5)["stream_options"] == {"include_usage": True}


def test_an_answer_without_token_ids_or_with_a_capture_error_is_loud() -> None:
    choice = {"token_ids": [3], "finish_reason": "length", "logprobs": {"token_logprobs": [-0.5]}}
    answer = {"choices": [choice], "usage": {"prompt_tokens": 2}}
    parsed = ENGINE.parse_completion(answer)
    assert (parsed.token_ids, parsed.prompt_tokens, parsed.logprobs) == ([3], 2, [-0.5])
    with pytest.raises(CaptureLost, match="no space left"):
        ENGINE.parse_completion(answer | {"kv_transfer_params": {"drafthouse": {"error": "no space left"}}})
    with pytest.raises(EngineError, match="without token_ids"):
        ENGINE.parse_completion({"choices": [{"finish_reason": "stop"}], "usage": {"prompt_tokens": 2}})


def counters(drafts: list[int], accepted: list[int], positions: list[list[int]]) -> SpecCounters | None:
    text = ""
    for index, (d, a, per) in enumerate(zip(drafts, accepted, positions, strict=True)):
        text += f'vllm:spec_decode_num_drafts_total{{engine="{index}"}} {d}\n'
        text += f'vllm:spec_decode_num_accepted_tokens_total{{engine="{index}"}} {a}\n'
        for place, count in enumerate(per):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            text += f'{name}{{engine="{index}",position="{place}"}} {count}\n'
    return counters_from(parse(text))


def test_counters_are_summed_over_engines_before_the_difference() -> None:
    before = counters([100, 50], [200, 80], [[90, 70, 40], [40, 30, 10]])
    after = counters([300, 150], [700, 230], [[280, 240, 180], [110, 80, 40]])
    assert before and after
    drafts, accepted = after.drafts - before.drafts, after.accepted - before.accepted  # type: ignore[operator]
    assert 1 + accepted / drafts == pytest.approx(3.17, abs=0.005)
    rates = [(b - a) / drafts for a, b in zip(before.per_position, after.per_position, strict=True)]
    assert rates == sorted(rates, reverse=True)
    assert sum(after.per_position) == after.accepted


def test_a_counter_that_is_not_reported_is_null_and_never_zero() -> None:
    assert counters_from([]) is None
    assert counters_from(parse("vllm:spec_decode_num_drafts_total 7\n")) == SpecCounters(7, None, ())
    text = 'vllm:spec_decode_num_drafts_total 7\nvllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 2\n'
    assert counters_from(parse(text)) == SpecCounters(7, None, ())


def test_progress_rises_along_a_real_log() -> None:
    log = Path(__file__).resolve().parents[1] / "fixtures" / "logs" / "vllm-base-h200.log"
    told = [t for line in log.read_text(errors="replace").splitlines() if (t := ENGINE.load_progress(line))]
    assert len(told) >= 8
    assert told[-1] == (1.0, "up")
    assert [share for share, _ in told] == sorted(share for share, _ in told)
