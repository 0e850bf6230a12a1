"""A small finished campaign in a store of its own, into which one fault is put at its own stage.

The base is the store of a campaign that ran on a real engine: its responses, hidden states and greedy outputs.
A world takes some of its samples, lets a fault change them, and goes on as the campaign would: align, train,
export, replay, and serving, which is the drafter in plain torch unless a real server is asked for.

Somebody who wants to add faults writes a function `inject(world)` and a `Fault` around it; see `Fault`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks.align import align
from tasks.config import Campaign
from tasks.diagnose import diagnose
from tasks.diagnosis.drafting import accept_rates
from tasks.diagnosis.repairs import Setup, read_texts, setup_of
from tasks.eagle3.export import load_drafter, verify_drafter
from tasks.eagle3.target import read_target_head
from tasks.errors import DrafthouseError
from tasks.replay import replay
from tasks.store.captured import read_states
from tasks.store.refs import AlignmentRef, BenchmarkRef, DrafterRef, ResponsesRef, StatesRef
from tasks.store.states import Sample, ShardWriter, read_acks
from tasks.store.tables import Store, rows_to_table, write_parquet
from tasks.train import train

Row = dict[str, Any]
STAGES = ("responses", "states", "train", "export", "serve")
RUN = "run-a"


@dataclass(frozen=True)
class Fault:
    """`inject` changes the world at `stage`; `cause` is the id that diagnose has to rank first.

    responses: change `world.responses` (rows of the table of that name)
    states:    change `world.states` (sample key -> [tokens, points, width], points as in `world.points`)
    train:     append context managers to `world.patches`, in force while the drafter is trained, or change
               `world.campaign` (`world.drafter_config(epochs=1)`)
    export:    change files of `world.drafter_dir` (`world.tensors()`, `world.write_tensors()`, `world.config()`, ...)
    serve:     set `world.served`, a function from how the drafter should be used (diagnosis.repairs.Setup) to how the
               server uses it
    `past_checks` = states faults only: train on the damaged states all the same, and judge the drafter with
    the right ones, as for a drafter from elsewhere.
    """

    name: str
    cause: str
    stage: str
    inject: Callable[[World], None]
    past_checks: bool = False
    also: tuple[str, ...] = ()  # ids that are as right an answer


@dataclass
class World:
    """Everything that a fault may touch."""

    folder: Path
    campaign: Campaign
    seed: int
    responses: list[Row]
    states: dict[str, Tensor]
    points: list[int]
    outputs: list[Row]
    random: random.Random
    generator: torch.Generator
    patches: list[AbstractContextManager[Any]] = field(default_factory=list)
    served: Callable[[Setup], Setup] = lambda setup: setup
    drafter_dir: Path | None = None
    stopped_by: str | None = None

    @property
    def store(self) -> Store:
        return Store(self.folder / "store", RUN)

    @property
    def model(self) -> Path:
        return Path(self.campaign.target.model)

    def drafter_config(self, **changes: Any) -> None:
        drafter = self.campaign.drafter.model_copy(update=changes)
        self.campaign = self.campaign.model_copy(update={"drafter": drafter})

    def tensors(self) -> dict[str, Tensor]:
        assert self.drafter_dir is not None
        return load_file(self.drafter_dir / "model.safetensors")

    def write_tensors(self, tensors: dict[str, Tensor]) -> None:
        assert self.drafter_dir is not None
        file = self.drafter_dir / "model.safetensors"
        file.unlink()  # a hard link of the artifact's weights, which stay as they are
        save_file({n: t.contiguous() for n, t in tensors.items()}, file, metadata={"format": "pt"})

    def config(self) -> Row:
        assert self.drafter_dir is not None
        body: Row = json.loads((self.drafter_dir / "config.json").read_text())
        return body

    def write_config(self, config: Row) -> None:
        assert self.drafter_dir is not None
        (self.drafter_dir / "config.json").write_text(json.dumps(config))


def world_from(base: Path, model: Path, folder: Path, seed: int, samples: int = 48) -> World:
    """A world on some of the samples of the newest run in the store `base`."""
    store = Store(base, "reader")
    run = max(store.read("runs").to_pylist(), key=lambda r: r["started_at"])
    campaign = Campaign.model_validate_json(run["config_json"])
    r = random.Random(seed)
    responses = {row["sample_key"]: row for row in store.read("responses", run["run_id"]).to_pylist()}
    index = {row["sample_key"]: row for row in store.read("states_index", run["run_id"]).to_pylist()}
    keys = r.sample(sorted(responses.keys() & index.keys()), samples)
    pool = next(p for p in base.glob("pools/states/*") if (p / index[keys[0]]["shard"]).exists())
    states = {key: read_states(pool, index[key]) for key in keys}
    outputs: list[Row] = []
    for file in base.glob("objects/benchmark/*/manifest.json"):
        manifest = json.loads(file.read_text())
        chat = next(w.name for w in campaign.workloads if w.kind == "prompts")
        base_arms = {a.name for a in campaign.arms if a.role == "base"}
        if manifest["made_by"] == run["run_id"] and manifest["workload"] == chat and manifest["arm"] in base_arms:
            outputs = pq.read_table(file.parent / "outputs.parquet").to_pylist()
    drafter = campaign.drafter.model_copy(
        update={"epochs": 9, "batch_size": 4, "learning_rate": 3e-3, "warmup_steps": 6, "seed": seed,
                "checkpoint_every_steps": 1000, "unroll_steps": 2}
    )
    target = campaign.target.model_copy(update={"model": str(model)})
    campaign = campaign.model_copy(update={"target": target, "drafter": drafter})
    return World(
        folder, campaign, seed, [{n: v for n, v in responses[k].items() if n != "run"} for k in keys],
        {k: s.states.clone() for k, s in states.items()},
        list(states[keys[0]].points), outputs, r, torch.Generator().manual_seed(seed),
    )


def suffer(world: World, fault: Fault | None, trained: Path | None = None) -> dict[str, Any]:
    """Run the world with the fault to its end, or to the stage that stops it, and diagnose it.

    `trained` = store of a healthy world of the same seed, whose drafter serves faults behind the training.
    """
    stage = fault.stage if fault else "none"
    right = {key: states.clone() for key, states in world.states.items()}
    if fault and stage in ("responses", "states", "train"):
        fault.inject(world)
    refs = write_run(world)
    alignment = AlignmentRef(key="a1", states_key=refs[1].key, worst_rel_error=0.0)
    if stage in ("responses", "states"):
        world.stopped_by = stopped(lambda: align(refs[1], world.campaign, world.store), "align")
    if world.stopped_by and fault and not fault.past_checks:
        return diagnose(world.store)
    if trained is None or stage in ("responses", "states", "train"):
        try:
            with patched(world):
                drafter = train(refs[1], refs[0], alignment, world.campaign, world.store)
        except DrafthouseError:
            world.stopped_by = world.stopped_by or "train"
            return diagnose(world.store)
    else:
        drafter = borrow(world, trained)
    if fault and fault.past_checks:
        world.states = right
        write_run(world)
    world.drafter_dir = world.store.artifact("drafter", drafter.key) / "serve" / "vllm"
    if fault and stage in ("export", "serve"):
        fault.inject(world)
        world.stopped_by = stopped(lambda: verify_drafter(world.drafter_dir, world.model), "export")  # type: ignore[arg-type]
    arm = next(a for a in world.campaign.arms if a.speculative)
    baseline = BenchmarkRef(key="b1", arm="base", workload=chat_of(world))
    world.stopped_by = world.stopped_by or stopped(
        lambda: replay(drafter, baseline, arm, world.campaign, world.store), "replay"
    )
    if world.stopped_by != "export":
        serve_in_torch(world)
    return diagnose(world.store, world.drafter_dir)


def chat_of(world: World) -> str:
    return next(w.name for w in world.campaign.workloads if w.kind == "prompts")


def stopped(stage: Callable[[], Any], name: str) -> str | None:
    """Name of the stage if it refuses to go on."""
    try:
        stage()
    except DrafthouseError:
        return name
    return None


@contextmanager
def patched(world: World) -> Iterator[None]:
    with ExitStack() as stack:
        for patch in world.patches:
            stack.enter_context(patch)
        yield


def write_run(world: World) -> tuple[ResponsesRef, StatesRef]:
    """Tables and artifacts of a run up to its states."""
    store, now = world.store, datetime.now(UTC)
    store.write("runs", [{
        "run_id": RUN, "campaign": world.campaign.name, "started_at": now, "state": "completed",
        "config_json": world.campaign.model_dump_json(), "versions_json": "{}", "machine_json": "{}",
    }], "run")
    store.write("responses", world.responses, "responses")
    with store.new_artifact("responses", "r1", {}) as folder:
        write_parquet(rows_to_table("responses", world.responses), folder / "responses.parquet")
    pool = store.pool("states", "p1") / "env"
    for old in pool.glob("*"):
        old.unlink()
    pool.mkdir(exist_ok=True)
    writer = ShardWriter(pool)
    ids = {row["sample_key"]: list(row["token_ids"]) for row in world.responses}
    for key, states in world.states.items():
        writer.put(Sample(key, ids[key][: len(states)], states.contiguous(), world.points))
    writer.close()
    acks = read_acks(pool)
    index = [
        {"sample_key": key, "state_key": key, "shard": f"env/{acks[key]['shard']}", "points": world.points,
         "row_group": acks[key]["row_group"], "tokens": acks[key]["tokens"], "bytes": acks[key]["bytes"],
         "dtype": world.campaign.target.dtype.value, "checksum": acks[key]["checksum"]}
        for key in world.states
    ]
    store.write("states_index", index, "states_index")
    with store.new_artifact("states", "s1", {"pool": "p1", "responses": "r1"}) as folder:
        write_parquet(rows_to_table("states_index", index), folder / "index.parquet")
    facts = {"arm": "base", "workload": chat_of(world), "accept_length": None, "running_requests_cap": 8}
    if not store.artifact("benchmark", "b1").exists():
        arm = next(a.name for a in world.campaign.arms if a.role == "base")
        with store.new_artifact("benchmark", "b1", facts | {"arm": arm}) as folder:
            pq.write_table(pa.Table.from_pylist(world.outputs), folder / "outputs.parquet")
    tokens = sum(len(row["token_ids"]) for row in world.responses)
    states_ref = StatesRef(
        key="s1", samples=len(index), tokens=tokens, engine="vllm", points=tuple(world.points),
        dtype=world.campaign.target.dtype.value,
    )
    return ResponsesRef(key="r1", samples=len(index), tokens=tokens), states_ref


def borrow(world: World, trained: Path) -> DrafterRef:
    """The drafter of a healthy world of the same seed, with its training rows and checkpoint."""
    other = Store(trained, RUN)
    source = next(other.root.glob("objects/drafter/*/manifest.json")).parent
    target = world.store.artifact("drafter", source.name)
    for file in sorted(f for f in source.rglob("*") if f.is_file()):
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_bytes())
    for file in other.root.glob(f"pools/training/{source.name}/step-*.pt"):
        (world.store.pool("training", source.name) / file.name).write_bytes(file.read_bytes())
    world.store.write("training", pq.read_table(source / "training.parquet").to_pylist(), "tiny-vllm")
    drafter = world.campaign.drafter
    return DrafterRef(key=source.name, name=drafter.name, extracted_on="vllm", points=drafter.points)


def serve_in_torch(world: World, k: int = 3) -> None:
    """Acceptance rows as a server would count them that uses the folder's drafter as `world.served` says."""
    assert world.drafter_dir is not None
    try:
        drafter, target_ids, own = load_drafter(world.drafter_dir, world.model)
    except (DrafthouseError, RuntimeError):
        return
    head = read_target_head(world.model, torch.float32, torch.device("cpu"))
    rows = [([*o["prompt_token_ids"], *o["output_token_ids"]], len(o["prompt_token_ids"])) for o in world.outputs]
    texts = read_texts(world.model, [row for row in rows if len(row[0]) > row[1] + 1])
    embeddings = head.embeddings_VD if own is None else own
    points = world.config().get("hidden_states_points") or world.campaign.drafter.points
    setup = setup_of(drafter, target_ids, embeddings, points, texts[0].states_TKD.shape[1] - 2)
    reached, drafts = accept_rates(world.served(setup), texts, k)
    arm = next(a for a in world.campaign.arms if a.speculative)
    shared = {"arm": arm.name, "engine": arm.engine, "workload": chat_of(world), "num_speculative_tokens": k,
              "concurrency": 1, "drafts": drafts}
    accepted = sum(reached.values())
    whole = {**shared, "accepted": accepted, "accept_length": 1 + accepted / drafts}
    by_position = [
        {**shared, "position": p, "accepted": reached[p + 1], "accept_rate": reached[p + 1] / drafts} for p in range(k)
    ]
    world.store.write("acceptance", [whole, *by_position], "served")
