"""State capture on a real SGLang: every state is transformers', whatever the chunks, the batch or the order."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import requests
import torch
from sglang_kit import ENGINE, Target, campaign, capture, complete, make_mla_target, post
from vllm_kit import LAYERS, VOCABULARY, make_target, reference_states, relative_error, wait_for_acks

from deployments.models.tiny_mla.build import build
from tasks.config import Role
from tasks.engines.settings import mismatches, setting_rows
from tasks.errors import SettingsMismatch
from tasks.serve import Server, serving
from tasks.store.states import Sample, read_acks, read_sample
from tasks.store.tables import Store
from tests.conftest import environment_python

pytestmark = pytest.mark.engine
CHUNK = 64
LENGTHS = (3, 17, 64, 65, 200, 300)  # below, at and above one chunk, and more than four
KV_TOKENS = 4096
POINTS = {"llama": (2, 4, 5), "nested-mla": (1, 3, 6)}


@dataclass
class Extraction:
    server: Server
    url: str
    folder: Path
    model: Target
    points: tuple[int, ...]


@pytest.fixture(scope="module", params=["llama", "nested-mla"])
def extraction(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Extraction]:
    environment_python("sglang-cpu")
    place, points = tmp_path_factory.mktemp(f"sglang-{request.param}"), POINTS[request.param]
    model: Target = make_target(place / "llama", constant=False)
    if request.param == "nested-mla":  # a DeepSeek-V3 in a text_config wrapper, as Kimi-K2.5 has it
        model = make_mla_target(place / "mla", place / "llama", constant=False)
        build(place / "nested-mla", width=64, tokenizer_from=place / "llama", nested=True)
    # Careless admission: the cache overflows under load, and requests are taken back.
    careless = ["--schedule-conservativeness", "0.01"]
    tuning = {
        "chunked_prefill_size": CHUNK, "kv_tokens": KV_TOKENS, "max_running_requests": 24, "extra_args": careless,
    }
    whole = campaign(place / request.param, {"role": "extraction", "tuning": tuning}, points)
    arm = whole.arms_of(Role.extraction)[0]
    pool = place / "pool"
    pool.mkdir()
    with serving(whole, arm, Store(place / "store", "run-a"), before_start=lambda: None, capture_dir=pool) as server:
        yield Extraction(server, server.url(), pool, model, points)


def texts(prefix: str, lengths: tuple[int, ...] = LENGTHS) -> dict[str, list[int]]:
    draw = torch.Generator().manual_seed(len(prefix))
    return {
        f"{prefix}-{i}": torch.randint(3, VOCABULARY, (length,), generator=draw).tolist()
        for i, length in enumerate(lengths)
    }


def assert_states_are_transformers(
    extraction: Extraction, wanted: dict[str, list[int]], at_once: int, max_tokens: int = 1
) -> None:
    assert_right(extraction, wanted, capture(extraction.url, extraction.folder, wanted, at_once, max_tokens))


def assert_right(extraction: Extraction, wanted: dict[str, list[int]], samples: dict[str, Sample]) -> None:
    for key, token_ids in wanted.items():
        sample = samples[key]
        assert sample.token_ids == token_ids
        assert sample.points == [*extraction.points, LAYERS]
        assert sample.states.shape == (len(token_ids), len(sample.points), extraction.model.config.hidden_size)
        reference = reference_states(extraction.model, token_ids)  # type: ignore[arg-type]
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
    """The first prompts decode while later ones are prefilled, so that batches of both kinds alternate."""
    assert_states_are_transformers(extraction, texts("many", (300, 5, 270, 64) * 5), at_once=16, max_tokens=8)


def test_the_same_prompt_twice_and_a_shared_prefix(extraction: Extraction) -> None:
    first = texts("same", (200,))["same-0"]
    wanted = {"twice-a": first, "twice-b": first, "prefix": [*first[:150], *first[:50]]}
    assert_states_are_transformers(extraction, wanted, at_once=3)


def test_a_retracted_request_is_captured_once_and_rightly(extraction: Extraction) -> None:
    """The answers outgrow the KV cache, so SGLang takes requests back and computes their prompts again.

    Not with `ignore_eos`, for which it sets the whole answer's cache aside.
    """
    wanted = texts("retracted", (200,) * 12)

    def ask(key: str) -> int:
        body = ENGINE.completion_body("target", wanted[key], 400, stream=False, sample_key=key)
        body["sampling_params"]["min_new_tokens"] = 400
        answer = post(extraction.url, body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["meta_info"]["num_retractions"])

    with ThreadPoolExecutor(len(wanted)) as pool:
        retractions = list(pool.map(ask, wanted))
    assert sum(retractions) > 0
    acks = wait_for_acks(extraction.folder, set(wanted))
    lines = "".join(file.read_text() for file in extraction.folder.glob("acks-*.jsonl"))
    assert all(lines.count(f'"{key}"') == 1 for key in wanted), acks
    places = {key: (acks[key]["shard"], acks[key]["row_group"]) for key in wanted}
    assert_right(extraction, wanted, {key: read_sample(extraction.folder, *place) for key, place in places.items()})


def test_requests_without_a_sample_key_are_not_captured(extraction: Extraction) -> None:
    before = read_acks(extraction.folder)
    complete(extraction.url, [5, 6, 7], max_tokens=4)
    assert requests.get(f"{extraction.url}/health_generate", timeout=60).status_code == 200
    capture(extraction.url, extraction.folder, texts("after-plain", (4,)), 1)
    assert set(read_acks(extraction.folder)) - set(before) == {"after-plain-0"}


def test_a_sample_key_never_becomes_a_file_name(extraction: Extraction) -> None:
    key = "../../escaped/../x\0"
    assert capture(extraction.url, extraction.folder, {key: [9, 8, 7]}, 1)[key].token_ids == [9, 8, 7]
    names = {path.name for path in extraction.folder.parent.rglob("*")}
    assert not any("escaped" in name or name == "x" for name in names)


@pytest.mark.parametrize("key", ["", "k" * 300, 7, ["a"]])
def test_a_sample_key_that_is_no_key_is_refused_and_the_server_lives(extraction: Extraction, key: object) -> None:
    body = ENGINE.completion_body("target", [5, 6, 7], 1, stream=False, sample_key=key)  # type: ignore[arg-type]
    answer = post(extraction.url, body)
    assert answer.status_code == 500
    assert "text of 1 to 256 characters" in answer.text
    assert complete(extraction.url, [5, 6, 7]).prompt_tokens == 3


def test_aborted_requests_disturb_no_other(extraction: Extraction) -> None:
    body = ENGINE.completion_body("target", [5] * 600, 100, ignore_eos=True, sample_key="aborted")
    for _ in range(4):
        with requests.post(f"{extraction.url}{ENGINE.endpoint}", json=body, stream=True, timeout=60) as answer:
            next(answer.iter_content(16))
        with pytest.raises(requests.exceptions.RequestException):  # while it is still in prefill
            post(extraction.url, {**body, "stream": False}, timeout_s=0.02)
    deadline = time.monotonic() + 60
    while ENGINE.running_requests(extraction.url):
        assert time.monotonic() < deadline, "aborted requests still run"
        time.sleep(0.1)
    assert_states_are_transformers(extraction, texts("after-abort", (80, 300)), 2)


def test_every_requested_setting_took_effect(extraction: Extraction) -> None:
    plan, server = extraction.server.plan, extraction.server
    rows = setting_rows(ENGINE.requested_settings(plan), ENGINE.effective_settings(extraction.url, server.log, plan))
    deciding = {row["setting"]: row["status"] for row in rows if row["requested"] is not None
                and row["status"] != "observed"}
    assert mismatches(rows) == []
    assert set(deciding.values()) == {"match"}, deciding
    assert set(deciding) == set(ENGINE.requested_settings(plan))
    shown = {(row["setting"], row["source"]): row["effective"] for row in rows}
    assert shown["capture.points", "probe"] == ",".join(map(str, [*extraction.points, LAYERS]))
    assert shown["cuda_graph.prefill", "log"] == "false"
    assert shown["kv_tokens", "log"] == str(KV_TOKENS)


def test_a_server_whose_hooks_did_not_take_is_refused(extraction: Extraction, tmp_path: Path) -> None:
    server, plan = extraction.server, extraction.server.plan
    [report] = extraction.folder.glob("capture-*.json")
    (tmp_path / report.name).write_text(report.read_text().replace("true", "false"))
    with pytest.raises(SettingsMismatch, match="hooks did not take"):
        ENGINE.effective_settings(extraction.url, server.log, replace(plan, capture_dir=tmp_path))
    quiet = tmp_path / "server.log"
    quiet.write_text(server.log.read_text().replace("drafthouse capture", "something else"))
    with pytest.raises(SettingsMismatch, match="never said"):
        ENGINE.effective_settings(extraction.url, quiet, plan)


def test_a_dead_writer_fails_requests_clearly_and_not_the_server(extraction: Extraction) -> None:
    """Stands for a full disk; the last test of a server. Once there is a disk again, capture goes on."""
    shutil.rmtree(extraction.folder)
    extraction.folder.write_text("not a folder")
    complete(extraction.url, [5, 6, 7], sample_key="lost")
    body = ENGINE.completion_body("target", [5, 6, 7], 1, stream=False, sample_key="lost-too")
    deadline = time.monotonic() + 30
    while (answer := post(extraction.url, body)).status_code == 200:
        assert time.monotonic() < deadline, "no request ever failed"
        time.sleep(0.1)
    assert answer.status_code == 500
    assert "hidden states: states writer stopped" in answer.text
    assert complete(extraction.url, [5, 6, 7]).prompt_tokens == 3
    extraction.folder.unlink()
    extraction.folder.mkdir()
    assert_states_are_transformers(extraction, texts("revived", (20,)), 1)
    assert "lost" not in read_acks(extraction.folder)
