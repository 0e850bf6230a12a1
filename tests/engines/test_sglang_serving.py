"""Serving on a real SGLang: what a drafter receives, greedy equality, acceptance, streams and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from sglang_kit import (
    ENGINE,
    Target,
    campaign,
    complete,
    make_mla_target,
    make_plain_drafter,
    make_sglang_drafter,
    post,
)
from transformers import LlamaForCausalLM
from vllm_kit import CONSTANT, make_target

from tasks.config import Role
from tasks.engines.settings import mismatches, setting_rows
from tasks.serve import Server, serving
from tasks.store.tables import Store
from tests.conftest import environment_python

pytestmark = pytest.mark.engine
DRAFTS = 2
SETTLED = [3, 4, 5] + [CONSTANT] * 60  # after so many equal tokens the states hardly change any more


@pytest.mark.parametrize(
    ("kind", "model_class", "points"),
    [
        ("llama", "LlamaForCausalLM", (1, 3, 6)), ("mla", "DeepseekV3ForCausalLM", (1, 3, 6)),
        ("mla", "DeepseekV3ForCausalLM", (2, 4, 5)),
    ],
)
def test_a_drafter_receives_exactly_the_trained_points(
    tmp_path: Path, kind: str, model_class: str, points: tuple[int, ...]
) -> None:
    """The drafter proposes the right token only on states of its points, in their order; see `vllm_kit`.

    Later draft tokens are fed with the drafter's own state, so only the first position is a proof.
    """
    environment_python("sglang-cpu")
    model: Target = make_target(tmp_path / "llama", constant=kind == "llama")
    if kind == "mla":
        model = make_mla_target(tmp_path / "mla", tmp_path / "llama", constant=True)
    text = [*SETTLED, *[CONSTANT] * 60]
    assert make_sglang_drafter(tmp_path / "drafter", model, model_class, text, points) > 0.005
    spec = {"drafter": str(tmp_path / "drafter"), "num_speculative_tokens": DRAFTS}
    whole = campaign(tmp_path / kind, {"role": "speculative", "speculative": spec})
    arm = whole.arms_of(Role.speculative)[0]
    with serving(whole, arm, Store(tmp_path / "store", "run-a"), before_start=lambda: None) as server:
        answer = complete(server.url(), SETTLED, max_tokens=40, ignore_eos=True)
    facts = answer.meta["speculative"]
    assert answer.token_ids == [CONSTANT] * 40
    assert facts["drafts"] >= 10
    assert facts["per_position"][0] == facts["drafts"]
    assert len(facts["per_position"]) == DRAFTS


@dataclass
class Speculative:
    server: Server
    url: str
    model: LlamaForCausalLM


@pytest.fixture(scope="module")
def speculative(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Speculative]:
    environment_python("sglang-cpu")
    place = tmp_path_factory.mktemp("sglang-serving")
    make_plain_drafter(place / "drafter", tiny_model)
    spec = {"drafter": str(place / "drafter"), "num_speculative_tokens": 3}
    # More running requests than the 48 to which SGLang lowers a cap that is not written out.
    tuning = {"max_running_requests": 64, "chunked_prefill_size": 64, "prefix_cache": True, "kv_tokens": 8192}
    whole = campaign(tiny_model, {"role": "speculative", "speculative": spec, "tuning": tuning})
    arm = whole.arms_of(Role.speculative)[0]
    with serving(whole, arm, Store(place / "store", "run-a"), before_start=lambda: None) as server:
        yield Speculative(server, server.url(), LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32))


@torch.no_grad()
def greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """The target's own greedy answer by transformers, and the margin of its two best log-probs at each step."""
    made = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, output_logits=True,
        return_dict_in_generate=True, pad_token_id=2, eos_token_id=None,
    )
    best = torch.stack(made.logits)[:, 0].log_softmax(-1).topk(2).values
    return made.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def test_speculative_answers_are_the_targets_own_greedy_answers(speculative: Speculative) -> None:
    draw = torch.Generator().manual_seed(3)
    prompts = [
        [0, 3, *torch.randint(5, 2048, (length,), generator=draw).tolist(), 4]
        for length in (3, 30, 60, 61, 62, 90, 200, 300)
    ]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: complete(speculative.url, p, 48, ignore_eos=True), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted, margins = greedy(speculative.model, prompt, 48)
        differs = [i for i in range(48) if answer.token_ids[i] != wanted[i]]
        assert not differs or margins[differs[0]] <= 1e-4, (prompt[:4], differs[0], margins[differs[0]])
    facts = [answer.meta["speculative"] for answer in answers]
    assert sum(f["accepted"] for f in facts) > 0
    for fact in facts:
        assert sum(fact["per_position"]) == fact["accepted"]
        assert fact["per_position"] == sorted(fact["per_position"], reverse=True)


