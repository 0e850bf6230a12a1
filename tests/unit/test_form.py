"""The Prefect form: what it shows, and what it accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.schema_tools.validation import validate

from flows.campaign import campaign
from flows.deploy import PREFECT_YAML, flow_of
from flows.form import chosen_campaign, form_schema, named_campaigns, run_name
from tasks.campaign_file import load_campaign
from tasks.errors import ConfigError, InputError

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "deployments" / "campaigns" / "stub.yaml"


def deployments() -> dict[str, dict[str, Any]]:
    return {d["name"]: d for d in yaml.safe_load(PREFECT_YAML.read_text())["deployments"]}


def form_of(name: str) -> dict[str, Any]:
    deployment = deployments()[name]
    return form_schema(flow_of(deployment["entrypoint"]).fn, deployment["form"])


@pytest.mark.parametrize("name", sorted(deployments()))
def test_every_field_of_every_form_has_a_title_and_a_description(name: str) -> None:
    form = form_of(name)
    groups = [form["properties"], *(d.get("properties", {}) for d in form["definitions"].values())]
    for fields in groups:
        for field, shape in fields.items():
            assert shape.get("description"), f"{field} has no description"
            assert shape.get("title") or "$ref" in shape, f"{field} has no title"


@pytest.mark.parametrize("name", sorted(deployments()))
def test_no_field_is_a_json_editor(name: str) -> None:
    """Prefect shows an object without declared fields, and a field without a type, as a JSON editor."""
    form = form_of(name)
    for definition in form["definitions"].values():
        assert definition["type"] != "object" or definition["properties"]
        for field, shape in definition.get("properties", {}).items():
            assert {"type", "$ref", "anyOf"} & shape.keys(), field
            assert shape.get("type") != "object", field


@pytest.mark.parametrize("name", sorted(deployments()))
def test_the_defaults_of_a_deployment_pass_its_own_form(name: str) -> None:
    assert validate(dict(deployments()[name].get("parameters", {})), form_of(name), ignore_required=True) == []


def test_every_shipped_campaign_can_be_written_in_the_form() -> None:
    form = form_of("campaign-from-fields")
    for file in named_campaigns():
        data = load_campaign(STUB.with_name(f"{file}.yaml")).model_dump(mode="json", exclude_none=True)
        assert validate({"config": data}, form, allow_none_with_default=True) == [], file


def test_an_optional_value_is_a_plain_field_and_an_optional_group_a_choice() -> None:
    arm = form_of("campaign-from-fields")["definitions"]["Arm"]["properties"]
    assert arm["environment"]["type"] == "string" and "default" not in arm["environment"]
    assert [o.get("title", o.get("$ref")) for o in arm["speculative"]["anyOf"]] == [
        "Not set", "#/definitions/Speculative"
    ]
    assert form_of("campaign-from-fields")["definitions"]["Machine"]["properties"]["ready_timeout_s"]["title"] == (
        "Ready timeout (s)"
    )


def test_unknown_parameters_are_refused_by_the_form() -> None:
    errors = validate({"config": "demo-cpu", "epochs": 3}, form_of("campaign"))
    assert "epochs" in errors[0].message


def test_a_form_for_a_parameter_that_the_flow_lacks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="speed is not a parameter of campaign"):
        form_schema(campaign.fn, {"speed": {"title": "Speed"}})


def test_a_campaign_is_chosen_by_name_by_path_or_by_its_fields() -> None:
    by_name = chosen_campaign("stub")
    assert by_name == chosen_campaign(str(STUB)) == chosen_campaign(by_name.model_dump(mode="json"))
    assert chosen_campaign("stub", ["drafter.epochs=7"]).drafter.epochs == 7
    assert chosen_campaign(by_name.model_dump(mode="json"), ["drafter.epochs=7"]).drafter.epochs == 7


@pytest.mark.parametrize("name", ["nothing", "../stub", "/etc/passwd", ""])
def test_a_name_that_is_no_campaign_is_one_line_that_lists_them(name: str) -> None:
    with pytest.raises(ConfigError, match=r"config: no campaign named .*; there are .*stub"):
        chosen_campaign(name)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("target.model=/nowhere", "target.model: no config.json in /nowhere"),
        ("prompts.train_file=/nowhere.jsonl", "prompts.train_file: /nowhere.jsonl is not a file"),
        ("arms.stub-spec.speculative.drafter=/nowhere", "arms.stub-spec.speculative.drafter: no config.json"),
    ],
)
def test_a_missing_file_is_told_before_anything_starts(override: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        chosen_campaign("stub", [override])


def test_a_run_is_named_by_target_arms_and_date_and_wrong_parameters_still_get_a_name() -> None:
    named = run_name({"config": "stub"}, "2026-01-02")
    assert named == "tiny-llama: stub-base, stub-extract, stub-spec (stub, 2026-01-02)"
    assert run_name({"config": "nothing"}, "2026-01-02") == "campaign with wrong parameters, 2026-01-02"
