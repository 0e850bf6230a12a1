"""The serving probe's comparison, on calls as a right and as a wrong server would make them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tasks.campaign_file import parse_campaign
from tasks.config import Campaign
from tasks.diagnosis.repairs import Setup, setup_of
from tasks.diagnosis.serving import compare
from tasks.eagle3.model import Drafter, drafter_config
from tasks.eagle3.target import read_target_head, target_config
from tasks.reference import layer_states
from tasks.store.served import Call, read_calls, write_call
from tasks.store.states import Sample, ShardWriter, read_acks

TEXT = [0, 4, 1114, 644, 691, 1257, 265, 1279, 276, 265, 1904, 5, 300, 301, 302]


@pytest.fixture(scope="module")
def setup(tiny_model: Path) -> Setup:
    torch.manual_seed(0)
    drafter = Drafter(drafter_config(target_config(tiny_model), 100)).eval()
    head = read_target_head(tiny_model, torch.float32, torch.device("cpu"))
    return setup_of(drafter, torch.arange(5, 105), head.embeddings_VD, (1, 2, 3), 4)


@pytest.fixture
def sample(tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    writer = ShardWriter(tmp_path)
    writer.put(Sample("s", TEXT, layer_states(tiny_model, [TEXT], [1, 2, 3, 4])[0], [1, 2, 3, 4]))
    writer.close()
    ack = read_acks(tmp_path)["s"]
    return {"pool": tmp_path, "place": {**ack, "points": [1, 2, 3, 4]}}


def campaign(model: Path) -> Campaign:
    return parse_campaign({
        "name": "small", "target": {"model": str(model)},
        "arms": [{"name": "base", "engine": "vllm", "role": "base"}], "workloads": [{"name": "chat"}],
        "prompts": {"train_file": "a", "heldout_file": "b"},
    })


def call(setup: Setup, model: Path, points: list[int], last: int = 11, shift: int = 0) -> Call:
    states = layer_states(model, [TEXT], points)[0].flatten(1)[: last + 1]
    right = layer_states(model, [TEXT], [1, 2, 3])[0].flatten(1)[: last + 1]
    embedded = nn.functional.embedding(torch.tensor(TEXT[1 : last + 2]), setup.embeddings_VD)[None]
    with torch.no_grad():
        logits = next(iter(setup.drafter.unroll(right[None], 1, lambda *_: embedded)))[0, -1]
    full = torch.full((setup.embeddings_VD.shape[0],), -torch.inf)
    full[setup.target_ids] = logits
    ids = TEXT[shift : last + 1 + shift]
    return Call(ids, list(range(last + 1)), states, TEXT[last + 1], [7, 8, 9], full)


def found(calls: list[Call], setup: Setup, model: Path, sample: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rows = compare([(c, TEXT, sample) for c in calls], setup, (1, 2, 3), campaign(model), "spec")
    return {row["check"].removeprefix("serving_"): row for row in rows}


def test_a_server_that_hands_on_the_trained_points_agrees(
    setup: Setup, tiny_model: Path, sample: dict[str, Any]
) -> None:
    rows = found([call(setup, tiny_model, [1, 2, 3])], setup, tiny_model, sample)
    assert all(row["passed"] for row in rows.values()), rows
    assert rows["state_rel_error"]["value"] < 1e-5 and rows["logit_rel_error"]["value"] < 1e-5


def test_points_one_layer_up_are_seen_while_serving(setup: Setup, tiny_model: Path, sample: dict[str, Any]) -> None:
    rows = found([call(setup, tiny_model, [2, 3, 4])], setup, tiny_model, sample)
    assert rows["state_rel_error"]["passed"] is False and rows["state_rel_error"]["value"] > 0.2


def test_tokens_at_other_positions_are_counted(setup: Setup, tiny_model: Path, sample: dict[str, Any]) -> None:
    rows = found([call(setup, tiny_model, [1, 2, 3], shift=1)], setup, tiny_model, sample)
    assert rows["token_mismatch"]["passed"] is False


def test_drafts_that_run_past_the_end_of_the_answer_are_no_strangers_but_far_positions_are(
    setup: Setup, tiny_model: Path, sample: dict[str, Any]
) -> None:
    whole = call(setup, tiny_model, [1, 2, 3], last=len(TEXT) - 2)
    rows, states = len(whole.positions), torch.cat([whole.states, whole.states[-1:]])
    past = replace(whole, positions=[*range(rows), len(TEXT)], token_ids=[*whole.token_ids, 9], states=states)
    assert found([past], setup, tiny_model, sample)["token_mismatch"]["value"] == 0
    far = replace(past, positions=[*range(rows), len(TEXT) + len(whole.drafts)])
    assert found([far], setup, tiny_model, sample)["token_mismatch"]["passed"] is False


def test_a_probe_that_recorded_nothing_is_null_and_says_so(
    setup: Setup, tiny_model: Path, sample: dict[str, Any]
) -> None:
    rows = found([], setup, tiny_model, sample)
    assert {row["passed"] for row in rows.values()} == {None}
    assert "recorded nothing" in rows["state_rel_error"]["detail"]


def test_a_probe_of_which_a_part_got_no_answer_keeps_what_came_and_says_so(
    setup: Setup, tiny_model: Path, sample: dict[str, Any]
) -> None:
    calls = [(call(setup, tiny_model, [1, 2, 3]), TEXT, sample)]
    rows = compare(calls, setup, (1, 2, 3), campaign(tiny_model), "spec", "; a probe got no answer (ReadTimeout)")
    assert all(row["passed"] for row in rows)
    assert all("1 drafter calls" in r["detail"] for r in rows if r["check"] == "serving_state_rel_error")
    assert all(row["detail"].endswith("a probe got no answer (ReadTimeout)") for row in rows)


def test_calls_read_back_as_they_were_written(setup: Setup, tiny_model: Path, tmp_path: Path) -> None:
    one = call(setup, tiny_model, [1, 2, 3])
    write_call(tmp_path, 1, one)
    [back] = read_calls(tmp_path)
    assert back.token_ids == one.token_ids and back.drafts == one.drafts
    assert torch.equal(back.states, one.states) and back.logits is not None and one.logits is not None
    assert torch.equal(back.logits, one.logits)