def test_a_stream_carries_token_ids_usage_and_acceptance(speculative: Speculative) -> None:
    body = ENGINE.completion_body("target", [0, 3, 9, 4], 12, ignore_eos=True)
    with requests.post(speculative.url + ENGINE.endpoint, json=body, stream=True, timeout=60) as answer:
        lines = [line.decode().removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    raw = [json.loads(line) for line in lines[:-1]]
    ids: list[int] = []
    for event in raw:
        chunk = ENGINE.as_completion_chunk(event, len(ids))
        ids += ENGINE.chunk_tokens(chunk) or []
    assert ids == complete(speculative.url, [0, 3, 9, 4], 12, ignore_eos=True).token_ids
    assert chunk["usage"] == {"prompt_tokens": 4, "completion_tokens": 12}
    assert chunk["choices"][0]["finish_reason"] == "length"
    assert ENGINE.chunk_spec(raw[-1]) is not None


def test_an_answer_that_ends_by_itself_carries_its_end_token(speculative: Speculative) -> None:
    """As vLLM's do, so that responses of both engines are the same samples."""
    ended = [complete(speculative.url, [0, 3, first, 4], 200) for first in (300, 675, 901, 1222)]
    ended = [answer for answer in ended if answer.finish_reason == "stop"]
    assert ended
    assert all(answer.token_ids[-1] == speculative.model.config.eos_token_id for answer in ended)


def test_logprobs_of_the_chosen_tokens_come_back(speculative: Speculative) -> None:
    prompt = [0, 3, 40, 4]
    answer = complete(speculative.url, prompt, 6, ignore_eos=True, logprobs=True)
    with torch.no_grad():
        logits = speculative.model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1]
    own = logits.log_softmax(-1).gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert answer.logprobs == pytest.approx(own.tolist(), abs=1e-4)


def test_sampling_on_a_speculative_server_is_refused_and_not_answered_greedily(speculative: Speculative) -> None:
    answer = post(speculative.url, ENGINE.completion_body("target", [3, 4, 5], 4, temperature=0.7, stream=False))
    assert answer.status_code == 400
    assert "greedy only" in answer.text
    assert len(complete(speculative.url, [3, 4, 5], 4, ignore_eos=True).token_ids) == 4


def test_flushing_empties_the_prefix_cache(speculative: Speculative) -> None:
    def cached(prompt: list[int]) -> int:
        body = ENGINE.completion_body("target", prompt, 1, stream=False)
        return int(post(speculative.url, body).json()["meta_info"]["cached_tokens"])

    prompt = [7, 9] * 100
    cached(prompt)
    before = ENGINE.cache_counters(speculative.url)
    assert cached(prompt) > 100
    after = ENGINE.cache_counters(speculative.url)
    assert before and after
    assert after[0] - before[0] == len(prompt)
    assert after[1] - before[1] > 100
    ENGINE.flush_cache(speculative.url)
    assert cached(prompt) == 0


def test_nothing_runs_when_nothing_was_asked(speculative: Speculative) -> None:
    assert ENGINE.running_requests(speculative.url) == 0


def test_every_requested_setting_took_effect_and_the_cap_was_not_lowered(speculative: Speculative) -> None:
    plan, server = speculative.server.plan, speculative.server
    requested = ENGINE.requested_settings(plan)
    rows = setting_rows(requested, ENGINE.effective_settings(speculative.url, server.log, plan))
    deciding: dict[str, Any] = {
        row["setting"]: row["status"] for row in rows if row["requested"] is not None and row["status"] != "observed"
    }
    assert mismatches(rows) == []
    assert deciding == dict.fromkeys(requested, "match")
    shown = {(row["setting"], row["source"]): row["effective"] for row in rows}
    assert shown["max_running_requests", "log"] == "64"
    assert shown["prefix_cache", "server_info"] == "true"
