"""What a run left behind that a diagnosis can look at. Whatever is missing or broken becomes a note, not an error."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow.parquet as pq

from tasks.config import Campaign
from tasks.errors import DrafthouseError, InputError
from tasks.store.captured import read_states
from tasks.store.states import Sample
from tasks.store.tables import Store, safe_name

Row = dict[str, Any]
T = TypeVar("T")
TABLES = ("acceptance", "replay", "training", "servers", "alignment")


@dataclass
class Case:
    """Rows and folders of one run, as far as they are there."""

    campaign: Campaign
    store: Store
    responses: list[Row]
    states_index: list[Row]
    pools: dict[str, Path]  # engine environment, as the first part of a shard's path -> pool of its states
    outputs: list[Row]
    tables: dict[str, list[Row]]
    drafter_dir: Path | None
    own_drafter: Path | None  # artifact of the drafter that this run trained
    checkpoint: Path | None  # newest training checkpoint of that drafter
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> Path:
        return Path(self.campaign.target.model)

    def states_of(self, row: Row) -> Sample:
        """Captured states of a row of `states_index`; raises ArtifactDamaged."""
        return read_states(self.pools[environment_of(row)], row)


def load_case(store: Store, drafter_dir: Path | None) -> Case:
    """Read a run; raises InputError for a run that is not there or was written by another version."""
    runs = store.read("runs", store.run_id).to_pylist()
    if not runs:
        raise InputError(f"run {store.run_id}: not in {store.root}")
    try:
        campaign = Campaign.model_validate_json(runs[0]["config_json"])
    except ValueError as error:
        told = " ".join(str(error).split())[:200]
        raise InputError(f"run {store.run_id}: its config is of another version of drafthouse ({told})") from error
    notes: list[str] = []
    index = store.read("states_index", store.run_id).to_pylist()
    pools = _pools(store, index, notes)
    own = _own_drafter(store, campaign, notes)
    if drafter_dir is None and own is not None:
        places = sorted((own / "serve").glob("*/config.json"))
        drafter_dir = places[0].parent if places else own
    if drafter_dir is not None and not (drafter_dir / "config.json").exists():
        places = sorted(drafter_dir.glob("serve/*/config.json"))
        if not places:
            raise InputError(f"{drafter_dir}: no config.json; is this a drafter folder?")
        drafter_dir = places[0].parent
    steps = sorted(store.root.glob(f"pools/training/{own.name}/step-*.pt")) if own else []
    return Case(
        campaign=campaign, store=store, responses=_responses(store, notes),
        states_index=[row for row in index if environment_of(row) in pools], pools=pools,
        outputs=_outputs(store, campaign, notes),
        tables={name: store.read(name, store.run_id).to_pylist() for name in TABLES},
        drafter_dir=drafter_dir, own_drafter=own, checkpoint=steps[-1] if steps else None, notes=notes,
    )


def _responses(store: Store, notes: list[str]) -> list[Row]:
    rows: list[Row] = store.read("responses", store.run_id).to_pylist()
    if rows:
        return rows
    # Answers that regenerate refused are set aside, and are what explains the refusal.
    for part in sorted(store.root.glob(f"pools/responses/*/rejected/part-*-{store.run_id}.parquet")):
        rows += pq.read_table(part).to_pylist()
    if not rows:
        notes.append("no responses in this run: data hypotheses are not tested")
    return rows


def environment_of(row: Row) -> str:
    """Engine environment that captured these states."""
    return Path(row["shard"]).parts[0]


def _pools(store: Store, index: list[Row], notes: list[str]) -> dict[str, Path]:
    if not index:
        notes.append("no states in this run: hypotheses on stored states are not tested")
    found = {}
    for environment in sorted({environment_of(row) for row in index}):
        places = sorted(store.root.glob(f"pools/states/*/{safe_name(environment)}"))
        if places:
            found[environment] = places[0].parent
        else:
            notes.append(f"shards of this run's states are gone ({environment})")
    return found


def _own_drafter(store: Store, campaign: Campaign, notes: list[str]) -> Path | None:
    found: list[tuple[bool, float, Path]] = []
    wanted = campaign.drafter.model_dump(mode="json")
    trained = store.read("training", store.run_id, ["step"]).num_rows
    for file in store.root.glob("objects/drafter/*/manifest.json"):
        try:
            manifest = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            notes.append(f"{file.parent.name}: unreadable manifest ({error})")
            continue
        mine = manifest.get("made_by") == store.run_id
        if mine or (trained and manifest.get("config") == wanted):
            found.append((mine, file.stat().st_mtime, file.parent))
    return max(found)[2] if found else None


def _outputs(store: Store, campaign: Campaign, notes: list[str]) -> list[Row]:
    """Greedy outputs of a base arm on held-out prompts: texts that the drafter was not trained on."""
    base = {arm.name for arm in campaign.arms if arm.role == "base"}
    chat = {w.name for w in campaign.workloads if w.kind == "prompts"}
    rows: list[Row] = []
    for file in store.root.glob("objects/benchmark/*/manifest.json"):
        try:
            manifest = json.loads(file.read_text())
            if manifest.get("made_by") != store.run_id or manifest.get("arm") not in base:
                continue
            if manifest.get("workload") in chat:
                rows += pq.read_table(file.parent / "outputs.parquet").to_pylist()
        except (OSError, ValueError) as error:
            notes.append(f"{file.parent.name}: unreadable outputs ({error})")
    if not rows:
        notes.append("no base outputs in this run: the drafter is judged on training responses")
    return [row for row in rows if len(row["output_token_ids"]) > 1]


def spread(rows: list[T], count: int) -> list[T]:
    """`count` of them spread over the list."""
    return rows[:: max(1, len(rows) // count)][:count]


def texts_of(case: Case, count: int) -> list[tuple[list[int], int]]:
    """(token ids, prompt tokens) that the drafter is judged on, held-out ones if there are any."""
    if case.outputs:
        held = spread(sorted(case.outputs, key=lambda r: str(r["prompt_key"])), count)
        return [([*r["prompt_token_ids"], *r["output_token_ids"]], len(r["prompt_token_ids"])) for r in held]
    usable = [r for r in case.responses if len(r["token_ids"]) > max(2, r["prompt_tokens"])]
    return [(list(r["token_ids"]), int(r["prompt_tokens"])) for r in spread(usable, count)]


def told(errors: Iterable[DrafthouseError]) -> str:
    """Their texts in one line."""
    return "; ".join(" ".join(str(e).split()) for e in errors)
