"""Six faults of the study, a healthy run, and what diagnose says about runs that it can only partly read."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from diagnose_faults import FAULTS
from diagnose_world import World, suffer, world_from, write_run
from transformers import AutoModelForCausalLM

from tasks.campaign_file import load_campaign
from tasks.diagnose import diagnose
from tasks.diagnosis.causes import CAUSES
from tasks.errors import InputError
from tasks.load.prompts import read_prompts, render
from tasks.reference import layer_states, nll_per_token
from tasks.store.states import Sample, ShardWriter, read_acks
from tasks.store.tables import Store

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "deployments" / "models" / "tiny_llama"
SAMPLES, HELD_OUT, TOKENS = 44, 16, 48
BY_NAME = {fault.name: fault for fault in FAULTS}


def greedy(model: Any, file: str, count: int) -> list[tuple[Any, list[int], list[int]]]:
    answers = []
    for one in render(read_prompts(TINY / file, count), TINY / "model", 256):
        ids = torch.tensor([one.token_ids])
        with torch.no_grad():
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        answers.append((one.prompt, one.token_ids, whole[0, ids.shape[1] :].tolist()))
    return answers


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a campaign on a real engine leaves behind, computed by transformers."""
    torch.set_num_threads(1)
    campaign = load_campaign(ROOT / "deployments" / "campaigns" / "demo-cpu.yaml")
    store = Store(tmp_path_factory.mktemp("base"), "base-1")
    model = AutoModelForCausalLM.from_pretrained(TINY / "model")
    store.write("runs", [{"run_id": "base-1", "started_at": datetime.now(UTC), "state": "completed",
                          "config_json": campaign.model_dump_json()}], "run")
    rows = [
        {"sample_key": f"s{n:03d}", "token_ids": [*ids, *answer], "prompt_tokens": len(ids), "prompt_key": prompt.key,
         "messages_json": json.dumps(list(prompt.messages)),
         "nll_per_token": nll_per_token(TINY / "model", [*ids, *answer], len(ids))}
        for n, (prompt, ids, answer) in enumerate(greedy(model, "prompts-train.jsonl", SAMPLES))
    ]
    store.write("responses", rows, "responses")
    pool = store.pool("states", "p") / "env"
    pool.mkdir()
    writer = ShardWriter(pool)
    found = layer_states(TINY / "model", [row["token_ids"] for row in rows], [1, 2, 3, 4])
    for row, states in zip(rows, found, strict=True):
        writer.put(Sample(row["sample_key"], row["token_ids"], states, [1, 2, 3, 4]))
    writer.close()
    store.write("states_index", [
        {"sample_key": key, "shard": f"env/{ack['shard']}", "row_group": ack["row_group"], "tokens": ack["tokens"],
         "points": [1, 2, 3, 4]} for key, ack in read_acks(pool).items()
    ], "index")
    with store.new_artifact("benchmark", "b", {"arm": "vllm-base", "workload": "chat"}) as folder:
        outputs = [
            {"prompt_key": prompt.key, "category": None, "prompt_token_ids": ids, "output_token_ids": answer}
            for prompt, ids, answer in greedy(model, "prompts-heldout.jsonl", HELD_OUT)
        ]
        pq.write_table(pa.Table.from_pylist(outputs), folder / "outputs.parquet")
    return store.root


def world_in(base: Path, folder: Path) -> World:
    return world_from(base, TINY / "model", folder, seed=0, samples=SAMPLES)


