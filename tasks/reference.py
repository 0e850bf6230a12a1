"""The target's own forward in transformers: what captured states and served answers are compared with.

A target that does not fit into memory is streamed: one decoder layer at a time is read from the
safetensors files, dequantised, run over all samples and dropped. Both ways run the same code, so
they give the same bits. Points are Hugging Face `hidden_states` indices: 0 = embeddings, k = after k
decoder layers, N = after the last one, *before* the final norm (what transformers returns as
`hidden_states[-1]` is after it; see `after_norm`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from tasks.errors import InputError, NotSupported
from tasks.store.checkpoint import Checkpoint

# Names that a checkpoint gives to an architecture which transformers knows under another name.
_SAME_ARCHITECTURE = {"kimi_k2": "deepseek_v3"}
_LOCK = threading.RLock()
_DEVICE = [torch.device("cpu")]
_SPARE_BYTES = 4 << 30  # of a GPU that stay free beside a reference's weights


def compute_on(device: str) -> None:
    """Where targets that fit are computed from now on (`cpu`, `cuda:1`), still in full fp32; answers are on the CPU."""
    with _LOCK:
        _DEVICE[0] = torch.device(device)


def device() -> torch.device:
    """Where `compute_on` said."""
    return _DEVICE[0]


def release_gpu() -> None:
    """Give a GPU's memory back before a server takes its share; the next question loads the target again."""
    if device().type == "cuda":
        with _LOCK:
            _cached_target.cache_clear()
            torch.cuda.empty_cache()


def layer_states(
    model_dir: Path | str, token_ids_batch: Sequence[Sequence[int]], points: Sequence[int],
    dtype: torch.dtype = torch.float32, *, threads: int | None = None, streamed: bool | None = None,
) -> list[Tensor]:
    """States [tokens, points, width] of each token sequence, each run on its own (no padding).

    `streamed` None = only if the weights in `dtype` would take more than half of the free memory.
    Raises InputError for a folder that is not a model or a point outside 0..N, NotSupported for weights
    that cannot be read.
    """
    with _LOCK, torch.no_grad(), _threads(threads):
        target = _target(model_dir, dtype, streamed)
        outside = [p for p in points if not 0 <= p <= target.num_layers]
        if outside:
            raise InputError(f"{model_dir}: no hidden_states index {outside} in a model of {target.num_layers} layers")
        if not token_ids_batch or not all(token_ids_batch):
            raise InputError("token sequences: each needs at least one token")
        return target.states(token_ids_batch, list(points))


def after_norm(
    model_dir: Path | str, states_TD: Tensor, *, threads: int | None = None, streamed: bool | None = None
) -> Tensor:
    """The final norm of states at point N: what transformers calls `hidden_states[-1]`."""
    with _LOCK, torch.no_grad(), _threads(threads):
        return _target(model_dir, states_TD.dtype, streamed).norm(states_TD)


def logits(
    model_dir: Path | str, states_TD: Tensor, *, threads: int | None = None, streamed: bool | None = None
) -> Tensor:
    """Logits [tokens, vocabulary] in fp32 of states at point N, before the final norm."""
    with _LOCK, torch.no_grad(), _threads(threads):
        target = _target(model_dir, states_TD.dtype, streamed)
        states_TD = states_TD.to(target.device)
        return nn.functional.linear(target.body.norm(states_TD), target.head).float().cpu()


def token_nlls(
    model_dir: Path | str, token_ids: Sequence[int], prompt_tokens: int, *, states_TD: Tensor | None = None,
    threads: int | None = None, streamed: bool | None = None,
) -> Tensor:
    """Negative log-likelihood in nats of each token after the first `prompt_tokens`.

    `states_TD` = their known states at point N, which saves the forward.
    """
    if not 1 <= prompt_tokens < len(token_ids):
        raise InputError(f"prompt_tokens: {prompt_tokens} of {len(token_ids)} tokens leave no response to score")
    if states_TD is None:
        return response_nlls(model_dir, [(token_ids, prompt_tokens)], threads=threads, streamed=streamed)[0]
    scores_TV = logits(model_dir, states_TD[prompt_tokens - 1 : -1], threads=threads, streamed=streamed)
    chosen = torch.tensor(list(token_ids[prompt_tokens:]))
    nlls: Tensor = nn.functional.cross_entropy(scores_TV, chosen, reduction="none")
    return nlls


