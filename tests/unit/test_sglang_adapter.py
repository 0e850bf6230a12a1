"""SGLang's command lines, refusals, requests, facts and layer ids, without a server."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tasks.config import Arm, Device, Machine, Target
from tasks.engines import sglang_check
from tasks.engines.base import LaunchPlan
from tasks.engines.inside import sglang_plugin
from tasks.engines.registry import engine
from tasks.engines.sglang import SglangEngine
from tasks.engines.sglang_check import tapped_points
from tasks.errors import CaptureLost, EngineError, NotSupported

ENGINE = SglangEngine()
ABLE = "    def set_eagle3_layers_to_capture(self, layer_ids=None):\n        pass\n"


@pytest.fixture(autouse=True)
def engine_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment with sources of three model classes, of which one inherits what it needs from another file."""
    models = tmp_path / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    (models / "llama.py").write_text(f"class Part(Module):\n    pass\nclass LlamaForCausalLM(Module):\n{ABLE}")
    (models / "mistral.py").write_text("class MistralForCausalLM(LlamaForCausalLM):\n    pass\n")
    (models / "gpt2.py").write_text("class GPT2LMHeadModel(Module):\n    pass\n")
    found = {
        "sglang": "0.5.23", "torch": "2.14.1", "drafthouse": sglang_check.version("drafthouse"),
        "plugin": sglang_plugin.CAPTURE_VERSION, "platforms": "drafthouse-cpu", "folder": str(tmp_path / "sglang"),
    }
    monkeypatch.setattr(sglang_check, "environment", lambda python, variables=(): found)
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_config(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def write_config(folder: Path, **changes: Any) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64, **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def plan(model: Path, role: str = "base", device: str = "cpu", tuning: Any = None, **more: Any) -> LaunchPlan:
    arm: dict[str, Any] = {"name": "arm", "engine": "sglang", "role": role, "tuning": tuning or {}}
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


def test_a_share_of_the_card_is_told_to_sglang_as_a_share_of_what_is_free(model: Path) -> None:
    tuning = {"memory_fraction": 0.45}
    alone = ENGINE.command(plan(model, device="cuda", tuning=tuning)).argv
    beside = plan(model, device="cuda", tuning=tuning, memory_taken=0.45)
    beside = replace(beside, arm=beside.arm.model_copy(update={"side_by_side": "x"}))
    second = ENGINE.command(beside).argv
    assert alone[alone.index("--mem-fraction-static") + 1] == "0.45"
    assert second[second.index("--mem-fraction-static") + 1] == "0.8182"
    assert ("--sleep-on-idle" in alone, "--sleep-on-idle" in second) == (False, True)


def test_the_registry_knows_this_engine() -> None:
    assert isinstance(engine(ENGINE.name), SglangEngine)  # type: ignore[arg-type]


def test_every_setting_of_the_campaign_is_on_the_command_line(model: Path) -> None:
    tuning = {"max_running_requests": 7, "chunked_prefill_size": 64, "kv_tokens": 5000, "prefix_cache": True,
              "extra_args": ["--num-continuous-decode-steps", "4"]}
    argv = ENGINE.command(plan(model, tuning=tuning)).argv
    assert argv[:5] == ("/opt/env/bin/python", "-m", "sglang.launch_server", "--host", "127.0.0.1")
    assert flag(argv, "--max-running-requests") == "7"
    assert flag(argv, "--chunked-prefill-size") == "64"
    assert flag(argv, "--max-total-tokens") == "5000"
    assert flag(argv, "--num-continuous-decode-steps") == "4"
    assert "--disable-radix-cache" not in argv
    assert "--disable-radix-cache" in ENGINE.command(plan(model)).argv


def test_a_cpu_launch_names_the_platform_and_a_cuda_launch_does_not(model: Path) -> None:
    cpu, cuda = ENGINE.command(plan(model)), ENGINE.command(plan(model, device="cuda"))
    assert cpu.env["SGLANG_PLATFORM"] == sglang_plugin.PLATFORM
    assert flag(cpu.argv, "--attention-backend") == "torch_native"
    assert "SGLANG_PLATFORM" not in cuda.env
    assert "--device" not in cuda.argv


def test_the_platform_declines_unless_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert sglang_plugin.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", "another")
    assert sglang_plugin.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", sglang_plugin.PLATFORM)
    assert sglang_plugin.activate() is not None


def test_extraction_on_cuda_turns_prefill_graphs_off(model: Path) -> None:
    made = ENGINE.command(plan(model, role="extraction", device="cuda"))
    assert flag(made.argv, "--cuda-graph-backend-prefill") == "disabled"
    assert "--cuda-graph-backend-decode" not in made.argv
    assert made.env[sglang_plugin.CAPTURE_POINTS] == "1,2,8"
    assert made.env[sglang_plugin.CAPTURE_DIR] == str(model / "pool")
    assert "--cuda-graph-backend-prefill" not in ENGINE.command(plan(model, device="cuda")).argv


def test_speculation_is_one_chain_and_keeps_the_cap_of_the_base_arm(model: Path, tmp_path: Path) -> None:
    argv = ENGINE.command(plan(model, role="speculative", drafter_dir=drafter(tmp_path, [1, 2, 3]))).argv
    assert flag(argv, "--speculative-num-steps") == "3"
    assert flag(argv, "--speculative-num-draft-tokens") == "4"
    assert flag(argv, "--speculative-eagle-topk") == "1"
    assert flag(argv, "--max-running-requests") == flag(ENGINE.command(plan(model)).argv, "--max-running-requests")


@pytest.mark.parametrize("profile", ["pcie-no-nvlink", "p2p-off"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_without_peer_access_custom_all_reduce_is_off_for_every_size(model: Path, profile: str, ranks: int) -> None:
    tuning = {"tensor_parallel": ranks, "nccl_profile": profile}
    made = plan(model, device="cuda", tuning=tuning)
    assert "--disable-custom-all-reduce" in ENGINE.command(made).argv
    assert ENGINE.requested_settings(made)["custom_all_reduce"] == "false"
    wanting = plan(model, device="cuda", tuning={**tuning, "custom_all_reduce": True})
    with pytest.raises(NotSupported, match="needs peer access"):
        ENGINE.check(wanting)


def test_with_nvlink_custom_all_reduce_stays_on(model: Path) -> None:
    made = plan(model, device="cuda", tuning={"tensor_parallel": 8, "nccl_profile": "nvlink"})
    assert "--disable-custom-all-reduce" not in ENGINE.command(made).argv


def test_the_kv_cache_on_a_cpu_never_takes_the_machines_memory(model: Path) -> None:
    per_token = 8 * 2 * 2 * 16 * 4  # layers, K and V, heads, head width, float32
    assert ENGINE.requested_settings(plan(model))["kv_tokens"] == str(32 * 1024)
    many = plan(model, tuning={"max_running_requests": 4096})
    assert int(ENGINE.requested_settings(many)["kv_tokens"]) == (1 << 30) // per_token
    asked = plan(model, tuning={"kv_cache_gib": 0.25})
    assert int(ENGINE.requested_settings(asked)["kv_tokens"]) == (1 << 28) // per_token
    write_config(model, kv_lora_rank=32, qk_rope_head_dim=16)
    assert int(ENGINE.requested_settings(asked)["kv_tokens"]) == (1 << 28) // (8 * 48 * 4)
    assert "kv_tokens" not in ENGINE.requested_settings(plan(model, device="cuda"))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("extraction", {"drafter_dir": Path("/somewhere")}, "takes no drafter"),
    ("extraction", {"engine_points": (1, 2, 9)}, "indices from 1 to 8"),
    ("extraction", {"engine_points": (0, 2, 8)}, "the embeddings, not"),
    ("extraction", {"engine_points": (2, 2, 8)}, "distinct"),
    ("extraction", {"engine_points": ()}, "distinct"),
    ("extraction", {"capture_dir": None}, "needs a capture folder"),
    ("speculative", {}, "needs a drafter folder"),
    ("base", {"tuning": {"extra_args": ["--speculative-eagle-topk=4"]}}, "one chain"),
    ("base", {"tuning": {"extra_args": ["--pp-size", "2"]}}, "pipeline parallelism"),
    ("base", {"tuning": {"extra_args": ["--tp", "2"]}}, "campaign's own fields"),
    ("base", {"tuning": {"attention_backend": "triton"}}, "torch_native"),
    ("base", {"tuning": {"cuda_graph": True}}, "no CUDA graphs on a CPU"),
    ("base", {"tuning": {"tensor_parallel": 2}}, "one process"),
    ("base", {"tuning": {"variables": [{"name": "SGLANG_PLATFORM", "value": "other"}]}}, "remove the variable"),
    ("base", {"tuning": {"variables": [{"name": "SGLANG_PLUGINS", "value": "other"}]}}, "leaves out drafthouse"),
]


@pytest.mark.parametrize(("role", "changes", "reason"), REFUSED)
def test_what_cannot_work_is_refused_before_loading(model: Path, role: str, changes: Any, reason: str) -> None:
    ENGINE.check(plan(model, role="extraction"))
    with pytest.raises(NotSupported, match=reason):
        ENGINE.check(plan(model, role=role, **changes))


def test_a_prefix_cache_on_an_extraction_server_is_refused(model: Path) -> None:
    made = plan(model, role="extraction")
    cached = made.arm.model_copy(update={"tuning": made.arm.tuning.model_copy(update={"prefix_cache": True})})
    with pytest.raises(NotSupported, match="cached tokens have no states"):
        ENGINE.check(replace(made, arm=cached))


@pytest.mark.parametrize(("name", "fine"), [("MistralForCausalLM", True), ("GPT2LMHeadModel", False), ("New", False)])
def test_a_model_class_without_auxiliary_states_is_refused(model: Path, name: str, fine: bool) -> None:
    write_config(model, architectures=[name])
    ENGINE.check(plan(model))
    if fine:
        ENGINE.check(plan(model, role="extraction"))
        return
    with pytest.raises(NotSupported, match="hands out no auxiliary states"):
        ENGINE.check(plan(model, role="extraction"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"drafthouse": "0.0.1"}, "install it there"), ({"plugin": "sglang-0"}, "install it there"),
        ({"sglang": "0.5.16"}, "0.5.23 or newer"), ({"platforms": ""}, "no platform plugin"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(
    model: Path, engine_environment: dict[str, str], changes: dict[str, str], reason: str
) -> None:
    engine_environment |= changes
    with pytest.raises(NotSupported, match=reason):
        ENGINE.check(plan(model))


def test_several_platform_plugins_on_cuda_need_a_name(model: Path, engine_environment: dict[str, str]) -> None:
    engine_environment |= {"sglang": "0.5.16", "platforms": "drafthouse-cpu,one"}
    ENGINE.check(plan(model, device="cuda"))
    engine_environment["platforms"] = "drafthouse-cpu,one,two"
    with pytest.raises(NotSupported, match="SGLANG_PLATFORM"):
        ENGINE.check(plan(model, device="cuda"))
    named = {"variables": [{"name": "SGLANG_PLATFORM", "value": "one"}]}
    ENGINE.check(plan(model, device="cuda", tuning=named))
    with pytest.raises(NotSupported, match="drafthouse's capture too"):
        ENGINE.check(plan(model, role="extraction", device="cuda", tuning=named))


MEASURED = ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"]


@pytest.mark.parametrize("model_class", MEASURED)
def test_ids_tap_exactly_the_points_whatever_the_class_makes_of_them(model_class: str) -> None:
    for points in combinations(range(1, 8), 3):
        assert tapped_points(model_class, ENGINE.layer_ids(model_class, 8, points)) == list(points)


def test_ids_of_the_measured_classes() -> None:
    assert ENGINE.layer_ids("LlamaForCausalLM", 8, (2, 4, 5)) == [1, 3, 4]
    assert ENGINE.layer_ids("DeepseekV3ForCausalLM", 8, (2, 4, 5)) == [1, 3, 4]  # first id 1: all are shifted
    assert ENGINE.layer_ids("DeepseekV3ForCausalLM", 8, (1, 3, 6)) == [3, 6, 1]  # first id is not 1: none is
    assert ENGINE.layer_ids("KimiK25ForConditionalGeneration", 61, (2, 30, 58)) == [1, 29, 57]


@pytest.mark.parametrize("points", [(0, 2, 4), (2, 4, 8), (4, 2, 5), (2, 2, 4), ()])
def test_points_that_no_id_can_name_are_refused(points: tuple[int, ...]) -> None:
    with pytest.raises(NotSupported, match="choose others"):
        ENGINE.layer_ids("LlamaForCausalLM", 8, points)


def test_a_class_that_was_never_measured_is_refused() -> None:
    with pytest.raises(NotSupported, match="has not been measured"):
        ENGINE.layer_ids("GptOssForCausalLM", 8, (2, 4, 5))


@pytest.mark.parametrize("ids", [[1, 2, 7], [0, 1, 1], [-1, 2, 3]])
def test_a_drafter_that_would_be_fed_with_other_points_is_refused(model: Path, tmp_path: Path, ids: list[int]) -> None:
    ENGINE.check(plan(model, role="speculative", drafter_dir=drafter(tmp_path, [1, 2, 6])))
    with pytest.raises(NotSupported, match="taps hidden_states"):
        ENGINE.check(plan(model, role="speculative", drafter_dir=drafter(tmp_path, ids)))


def test_a_request_carries_its_sample_key_apart_from_its_id() -> None:
    body = ENGINE.completion_body("m", [1, 2], 5, sample_key="../k", temperature=0.5)
    assert body["input_ids"] == [1, 2]
    assert body["sampling_params"]["custom_params"] == {sglang_plugin.SAMPLE_KEY: "../k"}
    assert "rid" not in body
    assert "custom_params" not in ENGINE.completion_body("m", [1, 2], 5)["sampling_params"]


def answer(**meta: Any) -> dict[str, Any]:
    facts = {"prompt_tokens": 2, "completion_tokens": 3, "finish_reason": {"type": "length", "length": 3}, **meta}
    return {"text": "abc", "output_ids": [7, 8, 9], "meta_info": facts}


def test_an_answer_is_read_by_its_token_ids() -> None:
    read = ENGINE.parse_completion(answer(output_token_logprobs=[[-0.1, 7, None], [-0.2, 8, None], [-0.3, 9, None]]))
    assert (read.token_ids, read.prompt_tokens, read.finish_reason) == ([7, 8, 9], 2, "length")
    assert read.logprobs == [-0.1, -0.2, -0.3]


def test_an_abort_is_an_error_and_one_of_the_capture_names_itself() -> None:
    lost = {"type": "abort", "message": "hidden states: states writer stopped"}
    with pytest.raises(CaptureLost, match="writer stopped"):
        ENGINE.parse_completion(answer(finish_reason=lost))
    with pytest.raises(EngineError, match="too long"):
        ENGINE.parse_completion({"error": {"message": "too long"}})
    assert "writer stopped" in ENGINE.as_completion_chunk(answer(finish_reason=lost), 0)["error"]["message"]


def test_chunks_that_repeat_the_answer_are_read_as_what_they_add() -> None:
    chunk = ENGINE.as_completion_chunk(answer(finish_reason=None), tokens_before=1)
    assert chunk["choices"][0]["token_ids"] == [8, 9]
    assert chunk["choices"][0]["finish_reason"] is None
    assert chunk["usage"] == {"prompt_tokens": 2, "completion_tokens": 3}
    assert ENGINE.chunk_tokens(chunk) == [8, 9]


def test_acceptance_of_one_request() -> None:
    told = {"spec_verify_ct": 10, "spec_num_correct_drafts": 9, "spec_num_proposed_drafts": 30,
            "spec_accept_length": 1.9, "spec_correct_drafts_histogram": [4, 3, 3]}
    facts = ENGINE.chunk_spec(answer(**told))
    assert facts == {"drafts": 10, "accepted": 9, "per_position": [6, 3, 0], "accept_length": 1.9}
    assert sum(facts["per_position"]) == facts["accepted"]


@pytest.mark.parametrize("told", [{}, {"spec_verify_ct": None}, {"spec_verify_ct": 0}, {"spec_verify_ct": 3}])
def test_acceptance_that_is_not_reported_is_none_and_never_zero(told: dict[str, Any]) -> None:
    assert ENGINE.chunk_spec(answer(**told)) is None


@pytest.mark.parametrize(
    ("line", "share"),
    [
        ("[t] Load weight begin. avail mem=139.09 GB", 0.25),
        ("Multi-thread loading shards:  50% Completed | 4/8 [00:01<00:01,  4.00it/s]", 0.45),
        ("Capturing batches (bs=16 avail_mem=121.12 GB):  50%|█████     | 18/36", 0.85),
        ("[t] The server is fired up and ready to roll!", 1.0),
        ("[t] Decode batch, #running-req: 3", None),
    ],
)
def test_load_progress(line: str, share: float | None) -> None:
    told = ENGINE.load_progress(line)
    assert (told[0] if told else None) == (pytest.approx(share) if share is not None else None)
