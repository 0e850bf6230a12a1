"""What is wrong with a campaign, in the words of a campaign file instead of pydantic's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel

from tasks.server_config import IN_WORDS


def in_words(error: Mapping[str, Any], root: type[BaseModel]) -> str:
    """One of pydantic's errors on `root` as `path.of.the.field: what is wrong (got value)`."""
    path = ".".join(str(step) for step in error["loc"]) or root.__name__.lower()
    kind, given = error["type"], error["input"]
    if kind == "extra_forbidden":
        return f"{path}: no such field; {_instead(error['loc'], root)}"
    plain = not isinstance(given, dict | list | tuple) and kind != "missing"
    return f"{path}: {_message(error)}" + (f" (got {given!r})" if plain else "")


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] == "tuple_type":
        return "should be a list, such as [1, 2]"
    if error["type"] in ("model_type", "model_attributes_type"):
        return "should be a mapping of fields"
    if error["type"] == "too_short":
        return f"needs at least {error['ctx']['min_length']} item(s)"
    if error["type"] == "string_pattern_mismatch":
        return IN_WORDS.get(error["ctx"]["pattern"], str(error["msg"]))
    return str(error["msg"]).removeprefix("Value error, ")


def _instead(path: Sequence[int | str], root: type[BaseModel]) -> str:
    known = sorted(_model_at(path[:-1], root).model_fields)
    near = get_close_matches(str(path[-1]), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"


def _model_at(path: Sequence[int | str], root: type[BaseModel]) -> type[BaseModel]:
    for step in path:
        if isinstance(step, str):
            root = _model_in(root.model_fields[step].annotation) or root
    return root


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that an annotation such as `tuple[Model, ...]` or `Model | None` is about."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_in(part))), None)
