"""Extract against a small HTTP engine that captures with the reference and writes real shards."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from fake_engine import VERSIONS, FakeEngine, FakeServer, campaign_of
from states_kit import LENGTHS, Servers, responses_of

from tasks import reference
from tasks.engines import ask as asking
from tasks.errors import ArtifactDamaged, CaptureLost, ConfigError, InputError, SettingsMismatch
from tasks.extract import extract
from tasks.store.captured import captured, read_states, states_index
from tasks.store.refs import ResponsesRef, StatesRef
from tasks.store.tables import Store


@pytest.fixture(autouse=True)
def _fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.extract.engine", lambda name: FakeEngine())
    monkeypatch.setattr(FakeEngine, "versions_now", dict(VERSIONS))
    monkeypatch.setattr(asking, "_FIRST_PAUSE_S", 0.01)


Run = Callable[..., tuple[StatesRef, Servers]]


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> Run:
    def go(
        store: Store, responses: ResponsesRef | None = None, fault: str = "", **changes: Any
    ) -> tuple[StatesRef, Servers]:
        changes.setdefault("machine__environments", [{"name": "vllm-cpu", "python": sys.executable}])
        campaign = campaign_of(tiny_model, tmp_path / "none", **changes)
        servers = Servers(campaign, tiny_model, fault)
        given = responses or responses_of(store)
        return extract(servers, given, campaign.arms[1], campaign, store, ack_timeout_s=0.6), servers

    return go


def test_states_of_every_length_equal_the_reference(run: Run, store: Store, tiny_model: Path) -> None:
    ref, servers = run(store)
    assert (ref.samples, ref.tokens, ref.points, ref.dtype) == (5, sum(LENGTHS), (1, 2, 3, 4), "float32")
    samples = list(captured(store, ref))
    assert [s.sample_key for s in samples] == [f"{n:032x}" for n in LENGTHS]
    for sample in samples:
        expected = reference.layer_states(tiny_model, [sample.token_ids], [1, 2, 3, 4])[0]
        torch.testing.assert_close(sample.states, expected, rtol=1e-5, atol=1e-5)
    rows = store.read("states_index", "run-a").to_pylist()
    assert [r["tokens"] for r in rows] == list(LENGTHS)
    assert {r["reused_from"] for r in rows} == {None}
    assert (servers.starts, servers.samples_asked) == (1, 5)
    assert store.counts["extract"] == {"requests": 6, "executed": 5, "reused": 0}


def test_a_second_run_starts_no_server(run: Run, store: Store) -> None:
    ref, _ = run(store)
    second = Store(store.root, "run-b")
    again, servers = run(second, responses_of(second))
    assert again == ref
    assert servers.made == []
    assert {r["reused_from"] for r in second.read("states_index", "run-b").to_pylist()} == {"run-a"}
    assert second.counts["extract"] == {"requests": 0, "executed": 0, "reused": 5}


def test_growing_extracts_only_what_is_new(run: Run, store: Store) -> None:
    run(store)
    second = Store(store.root, "run-b")
    ref, servers = run(second, responses_of(second, (*LENGTHS, 33, 34)))
    assert (ref.samples, servers.samples_asked) == (7, 2)
    assert [r["reused_from"] for r in second.read("states_index", "run-b").to_pylist()] == ["run-a"] * 5 + [None] * 2


@pytest.mark.parametrize("fault", ["drops once", "suffix once", "503 until 2"])
def test_lost_and_short_samples_are_asked_for_again(fault: str, run: Run, store: Store, tiny_model: Path) -> None:
    ref, servers = run(store, fault=fault)
    assert ref.samples == 5
    assert servers.samples_asked > 5
    for sample in captured(store, ref):
        expected = reference.layer_states(tiny_model, [sample.token_ids], [1, 2, 3, 4])[0]
        torch.testing.assert_close(sample.states, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("drops", "never acknowledged"),
        ("suffix only", r"rows for \d+ tokens \(prefix cache"),
        ("suffix padded", r"tokens have all-zero states"),
        ("not finite", "not finite"),
        ("wrong tokens", "token ids are not those that were sent"),
        ("wrong points", r"points \[2, 3, 4, 5\], asked for \[1, 2, 3, 4\]"),
    ],
)
def test_unusable_samples_stop_the_campaign_and_are_never_used(
    fault: str, reason: str, run: Run, store: Store
) -> None:
    with pytest.raises(CaptureLost, match=rf"1 of 1 samples have no usable states.*{reason}"):
        run(store, fault=fault)  # the probe fails first, before thousands of samples are asked for
    assert not list(store.root.glob("pools/states/*/*/checked.jsonl"))
    ref, servers = run(store)
    assert (ref.samples, servers.samples_asked) == (5, 5)


def test_one_lost_sample_is_named_and_the_others_are_kept(
    run: Run, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = FakeServer._capture
    monkeypatch.setattr(FakeServer, "_capture", lambda self, ids, key: len(ids) == 64 or capture(self, ids, key))
    with pytest.raises(CaptureLost, match=r"1 of 5 samples .* after 3 requests each: [0-9a-f]{32} \(never"):
        run(store)
    monkeypatch.setattr(FakeServer, "_capture", capture)
    _, servers = run(Store(store.root, "run-b"))
    assert servers.samples_asked == 1


def test_a_killed_run_keeps_what_was_acknowledged(run: Run, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.engines import capture as capturing

    record = capturing.record_checked

    def killed(folder: Path, acks: Any, made_by: str) -> None:
        if len(list(acks)) == 5:
            raise KeyboardInterrupt
        record(folder, acks, made_by)

    monkeypatch.setattr(capturing, "record_checked", killed)
    with pytest.raises(KeyboardInterrupt):
        run(store)
    monkeypatch.setattr(capturing, "record_checked", record)
    ref, servers = run(Store(store.root, "run-b"))
    assert (ref.samples, servers.starts) == (5, 0)


@pytest.mark.parametrize("damage", ["deleted", "cut", "overwritten", "overwritten, found in training"])
def test_states_whose_shard_is_gone_or_broken_are_extracted_again(damage: str, run: Run, store: Store) -> None:
    ref, _ = run(store)
    pool, rows = states_index(store, ref)
    for shard in {row["shard"] for row in rows}:
        if damage == "deleted":
            (pool / shard).unlink()
        elif damage.startswith("overwritten"):
            overwrite_states(pool / shard, keep_time="training" in damage)
        else:
            (pool / shard).write_bytes((pool / shard).read_bytes()[:-20])
    if "training" in damage:  # whoever reads a damaged state makes the next extraction look again
        for row in rows:
            with pytest.raises(ArtifactDamaged, match="rerun to extract"):
                read_states(pool, row)
    again, servers = run(store)
    assert again == ref
    assert servers.samples_asked == 5
    assert len(list(captured(store, again))) == 5


def overwrite_states(shard: Path, *, keep_time: bool) -> None:
    """A byte in the middle of every sample's states; size and footer stay."""
    info, whole = shard.stat(), bytearray(shard.read_bytes())
    file = pq.ParquetFile(shard)
    for group in range(file.num_row_groups):
        states = file.read_row_group(group).to_pylist()[0]["states"]
        place = bytes(whole).find(states[: min(64, len(states))])
        assert place > 0, "the states stand in the file as they are"
        whole[place + 8] ^= 0xFF
    shard.write_bytes(whole)
    if keep_time:
        os.utime(shard, ns=(info.st_atime_ns, info.st_mtime_ns))


