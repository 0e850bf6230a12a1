"""Campaign files: YAML or plain data with `a.b=c` overrides, checked, every mistake as one line."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tasks.config import Campaign
from tasks.errors import ConfigError


def load_campaign(path: Path, overrides: list[str] | None = None) -> Campaign:
    """Campaign from a YAML file, with `a.b=c` overrides (list items by index or by name: `arms.base.tuning...`).

    Relative paths in `target.model`, `prompts` and drafter folders are taken from the file's folder.
    Raises ConfigError with one line that starts with the path of the wrong field.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the campaign file ({error})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a campaign file is a mapping of fields, got {type(data).__name__}")
    for override in overrides or []:
        _apply(data, override)
    _resolve_paths(data, path.parent)
    return parse_campaign(data)


def parse_campaign(data: dict[str, Any], overrides: list[str] | None = None) -> Campaign:
    """Campaign from plain data, with `a.b=c` overrides; raises ConfigError that names every wrong field."""
    if overrides:
        data = deepcopy(data)
        for override in overrides:
            _apply(data, override)
    try:
        return Campaign.model_validate(data)
    except ValidationError as error:
        raise ConfigError("; ".join(_one_line(e) for e in error.errors())) from None


def _one_line(error: Any) -> str:
    path = ".".join(str(p) for p in error["loc"]) or "campaign"
    message = error["msg"].removeprefix("Value error, ")
    plain = not isinstance(error["input"], dict | list | tuple) and error["type"] != "missing"
    got = f" (got {error['input']!r})" if plain else ""
    return f"{path}: {message}{got}"


def _apply(data: Any, override: str) -> None:
    if not re.match(r"[^=\s]+=", override):
        raise ConfigError(f"--set {override}: write it as path=value, for example drafter.epochs=4")
    dotted, _, text = override.partition("=")
    *parents, last = dotted.split(".")
    here = data
    for step in parents:
        here = _child(here, step, dotted)
    value = yaml.safe_load(text)
    if isinstance(here, list):
        here[_index(here, last, dotted)] = value
    elif isinstance(here, dict):
        here[last] = value
    else:
        raise ConfigError(f"{dotted}: {last} is below a plain value")


def _child(here: Any, step: str, dotted: str) -> Any:
    if isinstance(here, list):
        return here[_index(here, step, dotted)]
    if isinstance(here, dict):
        return here.setdefault(step, {})
    raise ConfigError(f"{dotted}: {step} is below a plain value")


def _index(items: list[Any], step: str, dotted: str) -> int:
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    if step in names:
        return names.index(step)
    if step.isdigit() and int(step) < len(items):
        return int(step)
    raise ConfigError(f"{dotted}: no item {step}; there are {', '.join(str(n) for n in names)}")


def _resolve_paths(data: dict[str, Any], folder: Path) -> None:
    target, prompts = data.get("target"), data.get("prompts")
    places: list[tuple[Any, str]] = [(target, "model"), (prompts, "train_file"), (prompts, "heldout_file")]
    arms = [arm for arm in data.get("arms") or [] if isinstance(arm, dict)]
    places += [(arm.get("speculative"), "drafter") for arm in arms]
    for holder, field in places:
        value = holder.get(field) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and isinstance(value, str) and value != "own" and not Path(value).is_absolute():
            holder[field] = str((folder / value).resolve())
