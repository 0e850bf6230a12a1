"""Targets, campaigns and clients for the tests on a real SGLang; models and drafters are those of `vllm_kit`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3ForCausalLM, LlamaForCausalLM
from vllm_kit import CONSTANT, make_revealing_drafter, wait_for_acks

from deployments.models.tiny_mla.build import FOR_SGLANG, build
from tasks.campaign_file import parse_campaign
from tasks.config import Campaign
from tasks.engines.base import Completion
from tasks.engines.sglang import SglangEngine
from tasks.store.states import Sample, read_sample

ENGINE = SglangEngine()
Target = LlamaForCausalLM | DeepseekV3ForCausalLM


def make_mla_target(folder: Path, tokenizer: Path, *, constant: bool) -> DeepseekV3ForCausalLM:
    """A random 8-layer DeepSeek-V3 of the Llama's width; a `constant` one always answers the token CONSTANT."""
    build(folder, width=64, tokenizer_from=tokenizer)
    model = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if constant:
        with torch.no_grad():
            # One channel of the residual stream is the same everywhere, and the head reads only that one.
            model.model.embed_tokens.weight[:, 0] = 1.0
            for name, parameter in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter[0] = 0
                elif name.endswith("experts.down_proj"):  # [experts, width, inner]
                    parameter[:, 0] = 0
            model.lm_head.weight.mul_(0.01)
            model.lm_head.weight[:, 0] = 0
            model.lm_head.weight[CONSTANT, 0] = 50
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **FOR_SGLANG}))
    return model


def make_sglang_drafter(
    folder: Path, model: Target, model_class: str, token_ids: list[int], points: tuple[int, ...]
) -> float:
    """`vllm_kit.make_revealing_drafter`, with the ids by which SGLang taps `points` of such a class."""
    shutil.rmtree(folder, ignore_errors=True)
    margin = make_revealing_drafter(folder, model, token_ids, points)  # type: ignore[arg-type]
    config = json.loads((folder / "config.json").read_text())
    ids = ENGINE.layer_ids(model_class, model.config.num_hidden_layers, points)
    config["eagle_aux_hidden_state_layer_ids"] = ids
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    (folder / "config.json").write_text(json.dumps(config))
    return margin


def campaign(model: Path, arm: dict[str, Any], points: tuple[int, ...] = (1, 2, 3)) -> Campaign:
    """A campaign around one SGLang arm."""
    base = {"name": "base", "engine": "sglang", "role": "base"}
    return parse_campaign({
        "name": "sglang-test", "target": {"model": str(model), "max_model_len": 1024},
        "machine": {"cpu_threads": 1, "ready_timeout_s": 400},
        "arms": [base, {"name": "tested", "engine": "sglang", **arm}], "workloads": [{"name": "any"}],
        "prompts": {"train_file": "none", "heldout_file": "none"}, "drafter": {"points": list(points)},
    })


def post(url: str, body: dict[str, Any], timeout_s: float = 120) -> requests.Response:
    return requests.post(f"{url}{ENGINE.endpoint}", json=body, timeout=timeout_s)


def complete(url: str, token_ids: Sequence[int], max_tokens: int = 1, **settings: Any) -> Completion:
    answer = post(url, ENGINE.completion_body("target", list(token_ids), max_tokens, stream=False, **settings))
    assert answer.status_code == 200, answer.text
    return ENGINE.parse_completion(answer.json())


def capture(
    url: str, folder: Path, texts: dict[str, list[int]], at_once: int, max_tokens: int = 1
) -> dict[str, Sample]:
    """States of each text by sample key, asked for by `at_once` clients; waits for the acknowledgements."""
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda item: complete(url, item[1], max_tokens, sample_key=item[0]), texts.items()))
    acks = wait_for_acks(folder, set(texts))
    return {key: read_sample(folder, acks[key]["shard"], acks[key]["row_group"]) for key in texts}


def make_plain_drafter(folder: Path, target: Path) -> None:
    """An untrained drafter whose drafts are right now and then: the target's own head on its last captured state."""
    config = json.loads((target / "config.json").read_text())
    weights, width = load_file(target / "model.safetensors"), config["hidden_size"]
    random = torch.Generator().manual_seed(0)

    def noise(rows: int, columns: int) -> torch.Tensor:
        return 0.02 * torch.randn(rows, columns, generator=random)

    inner, layer = config["intermediate_size"], "midlayer."
    tensors = {
        "fc.weight": torch.cat([torch.zeros(width, 2 * width), torch.eye(width)], dim=1),
        "norm.weight": weights["model.norm.weight"].clone(), "lm_head.weight": weights["lm_head.weight"].clone(),
        **{f"{layer}{name}.weight": torch.ones(width)
           for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        **{f"{layer}self_attn.{name}_proj.weight": noise(width, 2 * width) for name in "qkv"},
        f"{layer}self_attn.o_proj.weight": noise(width, width),
        f"{layer}mlp.gate_proj.weight": noise(inner, width), f"{layer}mlp.up_proj.weight": noise(inner, width),
        f"{layer}mlp.down_proj.weight": noise(width, inner),
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = ENGINE.layer_ids("LlamaForCausalLM", config["num_hidden_layers"], (1, 2, 3))
    made = {
        **{name: value for name, value in config.items() if name != "architectures"},
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
        "draft_vocab_size": config["vocab_size"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
    }
    (folder / "config.json").write_text(json.dumps(made))