def nll_per_token(
    model_dir: Path | str, token_ids: Sequence[int], prompt_tokens: int, *, threads: int | None = None,
    streamed: bool | None = None,
) -> float:
    """Mean negative log-likelihood in nats per response token, at temperature 1 in fp32."""
    return float(token_nlls(model_dir, token_ids, prompt_tokens, threads=threads, streamed=streamed).mean())


def response_nlls(
    model_dir: Path | str, samples: Sequence[tuple[Sequence[int], int]], *, threads: int | None = None,
    streamed: bool | None = None,
) -> list[Tensor]:
    """`token_nlls` of several (token ids, prompt tokens), for the price of one pass over the weights."""
    points = [num_layers(model_dir)]
    batch = layer_states(model_dir, [ids for ids, _ in samples], points, threads=threads, streamed=streamed)
    return [
        token_nlls(model_dir, ids, prompt, states_TD=states[:, 0], threads=threads, streamed=streamed)
        for (ids, prompt), states in zip(samples, batch, strict=True)
    ]


def top2_margin(
    model_dir: Path | str, token_ids: Sequence[int], *, threads: int | None = None, streamed: bool | None = None
) -> float:
    """Log-probability margin of the two best next tokens after `token_ids`, in nats, in fp32."""
    last = num_layers(model_dir)
    states = layer_states(model_dir, [token_ids], [last], threads=threads, streamed=streamed)[0][-1:, 0]
    best, second = torch.topk(logits(model_dir, states, threads=threads, streamed=streamed)[0], 2).values.tolist()
    return float(best - second)


def token_errors(states_TPD: Tensor, expected_TPD: Tensor) -> Tensor:
    """Relative error |a - b| / |b| of each token at each point: [tokens, points], in fp32."""
    difference = (states_TPD.float() - expected_TPD.float()).norm(dim=-1)
    errors: Tensor = difference / expected_TPD.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return errors


def num_layers(model_dir: Path | str) -> int:
    """N: decoder layers of the (text part of the) target."""
    return int(text_config(model_dir).num_hidden_layers)


def text_config(model_dir: Path | str) -> Any:
    """transformers' config of the language model, also out of a multimodal wrapper's `text_config`."""
    from transformers import AutoConfig  # a second to import, which every flow would pay

    file = Path(model_dir) / "config.json"
    try:
        outer = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: not a model folder in Hugging Face format ({error})") from error
    inner = {key: value for key, value in outer.get("text_config", outer).items() if key != "quantization_config"}
    inner.setdefault("tie_word_embeddings", outer.get("tie_word_embeddings", False))
    model_type = inner.pop("model_type", "")
    try:
        return AutoConfig.for_model(_SAME_ARCHITECTURE.get(model_type, model_type), **inner)
    except ValueError as error:
        raise NotSupported(f"{file}: transformers knows no model_type {model_type!r}; update transformers") from error


