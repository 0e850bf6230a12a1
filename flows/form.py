"""What the Prefect form sends and shows: a named campaign file, or every field of a campaign.

Prefect derives a form from the flow's signature. Three of its shapes mislead somebody who never saw
the YAML, so the deployments carry the schema made here: an optional value becomes its plain field
(left empty = not set) instead of a choice "string or None", nulls leave the defaults (they would be
refused), and unknown fields are refused when a run is created, not when it starts. Optional groups
and switches stay a choice with "None": both UIs would submit an untouched one as filled in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from prefect.utilities.callables import parameter_schema

from tasks.campaign_file import load_campaign, parse_campaign
from tasks.config import NAME, Campaign
from tasks.errors import ConfigError, InputError

CAMPAIGNS: Final = Path(__file__).resolve().parents[1] / "deployments" / "campaigns"
_UNITS: Final = {"s": "s", "ms": "ms", "gib": "GiB", "pct": "%"}


def named_campaigns() -> list[str]:
    """Names of the campaign files that ship with the project."""
    return sorted(path.stem for path in CAMPAIGNS.glob("*.yaml"))


def chosen_campaign(config: Campaign | Mapping[str, Any] | str, overrides: Sequence[str] = ()) -> Campaign:
    """The campaign that a run was asked for: a file's name, a path, or all of its fields.

    Raises ConfigError that starts with the path of the wrong field, and InputError for a file or
    folder that the campaign names and that is not there: before anything is locked or started.
    """
    if isinstance(config, Campaign) and not overrides:
        campaign = config
    elif isinstance(config, str):
        campaign = load_campaign(_file_of(config), list(overrides))
    else:
        given = config.model_dump(mode="json") if isinstance(config, Campaign) else dict(config)
        campaign = parse_campaign(given, list(overrides))
    _check_files(campaign)
    return campaign


def _file_of(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if not re.match(NAME, name) or name not in named_campaigns():
        known = ", ".join(named_campaigns())
        raise ConfigError(f"config: no campaign named {name!r}; there are {known}; or give the path of a .yaml file")
    return CAMPAIGNS / f"{name}.yaml"


def _check_files(campaign: Campaign) -> None:
    model = Path(campaign.target.model)
    if not (model / "config.json").is_file():
        raise InputError(f"target.model: no config.json in {model}; give a Hugging Face model folder on this machine")
    for field in ("train_file", "heldout_file"):
        path = Path(getattr(campaign.prompts, field))
        if not path.is_file():
            raise InputError(f"prompts.{field}: {path} is not a file on this machine")
    for arm in campaign.arms:
        drafter = arm.speculative.drafter if arm.speculative else "own"
        if drafter != "own" and not (Path(drafter) / "config.json").is_file():
            raise InputError(f"arms.{arm.name}.speculative.drafter: no config.json in {drafter}")


def run_name(parameters: Mapping[str, Any], started: str) -> str:
    """`target arms date`, or only the date if the parameters are wrong, which the run then says itself."""
    try:
        campaign = chosen_campaign(parameters["config"], parameters.get("overrides") or ())
    except (ConfigError, InputError, KeyError):
        return f"campaign with wrong parameters, {started}"
    return f"{campaign.target.name}: {', '.join(arm.name for arm in campaign.arms)} ({campaign.name}, {started})"


# the form ------------------------------------------------------------------------------------


def form_schema(flow_function: Any, parameters: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """JSON schema of a deployment's form; `parameters` gives or replaces what a signature cannot say.

    A parameter of `parameters` with the value `{"campaign": "file"}` becomes a choice of the campaign
    files, with `{"campaign": "fields"}` every field of a campaign, and with None it is not in the form.
    """
    schema: dict[str, Any] = parameter_schema(flow_function).model_dump()
    properties, definitions = schema["properties"], schema["definitions"]
    for name, change in parameters.items():
        if name not in properties:
            raise ConfigError(f"deployments: {name} is not a parameter of {flow_function.__name__}")
        if change is None:
            del properties[name]
            continue
        shape = {k: v for k, v in change.items() if k != "campaign"}
        position = {"position": properties[name]["position"]}
        if change.get("campaign") == "file":
            properties[name] = _file_choice() | position | shape
        elif change.get("campaign") == "fields":
            campaign = Campaign.model_json_schema(ref_template="#/definitions/{model}")
            definitions |= campaign.pop("$defs")
            definitions["Campaign"] = campaign
            properties[name] = {"$ref": "#/definitions/Campaign", "title": "Campaign"} | position | shape
            schema["required"] = sorted({*schema["required"], name})
        else:
            properties[name] |= shape
    properties |= _readable(properties)
    for definition in definitions.values():
        if "properties" in definition:
            definition["properties"] = _readable(definition["properties"])
    _use_only_what_is_referred_to(schema)
    return schema | {"additionalProperties": False}


def _file_choice() -> dict[str, Any]:
    named = {"type": "string", "title": "By name", "enum": named_campaigns()}
    path = {"type": "string", "title": "By path", "pattern": r"\.ya?ml$", "description": "Path on the worker's machine"}
    return {"title": "Campaign file", "anyOf": [named, path], "default": named_campaigns()[0]}


def _readable(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _readable_field(name, dict(field)) for name, field in properties.items()}


def _readable_field(name: str, field: dict[str, Any]) -> dict[str, Any]:
    options = [option for option in field.get("anyOf", ()) if option.get("type") != "null"]
    optional = len(options) < len(field.get("anyOf", ()))
    if optional and field.get("default", 0) is None:
        del field["default"]
    if optional and len(options) == 1:
        del field["anyOf"]
        if "$ref" in options[0] or options[0].get("type") == "boolean":
            switch = {"title": "On or off"} if options[0].get("type") == "boolean" else {}
            field["anyOf"] = [{"type": "null", "title": "Not set"}, options[0] | switch]
            field["default"] = None
        else:
            field = options[0] | field
    if "default" in field:
        field["default"] = _without_nulls(field["default"])
    default = field.get("default")
    if isinstance(default, str | int | float) and "anyOf" not in field:
        shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
        field["description"] = f"{field.get('description', '')} Default: {shown}.".strip()
    if field.get("title", name).lower().replace(" ", "_") == name.lower():
        field["title"] = _title(name)
    return field


def _title(name: str) -> str:
    *words, last = name.split("_")
    unit = _UNITS.get(last) if words else None
    text = " ".join(words if unit else [*words, last]).capitalize()
    return f"{text} ({unit})" if unit else text


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list | tuple) else value


def _use_only_what_is_referred_to(schema: dict[str, Any]) -> None:
    wanted: set[str] = set()
    waiting = [schema["properties"]]
    while waiting:
        found = set(re.findall(r"#/definitions/(\w+)", str(waiting.pop()))) - wanted
        wanted |= found
        waiting += [schema["definitions"][name] for name in found]
    schema["definitions"] = {k: v for k, v in schema["definitions"].items() if k in wanted}
