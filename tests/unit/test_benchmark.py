"""The benchmark stage against the stub engine: rows, resuming, acceptance and losslessness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks import measurement
from tasks.benchmark import alternate, benchmark
from tasks.errors import DrafterBroken, MeasurementInvalid, SeamMismatch
from tasks.load.outputs import compare, first_difference, read_outputs
from tasks.store.refs import BenchmarkRef
from tasks.store.tables import Store
from tests.unit.stub_kit import Running, arm_of, campaign, stub

CONFIG = campaign()
CHAT = CONFIG.workloads[0]


@pytest.fixture(scope="module")
def base() -> Iterator[Running]:
    with stub(arm_of(CONFIG, "base")) as running:
        yield running


@pytest.fixture(scope="module")
def spec() -> Iterator[Running]:
    with stub(arm_of(CONFIG, "spec")) as running:
        yield running


def rows(store: Store, table: str, **where: Any) -> list[dict[str, Any]]:
    found = store.read(table, store.run_id).to_pylist()
    return [r for r in found if all(r[k] == v for k, v in where.items())]


def measure_base(base: Running, store: Store, **more: Any) -> BenchmarkRef:
    return benchmark(base, CHAT, CONFIG, store, baseline=None, drafter=None, **more)


def test_every_request_and_measurement_has_a_row(base: Running, store: Store) -> None:
    seen: list[tuple[int, int]] = []
    ref = measure_base(base, store, progress=lambda done, total: seen.append((done, total)))
    assert [(r["concurrency"], r["requests_ok"], r["valid"], r["comparable"]) for r in rows(store, "benchmarks")] == [
        (1, 6, True, True), (3, 6, True, True),
    ]
    requests = rows(store, "requests")
    assert len(requests) == 12 and {r["status"] for r in requests} == {"ok"}
    assert {r["token_source"] for r in requests} == {"server"}
    assert seen[-1] == (12, 12) and seen == sorted(seen)
    single, several = rows(store, "benchmarks")
    assert single["decode_tok_s"] == pytest.approx(1e3 / single["tpot_ms_p50"])
    assert several["decode_tok_s"] is None
    answers = read_outputs(store.artifact("benchmark", ref.key) / "outputs.parquet")
    assert [a["prompt_key"] for a in answers] == [r["prompt_key"] for r in requests[:6]]
    assert all(a["prompt_token_ids"] and a["output_token_ids"] for a in answers)
    assert len(read_outputs(store.artifact("benchmark", ref.key) / "all_outputs.parquet")) == 12
    assert ref.accept_length is None and rows(store, "acceptance") == []


def test_retry_of_the_same_run_goes_on_at_the_unfinished_measurement(
    base: Running, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = measurement.measure, []

    def breaks_at_the_second(*args: Any, **more: Any) -> Any:
        calls.append(args[4].concurrency)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args, **more)

    monkeypatch.setattr(measurement, "measure", breaks_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        measure_base(base, store)
    assert len(rows(store, "requests")) == 6
    kept = rows(store, "benchmarks")
    ref = measure_base(base, store)
    assert calls == [1, 3, 3]
    assert rows(store, "benchmarks", concurrency=1) == kept
    asked = base.asked
    assert measure_base(base, store) == ref
    assert (calls, base.asked) == ([1, 3, 3], asked), "a finished benchmark needs no server"
    other = Store(store.root, "run-b")
    assert measure_base(base, other).key != ref.key
    assert calls == [1, 3, 3, 1, 3], "another run measures anew"


def test_arms_side_by_side_take_turns_and_a_retry_goes_on_where_they_stopped(
    base: Running, spec: Running, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = CHAT.model_copy(update={"repeats": 2})
    real, turns = measurement.measure, []

    def breaks_once_at_the_fourth(*args: Any, **more: Any) -> Any:
        turns.append(("spec" if more["speculative"] else "base", args[4].concurrency, args[4].repeat))
        if len(turns) == 4:
            raise KeyboardInterrupt
        return real(*args, **more)

    def take_turns() -> None:
        alternate([base, spec], twice, CONFIG, store, baselines=[None, None], drafters=[None, None])

    monkeypatch.setattr(measurement, "measure", breaks_once_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        take_turns()
    take_turns()
    assert turns[:3] == [("base", 1, 0), ("spec", 1, 0), ("base", 3, 0)]
    assert turns[3:] == [("spec", 3, 0), ("spec", 3, 0), ("spec", 1, 1), ("base", 1, 1), ("spec", 3, 1), ("base", 3, 1)]
    assert {r["comparable"] for r in rows(store, "benchmarks")} == {True}
    asked = base.asked, spec.asked
    take_turns()
    first = benchmark(base, twice, CONFIG, store, baseline=None, drafter=None)
    second = benchmark(spec, twice, CONFIG, store, baseline=first, drafter=None)
    assert (base.asked, spec.asked, len(turns)) == (*asked, 9), "what took turns is not measured again"
    assert second.accept_length is not None and {r["verdict"] for r in rows(store, "losslessness")} == {"identical"}


def test_speculation_writes_acceptance_and_equal_outputs(base: Running, spec: Running, store: Store) -> None:
    ref = benchmark(spec, CHAT, CONFIG, store, baseline=measure_base(base, store), drafter=None)
    total = rows(store, "acceptance", position=None)
    assert [(r["concurrency"], r["source"], r["drafter"]) for r in total] == [
        (1, "counters", "none"), (3, "counters", "none"),
    ]
    assert ref.accept_length == pytest.approx(1 + sum(r["accepted"] for r in total) / sum(r["drafts"] for r in total))
    assert 1.5 < ref.accept_length < 3.5
    first = rows(store, "acceptance", concurrency=1)
    assert [r["position"] for r in first] == [None, 0, 1, 2]
    assert first[0]["accepted"] == sum(r["accepted"] for r in first[1:])
    lossless = rows(store, "losslessness")
    assert [(r["verdict"], r["identical"], r["base_arm"]) for r in lossless] == [("identical", True, "base")] * 6


def test_categories_are_blocks_with_an_acceptance_of_their_own(spec: Running, store: Store) -> None:
    by_category = CHAT.model_copy(update={"by_category": True, "concurrencies": (2,)})
    benchmark(spec, by_category, CONFIG, store, baseline=None, drafter=None)
    total, *each = rows(store, "acceptance", position=None)
    assert total["category"] is None and len(each) == 6
    assert {r["category"] for r in each} == {r["category"] for r in rows(store, "requests")}
    assert (total["drafts"], total["accepted"]) == (sum(r["drafts"] for r in each), sum(r["accepted"] for r in each))
    assert len(rows(store, "benchmarks")) == 1


def test_drafter_that_never_drafts_right_stops_the_campaign_after_its_rows(store: Store) -> None:
    with stub(arm_of(CONFIG, "spec", fault="no_drafts")) as server:
        for _ in range(2):  # a retry finds the measurement finished and must fail again
            with pytest.raises(DrafterBroken, match=r"accept length 1\.0.*drafter not working"):
                benchmark(server, CHAT, CONFIG, store, baseline=None, drafter=None)
    assert rows(store, "acceptance", position=None)[0]["accept_length"] == 1.0


def test_unreported_acceptance_is_null_with_a_reason(store: Store) -> None:
    with stub(arm_of(CONFIG, "spec", fault="no_counters")) as server:
        ref = benchmark(server, CHAT, CONFIG, store, baseline=None, drafter=None)
    assert ref.accept_length is None
    found = rows(store, "acceptance")
    assert [(r["drafts"], r["accept_length"], r["reason"]) for r in found] == [(None, None, "not reported")] * 2


def test_outputs_that_differ_fail_after_their_rows_and_again_on_a_retry(base: Running, store: Store) -> None:
    baseline = measure_base(base, store)
    with stub(arm_of(CONFIG, "spec", fault="lossy")) as server:
        for _ in range(2):
            with pytest.raises(SeamMismatch, match=r"greedy outputs are not base's; prompt \w+ differs at token 2"):
                benchmark(server, CHAT, CONFIG, store, baseline=baseline, drafter=None)
    wrong = rows(store, "losslessness", verdict="different")
    assert wrong and all(r["first_difference"] == 2 and r["top2_margin"] > 1e-4 for r in wrong)
    assert len(rows(store, "losslessness")) == 6


def test_failures_make_a_measurement_invalid_and_stay_out_of_its_latencies(store: Store) -> None:
    with stub(arm_of(CONFIG, "base", fault="cut")) as server:
        measure_base(server, store)
    row = rows(store, "benchmarks", concurrency=1)[0]
    assert (row["requests_ok"], row["requests_failed"], row["valid"]) == (4, 2, False)
    assert row["failures_json"] == '{"truncated": 2}' and "2 truncated of 6" in row["note"]


def test_no_success_at_all_is_an_error_with_rows_and_no_artifact(store: Store) -> None:
    with (
        stub(arm_of(CONFIG, "base", fault="benchmark")) as server,
        pytest.raises(MeasurementInvalid, match="6 http_error of 6"),
    ):
        measure_base(server, store)
    assert {r["status"] for r in rows(store, "requests")} == {"http_error"}
    row = rows(store, "benchmarks")[0]
    assert (row["valid"], row["ttft_ms_p50"], row["output_tok_s"]) == (False, None, None)
    assert not list((store.root / "objects").glob("benchmark/*"))


def test_cap_that_the_server_reports_decides_what_is_comparable(base: Running, spec: Running, store: Store) -> None:
    store.write("servers", [{"arm": "spec", "load": 1, "setting": "max_running_requests", "requested": "8",
                             "effective": "2", "status": "mismatch"}], "spec-load1")
    benchmark(spec, CHAT, CONFIG, store, baseline=measure_base(base, store), drafter=None)
    found = rows(store, "benchmarks", arm="spec")
    assert [(r["running_requests_cap"], r["comparable"]) for r in found] == [(2, False), (2, False)]
    assert "runs 2 requests at most, its baseline 8" in found[0]["note"]
    assert "3 in flight, but the server runs 2 at most" in found[1]["note"]


@pytest.mark.parametrize(
    ("a", "b", "at"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [], None), ([], [1], 0)],
)
def test_first_difference(a: list[int], b: list[int], at: int | None) -> None:
    assert first_difference(a, b) == at


def test_near_ties_are_told_from_differences_and_the_worst_answer_speaks_for_a_prompt() -> None:
    def row(key: str, output: list[int], concurrency: int = 1) -> dict[str, Any]:
        return {"prompt_key": key, "category": None, "prompt_token_ids": [9], "output_token_ids": output,
                "concurrency": concurrency, "repeat": 0}

    base = [row("a", [1, 2, 3]), row("b", [1, 2, 3]), row("c", [1, 2, 3]), row("c", [1, 2, 4], 8)]
    ours = [row("a", [1, 5, 3]), row("a", [1, 2, 7], 8), row("b", [1, 5]), row("c", [1, 2, 3]), row("c", [1, 2, 4], 8),
            row("new", [1])]
    asked: list[list[int]] = []

    def margin(ids: list[int]) -> float:
        asked.append(ids)
        return 1e-5 if len(ids) == 2 else 0.5

    found = {r["prompt_key"]: r for r in compare(ours, base, margin, 1e-4)}
    assert (found["a"]["verdict"], found["a"]["first_difference"], found["a"]["top2_margin"]) == ("different", 2, 0.5)
    assert (found["b"]["verdict"], found["b"]["identical"]) == ("near_tie", False)
    assert found["c"]["verdict"] == "identical", "each concurrency is compared with its own"
    assert found["new"].get("verdict") is None
    assert asked == [[9, 1], [9, 1, 2]], "the margin after a common prefix is computed once"


def test_artifact_names_nothing_of_this_machine(base: Running, store: Store) -> None:
    ref = measure_base(base, store)
    text = (store.artifact("benchmark", ref.key) / "manifest.json").read_text()
    assert str(Path.home()) not in text and base.address not in text
