"""Small targets and data for tests of the drafter: built in milliseconds, no model on disk is needed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tasks.campaign_file import parse_campaign
from tasks.config import Campaign, DrafterConfig
from tasks.eagle3.data import Dataset, DraftVocabulary, Row, draft_vocabulary, join_rows
from tasks.eagle3.model import drafter_config
from tasks.eagle3.target import TargetHead, read_target_head, target_config
from tasks.eagle3.trainer import Trainer, start_drafter
from tasks.store.states import Sample, ShardWriter, read_acks

WIDTH, VOCAB, LAYERS = 32, 200, 4
CPU = torch.device("cpu")


def small_target(folder: Path, *, nested: bool = False, tied: bool = False, sharded: bool = False) -> Path:
    """A Llama-like folder that holds only what training reads: config, embeddings, final norm, head."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 48,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": VOCAB, "rms_norm_eps": 1e-6, "rope_theta": 5000.0, "max_position_embeddings": 128,
        "eos_token_id": 1, "tie_word_embeddings": tied,
    }
    torch.manual_seed(1)
    prefix = "language_model.model." if nested else "model."
    tensors = {f"{prefix}embed_tokens.weight": torch.randn(VOCAB, WIDTH), f"{prefix}norm.weight": torch.rand(WIDTH) + 1}
    if not tied:
        tensors["language_model.lm_head.weight" if nested else "lm_head.weight"] = torch.randn(VOCAB, WIDTH)
    if nested:
        config = {"architectures": ["WrappedForConditionalGeneration"], "text_config": config}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    if sharded:
        names = {name: f"model-{number:05d}-of-00003.safetensors" for number, name in enumerate(tensors, 1)}
        for name, file in names.items():
            save_file({name: tensors[name]}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def responses(count: int, seed: int = 0, words: int = VOCAB) -> list[dict[str, Any]]:
    """Rows of the responses table with 20 to 22 random tokens below `words`, four of them prompt."""
    r = random.Random(seed)
    return [
        {
            "sample_key": f"sample-{seed}-{n}", "prompt_tokens": 4, "nll_per_token": None,
            "token_ids": [r.randrange(2, words) for _ in range(20 + n % 3)],
        }
        for n in range(count)
    ]


def write_states(pool: Path, rows: list[dict[str, Any]], spoil: dict[str, float] | None = None) -> list[dict[str, Any]]:
    """States in shards for `rows`, as an engine's plugin writes them; returns rows of states_index."""
    writer = ShardWriter(pool)
    for row in rows:
        generator = torch.Generator().manual_seed(sum(row["token_ids"]))
        states = torch.randn(len(row["token_ids"]), LAYERS, WIDTH, generator=generator)
        if spoil and row["sample_key"] in spoil:
            states = states * spoil[row["sample_key"]]
        writer.put(Sample(row["sample_key"], row["token_ids"], states, [1, 2, 3, 4]))
    writer.close()
    return list(read_acks(pool).values())


def vocabulary(rows: list[Row], size: int = 50, tokenizer_key: str = "tokenizer") -> DraftVocabulary:
    return draft_vocabulary(rows, tokenizer_key, VOCAB, size)


def small_trainer(
    folder: Path, rows: list[dict[str, Any]] | None = None, draft: int = 50, spoil: dict[str, float] | None = None,
    checkpoints: str = "checkpoints", **config: Any,
) -> Trainer:
    """A trainer over a small target and its states in `folder`, with checkpoints in `folder/<checkpoints>`."""
    target = folder / "target"
    if not target.exists():
        small_target(target)
    rows = responses(8) if rows is None else rows
    index = list(read_acks(folder / "pool").values()) if (folder / "pool").exists() else []
    index = index or write_states(folder / "pool", rows, spoil)
    joined = join_rows(index, rows)
    settings = DrafterConfig(
        **{"draft_vocab_size": draft, "unroll_steps": 3, "batch_size": 2, "epochs": 5, "checkpoint_every_steps": 5,
           "warmup_steps": 3} | config
    )
    head: TargetHead = read_target_head(target, torch.float32, CPU)
    words = vocabulary(joined, draft)
    drafter = start_drafter(drafter_config(target_config(target), draft), head, words, settings.seed)
    data = Dataset(folder / "pool", joined, settings.points, LAYERS)
    return Trainer(drafter, head, words, data, settings, folder / checkpoints, CPU)


def small_campaign(target: Path, **changes: Any) -> Campaign:
    """A campaign whose speculative arm is served by vLLM."""
    return parse_campaign({
        "name": "small", "target": {"model": str(target)},
        "arms": [
            {"name": "base", "engine": "vllm", "role": "base"},
            {"name": "states", "engine": "vllm", "role": "extraction"},
            {"name": "spec", "engine": "vllm", "role": "speculative", "speculative": {"extracted_on": "vllm"}},
        ],
        "workloads": [{"name": "heldout"}], "prompts": {"train_file": "a", "heldout_file": "b"}, **changes,
    })
