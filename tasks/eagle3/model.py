"""The EAGLE-3 drafter in plain torch, named as stock vLLM and SGLang name its tensors.

B = samples, T = tokens, D = width of target and drafter, H / G = query / key-value heads, K = head
width, V = draft vocabulary.

At position i the drafter sees the fused auxiliary states of the target at i and the embedding of token
i + 1, and predicts token i + 2. While speculating, its own output takes the place of the fused state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig

from tasks.errors import ConfigError, InputError

AUXILIARY = 3  # fused points
ROPE_COPIED = {"default", "linear", "llama3"}  # the same in vLLM, SGLang and transformers


def default_points(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high hidden_states index for a target of `num_layers` decoder layers.

    (2, n // 2, n - 3) where these are three; shallow targets get an even spread. Raises ConfigError
    when there are no three distinct points.
    """
    n = num_layers
    if n >= 7:
        return 2, n // 2, n - 3
    if n >= 4:
        return 1, n // 2, n - 1
    if n >= 2:
        return n - 2, n - 1, n
    raise ConfigError(f"drafter.points: a target of {n} layer(s) has no three distinct points to fuse")


def check_points(points: tuple[int, ...], num_layers: int) -> None:
    """Raises ConfigError unless `points` are three distinct hidden_states indices of such a target."""
    if len(set(points)) != AUXILIARY or min(points) < 0 or max(points) > num_layers:
        fits = f"; {list(default_points(num_layers))} fits" if num_layers >= 2 else ""
        raise ConfigError(
            f"drafter.points: {list(points)} are not three distinct indices in 0..{num_layers}, "
            f"which is what a target of {num_layers} layers has{fits}"
        )


