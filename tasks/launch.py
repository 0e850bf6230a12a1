"""From an arm to its launch: what the machine demands is resolved here, for serve and for the dry run alike."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from tasks.config import Arm, Campaign, Device, EngineName, Target, TargetShape
from tasks.engines.base import Command, Engine, LaunchPlan, Observed
from tasks.errors import ConfigError, InputError
from tasks.machine import backends, facts, nccl
from tasks.machine.facts import Facts, facts_of
from tasks.machine.handle import server_environment


def plan_of(
    campaign: Campaign, arm: Arm, capture_dir: Path | None, drafter_dir: Path | None, known: Facts | None = None
) -> LaunchPlan:
    """Everything that the arm's command depends on; the port is chosen at launch.

    The NCCL profile, the all-reduce flag and the attention backend are resolved for these GPUs.
    Raises NotSupported for what cannot work on them.
    """
    points: tuple[int, ...] = ()
    if capture_dir is not None:
        points = tuple(sorted({*campaign.drafter.points, shape_of(campaign.target).num_layers}))
    if arm.speculative and drafter_dir is None and arm.speculative.drafter != "own":
        drafter_dir = Path(arm.speculative.drafter)
    env: dict[str, str] = {}
    notes: dict[str, str] = {}
    if campaign.machine.device is Device.cuda:
        arm, env, notes = _fit_to_gpus(campaign, arm, known or facts_of(campaign.machine))
    return LaunchPlan(
        arm=arm, target=campaign.target, machine=campaign.machine, python=campaign.machine.environment_of(arm).python,
        port=campaign.machine.port or 0, engine_points=points, capture_dir=capture_dir, drafter_dir=drafter_dir,
        env=env, notes=notes, memory_taken=_taken_before(campaign, arm),
    )


def _taken_before(campaign: Campaign, arm: Arm) -> float:
    """Share of each GPU that arms side by side with this one have taken when it starts; they start in order."""
    if arm.side_by_side is None or campaign.machine.device is Device.cpu:
        return 0.0
    group = [other for other in campaign.arms if other.side_by_side == arm.side_by_side]
    before = takewhile(lambda other: other.name != arm.name, group)
    return sum(other.tuning.memory_fraction or 0.0 for other in before)


def _fit_to_gpus(campaign: Campaign, arm: Arm, known: Facts) -> tuple[Arm, dict[str, str], dict[str, str]]:
    tuning = arm.tuning
    own = {v.name: v.value for v in (*campaign.machine.environment_of(arm).variables, *tuning.variables)}
    resolved = nccl.resolve(
        name=tuning.nccl_profile, tensor_parallel=tuning.tensor_parallel, interconnect=known.interconnect,
        acs=known.acs, custom_all_reduce=tuning.custom_all_reduce, own_variables=own,
    )
    mla = shape_of(campaign.target).mla if known.capability else False
    backend = backends.resolve(arm.engine, known.capability, mla, tuning.attention_backend)
    fitted = {"custom_all_reduce": resolved.custom_all_reduce, "attention_backend": backend.name}
    notes = {
        "nccl.profile": f"{resolved.profile.name}: {resolved.profile.why}", "custom_all_reduce": resolved.reason,
        "attention_backend": backend.note,
    }
    env = dict(resolved.variables)
    env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # so that machine.gpus counts as nvidia-smi does
    arm = arm.model_copy(update={"tuning": tuning.model_copy(update=fitted)})
    return arm, env, {name: note for name, note in notes.items() if note}


def environment_for(plan: LaunchPlan, command: Command) -> dict[str, str]:
    """Full environment of the server process."""
    return server_environment(plan.python, *_layers(plan, command))


def shown_variables(plan: LaunchPlan, command: Command) -> dict[str, str]:
    """The variables that a launch adds to the environment, for records and dry runs; secrets stay hidden."""
    shown: dict[str, str] = {}
    for layer in _layers(plan, command, hide_secrets=True):
        shown.update(layer)
    return shown


def _layers(plan: LaunchPlan, command: Command, *, hide_secrets: bool = False) -> list[Mapping[str, str]]:
    own, tuned = (
        {v.name: v.shown if hide_secrets else v.value for v in variables}
        for variables in (plan.machine.environment_of(plan.arm).variables, plan.arm.tuning.variables)
    )
    return [own, plan.env, command.env, tuned]


def lock_keys(plan: LaunchPlan) -> list[str]:
    """What only one run at a time may use; the stub engine uses nothing."""
    return [] if plan.arm.engine is EngineName.stub else facts.lock_keys(plan.machine)


def requested(engine: Engine, plan: LaunchPlan, command: Command) -> dict[str, str]:
    """The engine's requested settings and the NCCL variables of the launch."""
    asked = {
        f"nccl.{name}": value for name, value in shown_variables(plan, command).items()
        if name.startswith("NCCL_") and not name.startswith("NCCL_DEBUG")
    }
    return engine.requested_settings(plan) | (asked if plan.arm.tuning.tensor_parallel > 1 else {})


def nccl_observed(log: Path) -> list[Observed]:
    """Effective NCCL settings by NCCL's own log lines; ranks that differ show all their values."""
    with log.open(errors="replace") as lines:
        said = nccl.read_log(lines)
    rows = [
        Observed(f"nccl.{name}", name, ", ".join(sorted(values)), "log", f"log line {said.first_line[name]}")
        for name, values in sorted(said.values.items())
    ]
    if said.paths:
        rows.append(Observed("nccl.path", "via", ", ".join(sorted(said.paths)), "log", "how ranks reach each other"))
    return rows


def shape_of(target: Target) -> TargetShape:
    """Facts of the target from its folder, or as declared where the folder is not on this machine.

    Raises InputError if neither tells, ConfigError if they disagree.
    """
    path = Path(target.model) / "config.json"
    if not path.exists() and target.shape is not None:
        return target.shape
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        text = config.get("text_config") or config  # wrappers such as Kimi-K2.5 nest the language model
        found = TargetShape(
            num_layers=text["num_hidden_layers"], width=text["hidden_size"], vocab_size=text["vocab_size"],
            weights_gib=max(sum(f.stat().st_size for f in path.parent.glob("*.safetensors")) / 2**30, 1e-6),
            mla=bool(text.get("kv_lora_rank")), model_class=(config.get("architectures") or ["unknown"])[0],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        told = f"cannot be read as a model's configuration ({error!r}); check target.model"
        raise InputError(f"{path}: {told}") from error
    if target.shape is not None:
        for name in ("num_layers", "width", "vocab_size", "mla"):
            if getattr(target.shape, name) != getattr(found, name):
                declared = getattr(target.shape, name)
                raise ConfigError(f"target.shape.{name}: {declared}, but {path} says {getattr(found, name)}")
    return found
