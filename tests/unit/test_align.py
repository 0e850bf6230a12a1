"""Align against states that a small engine captured, rightly or with a known fault."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_engine import FakeEngine, campaign_of
from states_kit import Servers, responses_of

from tasks import compare
from tasks.align import align
from tasks.config import Campaign
from tasks.errors import AlignmentMiss, OffPolicy
from tasks.extract import extract
from tasks.store.refs import StatesRef
from tasks.store.tables import Store


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.extract.engine", lambda name: FakeEngine())


def states_of(store: Store, model: Path, fault: str = "", **changes: Any) -> tuple[StatesRef, Campaign]:
    changes.setdefault("machine__environments", [{"name": "vllm-cpu", "python": sys.executable}])
    changes.setdefault("thresholds__max_nll_per_token", 30)  # these responses are no text
    campaign = campaign_of(model, model, **changes)
    servers = Servers(campaign, model, fault)
    return extract(servers, responses_of(store), campaign.arms[1], campaign, store, ack_timeout_s=2), campaign


def rows_of(store: Store) -> dict[str, list[dict[str, Any]]]:
    rows = store.read("alignment", store.run_id).to_pylist()
    return {check: [r for r in rows if r["check"] == check] for check in {r["check"] for r in rows}}


def test_right_states_pass_at_every_point_and_are_not_compared_twice(
    store: Store, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, campaign = states_of(store, tiny_model)
    ref = align(states, campaign, store)
    assert (ref.states_key, ref.worst_rel_error <= 1e-5) == (states.key, True)
    rows = rows_of(store)
    assert [r["subject"] for r in rows["state_rel_error"]] == [f"vllm point {p}" for p in (1, 2, 3, 4)]
    assert all(r["passed"] and r["value"] <= 1e-5 for r in rows["state_rel_error"])
    assert all(r["passed"] and r["value"] >= 0.2 for r in rows["next_best_rel_error"])
    assert all(r["passed"] and r["value"] == 0 for r in rows["far_token_share"])
    assert rows["response_nll"][0]["passed"]
    monkeypatch.setattr("tasks.align._pairs", None)
    second = Store(store.root, "run-b")
    assert align(states, campaign, second) == ref
    again = rows_of(second)
    assert {r["reused_from"] for r in again["state_rel_error"]} == {"run-a"}
    assert {check: len(r) for check, r in again.items()} == {check: len(r) for check, r in rows.items()}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("layers + 1", r"point 1 holds hidden_states\[2\].*point 3 holds hidden_states\[4\].*shifted by \+1"),
        ("layers - 1", r"point 1 holds hidden_states\[0\].*point 3 holds hidden_states\[2\].*shifted by -1"),
        ("after the norm", r"point 4 holds the state after the final norm instead of hidden_states\[4\] before it"),
        ("rows + 1", r"point 1 has its rows shifted by one token: row t holds the state of token t\+1"),
        ("states of another", r"point 1 holds, for sample 0+[0-9a-f]+, the states of sample 0+[0-9a-f]+"),
        ("half garbage", r"point 1 is right in sample 0+[0-9a-f]+ up to token \d+ of \d+ and wrong from there on"),
        ("drifted", r"point 1 is hidden_states\[1\] but not exactly: another number format"),
    ],
)
def test_a_miss_names_the_point_and_what_it_really_is(
    fault: str, message: str, store: Store, tiny_model: Path
) -> None:
    states, campaign = states_of(store, tiny_model, fault)
    with pytest.raises(AlignmentMiss, match=message):
        align(states, campaign, store)
    failed = [r for r in store.read("alignment").to_pylist() if not r["passed"]]
    assert failed, "the numbers are in the table although the campaign stops"
    assert not list(store.root.glob("objects/alignment/*"))


def test_points_that_cannot_be_told_apart_are_refused(store: Store, tiny_model: Path) -> None:
    states, campaign = states_of(store, tiny_model, thresholds__next_best_rel_error=5)
    with pytest.raises(AlignmentMiss, match=r"point 1 cannot be told from hidden_states\[\d\]"):
        align(states, campaign, store)


def test_responses_that_are_not_the_targets_text_stop_the_campaign(store: Store, tiny_model: Path) -> None:
    states, campaign = states_of(store, tiny_model, thresholds__max_nll_per_token=4)
    with pytest.raises(OffPolicy, match=r"nats per response token|nats per token under the target, at most 4"):
        align(states, campaign, store)
    assert not rows_of(store)["response_nll"][0]["passed"]


def pair(captured_TPD: torch.Tensor, expected_TKD: torch.Tensor) -> compare.Pair:
    return compare.Pair("a", list(range(len(captured_TPD))), captured_TPD, expected_TKD)


def test_in_bf16_a_few_tokens_far_off_do_not_hide_a_right_index_nor_a_wrong_half() -> None:
    torch.manual_seed(0)
    expected = torch.randn(200, 4, 16)
    expected[0] *= 1000  # the first token's activations are huge
    captured = (expected[:, 1:2] * (1 + 0.005 * torch.randn(200, 1, 16))).bfloat16()
    captured[5, 0] *= 1.3
    good = pair(captured, expected)
    assert float(compare.scores(good, "bfloat16")[0, 1]) < 0.02
    assert compare.bad_share([good], 0, 1, 0.2) == pytest.approx(1 / 200)
    half = captured.clone()
    half[120:] = torch.randn(80, 1, 16).bfloat16()
    bad = pair(half, expected)
    assert float(compare.scores(bad, "bfloat16")[0, 1]) < 0.02, "the median alone would let this pass"
    assert compare.bad_share([bad], 0, 1, 0.2) > 0.3
