"""What the demo and its checks rely on in the tiny target that ships with the project."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file

from tasks.load.prompts import read_prompts, render
from tasks.reference import layer_states

RUN = 5  # words


def user_turns(file: Path) -> list[str]:
    return [json.loads(line)["messages"][0]["content"] for line in file.read_text().splitlines()]


def runs(text: str) -> set[tuple[str, ...]]:
    words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    return {tuple(words[i : i + RUN]) for i in range(max(1, len(words) - RUN + 1))}


def test_held_out_prompts_share_no_five_words_in_a_row_with_training_prompts(tiny_model: Path) -> None:
    held_out, training = (user_turns(tiny_model.parent / f"prompts-{name}.jsonl") for name in ("heldout", "train"))
    assert len(set(held_out)) >= 48 and len(set(training)) >= 400
    assert not set().union(*map(runs, held_out)) & set().union(*map(runs, training))


def test_weights_are_small_and_the_same_numbers_in_bfloat16_and_float32(tiny_model: Path) -> None:
    assert sum(file.stat().st_size for file in tiny_model.iterdir()) <= 10 << 20
    assert {tensor.dtype for tensor in load_file(tiny_model / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tiny_model / "config.json").read_text())["dtype"] == "float32"


def test_neighbouring_layers_differ_enough_to_be_told_apart(tiny_model: Path) -> None:
    prompts = render(read_prompts(tiny_model.parent / "prompts-train.jsonl", 9), tiny_model, 256)
    for states in layer_states(tiny_model, [prompt.token_ids for prompt in prompts], range(5)):
        for low, high in pairwise(states.unbind(1)):
            assert (high - low).norm() / torch.maximum(high.norm(), low.norm()) >= 0.25
