"""Train the drafter on hidden states of the engine that will serve it, and export it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from tasks.config import Campaign, Device, Role
from tasks.eagle3.data import Dataset, DraftVocabulary, Row, draft_vocabulary, join_rows
from tasks.eagle3.export import export_drafter
from tasks.eagle3.model import check_points, drafter_config
from tasks.eagle3.target import TargetHead, model_class, read_target_head, target_config
from tasks.eagle3.trainer import Progress, Trainer, start_drafter
from tasks.engines.registry import engine
from tasks.errors import SeamMismatch
from tasks.store.keys import content_key, template_fingerprint
from tasks.store.refs import AlignmentRef, DrafterRef, ResponsesRef, StatesRef
from tasks.store.tables import Store, rows_to_table, write_parquet

log = logging.getLogger(__name__)

HEAD_SAMPLES = 8  # whose likelihood under the head is compared with the recorded one
HEAD_TOLERANCE = 0.05  # nats per token
NARROW = 512  # width below which one CPU thread trains


def train(
    states: StatesRef, responses: ResponsesRef, alignment: AlignmentRef, campaign: Campaign, store: Store, *,
    progress: Callable[[int, int], None] | None = None,
) -> DrafterRef:
    """Train on the response tokens, resuming from the newest checkpoint, and export for each serving engine.

    Writes the `training` rows. Raises SeamMismatch when states, responses, head and export do not fit.
    """
    config, target = campaign.drafter, Path(campaign.target.model)
    layer_ids = _layer_ids(states, campaign, target)
    key = content_key(
        "drafter", states.key, responses.key, alignment.key, config.model_dump(mode="json", exclude={"name"}), layer_ids
    )
    name = f"{config.name}-{states.engine}"  # a campaign may train one drafter per extracting engine
    ref = DrafterRef(key=key, name=name, extracted_on=states.engine, points=config.points)
    if manifest := store.manifest("drafter", key):
        rows = pq.read_table(store.artifact("drafter", key) / "training.parquet").to_pylist()
        store.write("training", [row | {"drafter": name, "reused_from": manifest["made_by"]} for row in rows], name)
        store.count("train", reused=len(rows))
        return ref

    samples, pool = _read_samples(states, responses, store)
    data = Dataset(pool, samples, config.points, max(states.points))
    if data.skipped:
        log.warning("%d of %d samples have no response token and are left out", len(data.skipped), len(samples))
    vocabulary = _vocabulary(samples, campaign, target)
    torch.set_num_threads(_threads(campaign, target))
    on_gpu = campaign.machine.device is Device.cuda
    device = torch.device(f"cuda:{(campaign.machine.gpus or (0,))[0]}" if on_gpu else "cpu")
    head = read_target_head(target, torch.bfloat16 if on_gpu else torch.float32, device)
    _check_head(head, data, responses, store, device)
    shape = drafter_config(target_config(target), config.draft_vocab_size)
    drafter = start_drafter(shape, head, vocabulary, config.seed)
    trainer = Trainer(drafter, head, vocabulary, data, config, store.pool("training", key), device)
    rows = _rows(name, trainer.fit(progress))
    store.count("train", executed=trainer.total - trainer.resumed_at, reused=trainer.resumed_at)
    facts = {
        "states": states.key, "responses": responses.key, "alignment": alignment.key, "points": list(config.points),
        "layer_ids": layer_ids, "vocabulary_key": vocabulary.key, "vocabulary_coverage": vocabulary.coverage,
        "samples": len(data), "skipped_samples": data.skipped, "config": config.model_dump(mode="json"),
    }
    with store.new_artifact("drafter", key, facts) as folder:
        export_drafter(drafter, vocabulary, folder, layer_ids, config.points, target)
        write_parquet(rows_to_table("training", rows), folder / "training.parquet")
    store.write("training", rows, name)
    if on_gpu:  # the next server wants this memory, and this process lives on
        drafter.to("cpu")
        del trainer, head
        torch.cuda.empty_cache()
    return ref


def _layer_ids(states: StatesRef, campaign: Campaign, target: Path) -> dict[str, list[int]]:
    """Engine -> ids by which it taps the drafter's points, for each engine that will serve this drafter."""
    layers = int(target_config(target)["num_hidden_layers"])
    check_points(campaign.drafter.points, layers)
    missing = {*campaign.drafter.points, layers} - set(states.points)
    if missing:
        raise SeamMismatch(f"states hold points {list(states.points)}, the drafter needs {sorted(missing)} too")
    serving = {
        arm.engine for arm in campaign.arms_of(Role.speculative)
        if arm.speculative and arm.speculative.drafter == "own" and arm.speculative.extracted_on == states.engine
    }
    names = sorted(serving) or [a.engine for a in campaign.arms_of(Role.extraction) if a.engine == states.engine]
    return {name: engine(name).layer_ids(model_class(target), layers, campaign.drafter.points) for name in names}


def _read_samples(states: StatesRef, responses: ResponsesRef, store: Store) -> tuple[list[Row], Path]:
    manifest = store.require("states", states.key)
    index = pq.read_table(store.artifact("states", states.key) / "index.parquet").to_pylist()
    return join_rows(index, _responses(responses, store)), store.pool("states", manifest["pool"])


def _responses(responses: ResponsesRef, store: Store) -> list[dict[str, Any]]:
    store.require("responses", responses.key)
    file = store.artifact("responses", responses.key) / "responses.parquet"
    rows: list[dict[str, Any]] = pq.read_table(file).to_pylist()
    return rows


def _vocabulary(samples: Sequence[Row], campaign: Campaign, target: Path) -> DraftVocabulary:
    vocab_size = int(target_config(target)["vocab_size"])
    return draft_vocabulary(samples, template_fingerprint(target), vocab_size, campaign.drafter.draft_vocab_size)


def _check_head(head: TargetHead, data: Dataset, responses: ResponsesRef, store: Store, device: torch.device) -> None:
    """The head on the stored states must find the responses as likely as the target did when it wrote them."""
    recorded = {row["sample_key"]: row["nll_per_token"] for row in _responses(responses, store)}
    for number, row in enumerate(data.rows[:HEAD_SAMPLES]):
        known = recorded[row.sample_key]
        if known is None:
            continue
        batch = data.batch([number], device)
        first = row.prompt_tokens
        found = head.nll(batch.last[0, first - 1 : -1], batch.token_ids[0, first:])
        if abs(found - known) > HEAD_TOLERANCE * max(1.0, known):
            raise SeamMismatch(
                f"sample {row.sample_key}: {found:.3f} nats per token by the target's norm and head on the stored "
                f"states, {known:.3f} when it was generated; the last point is not the state before the final norm"
            )


def _threads(campaign: Campaign, target: Path) -> int:
    """CPU threads: as configured; a narrow target gains little from a second one (6.5 against 4.4 steps/s at width
    192), and on a busy host a second one that waits spinning for its turn costs more than half (0.75 steps/s)."""
    narrow = target_config(target)["hidden_size"] < NARROW
    return campaign.machine.cpu_threads or (1 if narrow else torch.get_num_threads())


def _rows(name: str, history: Sequence[Progress]) -> list[dict[str, Any]]:
    return [
        {"drafter": name, "step": entry.step, "tokens": entry.tokens, "loss": entry.loss, "lr": entry.lr,
         "accuracy_json": json.dumps([round(share, 4) for share in entry.accuracy]), "tok_s": entry.tok_s}
        for entry in history
    ]
