"""Forward pass of a small Llama in numpy: what the stub engine computes its answers and states with.

Written from the paper's equations and independent of transformers, so that comparing the two proves
something. float32 only, default rotary embedding only; meant for models of a few million parameters.
RMSNorm, rotary embedding, grouped-query attention, SwiGLU: https://arxiv.org/abs/2302.13971
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]


@dataclass
class Sequence:
    """One sequence under way: its tokens and, per layer, rotated keys and values [heads, tokens, head width]."""

    token_ids: list[int] = field(default_factory=list)
    keys: list[Array] = field(default_factory=list)
    values: list[Array] = field(default_factory=list)


def read_safetensors(file: Path) -> dict[str, Array]:
    """All tensors of a file as float32; numpy has no bfloat16, which is the upper half of a float32.

    Format: https://github.com/huggingface/safetensors#format
    """
    raw = file.read_bytes()
    data_start = 8 + int.from_bytes(raw[:8], "little")
    header: dict[str, Any] = json.loads(raw[8:data_start])
    tensors: dict[str, Array] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        payload = raw[data_start + begin : data_start + end]
        match entry["dtype"]:
            case "F32" | "F16" as kind:
                flat = np.frombuffer(payload, np.float32 if kind == "F32" else np.float16).astype(np.float32)
            case "BF16":
                flat = (np.frombuffer(payload, np.uint16).astype(np.uint32) << 16).view(np.float32)
            case other:
                raise ValueError(f"{file}: {name} is {other}; the stub engine reads F32, F16 and BF16")
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


class TinyLlama:
    """A Llama whose weights fit in memory many times over."""

    def __init__(self, folder: Path) -> None:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if config.get("model_type") != "llama" or rope.get("rope_type", "default") != "default":
            raise ValueError(f"{folder}: the stub engine computes plain Llama models with the default rotary embedding")
        self.weights: dict[str, Array] = {}
        for file in sorted(folder.glob("*.safetensors")):
            self.weights |= read_safetensors(file)
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config.get("num_key_value_heads") or self.heads
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps: float = config["rms_norm_eps"]
        self.vocab_size: int = config["vocab_size"]
        ends = config.get("eos_token_id")
        self.end_ids: set[int] = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
        self.frequencies = theta ** -(np.arange(0, self.head_dim, 2) / self.head_dim)  # [head width / 2]

    def forward(self, sequence: Sequence, new_ids: list[int]) -> tuple[list[Array], Array]:
        """Append `new_ids`; returns their hidden_states 0..N, each [new, width], and logits [new, vocabulary].

        hidden_states[N] is before the final norm.
        """
        start = len(sequence.token_ids)
        positions = np.arange(start, start + len(new_ids))
        hidden = self.weights["model.embed_tokens.weight"][new_ids]
        states = [hidden]
        for layer in range(self.layers):
            before = self._norm(hidden, f"model.layers.{layer}.input_layernorm")
            hidden = hidden + self._attention(layer, before, sequence, positions)
            hidden = hidden + self._mlp(layer, self._norm(hidden, f"model.layers.{layer}.post_attention_layernorm"))
            states.append(hidden)
        sequence.token_ids.extend(new_ids)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return states, self._norm(hidden, "model.norm") @ head.T

    def _norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self.eps))
        result: Array = x / scale * self.weights[f"{name}.weight"]
        return result

    def _mlp(self, layer: int, x: Array) -> Array:
        gate, up, down = (self.weights[f"model.layers.{layer}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        gated = x @ gate.T
        result: Array = (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T
        return result

    def _attention(self, layer: int, x: Array, sequence: Sequence, positions: npt.NDArray[np.int64]) -> Array:
        q, k, v, o = (self.weights[f"model.layers.{layer}.self_attn.{n}_proj.weight"] for n in "qkvo")
        queries = self._rotate(self._split(x @ q.T, self.heads), positions)
        keys, values = self._rotate(self._split(x @ k.T, self.kv_heads), positions), self._split(x @ v.T, self.kv_heads)
        if layer < len(sequence.keys):
            keys = np.concatenate([sequence.keys[layer], keys], axis=1)
            values = np.concatenate([sequence.values[layer], values], axis=1)
            sequence.keys[layer], sequence.values[layer] = keys, values
        else:
            sequence.keys.append(keys)
            sequence.values.append(values)
        group = self.heads // self.kv_heads
        keys, values = np.repeat(keys, group, axis=0), np.repeat(values, group, axis=0)
        scores = queries @ keys.transpose(0, 2, 1) / np.float32(np.sqrt(self.head_dim))  # [heads, new, all]
        scores[:, np.arange(keys.shape[1])[None, :] > positions[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (weights / weights.sum(axis=-1, keepdims=True)) @ values
        result: Array = mixed.transpose(1, 0, 2).reshape(len(positions), -1) @ o.T
        return result

    def _split(self, x: Array, heads: int) -> Array:
        return x.reshape(len(x), heads, self.head_dim).transpose(1, 0, 2)

    def _rotate(self, x: Array, positions: npt.NDArray[np.int64]) -> Array:
        angles = positions[:, None] * self.frequencies[None, :]
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        low, high = np.split(x, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