def test_an_upgrade_that_changes_nothing_extracts_nothing(
    run: Run, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref, _ = run(store)
    monkeypatch.setattr(FakeEngine, "versions_now", VERSIONS | {"vllm": "1.1"})
    again, servers = run(store)
    assert again == ref
    assert (servers.starts, servers.samples_asked) == (1, 0)  # one start to look at its states
    _, servers = run(store)
    assert servers.starts == 0  # and remembered


def test_an_upgrade_that_drifts_extracts_everything(run: Run, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, _ = run(store)
    monkeypatch.setattr(FakeEngine, "versions_now", VERSIONS | {"vllm": "1.1"})
    again, servers = run(store, fault="drifted")
    assert again.key != ref.key
    assert servers.samples_asked == 5
    monkeypatch.setattr(FakeEngine, "versions_now", VERSIONS)
    back, servers = run(store)
    assert (back, servers.starts) == (ref, 0)


def test_equal_texts_are_captured_once_and_indexed_twice(run: Run, store: Store) -> None:
    ref, servers = run(store, responses_of(store, (17, 17, 20)))
    assert ref.samples == 3
    assert servers.samples_asked == 2


def test_a_server_that_changes_prompts_is_refused(run: Run, store: Store) -> None:
    with pytest.raises(SettingsMismatch, match=r"sent \d+ token ids, the server counted"):
        run(store, fault="second BOS")


@pytest.mark.parametrize("changes", [{"target__dtype": "bfloat16"}, {"drafter__points": [0, 2, 3]}])
def test_other_points_or_dtype_share_nothing(changes: dict[str, Any], run: Run, store: Store) -> None:
    run(store)
    with pytest.raises(CaptureLost, match="asked for"):
        run(store, **changes)  # this engine goes on capturing points 1 to 4 in fp32: asked again, and refused


def test_what_does_not_fit_is_refused_before_a_server_starts(run: Run, store: Store) -> None:
    with pytest.raises(InputError, match=r"responses: 1 are longer than 199 tokens .* first 0+c8"):
        run(store, target__max_model_len=200)
    with pytest.raises(ConfigError, match=r"drafter\.points: 5 is beyond the target's 4 layers; .* 0 to 4"):
        run(store, drafter__points=[1, 2, 5])


@pytest.mark.parametrize(("layers", "points"), [(1, (0, 1, 2)), (2, (0, 1, 3)), (28, (2, 14, 29))])
def test_points_beyond_a_shallow_model_name_the_option(
    layers: int, points: tuple[int, ...], tmp_path: Path
) -> None:
    from tasks.extract import capture_points

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": layers}))
    with pytest.raises(ConfigError, match=r"^drafter\.points: "):
        capture_points(campaign_of(tmp_path, tmp_path, drafter__points=points))


def test_points_are_captured_with_the_one_before_the_final_norm(tmp_path: Path) -> None:
    from tasks.extract import capture_points

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 61}))
    assert capture_points(campaign_of(tmp_path, tmp_path, drafter__points=[2, 30, 58])) == (2, 30, 58, 61)
    assert capture_points(campaign_of(tmp_path, tmp_path, drafter__points=[2, 30, 61])) == (2, 30, 61)