@pytest.fixture(scope="module")
def healthy(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("healthy")
    found = suffer(world_in(base, folder), None)
    return folder / "store", found


def test_a_healthy_run_is_not_accused(healthy: tuple[Path, dict[str, Any]]) -> None:
    assert healthy[1]["healthy"] and healthy[1]["causes"] == [], healthy[1]


@pytest.mark.parametrize(("name", "stage"), [
    ("one point one layer down", "align"), ("states of other requests", "align"), ("random responses", "align"),
    ("another chat template", "align"), ("responses begin elsewhere", "align"),
    ("d2t permuted", "replay"), ("random head", "replay"), ("served one layer up", None),
])
def test_the_right_cause_comes_first_and_what_shows_before_training_stops_there(
    base: Path, healthy: tuple[Path, dict[str, Any]], tmp_path: Path, name: str, stage: str | None
) -> None:
    world, fault = world_in(base, tmp_path), BY_NAME[name]
    found = suffer(world, fault, healthy[0])
    assert not found["healthy"] and found["causes"][0]["id"] == fault.cause, found
    assert found["causes"][0]["remedy"] and world.stopped_by == stage


def test_every_id_is_explained_in_the_docs() -> None:
    text = (ROOT / "docs" / "diagnose.md").read_text()
    assert [id for id in CAUSES if f"| `{id}` |" not in text] == []


def test_a_drafter_without_d2t_is_named_and_the_rest_is_judged(
    healthy: tuple[Path, dict[str, Any]], base: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file
    source = next(healthy[0].glob("objects/drafter/*/serve/vllm"))
    shutil.copytree(source, tmp_path / "foreign")
    tensors = load_file(source / "model.safetensors")
    (tmp_path / "foreign" / "model.safetensors").unlink()
    save_file({n: t for n, t in tensors.items() if n != "d2t"}, tmp_path / "foreign" / "model.safetensors")
    found = diagnose(Store(healthy[0], "run-a"), tmp_path / "foreign")
    assert found["causes"][0]["id"] == "d2t_mismatch" and "has no d2t" in found["causes"][0]["evidence"]


def test_a_run_of_another_version_and_a_folder_that_is_no_drafter_are_clear_errors(
    healthy: tuple[Path, dict[str, Any]], store: Store, tmp_path: Path
) -> None:
    row = {"run_id": store.run_id, "started_at": datetime.now(UTC), "config_json": '{"nmae": 1}'}
    store.write("runs", [row], "run")
    with pytest.raises(InputError, match="another version of drafthouse"):
        diagnose(store)
    with pytest.raises(InputError, match=r"no config\.json"):
        diagnose(Store(healthy[0], "run-a"), tmp_path)


def with_a_second_engine(base: Path, folder: Path, shift: int, **config: str) -> Store:
    """A run whose samples were captured by two engines, the second one `shift` layers off."""
    model = folder / "model"
    shutil.copytree(TINY / "model", model)
    known = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(known | config))
    world = world_in(base, folder / "w")
    target = world.campaign.target.model_copy(update={"model": str(model)})
    world.campaign = world.campaign.model_copy(update={"target": target})
    write_run(world)
    pool = world.store.pool("states", "p2") / "second"
    pool.mkdir()
    writer = ShardWriter(pool)
    ids = {row["sample_key"]: list(row["token_ids"]) for row in world.responses}
    for key, states in world.states.items():
        writer.put(Sample(key, ids[key], states.roll(-shift, 1).contiguous(), world.points))
    writer.close()
    world.store.write("states_index", [
        {"sample_key": key, "state_key": key, "shard": f"second/{ack['shard']}", "row_group": ack["row_group"],
         "tokens": ack["tokens"], "points": world.points} for key, ack in read_acks(pool).items()
    ], "second")
    return world.store


def test_states_of_a_second_engine_are_judged_too(base: Path, tmp_path: Path) -> None:
    found = diagnose(with_a_second_engine(base, tmp_path, 1))
    assert found["causes"] and found["causes"][0]["id"] in ("layer_shift", "point_order"), found


@pytest.mark.parametrize(("shift", "causes"), [(0, []), (1, ["layer_shift"])])
def test_engines_are_compared_with_each_other_where_transformers_cannot_load_the_target(
    base: Path, tmp_path: Path, shift: int, causes: list[str]
) -> None:
    found = diagnose(with_a_second_engine(base, tmp_path, shift, model_type="from_the_future"))
    assert [cause["id"] for cause in found["causes"]] == causes, found
    assert any("engine-to-engine comparison" in note for note in found["notes"]), found["notes"]


def test_a_target_that_transformers_cannot_load_leaves_notes_and_no_accusation(
    base: Path, tmp_path: Path
) -> None:
    model = tmp_path / "odd"
    shutil.copytree(TINY / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "from_the_future"}))
    world = world_in(base, tmp_path / "w")
    target = world.campaign.target.model_copy(update={"model": str(model)})
    world.campaign = world.campaign.model_copy(update={"target": target})
    write_run(world)
    found = diagnose(world.store)
    assert found["causes"] == []
    assert any("not compared with a transformers forward" in note for note in found["notes"])
    assert any("one engine's states only" in note for note in found["notes"])