class _Recorder(nn.Module):
    """Stands for a decoder layer, keeps the arguments of its call and hands the states through."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.call = (args, kwargs)
        return hidden


class _Target:
    """A target on the CPU or a GPU: embeddings, final norm and head resident, decoder layers resident or streamed."""

    def __init__(self, folder: Path, dtype: torch.dtype, streamed: bool) -> None:
        from transformers import AutoModelForCausalLM

        self.streamed, self.checkpoint = streamed, Checkpoint(folder)
        config = text_config(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
        self.body = model.model
        self.num_layers = len(self.body.layers)
        # The model's own forward computes masks and rotary angles per layer; we run the layers.
        self.layers, self.body.layers = self.body.layers, nn.ModuleList(_Recorder() for _ in self.body.layers)
        # Its frequencies are no weights: they are computed, so not on the meta device.
        self.body.rotary_emb = type(self.body.rotary_emb)(config=self.body.config)
        name = self.checkpoint.body
        self._load(self.body.embed_tokens, f"{name}embed_tokens.")
        self._load(self.body.norm, f"{name}norm.")
        head = self.checkpoint.head
        if head is None and not config.tie_word_embeddings:
            raise InputError(f"{folder}: no lm_head.weight in its safetensors, and its embeddings are not tied")
        self.head = self.checkpoint.read(head, model.lm_head.weight, set()) if head else self.body.embed_tokens.weight
        if not streamed:
            for number, layer in enumerate(self.layers):
                self._load(layer, f"{name}layers.{number}.")
        self.device = torch.device("cpu") if streamed else _device_for(self)
        if self.device.type != "cpu":  # streamed layers stay on the meta device
            self.body.to(self.device)
            self.layers.to(self.device)
            self.head = self.head.to(self.device)

    def _load(self, module: nn.Module, prefix: str) -> None:
        used: set[str] = set()
        like = module.state_dict()
        module.load_state_dict({n: self.checkpoint.read(prefix + n, t, used) for n, t in like.items()}, assign=True)
        left = self.checkpoint.names(prefix) - used
        if left:  # a bias that the model class does not know would change every state silently
            raise NotSupported(f"{self.checkpoint.folder}: transformers does not use {', '.join(sorted(left)[:3])}")
        unset = [n for n, t in [*module.named_parameters(), *module.named_buffers()] if t.is_meta]
        assert not unset, f"{prefix}: not loaded: {unset}"

    @contextmanager
    def _layer(self, number: int) -> Iterator[nn.Module]:
        layer = self.layers[number]
        if self.streamed:
            self._load(layer, f"{self.checkpoint.body}layers.{number}.")
        yield layer
        if self.streamed:
            layer.to("meta")

    def norm(self, states_TD: Tensor) -> Tensor:
        normed: Tensor = self.body.norm(states_TD.to(self.device))
        return normed.cpu()

    def states(self, token_ids_batch: Sequence[Sequence[int]], points: list[int]) -> list[Tensor]:
        inputs = [torch.tensor([list(ids)], device=self.device) for ids in token_ids_batch]
        hidden = [self.body.embed_tokens(ids_BT) for ids_BT in inputs]  # [1, tokens, width]
        calls = []
        for states_BTD in hidden:
            self.body(inputs_embeds=states_BTD, use_cache=False)
            calls.append([layer.call for layer in self.body.layers])
        kept = [{0: states_BTD[0].cpu()} for states_BTD in hidden]
        for number in range(max(points)):
            with self._layer(number) as layer:
                for index, states_BTD in enumerate(hidden):
                    args, kwargs = calls[index][number]
                    hidden[index] = layer(states_BTD, *args, **kwargs)
                    if number + 1 in points:
                        kept[index][number + 1] = hidden[index][0].cpu()
        return [torch.stack([states[point] for point in points], dim=1) for states in kept]


def _device_for(target: _Target) -> torch.device:
    """The chosen device if the weights fit into what is free there, beside a server that may be running."""
    device = _DEVICE[0]
    if device.type == "cuda":
        weights = [*target.body.parameters(), *target.layers.parameters(), target.head]
        needed = sum(p.numel() * p.element_size() for p in weights)
        if torch.cuda.mem_get_info(device)[0] < 2 * needed + _SPARE_BYTES:
            return torch.device("cpu")
    return device


def _target(model_dir: Path | str, dtype: torch.dtype, streamed: bool | None) -> _Target:
    folder = Path(model_dir).resolve()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder}: no *.safetensors in this model folder")
    stats = tuple((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in [*files, folder / "config.json"])
    return _cached_target(folder, stats, dtype, streamed, str(_DEVICE[0]))


@lru_cache(maxsize=2)
def _cached_target(
    folder: Path, stats: tuple[tuple[str, int, int], ...], dtype: torch.dtype, streamed: bool | None, _device: str
) -> _Target:
    if streamed is None:
        stored_bytes = sum(size for _, size, _ in stats)
        streamed = stored_bytes * _growth(folder, dtype) > psutil.virtual_memory().available / 2
    return _Target(folder, dtype, streamed)


def _growth(folder: Path, dtype: torch.dtype) -> float:
    """How much larger the weights are in `dtype` than as stored; quantised ones count as 4 bits."""
    raw = json.loads((folder / "config.json").read_text())
    inner = raw.get("text_config", raw)
    if "quantization_config" in inner or "quantization_config" in raw:
        return dtype.itemsize * 2.0
    stored = inner.get("dtype") or inner.get("torch_dtype") or raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    return dtype.itemsize / (4.0 if stored == "float32" else 2.0)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
