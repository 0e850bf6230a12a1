"""What a campaign would do, without GPUs, model or engines: every launch, the number of loads, the cost."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tasks.config import Arm, Campaign, Role, TargetShape
from tasks.engines.registry import engine
from tasks.errors import DrafthouseError
from tasks.launch import plan_of, shape_of, shown_variables
from tasks.machine.estimate import Estimate, disk_needed_gib, estimate
from tasks.machine.facts import Facts, facts_of
from tasks.machine.known_bad import Finding, judge_campaign
from tasks.preflight import preflight

PORT = 30000


@dataclass(frozen=True)
class Launch:
    """One server start as it would be rendered; `problem` says why it would be refused."""

    arm: str
    role: str
    engine: str
    argv: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    side_by_side: str | None = None


@dataclass(frozen=True)
class DryRun:
    """Everything that `drafthouse run --dry-run` shows."""

    campaign: str
    launches: list[Launch]
    loads: int
    estimates: list[Estimate]
    disk_gib: float
    findings: list[Finding]
    layer_ids: dict[str, str]  # engine -> ids by which it taps drafter.points, or why it cannot

    @property
    def refused(self) -> bool:
        return any(launch.problem for launch in self.launches) or any(f.level == "error" for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "refused": self.refused}


def render(campaign: Campaign, store: Path = Path("store"), facts: Facts | None = None) -> DryRun:
    """Render a campaign; starts nothing. Raises InputError or MachineError for what cannot be read or does not fit."""
    shape, known = shape_of(campaign.target), facts or facts_of(campaign.machine)
    with _model_folder(campaign, shape) as (rendered, real, stand_in):
        launches = [_launch(rendered, arm, store, known, {stand_in: real}) for arm in campaign.arms]
    rows = estimate(campaign, shape)
    return DryRun(
        campaign.name, launches, len(launches), rows, disk_needed_gib(campaign, shape),
        [*preflight(campaign, shape, elsewhere=True), *judge_campaign(campaign, known, shape)],
        _layer_ids(campaign, shape),
    )


def _layer_ids(campaign: Campaign, shape: TargetShape) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in sorted({arm.engine for arm in campaign.arms}):
        try:
            found[name] = str(engine(name).layer_ids(shape.model_class, shape.num_layers, campaign.drafter.points))
        except DrafthouseError as error:
            found[name] = f"none: {error}"
    return found


def _launch(campaign: Campaign, arm: Arm, store: Path, facts: Facts, shown: dict[str, str]) -> Launch:
    adapter = engine(arm.engine)
    capture = store / "pools" / "states" / "KEY" if arm.role is Role.extraction else None
    drafter = None
    if arm.speculative and arm.speculative.drafter == "own":
        drafter = store / "objects" / "drafter" / "KEY" / "serve" / arm.engine
    blank = Launch(arm.name, arm.role.value, arm.engine.value, side_by_side=arm.side_by_side)
    try:
        plan = plan_of(campaign, arm, capture, drafter, facts)
        plan = replace(plan, port=plan.port or PORT)
        command = adapter.command(plan)
    except DrafthouseError as error:
        return replace(blank, problem=str(error))
    argv = [_replaced(word, shown) for word in command.argv]
    env = {name: _replaced(value, shown) for name, value in shown_variables(plan, command).items()}
    return replace(blank, argv=argv, env=env, notes=plan.notes)


def _replaced(text: str, shown: dict[str, str]) -> str:
    for stand_in, real in shown.items():
        text = text.replace(stand_in, real)
    return text


@contextmanager
def _model_folder(campaign: Campaign, shape: TargetShape) -> Iterator[tuple[Campaign, str, str]]:
    """The campaign with a model folder that adapters can read: where the real one is absent, one from its shape."""
    real = campaign.target.model
    if Path(real, "config.json").exists():
        yield campaign, real, real
        return
    text: dict[str, Any] = {
        "num_hidden_layers": shape.num_layers, "hidden_size": shape.width, "vocab_size": shape.vocab_size,
        "num_attention_heads": 64, **({"kv_lora_rank": 512, "qk_rope_head_dim": 64} if shape.mla else {}),
    }
    with tempfile.TemporaryDirectory(prefix="drafthouse-shape-") as folder:
        Path(folder, "config.json").write_text(json.dumps({"architectures": [shape.model_class], "text_config": text}))
        target = campaign.target.model_copy(update={"model": folder})
        yield campaign.model_copy(update={"target": target}), real, folder


def lines(run: DryRun) -> list[str]:
    """The dry run as text: a launch could be pasted into a shell."""
    shown = []
    for launch in run.launches:
        together = f", takes turns with the others of {launch.side_by_side}" if launch.side_by_side else ""
        shown.append(f"{launch.arm} ({launch.engine}, {launch.role}{together})")
        if launch.problem:
            shown.append(f"  refused: {launch.problem}")
            continue
        shown += [f"  {name}={shlex.quote(value)}" for name, value in sorted(launch.env.items())]
        shown.append("  " + shlex.join(launch.argv))
        shown += [f"  # {setting}: {note}" for setting, note in launch.notes.items()]
    shown += [f"auxiliary layer ids of the points as {name} counts them: {ids}" for name, ids in run.layer_ids.items()]
    shown.append(f"{run.loads} loads of the target, {run.disk_gib:,.1f} GiB of disk with a tenth to spare")
    for row in run.estimates:
        memory = "" if row.memory_gib is None else f"{row.memory_gib:,.1f} GiB memory"
        cost = f"{row.minutes:8,.1f} min {row.disk_gib:9,.2f} GiB disk  {memory:20}"
        shown.append(f"  {row.stage:28} {cost} {row.assumption}")
    shown.append(f"  {'together':28} {sum(r.minutes for r in run.estimates):8,.1f} min")
    return shown + [str(finding) for finding in run.findings]
