"""What training needs of the target: embeddings, final norm and head, read from its safetensors.

The target itself is never instantiated, so its size does not matter. M = positions, D = width, V =
target vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tasks.errors import InputError, NotSupported

CHUNK = 4096  # positions whose logits over the whole vocabulary are in memory at once
_OTHER_HEADS = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def target_config(folder: Path) -> dict[str, Any]:
    """The target's config.json; for multimodal wrappers the nested text_config, which is what counts."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: no readable config.json ({error}); is this a model folder?") from error
    text = config.get("text_config")
    if isinstance(text, dict):
        tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
        config = {**text, "tie_word_embeddings": tied}
    return config


def model_class(folder: Path) -> str:
    """The architecture that config.json names: what decides how an engine numbers its layers."""
    try:
        return str(json.loads((folder / "config.json").read_text())["architectures"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise InputError(f"{folder}/config.json: names no architecture ({error}); is this a model folder?") from error


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file, by the index if there is one."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return {name: folder / Path(file).name for name, file in weight_map.items()}
        files: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                files.update(dict.fromkeys(tensors.keys(), file))
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise InputError(f"{folder}: cannot read its safetensors ({error})") from error
    if not files:
        raise InputError(f"{folder}: no *.safetensors in this model folder")
    return files


def read_tensor(files: dict[str, Path], name: str) -> Tensor:
    """One tensor; raises InputError that names the file which lacks it."""
    try:
        with safe_open(files[name], "pt") as tensors:
            result: Tensor = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{files[name]}: cannot read {name} ({error})") from error
    return result


@dataclass(frozen=True)
class TargetHead:
    """Frozen parts of the target on the training device."""

    embeddings_VD: Tensor
    norm_D: Tensor
    head_VD: Tensor
    eps: float

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of the tokens."""
        return F.embedding(token_ids, self.embeddings_VD)

    def logits(self, last_MD: Tensor) -> Tensor:
        """Logits in float32 from states after the last layer, before the final norm."""
        normed = F.rms_norm(last_MD.to(self.head_VD.dtype), self.norm_D.shape, self.norm_D, self.eps)
        return F.linear(normed, self.head_VD).float()

    def draft_scores(self, last_MD: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits over the draft vocabulary [M, draft], and the most likely token of the whole vocabulary [M]."""
        scores, best = [], []
        for chunk in torch.split(last_MD, CHUNK):
            full = self.logits(chunk)
            scores.append(full[:, target_ids])
            best.append(full.argmax(-1))
        return torch.cat(scores), torch.cat(best)

    def nll(self, last_MD: Tensor, next_ids_M: Tensor) -> float:
        """Mean negative log-likelihood of the following tokens, in nats."""
        return float(F.cross_entropy(self.logits(last_MD), next_ids_M))


def read_target_head(folder: Path, dtype: torch.dtype, device: torch.device) -> TargetHead:
    """Embeddings, final norm and head of a Llama-like target.

    Raises InputError when a part is missing and NotSupported when the head is computed differently.
    """
    config, files = target_config(folder), tensor_files(folder)
    if str(config.get("model_type", "")).startswith("gemma"):
        raise NotSupported(f"{folder}: gemma's final norm multiplies by 1 + weight, which is not supported")
    for field in _OTHER_HEADS:
        if config.get(field) not in (None, 1, 1.0):
            raise NotSupported(f"{folder}: config.json has {field}={config[field]}, a head that is not supported")
    # a multi-token prediction layer (DeepSeek) carries copies of its own below .layers.
    embedded = _only(
        folder, [n for n in files if n.endswith("embed_tokens.weight") and ".layers." not in n], "*embed_tokens.weight"
    )
    prefix = embedded.removesuffix("embed_tokens.weight")
    norm = _only(folder, [n for n in files if n == f"{prefix}norm.weight"], f"{prefix}norm.weight")
    heads = [n for n in files if n == "lm_head.weight" or n.endswith(".lm_head.weight")]
    head = embedded if not heads and config.get("tie_word_embeddings") else _only(folder, heads, "*lm_head.weight")

    def load(name: str) -> Tensor:
        tensor = read_tensor(files, name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise NotSupported(f"{folder}: {name} is quantised ({tensor.dtype}); embeddings and head must not be")
        return tensor.to(device, dtype)

    embeddings = load(embedded)
    return TargetHead(
        embeddings, load(norm), embeddings if head == embedded else load(head), float(config.get("rms_norm_eps", 1e-6))
    )


def _only(folder: Path, names: list[str], wanted: str) -> str:
    if len(names) != 1:
        raise InputError(f"{folder}: expected one tensor {wanted}, found {names or 'none'}; is it Llama-like?")
    return names[0]
