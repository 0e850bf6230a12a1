"""Seam checks that need no server: hazards, replay against serving, sanity of answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.agree import agree, compare, interval
from tasks.campaign_file import parse_campaign
from tasks.config import Arm, Campaign
from tasks.engines.base import LaunchPlan, Observed
from tasks.engines.hazards import hazards
from tasks.engines.settings import setting_rows
from tasks.engines.sglang_settings import from_log, from_server_info
from tasks.errors import SeamMismatch
from tasks.sanity import judge
from tasks.store.refs import BenchmarkRef, ReplayRef
from tasks.store.tables import Store, rows_to_table, write_parquet

LOGS = Path(__file__).resolve().parents[1] / "fixtures" / "logs"


def small(model: Path, **workload: Any) -> Campaign:
    return parse_campaign({
        "name": "small", "target": {"model": str(model), "name": "tiny", "max_model_len": 512},
        "arms": [
            {"name": "base", "engine": "vllm", "role": "base"},
            {"name": "states", "engine": "vllm", "role": "extraction"},
            {"name": "spec", "engine": "vllm", "role": "speculative", "speculative": {"extracted_on": "vllm"}},
        ],
        "workloads": [{"name": "chat", "output_tokens": 96, "concurrencies": [1, 64], **workload}],
        "prompts": {"train_file": "a", "heldout_file": "b", "max_prompt_tokens": 128},
    })


def plan(campaign: Campaign, arm: str = "spec") -> LaunchPlan:
    found: Arm = next(a for a in campaign.arms if a.name == arm)
    return LaunchPlan(found, campaign.target, campaign.machine, sys.executable, 1)


def named(campaign: Campaign, observed: list[Observed], arm: str = "spec") -> dict[str, str]:
    rows = hazards(observed, plan(campaign, arm), campaign)
    return {row["setting"].removeprefix("hazard."): row["detail"] for row in rows}


def said(setting: str, value: str, source: Any = "log") -> Observed:
    return Observed(setting, setting, value, source)


def test_speculation_that_caps_running_requests_below_the_load_is_a_hazard(tiny_model: Path) -> None:
    found = named(small(tiny_model), [said("max_running_requests", "48")])
    assert "64 requests in flight will wait for 48 places" in found["running_requests"]
    assert named(small(tiny_model), [said("max_running_requests", "64")]) == {}


def test_a_real_sglang_that_claims_graphs_up_to_256_and_captured_48_is_a_contradiction(tiny_model: Path) -> None:
    with (LOGS / "sglang-spec-h200.log").open() as lines:
        observed = [*from_server_info(json.loads((LOGS / "sglang-spec-h200-info.json").read_text())), *from_log(lines)]
    found = named(small(tiny_model), observed)
    assert found["contradiction.cuda_graph.max_batch"].startswith(
        "cuda_graph.max_batch: server_info says 256 but log says 48"
    )
    rows = setting_rows({"cuda_graph.max_batch": "256"}, observed)
    decided = next(r for r in rows if r["setting"] == "cuda_graph.max_batch" and r["source"] == "log")
    assert decided["status"] == "mismatch" and decided["effective"] == "48"


def test_concurrency_above_the_largest_captured_graph_is_a_hazard(tiny_model: Path) -> None:
    graphs = [said("cuda_graph", "true"), said("cuda_graph.max_batch", "48"), said("max_running_requests", "64")]
    assert "batches above 48 run without CUDA graphs" in named(small(tiny_model), graphs)["graph_size"]
    assert named(small(tiny_model), [said("cuda_graph", "false"), *graphs[1:]]) == {}


def test_a_kv_cache_too_small_for_the_load_is_a_hazard(tiny_model: Path) -> None:
    found = named(small(tiny_model), [said("kv_tokens", "4096"), said("max_running_requests", "64")])
    assert "chat may hold 14336 tokens at once" in found["kv_tokens"]
    assert named(small(tiny_model), [said("kv_tokens", "14336"), said("max_running_requests", "64")]) == {}


def test_a_prefix_cache_under_random_prompts_is_a_hazard(tiny_model: Path) -> None:
    campaign = small(tiny_model, kind="random", input_tokens=16)
    assert "may be found in the cache" in named(campaign, [said("prefix_cache", "true")])["prefix_cache"]
    assert named(small(tiny_model), [said("prefix_cache", "true")]) == {}


def test_prefill_graphs_on_an_extraction_server_are_a_hazard(tiny_model: Path) -> None:
    graphs = [said("cuda_graph.prefill", "true")]
    assert "hooks see nothing" in named(small(tiny_model), graphs, "states")["capture"]
    assert named(small(tiny_model), graphs) == {}


def test_intervals_hold_the_rate_and_shrink_with_counts() -> None:
    few, many = interval(7, 10), interval(700, 1000)
    assert few[0] < 0.7 < few[1] and many[1] - many[0] < (few[1] - few[0]) / 5
    assert interval(0, 10)[0] == pytest.approx(0.0) and interval(10, 10)[1] == pytest.approx(1.0)


def test_a_gap_beyond_intervals_and_tolerance_fails_and_a_wide_interval_does_not() -> None:
    good = compare({0: (1000, 700), 1: (1000, 400)}, {0: (900, 628), 1: (900, 362)}, 0.02, "spec chat")
    assert [row["passed"] for row in good] == [True, True, True]
    few = compare({0: (20, 14)}, {0: (20, 10)}, 0.02, "spec chat")
    assert all(row["passed"] for row in few)
    off = compare({0: (4000, 2800), 1: (4000, 1600)}, {0: (4000, 2500), 1: (4000, 1600)}, 0.02, "spec chat")
    assert [row["passed"] for row in off] == [False, True, False]
    assert "served 0.625" in off[0]["detail"] and "replayed 0.700" in off[0]["detail"]


def test_counts_that_a_side_does_not_report_are_null_and_not_a_pass() -> None:
    assert compare({0: (10, 5)}, {}, 0.02, "s") == [
        {"check": "replay_gap", "subject": "s", "threshold": 0.02, "detail": "the server reports no counts"}
    ]


POSITION = {"workload": "chat", "position": 0, "drafts": 4000}


def replayed_as(store: Store, key: str, accepted: int) -> None:
    """A finished replay of a drafter of that name, in the table and as an artifact."""
    rows = [{**POSITION, "accepted": accepted, "auxiliary": "true", "drafter": key}]
    store.write("replay", rows, f"replay-{key}")
    with store.new_artifact("replay", key, {"drafter": key, "requests": 1}) as folder:
        write_parquet(rows_to_table("replay", rows), folder / "replay.parquet")


def test_each_arm_is_compared_with_the_replay_of_its_own_drafter(store: Store, tiny_model: Path) -> None:
    """Two drafters on one workload: pooled, a good arm fails and a bad one may pass."""
    for key, accepted in (("good", 2800), ("poor", 1200)):
        replayed_as(store, key, accepted)
        store.write("acceptance", [{**POSITION, "accepted": accepted, "arm": f"spec-{key}"}], f"live-{key}")
    for key in ("good", "poor"):
        served = BenchmarkRef(key="b", arm=f"spec-{key}", workload="chat")
        agree(ReplayRef(key=key, drafter_key=key, accept_length=1.5), served, small(tiny_model), store)
    rows = store.read("alignment", "run-a").to_pylist()
    assert [row["passed"] for row in rows] == [True] * 4


def test_served_acceptance_below_replay_stops_the_campaign(store: Store, tiny_model: Path) -> None:
    replayed_as(store, "r", 2800)
    store.write("acceptance", [{**POSITION, "accepted": 2400, "arm": "spec"}], "live")
    refs = (ReplayRef(key="r", drafter_key="d", accept_length=1.7), BenchmarkRef(key="b", arm="spec", workload="chat"))
    with pytest.raises(SeamMismatch, match=r"position 0: served 0\.600 .* replayed 0\.700 .*drafthouse diagnose run-a"):
        agree(*refs, small(tiny_model), store)
    rows = store.read("alignment", "run-a").to_pylist()
    assert [row["passed"] for row in rows] == [False, False]


def test_nonsense_is_told_from_the_targets_own_text(tiny_model: Path, tmp_path: Path) -> None:
    campaign = small(tiny_model)
    prompt = [0, 4, 1114, 644, 5]
    assert "of its tokens are those that the target chooses" in judge([(prompt, [7] * 24)], plan(campaign))
    unknown = plan(small(tmp_path))  # a target that cannot be computed here
    assert judge([(prompt, [7] * 24)], unknown) == "every answer repeats one token (100% of it)"
    assert judge([(prompt, [])], unknown) == "every answer is empty"
    assert judge([(prompt, list(range(24)))], unknown) == ""
