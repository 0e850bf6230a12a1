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
from tasks.wording import in_words


def load_campaign(path: Path, overrides: list[str] | None = None) -> Campaign:
    """Campaign from a YAML file, with `a.b=c` overrides (list items by index or by name: `arms.base.tuning...`).

    Relative paths in `target.model`, `prompts` and drafter folders are taken from the file's folder.
    Raises ConfigError with one line that starts with the path of the wrong field.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the campaign file ({error})") from error
    data = _read_yaml(text, str(path))
    if not isinstance(data, dict):
        given = "an empty one" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{path}: a campaign file is a mapping of fields, this is {given}")
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
        raise ConfigError("; ".join(in_words(e, Campaign) for e in error.errors())) from None


def _read_yaml(text: str, where: str) -> Any:
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _refuse_repeated_keys(node, where, (), set())
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {_problem(error)}") from error
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # such as a date that does not exist
        raise ConfigError(f"{where}: not valid YAML: {error}") from error


def _problem(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    place = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
    return f"{place}: {', '.join(filter(None, (error.context, error.problem)))}"


def _refuse_repeated_keys(node: yaml.Node | None, where: str, path: tuple[str, ...], seen: set[int]) -> None:
    """YAML itself lets the second key replace the first without a word."""
    if id(node) in seen or not isinstance(node, yaml.MappingNode | yaml.SequenceNode):
        return
    seen.add(id(node))  # an alias may lead back here
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _refuse_repeated_keys(item, where, (*path, str(index)), seen)
        return
    firsts: dict[tuple[str, str], yaml.Node] = {}
    for key, value in node.value:
        name = (*path, str(key.value))
        first = firsts.get((key.tag, str(key.value)))
        if first is not None and not key.tag.endswith(":merge"):
            lines = f"lines {first.start_mark.line + 1} and {key.start_mark.line + 1}"
            raise ConfigError(f"{where}: {'.'.join(name)} is given twice, on {lines}; keep one")
        firsts[key.tag, str(key.value)] = key
        _refuse_repeated_keys(value, where, name, seen)


def _apply(data: Any, override: str) -> None:
    if not re.match(r"[^=\s]+=", override):
        raise ConfigError(f"--set {override}: write it as path=value, for example drafter.epochs=4")
    dotted, _, text = override.partition("=")
    *parents, last = dotted.split(".")
    here = data
    for step in parents:
        here = _child(here, step, dotted)
    value = _read_yaml(text, f"--set {override}")
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
    if step.isdecimal() and int(step) < len(items):
        return int(step)
    raise ConfigError(f"{dotted}: no item {step}; there are {', '.join(str(n) for n in names)}")


def _resolve_paths(data: dict[str, Any], folder: Path) -> None:
    target, prompts = data.get("target"), data.get("prompts")
    places: list[tuple[Any, str]] = [(target, "model"), (prompts, "train_file"), (prompts, "heldout_file")]
    arms = data.get("arms")
    places += [(a.get("speculative"), "drafter") for a in arms if isinstance(a, dict)] if isinstance(arms, list) else []
    for holder, field in places:
        value = holder.get(field) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and isinstance(value, str) and value != "own" and not Path(value).is_absolute():
            holder[field] = str((folder / value).resolve())
