"""The stub engine over real HTTP: the target's own answers and states, and every fault that it plays."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from tasks.config import Role, StubFault
from tasks.engines.base import LaunchPlan
from tasks.engines.settings import mismatches, setting_rows
from tasks.engines.stub import StubEngine
from tasks.errors import NotSupported, SeamMismatch
from tasks.load.measure import measure
from tasks.load.recorder import Request, record
from tasks.load.rows import benchmark_row
from tasks.load.workloads import Point, blocks
from tasks.store.states import read_acks, read_sample
from tests.unit.stub_kit import Running, arm_of, base_arm, campaign, stub, stub_process

ENGINE = StubEngine()
PROMPT = [0, 4, 1114, 644, 691, 1257, 265, 1279, 276, 265, 1904, 5]


@pytest.fixture(scope="module")
def base() -> Iterator[Running]:
    with stub(base_arm()) as running:
        yield running


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def post(server: Running, token_ids: list[int], n: int, **more: Any) -> requests.Response:
    body = ENGINE.completion_body("tiny", token_ids, n, stream=False, **more)
    return requests.post(server.url() + ENGINE.endpoint, json=body, timeout=20)


def load(server: Running, n: int = 6, concurrency: int = 2, tokens: int = 8, timeout_s: float = 20) -> list[Any]:
    prompts = [[*PROMPT[:-1], 100 + i, 5] for i in range(n)]
    sent = [
        Request(f"r{i}", f"k{i}", None, tuple(ids), ENGINE.completion_body("tiny", ids, tokens))
        for i, ids in enumerate(prompts)
    ]
    return record(server.url(), sent, concurrency, ENGINE, timeout_s=timeout_s).records


def test_greedy_answer_and_log_probabilities_are_those_of_transformers(base: Running, target: Any) -> None:
    answer = ENGINE.parse_completion(post(base, PROMPT, 24, logprobs=True).json())
    ids = torch.tensor([PROMPT])
    expected = target.generate(ids, max_new_tokens=24, do_sample=False)[0, len(PROMPT) :].tolist()
    assert answer.token_ids == expected
    assert answer.prompt_tokens == len(PROMPT)
    with torch.no_grad():
        logits = target(torch.tensor([PROMPT + expected])).logits[0, len(PROMPT) - 1 : -1]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(expected)[:, None])[:, 0]
    assert answer.logprobs == pytest.approx(chosen.tolist(), abs=1e-4)


def test_streamed_and_whole_answers_are_equal_and_counted(base: Running) -> None:
    found = load(base)
    assert [r.status for r in found] == ["ok"] * 6
    for r in found:
        whole = ENGINE.parse_completion(post(base, list(r.request.token_ids), 8).json())
        assert r.answer.token_ids == whole.token_ids
        assert r.answer.completion_tokens == (len(whole.token_ids), "server")
        assert r.answer.prompt_tokens == len(PROMPT) + 1


def test_sampling_draws_different_answers(base: Running) -> None:
    def ids(**more: Any) -> tuple[int, ...]:
        return tuple(ENGINE.parse_completion(post(base, PROMPT, 16, **more).json()).token_ids)

    assert len({ids(temperature=1.5) for _ in range(4)}) > 1
    assert ids(temperature=1.0, top_p=1e-6) == ids(), "a tiny nucleus is the greedy choice"


def test_closed_loop_keeps_exactly_its_concurrency_in_flight(base: Running) -> None:
    found = load(base, n=12, concurrency=3, tokens=24)
    moves = sorted([(r.sent, 1) for r in found] + [(r.ended, -1) for r in found])
    level = most = 0
    for _, move in moves:
        level += move
        most = max(most, level)
    assert most == 3
    assert [r.request.request_id for r in found] == [f"r{i}" for i in range(12)]


def test_health_comes_after_the_model_list_and_tokens_after_health() -> None:
    arm = base_arm(tuning={"extra_args": ["--healthy-after-s", "0.3", "--generates-after-s", "1.0"]})
    from tasks.engines.ready import Readiness

    with stub(arm) as server:
        assert requests.get(server.address + "/v1/models", timeout=5).status_code == 200
        began, seen, ready = time.monotonic(), set[str](), Readiness(ENGINE, server.address, "tiny")
        while not ready.ready(5) and time.monotonic() < began + 20:
            seen.add(ready.reason)
            time.sleep(0.01)
        assert post(server, PROMPT, 1).status_code == 200
    assert "/health answers 503" in seen
    assert any("completion answers 503" in reason for reason in seen)


def test_launch_fault_exits_with_a_code_and_a_reason() -> None:
    with stub_process(base_arm(fault="launch")) as server:
        assert server.process is not None and server.process.wait(20) == 1
        assert server.process.stderr is not None and b"out of memory" in server.process.stderr.read()


def extraction(**changes: Any) -> Any:
    return base_arm(name="extract", role=Role.extraction, **changes)


def test_states_are_those_of_transformers_at_every_point(tmp_path: Path, target: Any) -> None:
    with stub(extraction(), capture_dir=tmp_path, points=(1, 2, 3, 4)) as server:
        assert post(server, PROMPT, 1, sample_key="a-sample").status_code == 200
    ack = read_acks(tmp_path)["a-sample"]
    sample = read_sample(tmp_path, ack["shard"], ack["row_group"])
    assert (sample.token_ids, sample.points) == (PROMPT, [1, 2, 3, 4])
    seen: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda _m, _i, out: seen.append(out[0] if isinstance(out, tuple) else out))
             for layer in target.model.layers]
    with torch.no_grad():
        target(torch.tensor([PROMPT]))
    for hook in hooks:
        hook.remove()
    for i, reference in enumerate(seen):
        reference = reference.reshape(len(PROMPT), -1)
        assert float((sample.states[:, i] - reference).norm() / reference.norm()) < 1e-5


def test_cached_suffix_loses_rows_and_the_reader_refuses_the_sample(tmp_path: Path) -> None:
    shared = [0, 4, *range(100, 164)]
    with stub(extraction(fault="cached_suffix"), capture_dir=tmp_path, points=(1, 2, 3, 4)) as server:
        for name, tail in (("one", [7, 8, 5]), ("two", [9, 5])):
            assert post(server, [*shared, *tail], 1, sample_key=name).status_code == 200
        looked_up, found = ENGINE.cache_counters(server.url()) or (0, 0)
        assert found == 64 and looked_up >= 2 * len(shared)
    acks = read_acks(tmp_path)
    assert len(read_sample(tmp_path, acks["one"]["shard"], acks["one"]["row_group"]).token_ids) == len(shared) + 3
    with pytest.raises(ValueError, match="bytes of states, its 68 tokens need"):
        read_sample(tmp_path, acks["two"]["shard"], acks["two"]["row_group"])


def test_healthy_server_that_captures_nothing_acknowledges_nothing(tmp_path: Path) -> None:
    with stub(extraction(fault="extract"), capture_dir=tmp_path, points=(1, 4)) as server:
        assert post(server, PROMPT, 1, sample_key="x").status_code == 200
    assert read_acks(tmp_path) == {}


def test_full_disk_fails_the_request_and_the_server_lives(tmp_path: Path) -> None:
    with stub(extraction(fault="writer_full"), capture_dir=tmp_path, points=(1, 4)) as server:
        answer = post(server, PROMPT, 1, sample_key="x")
        assert answer.status_code == 500 and str(errno.ENOSPC) in answer.text
        assert post(server, PROMPT, 1).status_code == 200
    assert read_acks(tmp_path) == {}


def test_shifted_states_are_another_layers(tmp_path: Path) -> None:
    found = []
    for fault in (None, "align"):
        folder = tmp_path / str(fault)
        with stub(extraction(fault=fault), capture_dir=folder, points=(1, 2, 4)) as server:
            post(server, PROMPT, 1, sample_key="x")
        ack = read_acks(folder)["x"]
        found.append(read_sample(folder, ack["shard"], ack["row_group"]).states)
    assert torch.equal(found[1][:, 0], found[0][:, 1]) and torch.equal(found[1][:, 2], found[0][:, 2])


@pytest.mark.parametrize(
    ("fault", "statuses"),
    [
        ("benchmark", ["http_error"] * 6), ("cut", ["ok", "ok", "truncated"] * 2), ("silent", ["timeout"] * 6),
        ("regenerate", ["ok"] * 6),
    ],
)
def test_faulty_streams_are_failures_of_their_kind(fault: str, statuses: list[str]) -> None:
    with stub(base_arm(fault=fault)) as server:
        found = load(server, concurrency=1, timeout_s=0.2 if fault == "silent" else 20)
        assert [r.status for r in found] == statuses
        assert all(r.detail for r in found if r.status != "ok")
        if fault == "regenerate":
            assert post(server, PROMPT, 4).status_code == 500 and post(server, PROMPT, 1).status_code == 200


def test_server_that_dies_leaves_failures_and_no_hang() -> None:
    from tasks.engines.ready import Readiness

    with stub_process(base_arm(fault="dies")) as server:
        ready, deadline = Readiness(ENGINE, server.address, "tiny"), time.monotonic() + 30
        while not ready.ready(5) and time.monotonic() < deadline:
            time.sleep(0.02)
        found = load(server, n=30, concurrency=1)
        assert server.process is not None and server.process.wait(10) == 3
    assert [r.status for r in found[:19]] == ["ok"] * 19
    assert {r.status for r in found[19:]} <= {"truncated", "http_error"}


def test_template_applied_unasked_is_a_seam_mismatch() -> None:
    with stub(base_arm(fault="template")) as server, pytest.raises(SeamMismatch, match="sent 13 token ids, the server"):
        load(server)


def test_settings_that_did_not_take_effect_are_seen() -> None:
    wrongs = {"settings": "attention_backend: asked flash, got triton", "capped": "max_running_requests"}
    for fault, wrong in wrongs.items():
        arm = base_arm(fault=fault, tuning={"attention_backend": "flash"})
        config = campaign()
        plan = LaunchPlan(arm, config.target, config.machine, "python", 1)
        with stub(arm) as server:
            rows = setting_rows(
                ENGINE.requested_settings(plan), ENGINE.effective_settings(server.url(), Path("log"), plan)
            )
        assert [text for text in mismatches(rows) if wrong in text] and len(mismatches(rows)) == 1
        assert "not_reported" not in {r["status"] for r in rows}


def test_refusals_come_before_loading(tmp_path: Path) -> None:
    config = campaign()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    other = config.target.model_copy(update={"model": str(tmp_path)})
    with pytest.raises(NotSupported, match="plain Llama"):
        ENGINE.check(LaunchPlan(base_arm(), other, config.machine, "python", 1))
    with pytest.raises(NotSupported, match="no drafter"):
        ENGINE.check(LaunchPlan(arm_of(config, "spec"), config.target, config.machine, "python", 1))
    with pytest.raises(NotSupported, match="distinct"):
        ENGINE.layer_ids("LlamaForCausalLM", 4, (1, 1, 3))


def test_random_load_on_a_warm_prefix_cache_is_flagged_and_flushed_or_new_ids_are_not() -> None:
    config = campaign(workloads=[{"name": "r", "kind": "random", "input_tokens": 64, "output_tokens": 4, "requests": 4,
                                  "warmup_requests": 0}])
    arm, workload = base_arm(tuning={"prefix_cache": True}), config.workloads[0]

    class NeverFlushes(StubEngine):
        def flush_cache(self, url: str) -> None:
            pass

    def shares(engine: StubEngine, seeds: tuple[str, str]) -> list[Any]:
        rows = []
        with stub(arm) as server:
            for seed in seeds:
                planned = blocks(workload, Point(2, 0), [], 2048, seed)
                found = measure(engine, server.url(), "tiny", workload, Point(2, 0), planned, [], running_cap=8,
                                baseline_cap=None, speculative=False)
                rows.append(benchmark_row(found, {}, config.thresholds))
        return rows

    warm = shares(NeverFlushes(), ("a", "a"))[1]
    assert warm["prefix_hit_share"] > 0.5 and not warm["valid"] and "prefix cache" in warm["note"]
    for rows in (shares(StubEngine(), ("a", "a")), shares(NeverFlushes(), ("a", "b"))):
        assert [r["prefix_hit_share"] for r in rows] == [0, 0] and all(r["valid"] for r in rows)


def test_every_fault_has_a_meaning() -> None:
    assert all(f.value.replace("_", "").isalpha() for f in StubFault)
