"""Acceptance from counters that are cumulative, split per engine and sometimes reset."""

from __future__ import annotations

import pytest

from tasks.config import Thresholds, Workload
from tasks.engines.base import SpecCounters
from tasks.engines.prometheus import by_label, parse, total
from tasks.engines.stub import StubEngine
from tasks.load.metrics import Acceptance, add_up, counter_difference, distinct_4gram_share, per_request_acceptance
from tasks.load.recorder import Recording
from tasks.load.rows import Measured, acceptance_rows, benchmark_row

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a \\"b\\" {c}"} %s
vllm:spec_decode_num_drafts_total{engine="1",model_name="a \\"b\\" {c}"} %s
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} %s
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} %s
vllm:kv_cache_usage_perc NaN
"""


def counters(*numbers: int) -> SpecCounters:
    samples = parse(METRICS % numbers)
    drafts = by_label(samples, "vllm:spec_decode_num_drafts_total", "engine")
    accepted = by_label(samples, "vllm:spec_decode_num_accepted_tokens_total", "engine")
    each = tuple(SpecCounters(int(drafts[e]), int(accepted[e])) for e in ("0", "1"))
    return SpecCounters(int(sum(drafts.values())), int(sum(accepted.values())), engines=each)


def test_accept_length_is_summed_over_engines_before_it_is_divided() -> None:
    found = counter_difference(counters(100, 50, 200, 80), counters(300, 150, 700, 230))
    assert (found.drafts, found.accepted) == (300, 650)
    assert found.accept_length == pytest.approx(1 + 650 / 300)


def test_reset_of_one_engine_is_told_even_when_the_sum_grew() -> None:
    found = counter_difference(counters(100, 50, 200, 80), counters(500, 10, 900, 20))
    assert found == Acceptance(None, None, reason="counter reset during the measurement")
    assert found.accept_length is None


def test_reset_is_told_without_figures_per_engine() -> None:
    found = counter_difference(SpecCounters(100, 200, (90,)), SpecCounters(20, 40, (15,)))
    assert found.drafts is None and found.reason is not None and "reset" in found.reason


def test_absent_metric_is_not_reported_and_not_zero() -> None:
    assert total(parse(METRICS % (1, 2, 3, 4)), "vllm:absent_total") is None
    for before, after in ((None, None), (SpecCounters(None, None), SpecCounters(3, 1)), (SpecCounters(0, 0), None)):
        found = counter_difference(before, after)
        assert (found.accept_length, found.reason) == (None, "not reported")


def test_no_draft_step_is_null_with_a_reason_and_accepting_nothing_is_exactly_one() -> None:
    idle = counter_difference(SpecCounters(5, 9), SpecCounters(5, 9))
    assert (idle.accept_length, idle.reason) == (None, "no draft step was counted")
    assert counter_difference(SpecCounters(5, 9), SpecCounters(25, 9)).accept_length == 1.0


def test_rates_that_rise_with_the_position_are_doubted() -> None:
    good = add_up([Acceptance(10, 12, (7, 5)), Acceptance(5, 3, (3,))])
    assert (good.per_position, good.reason) == ((10, 5), None)
    bad = add_up([Acceptance(10, 12, (5, 7))])
    assert bad.reason is not None and "doubtful" in bad.reason


@pytest.mark.parametrize(
    ("spec", "length", "reason"),
    [
        (None, None, "not reported"), ({"drafts": None, "accepted": None}, None, "not reported"),
        ({"accept_length": 0}, None, "not reported"), ({"drafts": 10, "accepted": 0}, 1.0, None),
        ({"drafts": 10, "accepted": 29}, 3.9, None),
    ],
)
def test_per_request_figures(spec: dict[str, int] | None, length: float | None, reason: str | None) -> None:
    found = per_request_acceptance([spec])
    assert found.accept_length == (None if length is None else pytest.approx(length))
    assert found.reason == reason


def measured(concurrency: int, seen: list[int], cap: int, baseline_cap: int | None = None, n: int = 200) -> Measured:
    from tests.unit.test_stream import DONE, completion, read, record, usage

    records = [
        record(read((1.0, completion("a", [1])), (2.0, completion("b", [2], "stop")), (2.0, usage(1, 2)), (2.0, DONE)))
        for _ in range(n)
    ]
    recording = Recording(records, [0.001] * 50, seen)
    return Measured(
        Workload(name="w"), concurrency, 0, (recording,), (Acceptance(10, 15, (8, 7)),), None, cap, baseline_cap
    )


@pytest.mark.parametrize("concurrency", [1, 16, 48, 64, 128])
def test_rows_above_the_cap_or_with_another_cap_than_the_baseline_are_not_comparable(concurrency: int) -> None:
    base = benchmark_row(measured(concurrency, [], 4096), {}, Thresholds())
    assert base["comparable"] and base["running_requests_cap"] == 4096
    row = benchmark_row(measured(concurrency, [], 48, 4096), {}, Thresholds())
    assert not row["comparable"] and "its baseline 4096" in row["note"]
    equal = benchmark_row(measured(concurrency, [], 48, 48), {}, Thresholds())
    assert equal["comparable"] == (concurrency <= 48)


def test_a_cap_that_nobody_reports_is_seen_in_the_running_requests() -> None:
    row = benchmark_row(measured(64, [48] * 30, 4096, 4096), {}, Thresholds())
    assert not row["comparable"] and "hidden cap" in row["note"] and row["running_requests_peak"] == 48
    assert benchmark_row(measured(64, [20, 64] * 15, 4096, 4096), {}, Thresholds())["comparable"]


def test_client_that_lagged_voids_the_row() -> None:
    slow = measured(1, [], 8)
    slow.recordings[0].lags_s[:] = [0.2] * 50
    row = benchmark_row(slow, {}, Thresholds())
    assert not row["valid"] and "lagged 200 ms" in row["note"]


def test_acceptance_rows_hold_all_and_each_position() -> None:
    rows = acceptance_rows(measured(1, [], 8), {"arm": "spec"}, k=2)
    assert [(r.get("position"), r["accept_rate"], r.get("accept_length")) for r in rows] == [
        (None, 0.75, 2.5), (0, 0.8, None), (1, 0.7, None),
    ]
    assert {r["source"] for r in rows} == {"counters"}


def test_distinct_4grams() -> None:
    assert distinct_4gram_share([[1, 2, 3, 4, 5], [1, 2, 3, 4]]) == pytest.approx(2 / 3)
    assert distinct_4gram_share([[1, 2, 3]]) is None


def test_stub_adapter_reads_its_own_chunks() -> None:
    assert StubEngine().chunk_tokens({"choices": [{"token_ids": [1]}]}) == [1]
    assert StubEngine().chunk_tokens({"choices": []}) is None
