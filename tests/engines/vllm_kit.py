"""Small random targets, a drafter that reveals what it receives, and clients, for the tests on a real vLLM."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tasks.campaign_file import parse_campaign
from tasks.config import Campaign
from tasks.engines.base import Completion
from tasks.engines.vllm import VllmEngine
from tasks.store.states import Sample, read_acks, read_sample

VOCABULARY, WIDTH, LAYERS, CONSTANT = 256, 64, 8, 77
ENGINE = VllmEngine()


def make_target(folder: Path, *, constant: bool) -> LlamaForCausalLM:
    """A random 8-layer Llama, saved; a `constant` one always answers the token CONSTANT."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t0", eos_token="t1", pad_token="t2")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, bos_token_id=0,
        eos_token_id=1, pad_token_id=2, tie_word_embeddings=False, dtype="float32",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.15)
        if constant:
            # One channel of the residual stream is the same everywhere, and the head reads only that one.
            model.model.embed_tokens.weight[:, 0] = 1.0
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight[0] = 0
                layer.mlp.down_proj.weight[0] = 0
            model.lm_head.weight.mul_(0.01)
            model.lm_head.weight[:, 0] = 0
            model.lm_head.weight[CONSTANT, 0] = 50
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def reference_states(model: LlamaForCausalLM, token_ids: Sequence[int]) -> torch.Tensor:
    """[tokens, N + 1, width]: hidden_states 0..N, the last one before the final norm."""
    before_norm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0]))
    states = model.model(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
    hook.remove()
    return torch.stack([*(state[0] for state in states[:-1]), before_norm[0]], dim=1)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def make_revealing_drafter(
    folder: Path, model: LlamaForCausalLM, token_ids: list[int], points: tuple[int, ...]
) -> float:
    """A drafter that proposes CONSTANT only if it receives exactly `points`, in this order.

    Its attention and MLP are zero, so that its head sees a third of each fused state. A row of the head
    stands for each choice of indices that differs from `points` in one place, and for both shifts.
    Returns the smallest margin between the right row and the best wrong one, by transformers' states.
    """
    states = reference_states(model, token_ids)[len(token_ids) // 2 :]  # [tokens, N + 1, width]
    share = WIDTH // 3
    project = torch.randn(3, share, WIDTH, generator=torch.Generator().manual_seed(1))

    def fused(choice: Sequence[int]) -> torch.Tensor:  # [tokens, width]
        parts = [states[:, index] @ project[slot].T for slot, index in enumerate(choice)]
        joined = torch.nn.functional.pad(torch.cat(parts, dim=-1), (0, WIDTH - 3 * share))
        return torch.nn.functional.normalize(joined, dim=-1)

    wrong = [
        tuple(other if place == slot else index for place, index in enumerate(points))
        for slot in range(3) for other in range(LAYERS + 1) if other != points[slot]
    ]
    wrong += [tuple(p + 1 for p in points), tuple(p - 1 for p in points), tuple(reversed(points))]
    head = torch.zeros(VOCABULARY, WIDTH)
    head[CONSTANT] = torch.nn.functional.normalize(fused(points).mean(0), dim=-1)
    free = [token for token in range(3, VOCABULARY) if token != CONSTANT][: len(wrong)]
    for token, choice in zip(free, wrong, strict=True):
        head[token] = torch.nn.functional.normalize(fused(choice).mean(0), dim=-1)
    right = fused(points) @ head.T
    best_wrong = right[:, free].max(-1).values
    margin = float((right[:, CONSTANT] - best_wrong).min())
    assert all(int((fused(choice) @ head.T).argmax(-1).eq(CONSTANT).sum()) == 0 for choice in wrong)

    fc = torch.zeros(WIDTH, 3 * WIDTH)
    for slot in range(3):
        fc[slot * share : (slot + 1) * share, slot * WIDTH : (slot + 1) * WIDTH] = project[slot]
    one, layer = torch.ones(WIDTH), "midlayer."
    tensors = {
        "fc.weight": fc, "norm.weight": one.clone(), "lm_head.weight": head,
        f"{layer}input_layernorm.weight": one.clone(), f"{layer}hidden_norm.weight": one.clone(),
        f"{layer}post_attention_layernorm.weight": one.clone(),
        **{f"{layer}self_attn.{name}_proj.weight": torch.zeros(WIDTH, 2 * WIDTH) for name in "qkv"},
        f"{layer}self_attn.o_proj.weight": torch.zeros(WIDTH, WIDTH),
        f"{layer}mlp.gate_proj.weight": torch.zeros(128, WIDTH), f"{layer}mlp.up_proj.weight": torch.zeros(128, WIDTH),
        f"{layer}mlp.down_proj.weight": torch.zeros(WIDTH, 128),
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = ENGINE.layer_ids("LlamaForCausalLM", LAYERS, points)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "dtype": "float32", "hidden_size": WIDTH,
        "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 32, "vocab_size": VOCABULARY, "draft_vocab_size": VOCABULARY, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        "eagle_aux_hidden_state_layer_ids": ids,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return margin


def campaign(model: Path, arm: dict[str, Any], points: tuple[int, ...] = (1, 2, 3)) -> Campaign:
    """A campaign around one vLLM arm."""
    base = {"name": "base", "engine": "vllm", "role": "base"}
    return parse_campaign({
        "name": "vllm-test", "target": {"model": str(model), "max_model_len": 1024},
        "machine": {"cpu_threads": 1, "ready_timeout_s": 300},
        "arms": [base, {"name": "tested", "engine": "vllm", **arm}], "workloads": [{"name": "any"}],
        "prompts": {"train_file": "none", "heldout_file": "none"}, "drafter": {"points": list(points)},
    })


def complete(url: str, token_ids: Sequence[int], max_tokens: int = 1, **settings: Any) -> Completion:
    body = ENGINE.completion_body("target", list(token_ids), max_tokens, stream=False, **settings)
    answer = requests.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return ENGINE.parse_completion(answer.json())


def capture(url: str, folder: Path, texts: dict[str, list[int]], at_once: int) -> dict[str, Sample]:
    """States of each text by sample key, asked for by `at_once` clients; waits for the acknowledgements."""
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda item: complete(url, item[1], sample_key=item[0]), texts.items()))
    acks = wait_for_acks(folder, set(texts))
    return {key: read_sample(folder, acks[key]["shard"], acks[key]["row_group"]) for key in texts}


def wait_for_acks(folder: Path, keys: set[str], timeout_s: float = 30) -> dict[str, dict[str, Any]]:
    deadline = time.monotonic() + timeout_s
    while not keys <= (acks := read_acks(folder)).keys():
        assert time.monotonic() < deadline, f"never acknowledged: {keys - acks.keys()}"
        time.sleep(0.05)
    return acks
