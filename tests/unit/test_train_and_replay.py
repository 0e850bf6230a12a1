"""Train and replay as stages: on the tiny target itself, with states from a transformers forward."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from eagle3_kit import small_campaign
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tasks.config import Campaign
from tasks.errors import DrafterBroken, ExportMismatch, SeamMismatch
from tasks.load.prompts import read_prompts, render
from tasks.reference import layer_states, nll_per_token
from tasks.replay import replay, replay_requests
from tasks.store.refs import AlignmentRef, BenchmarkRef, DrafterRef, ResponsesRef, StatesRef
from tasks.store.states import Sample, ShardWriter, read_acks
from tasks.store.tables import Store, rows_to_table, write_parquet
from tasks.train import train

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ROOT / "deployments" / "models" / "tiny_llama"
SAMPLES = 54


@dataclass
class World:
    """A campaign up to its alignment, and a baseline benchmark, in one store."""

    store: Store
    campaign: Campaign
    responses: ResponsesRef
    states: StatesRef
    alignment: AlignmentRef
    baseline: BenchmarkRef
    requests: list[dict[str, Any]]

    def train(self, store: Store | None = None, **drafter: Any) -> DrafterRef:
        campaign = self.with_drafter(**drafter)
        return train(self.states, self.responses, self.alignment, campaign, store or self.store)

    def with_drafter(self, **drafter: Any) -> Campaign:
        return self.campaign.model_copy(update={"drafter": self.campaign.drafter.model_copy(update=drafter)})

    def later(self) -> Store:
        return Store(self.store.root, "run-b")


def greedy(model: Path, file: str, count: int, max_tokens: int) -> list[tuple[str | None, list[int], list[int]]]:
    """Category, prompt and greedy answer of each prompt: one left-padded batch."""
    target = AutoModelForCausalLM.from_pretrained(model)
    end, pad = target.config.eos_token_id, target.config.pad_token_id
    prompts = render(read_prompts(PROMPTS / file, count), model, 256)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    ids = torch.tensor([[pad] * (longest - len(prompt.token_ids)) + prompt.token_ids for prompt in prompts])
    with torch.no_grad():
        texts = target.generate(ids, attention_mask=(ids != pad).long(), max_new_tokens=max_tokens, do_sample=False)
    answers = []
    for prompt, text in zip(prompts, texts[:, longest:].tolist(), strict=True):
        answer = text[: text.index(end) + 1] if end in text else text
        answers.append((prompt.prompt.category, prompt.token_ids, answer))
    return answers


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, store = PROMPTS / "model", Store(tmp_path_factory.mktemp("store"), "run-a")
    drafter = {"epochs": 8, "batch_size": 6, "learning_rate": 3e-3, "warmup_steps": 5, "checkpoint_every_steps": 20}
    campaign = small_campaign(model, drafter=drafter)
    answers = greedy(model, "prompts-train.jsonl", SAMPLES, 64)
    rows = [
        {"sample_key": f"sample-{n}", "category": category, "token_ids": [*prompt, *answer],
         "prompt_tokens": len(prompt),
         "nll_per_token": nll_per_token(model, [*prompt, *answer], len(prompt)) if n < 8 else None}
        for n, (category, prompt, answer) in enumerate(answers)
    ]
    with store.new_artifact("responses", "r1", {}) as folder:
        write_parquet(rows_to_table("responses", rows), folder / "responses.parquet")
    writer = ShardWriter(store.pool("states", "p1"))
    texts = [row["token_ids"] for row in rows]
    for row, states in zip(rows, layer_states(model, texts, [1, 2, 3, 4]), strict=True):
        writer.put(Sample(row["sample_key"], row["token_ids"], states, [1, 2, 3, 4]))
    writer.close()
    index = [
        {n: ack[n] for n in ("sample_key", "shard", "row_group", "tokens")}
        for ack in read_acks(store.pool("states", "p1")).values()
    ]
    with store.new_artifact("states", "s1", {"pool": "p1"}) as folder:
        write_parquet(rows_to_table("states_index", index), folder / "index.parquet")
    requests = [
        {"prompt_key": f"p{n}", "category": category, "prompt_token_ids": prompt, "output_token_ids": answer}
        for n, (category, prompt, answer) in enumerate(greedy(model, "prompts-heldout.jsonl", 9, 48))
    ]
    with store.new_artifact("benchmark", "b1", {}) as folder:
        write_parquet(pa.Table.from_pylist(requests), folder / "outputs.parquet")
    tokens = sum(map(len, texts))
    yield World(
        store, campaign, ResponsesRef(key="r1", samples=SAMPLES, tokens=tokens),
        StatesRef(key="s1", samples=SAMPLES, tokens=tokens, engine="vllm", points=(1, 2, 3, 4), dtype="float32"),
        AlignmentRef(key="a1", states_key="s1", worst_rel_error=1e-6),
        BenchmarkRef(key="b1", arm="base", workload="heldout"), requests,
    )
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def drafter(world: World) -> DrafterRef:
    return world.train()


def whole(rows: list[dict[str, Any]], auxiliary: str) -> dict[str, Any]:
    return next(r for r in rows if r["auxiliary"] == auxiliary and r["category"] is None and r["position"] is None)


def test_training_writes_rows_and_an_artifact_that_tells_its_inputs(world: World, drafter: DrafterRef) -> None:
    rows = world.store.read("training", "run-a").to_pylist()
    assert [row["step"] for row in rows] == list(range(1, 73)) and {row["reused_from"] for row in rows} == {None}
    assert rows[-1]["loss"] < rows[0]["loss"] / 2 and len(json.loads(rows[-1]["accuracy_json"])) == 4
    manifest = world.store.require("drafter", drafter.key)
    assert manifest["layer_ids"] == {"vllm": [1, 2, 3]} and manifest["states"] == "s1" and manifest["vocabulary_key"]
    assert world.store.counts["train"]["executed"] == 72


def test_the_same_training_is_reused_by_the_next_run(world: World, drafter: DrafterRef) -> None:
    store = world.later()
    assert world.train(store) == drafter
    rows = store.read("training", "run-b").to_pylist()
    assert len(rows) == 72 and {row["reused_from"] for row in rows} == {"run-a"}
    assert store.counts["train"]["executed"] == 0


def test_a_changed_drafter_config_is_another_drafter_but_its_name_is_not(world: World, drafter: DrafterRef) -> None:
    assert world.train(world.later(), name="renamed").key == drafter.key
    assert world.train(world.later(), epochs=1).key != drafter.key


def test_a_damaged_drafter_is_exported_again_without_training(world: World, drafter: DrafterRef) -> None:
    (world.store.artifact("drafter", drafter.key) / "serve" / "vllm" / "config.json").write_text("{}")
    store = world.later()
    assert world.train(store) == drafter
    assert store.counts["train"] == {"requests": 0, "executed": 0, "reused": 72}
    assert store.manifest("drafter", drafter.key) is not None


def test_states_after_the_final_norm_are_noticed(world: World) -> None:
    """The last point is taken where a different tensor lies: the head then disagrees with the recorded likelihood."""
    states = world.states.model_copy(update={"points": (1, 2, 3)})
    with pytest.raises(SeamMismatch, match=r"needs \[4\] too"):
        train(states, world.responses, world.alignment, world.campaign, world.later())
    file = world.store.artifact("responses", "r1") / "responses.parquet"
    rows = pq.read_table(file).to_pylist()
    rows[0]["nll_per_token"] += 0.5
    with world.store.new_artifact("responses", "r2", {}) as folder:
        write_parquet(rows_to_table("responses", rows), folder / "responses.parquet")
    with pytest.raises(SeamMismatch, match=r"sample-0: .* nats per token"):
        other = world.responses.model_copy(update={"key": "r2"})
        train(world.states, other, world.alignment, world.campaign, world.store)


def test_replay_reports_positions_categories_and_what_the_states_are_worth(world: World, drafter: DrafterRef) -> None:
    ref = replay(drafter, world.baseline, world.campaign.arms[2], world.campaign, world.store)
    rows = world.store.read("replay", "run-a").to_pylist()
    total, blind = whole(rows, "true"), whole(rows, "zeroed")
    assert ref.accept_length == total["accept_length"] > 1.3 > blind["accept_length"] >= 1
    by_position = [r for r in rows if r["auxiliary"] == "true" and r["category"] is None and r["position"] is not None]
    rates = [row["accept_rate"] for row in by_position]
    assert [row["position"] for row in by_position] == [0, 1, 2] and rates == sorted(rates, reverse=True)
    assert sum(row["accepted"] for row in by_position) == total["accepted"]
    assert total["accept_length"] == pytest.approx(1 + sum(rates))
    assert {r["category"] for r in rows} == {None, *(request["category"] for request in world.requests)}


def test_replay_is_reused_by_content_and_not_by_the_benchmarks_key(world: World, drafter: DrafterRef) -> None:
    first = replay(drafter, world.baseline, world.campaign.arms[2], world.campaign, world.store)
    with world.store.new_artifact("benchmark", "b2", {}) as folder:
        write_parquet(pa.Table.from_pylist(world.requests), folder / "outputs.parquet")
    again = world.baseline.model_copy(update={"key": "b2"})
    store = world.later()
    assert replay(drafter, again, world.campaign.arms[2], world.campaign, store) == first
    assert {row["reused_from"] for row in store.read("replay", "run-b").to_pylist()} == {"run-a"}


def served(model: Path, folder: Path, world: World) -> tuple[int, int]:
    """Drafts and accepted tokens of an engine written out: draft k, let the target judge, keep what it agrees with."""
    from tasks.eagle3.drafting import drafts_at_every_start
    from tasks.eagle3.export import load_drafter
    from tasks.eagle3.target import read_target_head

    net, target_ids, _ = load_drafter(folder, model)
    embeddings = read_target_head(model, torch.float32, torch.device("cpu")).embeddings_VD
    target = AutoModelForCausalLM.from_pretrained(model)
    drafts = accepted = 0
    for request in world.requests[:4]:
        prompt, length = request["prompt_token_ids"], len(request["output_token_ids"])
        text = [*prompt, request["output_token_ids"][0]]
        while len(text) - len(prompt) < length:
            states = layer_states(model, [text], [1, 2, 3])[0].flatten(1)
            draft = drafts_at_every_start(net, target_ids, embeddings, text, states, 3)[-1].tolist()
            with torch.no_grad():
                choices = target(torch.tensor([text + draft])).logits[0, len(text) - 1 :].argmax(-1).tolist()
            agreed = next((n for n, (a, b) in enumerate(zip(draft, choices, strict=False)) if a != b), 3)
            drafts, accepted = drafts + 1, accepted + agreed
            text += choices[: agreed + 1]
        assert text[len(prompt) :][:length] == request["output_token_ids"]
    return drafts, accepted


def test_replay_counts_what_a_served_loop_counts(world: World, drafter: DrafterRef) -> None:
    """Ends included: drafts that run over the end token or max_tokens count in full, as engines count them."""
    model, folder = Path(world.campaign.target.model), world.store.artifact("drafter", drafter.key) / "serve" / "vllm"
    requests = world.requests[:4]
    texts = [[*r["prompt_token_ids"], *r["output_token_ids"]] for r in requests]
    walks = replay_requests(folder, model, requests, layer_states(model, texts, [1, 2, 3]), 3)
    counts = [count for walk in walks for count in walk.accepted]
    assert (len(counts), sum(counts)) == served(model, folder, world)


def copy_of(drafter: DrafterRef, world: World, tensors: dict[str, torch.Tensor], key: str) -> DrafterRef:
    """The drafter with some tensors replaced, as an artifact of its own."""
    source = world.store.artifact("drafter", drafter.key)
    with world.store.new_artifact("drafter", key, {}) as folder:
        place = folder / "serve" / "vllm"
        place.mkdir(parents=True)
        save_file(load_file(source / "model.safetensors") | tensors, place / "model.safetensors")
        (place / "config.json").write_bytes((source / "serve" / "vllm" / "config.json").read_bytes())
    return drafter.model_copy(update={"key": key})


def test_a_permuted_vocabulary_is_found_before_a_server_starts(world: World, drafter: DrafterRef) -> None:
    d2t = load_file(world.store.artifact("drafter", drafter.key) / "model.safetensors")["d2t"]
    said = d2t + torch.arange(len(d2t))
    shuffled = said[torch.randperm(len(said), generator=torch.Generator().manual_seed(0))]
    broken = copy_of(drafter, world, {"d2t": shuffled - torch.arange(len(d2t))}, "permuted")
    with pytest.raises(DrafterBroken, match=r"accept length 1\.0\d\d over"):
        replay(broken, world.baseline, world.campaign.arms[2], world.campaign, world.store)
    rows = world.store.read("replay", "run-a").to_pylist()
    assert whole(rows, "true")["accept_length"] <= 1.05


def test_a_drafter_without_its_head_never_reaches_replay(world: World, drafter: DrafterRef) -> None:
    broken = copy_of(drafter, world, {"lm_head.weight": torch.zeros(3, 192)}, "headless")
    with pytest.raises(ExportMismatch, match=r"lm_head\.weight is \[3, 192\], expected \[1024, 192\]"):
        replay(broken, world.baseline, world.campaign.arms[2], world.campaign, world.store)
