"""Extract and align on a real vLLM: the tiny target's states, and the control that a shifted capture is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tasks import reference
from tasks.align import align
from tasks.campaign_file import parse_campaign
from tasks.config import Campaign
from tasks.errors import AlignmentMiss
from tasks.extract import extract
from tasks.load.prompts import read_prompts, render
from tasks.serve import Server, serving
from tasks.store.captured import captured, states_index
from tasks.store.refs import ResponsesRef, StatesRef
from tasks.store.states import Sample, ShardWriter, read_acks
from tasks.store.tables import Store, rows_to_table, write_parquet
from tests.conftest import TINY, environment_python

pytestmark = pytest.mark.engine
ANSWER = 64


def campaign_with(points: list[int]) -> Campaign:
    return parse_campaign({
        "name": "states", "target": {"model": str(TINY / "model")}, "machine": {"cpu_threads": 1},
        "arms": [
            {"name": "base", "engine": "vllm", "role": "base"},
            {"name": "extraction", "engine": "vllm", "role": "extraction",
             "tuning": {"kv_cache_gib": 0.125, "chunked_prefill_size": 64}},
        ],
        "workloads": [{"name": "any"}], "drafter": {"points": points}, "sampling": {"concurrency": 6},
        "prompts": {"train_file": "none", "heldout_file": "none"},
    })


def responses_of(store: Store, count: int) -> ResponsesRef:
    """The target's greedy answers, by the reference itself."""
    model, rows = TINY / "model", []
    for rendered in render(read_prompts(TINY / "prompts-heldout.jsonl", count), model, 512):
        ids = list(rendered.token_ids)
        for _ in range(ANSWER):
            states = reference.layer_states(model, [ids], [4], threads=1)[0][-1:, 0]
            ids.append(int(reference.logits(model, states)[0].argmax()))
        rows.append({
            "sample_key": rendered.prompt.key, "draw": 0, "prompt_key": rendered.prompt.key, "token_ids": ids,
            "messages_json": "[]", "prompt_tokens": len(rendered.token_ids), "finish_reason": "length",
        })
    with store.new_artifact("responses", f"greedy-{count}", {}) as folder:
        write_parquet(rows_to_table("responses", rows), folder / "responses.parquet")
    return ResponsesRef(key=f"greedy-{count}", samples=count, tokens=sum(len(r["token_ids"]) for r in rows))


@dataclass
class Extracted:
    store: Store
    campaign: Campaign
    states: StatesRef
    server_for: Callable[[Path], AbstractContextManager[Server]]
    servers: list[Server] = field(default_factory=list)


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Extracted]:
    environment_python("vllm-cpu")
    store = Store(tmp_path_factory.mktemp("states"), "run-a")
    campaign = campaign_with([1, 2, 3])
    servers: list[Server] = []

    @contextmanager
    def server_for(folder: Path) -> Iterator[Server]:
        with serving(campaign, campaign.arms[1], store, before_start=lambda: None, capture_dir=folder) as server:
            servers.append(server)
            yield server

    states = extract(server_for, responses_of(store, 6), campaign.arms[1], campaign, store)
    yield Extracted(store, campaign, states, server_for, servers)


def test_the_engines_states_are_the_targets_at_every_point(extracted: Extracted) -> None:
    ref = align(extracted.states, extracted.campaign, extracted.store)
    assert ref.worst_rel_error <= 1e-5
    rows = extracted.store.read("alignment", "run-a").to_pylist()
    assert all(r["passed"] for r in rows)
    assert min(r["value"] for r in rows if r["check"] == "next_best_rel_error") >= 0.2
    assert max(len(s.token_ids) for s in captured(extracted.store, extracted.states)) > 64, "longer than one chunk"


def test_what_is_in_the_pool_needs_no_server(extracted: Extracted) -> None:
    second = Store(extracted.store.root, "run-b")
    before = len(extracted.servers)
    responses = responses_of(second, 6)
    again = extract(extracted.server_for, responses, extracted.campaign.arms[1], extracted.campaign, second)
    assert again == extracted.states
    assert len(extracted.servers) == before
    assert second.counts["extract"] == {"requests": 0, "executed": 0, "reused": 6}


def test_layer_points_shifted_by_one_stop_the_campaign_before_training(extracted: Extracted) -> None:
    """The real engine's shards under the labels that a plugin with another numbering would give them."""
    store, relabelled = extracted.store, [0, 1, 2, 4]
    _, index = states_index(store, extracted.states)
    writer = ShardWriter(store.pool("states", "shifted") / "engine")
    for sample in captured(store, extracted.states):
        writer.put(Sample(sample.sample_key, sample.token_ids, sample.states, relabelled))
    writer.close()
    acks = read_acks(store.pool("states", "shifted") / "engine")
    for row in index:
        ack = acks[row["sample_key"]]
        row |= {"shard": f"engine/{ack['shard']}", "row_group": ack["row_group"], "points": relabelled}
    manifest = store.require("states", extracted.states.key)
    with store.new_artifact("states", "shifted", manifest | {"pool": "shifted"}) as folder:
        write_parquet(rows_to_table("states_index", index), folder / "index.parquet")
    assert pq.read_table(store.artifact("states", "shifted") / "index.parquet").num_rows == 6
    states = extracted.states.model_copy(update={"key": "shifted", "points": tuple(relabelled)})
    with pytest.raises(AlignmentMiss, match=r"point 0 holds hidden_states\[1\].*point 2 holds hidden_states\[3\].*\+1"):
        align(states, campaign_with([0, 1, 2]), store)
