"""Regenerate against a small HTTP engine whose answers come from the tiny target itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fake_engine import FakeEngine, FakeServer, campaign_of, serving

from tasks import reference
from tasks.engines import ask as asking
from tasks.errors import ConfigError, EngineError, InputError, OffPolicy, ServerLost, SettingsMismatch
from tasks.regenerate import regenerate
from tasks.store.refs import ResponsesRef
from tasks.store.tables import Store


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.regenerate.engine", lambda name: FakeEngine())
    monkeypatch.setattr(asking, "_FIRST_PAUSE_S", 0.01)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"Name {n} things to take to the sea.", "category": "checklist"} for n in range(2, 22)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(
    model: Path, prompts: Path, store: Store, fault: str = "", **changes: Any
) -> tuple[ResponsesRef, FakeServer]:
    campaign = campaign_of(model, prompts, **changes)
    with serving(FakeServer(model, campaign.arms[0], fault=fault)) as server:
        return regenerate(server, campaign, store), server


def rows_of(store: Store, ref: ResponsesRef) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(store.artifact("responses", ref.key) / "responses.parquet").to_pylist()
    return rows


def test_one_row_per_prompt_in_prompt_order_with_the_targets_own_tokens(
    tiny_model: Path, prompts: Path, store: Store
) -> None:
    seen: list[tuple[int, int]] = []
    campaign = campaign_of(tiny_model, prompts)
    with serving(FakeServer(tiny_model, campaign.arms[0])) as server:
        ref = regenerate(server, campaign, store, progress=lambda done, total: seen.append((done, total)))
    rows = rows_of(store, ref)
    assert [json.loads(r["messages_json"])[0]["content"] for r in rows] == [
        f"Name {n} things to take to the sea." for n in range(2, 8)
    ]
    for row in rows:
        assert len(row["token_ids"]) == row["prompt_tokens"] + 4
        assert row["finish_reason"] == "length"
        expected = reference.nll_per_token(tiny_model, row["token_ids"], row["prompt_tokens"])
        assert row["nll_per_token"] == pytest.approx(expected, rel=1e-3)
    assert (ref.samples, ref.tokens) == (6, sum(len(r["token_ids"]) for r in rows))
    table = store.read("responses", "run-a").to_pylist()
    assert [r["sample_key"] for r in table] == [r["sample_key"] for r in rows]
    assert {r["reused_from"] for r in table} == {None}
    assert seen[-1] == (6, 6)
    assert store.counts["regenerate"] == {"requests": 6, "executed": 6, "reused": 0}


def test_a_second_run_needs_no_server_and_names_the_first(tiny_model: Path, prompts: Path, store: Store) -> None:
    ref, _ = run(tiny_model, prompts, store)
    second = Store(store.root, "run-b")
    again, server = run(tiny_model, prompts, second)
    assert again == ref
    assert (server.starts, server.requests) == (0, 0)
    assert {r["reused_from"] for r in second.read("responses", "run-b").to_pylist()} == {"run-a"}
    assert second.counts["regenerate"] == {"requests": 0, "executed": 0, "reused": 6}


def test_growing_from_4_to_6_generates_only_2(tiny_model: Path, prompts: Path, store: Store) -> None:
    run(tiny_model, prompts, store, prompts__train_samples=4)
    second = Store(store.root, "run-b")
    ref, server = run(tiny_model, prompts, second)
    assert server.requests == 2
    assert ref.samples == 6
    reused = [r["reused_from"] for r in second.read("responses", "run-b").to_pylist()]
    assert reused == ["run-a"] * 4 + [None] * 2


def test_a_killed_run_loses_only_what_was_in_flight(tiny_model: Path, prompts: Path, store: Store) -> None:
    with pytest.raises(ServerLost, match="nothing listens there any more"):
        run(tiny_model, prompts, store, "dies after 8", prompts__train_samples=20, sampling__concurrency=2)
    [part] = store.root.glob("pools/responses/*/part-*.parquet")
    kept = pq.read_table(part).num_rows
    assert kept == 8
    part.with_name("part-torn.parquet").write_bytes(part.read_bytes()[:-100])
    ref, server = run(tiny_model, prompts, Store(store.root, "run-b"), prompts__train_samples=20)
    assert server.requests == 20 - kept
    assert ref.samples == len({tuple(r["token_ids"]) for r in rows_of(store, ref)}) == 20


def test_a_deleted_or_damaged_artifact_is_made_again_from_the_pool(
    tiny_model: Path, prompts: Path, store: Store
) -> None:
    ref, _ = run(tiny_model, prompts, store)
    file = store.artifact("responses", ref.key) / "responses.parquet"
    whole = file.read_bytes()
    for damage in (file.unlink, lambda: file.write_bytes(whole[:-7])):
        damage()
        again, server = run(tiny_model, prompts, store)
        assert again == ref
        assert server.starts == 0
        assert file.read_bytes() == whole


def test_a_lost_part_is_generated_again(tiny_model: Path, prompts: Path, store: Store) -> None:
    ref, _ = run(tiny_model, prompts, store)
    for part in store.root.glob("pools/responses/*/part-*.parquet"):
        part.unlink()
    again, server = run(tiny_model, prompts, store)
    assert (again, server.requests) == (ref, 6)


def test_single_failures_are_retried_and_counted(
    tiny_model: Path, prompts: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tasks.regenerate")
    ref, server = run(tiny_model, prompts, store, "503 until 3")
    assert (ref.samples, server.requests) == (6, 9)
    assert "9 requests, failures http_503: 3" in caplog.text


def test_a_refused_prompt_is_an_error_that_keeps_the_other_answers(
    tiny_model: Path, prompts: Path, store: Store
) -> None:
    with pytest.raises(EngineError, match=r"1 of 6 prompts unanswered \(6 requests, failures http_400: 1"):
        run(tiny_model, prompts, store, "400 for the third")
    _, server = run(tiny_model, prompts, store)
    assert server.requests == 1


@pytest.mark.parametrize(("fault", "who"), [("garbage", "forward"), ("garbage, vouched for", "forward")])
def test_text_that_is_not_the_targets_stops_the_campaign_whatever_the_server_says(
    fault: str, who: str, tiny_model: Path, prompts: Path, store: Store
) -> None:
    with pytest.raises(OffPolicy, match=rf"run-a: mean NLL per token \d+\.\d+ by a transformers {who}, at most 4"):
        run(tiny_model, prompts, store, fault)
    ref, server = run(tiny_model, prompts, Store(store.root, "run-b"))
    assert server.requests == 6, "rejected text is never reused"
    assert all(r["nll_per_token"] < 4 for r in rows_of(store, ref))


def test_a_good_old_run_does_not_hide_a_bad_new_one(tiny_model: Path, prompts: Path, store: Store) -> None:
    run(tiny_model, prompts, store, prompts__train_samples=18)
    with pytest.raises(OffPolicy, match="run-b"):
        run(tiny_model, prompts, Store(store.root, "run-b"), "garbage", prompts__train_samples=20)
    _, server = run(tiny_model, prompts, Store(store.root, "run-c"), prompts__train_samples=20)
    assert server.requests == 2


def test_a_server_that_changes_prompts_is_refused(tiny_model: Path, prompts: Path, store: Store) -> None:
    with pytest.raises(SettingsMismatch, match=r"sent \d+ token ids, the server counted"):
        run(tiny_model, prompts, store, "second BOS")


def test_empty_answers_are_left_out_and_not_asked_for_again(tiny_model: Path, prompts: Path, store: Store) -> None:
    ref, _ = run(tiny_model, prompts, store, "empty")
    assert ref.samples == 5
    again, server = run(tiny_model, prompts, store)
    assert (again, server.starts) == (ref, 0)


def test_responses_never_exceed_the_model_length(tiny_model: Path, prompts: Path, store: Store) -> None:
    ref, _ = run(tiny_model, prompts, store)
    longest = max(r["prompt_tokens"] for r in rows_of(store, ref))
    ref, _ = run(tiny_model, prompts, store, target__max_model_len=longest + 4)
    lengths = {len(r["token_ids"]) for r in rows_of(store, ref)}
    assert max(lengths) == longest + 3  # one token is left for the extraction request
    with pytest.raises(InputError, match="no prompt leaves room"):
        run(tiny_model, prompts, store, target__max_model_len=16)


def test_other_sampling_shares_nothing(tiny_model: Path, prompts: Path, store: Store) -> None:
    run(tiny_model, prompts, store)
    _, server = run(tiny_model, prompts, store, sampling__temperature=0.7, sampling__draws=2)
    assert server.requests == 12
    _, server = run(tiny_model, prompts, store, sampling__max_tokens=5)
    assert server.requests == 6


def test_repeated_greedy_draws_are_refused(tiny_model: Path, prompts: Path, store: Store) -> None:
    with pytest.raises(ConfigError, match=r"sampling\.draws: greedy draws are all the same text"):
        run(tiny_model, prompts, store, sampling__draws=2)
