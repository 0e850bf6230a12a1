"""A drafter as a Hugging Face folder that stock vLLM and SGLang load, and the check of such folders.

Servers load a drafter with a missing head or mapping without a word and then accept nothing, so what
is written is read back tensor by tensor, and any folder is checked before it is served.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from tasks.eagle3.data import DraftVocabulary
from tasks.eagle3.model import AUXILIARY, Drafter
from tasks.eagle3.target import target_config
from tasks.errors import ExportMismatch, InputError

WEIGHTS = "model.safetensors"
_LAYER = "midlayer."
_INHERITED = {"bos_token_id", "eos_token_id", "pad_token_id"}


def export_drafter(
    drafter: Drafter, vocabulary: DraftVocabulary, folder: Path, layer_ids: Mapping[str, Sequence[int]],
    points: Sequence[int], target: Path,
) -> None:
    """Write `folder/model.safetensors` and, per engine, `folder/serve/<engine>/` with its own config.json.

    `layer_ids[engine]` are the ids by which that engine taps `points`. The weights are one file, hard-linked.
    Raises ExportMismatch if what was written does not read back as it is in memory.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    if len(vocabulary.target_ids) < len(vocabulary.t2d):  # a full vocabulary needs no mapping
        tensors |= {"d2t": vocabulary.d2t.cpu(), "t2d": vocabulary.t2d.cpu()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    for engine, ids in layer_ids.items():
        place = folder / "serve" / engine
        place.mkdir(parents=True, exist_ok=True)
        config = _config_json(drafter.config, list(ids), list(points))
        (place / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        _link(folder / WEIGHTS, place / WEIGHTS)
        verify_drafter(place, target)
        _compare(tensors, load_file(place / WEIGHTS), place)


def _config_json(config: LlamaConfig, layer_ids: list[int], points: list[int]) -> dict[str, Any]:
    """Plain fields that readers old and new understand; the layer ids stand where each engine looks."""
    rope = dict(config.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    body = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "dtype": "float32", "torch_dtype": "float32",
        "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size, "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim, "vocab_size": config.vocab_size, "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": config.max_position_embeddings, "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "rope_parameters": rope, "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        "eagle_aux_hidden_state_layer_ids": layer_ids,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layer_ids, "use_aux_hidden_state": True},
        "hidden_states_points": points,  # ours: Hugging Face indices, whatever the engine calls them
    }
    special = {name: getattr(config, name) for name in sorted(_INHERITED) if getattr(config, name) is not None}
    return {key: value for key, value in (body | special).items() if value is not None}


def _link(weights: Path, place: Path) -> None:
    place.unlink(missing_ok=True)
    try:
        os.link(weights, place)
    except OSError:  # file systems without hard links
        place.symlink_to(os.path.relpath(weights, place.parent))


def _compare(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], folder: Path) -> None:
    for name, tensor in wanted.items():
        if not torch.equal(tensor, found[name]):
            raise ExportMismatch(f"{folder / WEIGHTS}: {name} reads back with other numbers than it was written with")


def verify_drafter(folder: Path, target: Path) -> dict[str, Any]:
    """Check a drafter folder, own or foreign, against the target it is to draft for; returns its config.

    Raises ExportMismatch that names the missing, unexpected or misshapen tensor and the shape it needs,
    and InputError if the folder cannot be read at all.
    """
    config = read_config(folder)
    wanted_by = target_config(target)
    for field in ("hidden_size", "vocab_size"):
        theirs = config.get("target_hidden_size", config.get(field)) if field == "hidden_size" else config.get(field)
        if theirs != wanted_by.get(field):
            raise ExportMismatch(f"{folder}/config.json: {field} is {theirs}, the target has {wanted_by.get(field)}")
    shapes = stored_shapes(folder)
    wanted = expected_shapes(config)
    optional = _optional_shapes(config)
    for name, shape in wanted.items():
        if name not in shapes:
            raise ExportMismatch(f"{folder / WEIGHTS}: no tensor {name}, expected {name} {shape}")
    for name, shape in shapes.items():
        expected = wanted.get(name) or optional.get(name)
        if expected is None:
            raise ExportMismatch(f"{folder / WEIGHTS}: unexpected tensor {name} {shape}; this drafter has no such part")
        if expected != shape:
            raise ExportMismatch(f"{folder / WEIGHTS}: {name} is {shape}, expected {expected}")
    if "d2t" in wanted:
        _check_mapping(folder, config)
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; raises InputError if it is not an EAGLE-3 drafter of a known kind."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        names = str(config.get("architectures"))
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{folder}: no readable config.json ({error}); is this a drafter folder?") from error
    if "Eagle3" not in names or config.get("model_type") != "llama":
        raise InputError(f"{folder}/config.json: {names} ({config.get('model_type')}) is not a Llama EAGLE-3 drafter")
    return config