def drafter_config(target: dict[str, Any], draft_vocab_size: int) -> LlamaConfig:
    """Configuration of a drafter for a target, from the target's (text) config.json.

    Width, vocabulary and norm are the target's by necessity, heads and rope by default; a target with
    latent attention or a rope that engines disagree about gives its rope_theta only.
    """
    try:
        width, vocab = int(target["hidden_size"]), int(target["vocab_size"])
    except KeyError as error:
        raise InputError(f"target config.json: no {error.args[0]}; is this a Llama-like model?") from None
    if not 2 <= draft_vocab_size <= vocab:
        raise ConfigError(f"drafter.draft_vocab_size: {draft_vocab_size} is not in 2..{vocab}, the target's vocabulary")
    heads = int(target.get("num_attention_heads", max(1, width // 128)))
    key_value_heads = int(target.get("num_key_value_heads") or heads)
    head_dim = int(target.get("head_dim") or width // heads)
    if "kv_lora_rank" in target:  # latent attention: its head sizes mean something else
        head_dim = math.gcd(width, 128)
        heads = key_value_heads = width // head_dim
    rope = dict(target.get("rope_parameters") or target.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or target.get("rope_theta") or 10_000.0)
    if rope.get("rope_type", rope.get("type", "default")) not in ROPE_COPIED:
        rope = {}
    rope = {"rope_type": "default", **{k: v for k, v in rope.items() if k != "type"}, "rope_theta": theta}
    return LlamaConfig(
        architectures=["LlamaForCausalLMEagle3"], hidden_size=width, vocab_size=vocab, num_hidden_layers=1,
        draft_vocab_size=draft_vocab_size, num_attention_heads=heads, num_key_value_heads=key_value_heads,
        head_dim=head_dim, intermediate_size=int(target.get("intermediate_size") or 4 * width),
        max_position_embeddings=int(target.get("max_position_embeddings") or 4096),
        rms_norm_eps=float(target.get("rms_norm_eps", 1e-6)), rope_parameters=rope, hidden_act="silu",
        bos_token_id=target.get("bos_token_id"), eos_token_id=target.get("eos_token_id"),
        pad_token_id=target.get("pad_token_id"), tie_word_embeddings=False, attention_bias=False, mlp_bias=False,
    )


class Norm(nn.Module):
    """RMS norm over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    return layer


class Attention(nn.Module):
    """Projections of the attention; what attends to what is the unroll's business."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )
        self.q_proj = _linear(2 * config.hidden_size, self.heads * self.head_dim)
        self.k_proj = _linear(2 * config.hidden_size, self.groups * self.head_dim)
        self.v_proj = _linear(2 * config.hidden_size, self.groups * self.head_dim)
        self.o_proj = _linear(self.heads * self.head_dim, config.hidden_size)

    def queries_keys_values(self, x_BTE: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H, T, K] each; key-value heads are repeated for their group of query heads."""
        q, k, v = (self._heads(p(x_BTE)) for p in (self.q_proj, self.k_proj, self.v_proj))
        repeat = self.heads // self.groups
        k, v = _rotate(k, cos, sin).repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        return _rotate(q, cos, sin), k, v

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-right, left], dim=-1) * sin.to(x.dtype)


class Mlp(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """One decoder layer whose attention reads [normed embedding, normed state]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = Attention(config), Mlp(config)
        self.input_layernorm, self.hidden_norm = Norm(width, eps), Norm(width, eps)
        self.post_attention_layernorm = Norm(width, eps)


class Drafter(nn.Module):
    """The EAGLE-3 drafter; `state_dict` names are those of an exported checkpoint.

    The target's embeddings are passed in: they are frozen and not part of the checkpoint.
    """

    def __init__(self, config: LlamaConfig) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # a second to import

        super().__init__()
        self.config = config
        self.fc = _linear(AUXILIARY * config.hidden_size, config.hidden_size)
        self.midlayer = Layer(config)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = _linear(config.hidden_size, config.draft_vocab_size)
        self.rotary = LlamaRotaryEmbedding(config)  # buffers that are computed, not stored

    def unroll(
        self, auxiliary_BTA: Tensor, steps: int, embed_next: Callable[[int, Tensor | None], Tensor]
    ) -> Iterator[Tensor]:
        """Logits [B, T, V] of each speculative step, for a draft that starts at every position at once.

        `auxiliary_BTA` are the fused points side by side (A = 3 D). `embed_next(step, logits)` gives the
        embeddings [B, T, D] of the token that follows each position at this step; `logits` are those of
        the step before (None at first). In step s a position attends to the true prefix up to its start
        and to its own s speculative predecessors, as an engine's key-value cache has it.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        hidden_BTD = self.fc(auxiliary_BTA)
        tokens = hidden_BTD.shape[1]
        start = torch.arange(tokens, device=hidden_BTD.device)
        future_TT = start[None, :] > start[:, None]
        scale = attention.head_dim**-0.5
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits: Tensor | None = None
        for step in range(steps):
            embedded_BTD = embed_next(step, logits)
            x_BTE = torch.cat([layer.input_layernorm(embedded_BTD), layer.hidden_norm(hidden_BTD)], dim=-1)
            cos, sin = self.rotary(hidden_BTD, (start + step)[None])
            q, k, v = attention.queries_keys_values(x_BTE, cos[:, None], sin[:, None])
            keys.append(k)
            values.append(v)
            prefix_BHTT = (q @ keys[0].transpose(-1, -2)).masked_fill(future_TT, -math.inf)
            own_BHTS = [(q * own).sum(-1, keepdim=True) for own in keys[1:]]
            weights = (torch.cat([prefix_BHTT, *own_BHTS], dim=-1) * scale).softmax(-1, dtype=torch.float32).to(q.dtype)
            mixed = weights[..., :tokens] @ values[0]
            for number, own in enumerate(values[1:]):
                mixed = mixed + weights[..., tokens + number, None] * own
            hidden_BTD = hidden_BTD + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            hidden_BTD = hidden_BTD + layer.mlp(layer.post_attention_layernorm(hidden_BTD))
            logits = self.lm_head(self.norm(hidden_BTD))
            yield logits
