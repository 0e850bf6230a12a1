"""What the folders of a target and of a drafter say about themselves, read the same way for both engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tasks.engines.base import LaunchPlan
from tasks.errors import NotSupported


def model_config(plan: LaunchPlan) -> dict[str, Any]:
    """The target's config.json; raises NotSupported if the folder cannot be served."""
    folder = Path(plan.target.model)
    config = _read_config(folder, "target.model")
    shards = sorted(folder.glob("*.safetensors"))
    if not shards or any(shard.stat().st_size == 0 for shard in shards):
        raise NotSupported(f"target.model: {folder} has no weights (*.safetensors), or empty ones")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text()).get("weight_map", {}).values())
        missing = sorted(named - {shard.name for shard in shards})
        if missing:
            raise NotSupported(f"target.model: {folder} lacks {len(missing)} weight files, first {missing[0]}")
    if not config.get("architectures"):
        raise NotSupported(f"target.model: {folder}/config.json names no `architectures`, so no model class")
    return config


def _read_config(folder: Path, field: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise NotSupported(f"{field}: {folder} has no readable config.json; give a Hugging Face folder") from error
    if not isinstance(config, dict):
        raise NotSupported(f"{field}: {folder}/config.json is not a JSON object")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config (multimodal wrappers nest it)."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def num_layers(plan: LaunchPlan) -> int:
    """N of the target; raises NotSupported if its config does not say."""
    layers = text_config(_read_config(Path(plan.target.model), "target.model")).get("num_hidden_layers")
    if not isinstance(layers, int) or layers < 1:
        raise NotSupported(f"target.model: {plan.target.model}/config.json has no num_hidden_layers")
    return layers


def drafter_ids(plan: LaunchPlan) -> list[int] | None:
    """The ids in the drafter's config.json; None where it leaves them to vLLM's default."""
    if plan.drafter_dir is None:
        return None
    config = _read_config(plan.drafter_dir, "speculative.drafter")
    nested = config.get("eagle_config")
    ids = config.get("eagle_aux_hidden_state_layer_ids") or (
        nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else None
    )
    return [int(i) for i in ids] if ids else None