def stored_shapes(folder: Path) -> dict[str, list[int]]:
    """Tensor name -> shape from the file's header, with either spelling of the layer made one."""
    file = folder / WEIGHTS
    if not file.is_file():
        raise InputError(f"{file}: missing; drafters are read from one safetensors file, never from pickles")
    try:
        with safe_open(file, "pt") as tensors:
            return {spelling(name): list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{file}: cannot be read ({error})") from error


def spelling(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", _LAYER, 1)


def expected_shapes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """Every tensor that a drafter of this config must have."""
    try:
        width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        heads = config["num_attention_heads"]
    except KeyError as error:
        raise InputError(f"drafter config.json: no {error.args[0]}") from None
    draft = config.get("draft_vocab_size") or vocab
    fused = AUXILIARY * (config.get("target_hidden_size") or width)
    head_dim = config.get("head_dim") or width // heads
    query, key_value = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    attention, mlp = f"{_LAYER}self_attn.", f"{_LAYER}mlp."
    shapes = {
        "fc.weight": [width, fused], "norm.weight": [width], "lm_head.weight": [draft, width],
        f"{attention}q_proj.weight": [query, 2 * width], f"{attention}k_proj.weight": [key_value, 2 * width],
        f"{attention}v_proj.weight": [key_value, 2 * width], f"{attention}o_proj.weight": [width, query],
        f"{mlp}gate_proj.weight": [inner, width], f"{mlp}up_proj.weight": [inner, width],
        f"{mlp}down_proj.weight": [width, inner],
    }
    shapes |= {
        f"{_LAYER}{n}.weight": [width] for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    if draft != vocab:
        shapes["d2t"] = [draft]
    return shapes


def _optional_shapes(config: Mapping[str, Any]) -> dict[str, list[int]]:
    vocab, draft = config["vocab_size"], config.get("draft_vocab_size") or config["vocab_size"]
    shapes = {"embed_tokens.weight": [vocab, config["hidden_size"]]}
    return shapes | ({"t2d": [vocab]} if draft != vocab else {})


def _check_mapping(folder: Path, config: Mapping[str, Any]) -> None:
    stored = {spelling(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    d2t = stored["d2t"]
    if d2t.dtype != torch.int64:
        raise ExportMismatch(f"{folder / WEIGHTS}: d2t is {d2t.dtype}, expected int64 offsets")
    said = d2t + torch.arange(len(d2t))
    if not 0 <= int(said.min()) <= int(said.max()) < config["vocab_size"] or len(said.unique()) < len(said):
        raise ExportMismatch(
            f"{folder / WEIGHTS}: i + d2t[i] must be distinct target ids below {config['vocab_size']}, "
            f"got {len(said.unique())} distinct in {int(said.min())}..{int(said.max())}"
        )
    t2d = stored.get("t2d")
    if t2d is not None and not torch.equal(t2d.bool().nonzero()[:, 0], said.sort().values):
        raise ExportMismatch(f"{folder / WEIGHTS}: t2d marks other tokens than d2t maps to")


def load_drafter(folder: Path, target: Path) -> tuple[Drafter, Tensor, Tensor | None]:
    """The drafter of a checked folder in float32, the target id of each draft id, and its own embeddings if any."""
    body = verify_drafter(folder, target)
    for field in ("norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "attention_bias"):
        if body.get(field) or (body.get("eagle_config") or {}).get(field):
            raise InputError(f"{folder}/config.json: {field} is set, a variant that replay cannot compute")
    stored = {spelling(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    draft = body.get("draft_vocab_size") or body["vocab_size"]
    d2t = stored.pop("d2t", torch.zeros(draft, dtype=torch.int64))
    embeddings = stored.pop("embed_tokens.weight", None)
    weights = {name: tensor.float() for name, tensor in stored.items() if name != "t2d"}
    drafter = Drafter(LlamaConfig(**{**body, "draft_vocab_size": draft}))
    drafter.load_state_dict(weights)
    return drafter.eval(), d2t + torch.arange(draft), None if embeddings is None else embeddings.float()
