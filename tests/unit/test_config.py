"""Campaign files: every mistake is one clear line that names the path of the field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.campaign_file import load_campaign, parse_campaign
from tasks.config import Campaign, Role
from tasks.errors import ConfigError


def valid() -> dict[str, Any]:
    return {
        "name": "c", "target": {"model": "m"}, "workloads": [{"name": "w"}],
        "prompts": {"train_file": "t.jsonl", "heldout_file": "h.jsonl"},
        "arms": [
            {"name": "base", "engine": "vllm", "role": "base"},
            {"name": "take", "engine": "vllm", "role": "extraction"},
            {"name": "spec", "engine": "vllm", "role": "speculative", "speculative": {}},
        ],
    }


def load(tmp_path: Path, data: Any, *overrides: str) -> Campaign:
    path = tmp_path / "c.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return load_campaign(path, list(overrides))


def test_overrides_reach_lists_by_name_and_by_index(tmp_path: Path) -> None:
    overrides = ("arms.spec.speculative.num_speculative_tokens=5", "arms.0.tuning.max_running_requests=7",
                 "workloads.w.concurrencies=[1, 2]", "drafter.epochs=3")
    loaded = load(tmp_path, valid(), *overrides)
    assert loaded.arms[2].speculative.num_speculative_tokens == 5  # type: ignore[union-attr]
    assert (loaded.arms[0].tuning.max_running_requests, loaded.workloads[0].concurrencies) == (7, (1, 2))
    assert loaded.drafter.epochs == 3


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        ("base", None, "arms: base is alone with side_by_side 'x': give it to a second arm too"),
        ("base", "spec", "side_by_side 'x' names base, spec; only base arms, or only speculative arms, take turns"),
        ("take", "take-2", "side_by_side 'x' names take, take-2; only base arms, or only speculative"),
    ],
)
def test_arms_that_cannot_take_turns_are_refused(tmp_path: Path, first: str, second: str | None, line: str) -> None:
    data = valid()
    data["arms"].append(data["arms"][1] | {"name": "take-2"})
    for arm in data["arms"]:
        if arm["name"] in (first, second):
            arm["side_by_side"] = "x"
    with pytest.raises(ConfigError, match=re.escape(line)):
        load(tmp_path, data)


def test_one_port_is_not_given_to_two_servers_that_are_up_together(tmp_path: Path) -> None:
    data = valid()
    data["arms"] = [data["arms"][0] | {"name": name, "side_by_side": "x"} for name in ("a", "b")]
    assert load(tmp_path, data).arms_together(Role.base) == [list(load(tmp_path, data).arms)]
    with pytest.raises(ConfigError, match=r"machine\.port is one port, and a, b are up together"):
        load(tmp_path, data, "machine.port=30000")


def test_paths_are_relative_to_the_campaign_file(tmp_path: Path) -> None:
    loaded = load(tmp_path, valid())
    assert loaded.target.model == str(tmp_path / "m")
    assert loaded.prompts.train_file == str(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("drafter.epoch=3", "drafter.epoch: no such field; did you mean 'epochs'?"),
        ("draftr.epochs=3", "draftr: no such field; did you mean 'drafter'?"),
        ("arms.spec.speculative.num_tokens=3", "num_tokens: no such field; did you mean 'num_speculative_tokens'?"),
        ("target.zzz=3", "target.zzz: no such field; there are dtype, max_model_len, model, name, shape, trust_remote"),
        ("drafter.epochs=many", "drafter.epochs: Input should be a valid integer"),
        ("drafter.points=[1, 1, 2]", "drafter.points: needs three distinct"),
        ("arms.nobody.name=x", "arms.nobody.name: no item nobody; there are base, take, spec"),
        ("drafter.epochs", "--set drafter.epochs: write it as path=value"),
        ("arms.take.tuning.prefix_cache=true", "tuning.prefix_cache must be false for extraction"),
        ("arms.base.fault=launch", "`fault` is a setting of the stub engine only"),
        ("arms.spec.engine=sglang", "set speculative.declared_experiment to true"),
        ("arms.spec.name=base", "name used twice: base"),
        ("arms.take.role=base", "spec wants a drafter from vllm, no arm extracts there"),
        ("target.dtype=int3", "target.dtype: Input should be 'float32'"),
        ("drafter.points=[1,2", "--set drafter.points=[1,2: not valid YAML: line 1, column 5: while parsing"),
        ("name=2024-13-45", "--set name=2024-13-45: not valid YAML: month must be in 1..12"),
        ("drafter={epochs: 1, epochs: 2}", "epochs is given twice, on lines 1 and 1; keep one"),
        ("arms.².name=x", "arms.².name: no item ²; there are base, take, spec"),
        ("arms=5", "arms: should be a list, such as [1, 2] (got 5)"),
        ("drafter=5", "drafter: should be a mapping of fields (got 5)"),
        ("workloads.0.concurrencies=4", "workloads.0.concurrencies: should be a list, such as [1, 2] (got 4)"),
        ("workloads.0.concurrencies=[0]", "workloads.0.concurrencies.0: Input should be greater than or equal to 1"),
        ("workloads.0.concurrencies=[]", "workloads.0.concurrencies: needs at least 1 item"),
        ("workloads.0.concurrencies=[1, 2, 1]", "workloads.0.concurrencies: listed more than once: 1"),
        ("machine.gpus=[0, 0]", "machine.gpus: listed more than once: 0"),
        ("machine.gpus=[-1]", "machine.gpus.0: Input should be greater than or equal to 0"),
        ("arms.base.tuning.variables=[{name: A, value: x}, {name: A, value: y}]", "variables: listed more than once"),
        ("machine.environments=[{name: e, python: x}, {name: e, python: y}]", "environments: listed more than once: e"),
        ("name=My Run", "name: use 1 to 40 lower-case letters, digits and hyphens, with a letter or digit first (got"),
        ("arms.base.tuning.variables=[{name: a, value: x}]", "name: use upper-case letters, digits and underscores"),
    ],
)
def test_a_wrong_override_is_one_line_with_its_path(tmp_path: Path, override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, valid(), override)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a list", "a: [unclosed", "42"])
def test_a_file_that_is_no_campaign_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert "c.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("again", "line"),
    [
        ("drafter: {epochs: 9}\n", "c.yaml: drafter is given twice, on lines 1 and 4; keep one"),
        ("target:\n  model: a\n  model: b\n", "c.yaml: target.model is given twice, on lines 5 and 6; keep one"),
        ("arms:\n- {name: a}\n- {name: b,\n   name: c}\n", "arms.1.name is given twice, on lines 6 and 7; keep one"),
    ],
)
def test_a_key_that_is_given_twice_is_refused_with_its_lines(tmp_path: Path, again: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "drafter:\n  epochs: 2\n  batch_size: 3\n" + again)
    assert str(caught.value).endswith(line)


def test_aliases_and_merges_are_no_repeated_keys(tmp_path: Path) -> None:
    text = yaml.safe_dump({k: v for k, v in valid().items() if k not in ("workloads", "drafter")})
    text += "workloads:\n- &one {name: w, requests: 3}\n- &two {<<: *one, name: x}\n"
    text += "- {<<: *two, name: y, requests: 4}\n"
    assert [(w.name, w.requests) for w in load(tmp_path, text).workloads] == [("w", 3), ("x", 3), ("y", 4)]


def test_a_file_that_is_not_yaml_names_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"c\.yaml: not valid YAML: line 2, column 3: mapping values are not"):
        load(tmp_path, "a: b\n c: d\n")


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the campaign file"):
        load_campaign(tmp_path / "absent.yaml")


def test_the_key_changes_with_any_setting_and_not_with_key_order() -> None:
    one, two = valid(), dict(reversed(valid().items()))
    assert parse_campaign(one).key == parse_campaign(two).key
    assert parse_campaign(one | {"strict": False}).key != parse_campaign(one).key


def test_every_field_has_a_description_for_the_form() -> None:
    schema = Campaign.model_json_schema()
    models = [schema, *schema["$defs"].values()]
    bare = [
        f"{model['title']}.{name}"
        for model in models
        for name, field in model.get("properties", {}).items()
        if "description" not in field
    ]
    assert bare == []
