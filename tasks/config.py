"""The whole campaign as one frozen model: the YAML file, the Prefect form and `--set` overrides.

The only layer number here is the Hugging Face `hidden_states` index: 0 = embeddings, k = residual
stream after k decoder layers, N = after the last layer before the final norm.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator, model_validator

from tasks.server_config import (
    HIDDEN,
    NAME,
    SECRET_NAME,
    Arm,
    Device,
    Dtype,
    EngineEnvironment,
    EngineName,
    Frozen,
    Interconnect,
    Machine,
    Role,
    Speculative,
    StubFault,
    Target,
    TargetShape,
    Tuning,
    Variable,
    each_once,
)
from tasks.store.keys import content_key

__all__ = [
    "HIDDEN",
    "NAME",
    "SECRET_NAME",
    "Arm",
    "Campaign",
    "Device",
    "DrafterConfig",
    "Dtype",
    "EngineEnvironment",
    "EngineName",
    "Frozen",
    "Interconnect",
    "Machine",
    "Prompts",
    "Role",
    "Sampling",
    "Speculative",
    "StubFault",
    "Target",
    "TargetShape",
    "Thresholds",
    "Tuning",
    "Variable",
    "Workload",
    "WorkloadKind",
]


Count = Annotated[int, Field(ge=1)]


class WorkloadKind(StrEnum):
    prompts = "prompts"
    random = "random"


class Workload(Frozen):
    name: str = Field(pattern=NAME)
    """Name of the load, unique in the campaign."""
    kind: WorkloadKind = WorkloadKind.prompts
    """Held-out prompts, or random token ids of fixed length."""
    input_tokens: int = Field(128, ge=1)
    """Prompt length of a random load, in tokens."""
    output_tokens: int = Field(96, ge=2)
    """Longest answer, in tokens."""
    ignore_eos: bool = False
    """Generate exactly `output_tokens` tokens."""
    concurrencies: Annotated[tuple[Count, ...], AfterValidator(each_once)] = Field((1, 8), min_length=1)
    """Requests in flight, one measurement each (closed loop), each number once."""
    requests: int = Field(32, ge=1)
    """Requests per measurement; prompts are taken in order, and again from the start if they run out."""
    repeats: int = Field(1, ge=1)
    """Measurements per concurrency."""
    warmup_requests: int = Field(2, ge=0)
    """Requests before each measurement that are not counted."""
    timeout_s: float = Field(120, gt=0)
    """Longest time for one request, in seconds."""
    by_category: bool = False
    """Run each prompt category as a block of its own, so that acceptance is known per category."""
    replay: bool = True
    """Predict acceptance on the base arm's answers to these prompts before speculation is served."""


class Prompts(Frozen):
    train_file: str
    """JSON lines with the training prompts: `messages`, `prompt`, `question` or `turns`, and `category`."""
    heldout_file: str
    """JSON lines with the prompts of the benchmarks; they share no text with the training prompts."""
    train_samples: int = Field(256, ge=1)
    """Training prompts to use, from the start of the file."""
    heldout_samples: int = Field(32, ge=1)
    """Held-out prompts to use, from the start of the file."""
    max_prompt_tokens: int = Field(512, ge=8)
    """Longer prompts are dropped and counted."""


class Sampling(Frozen):
    temperature: float = Field(0.0, ge=0)
    """0 = greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling share."""
    max_tokens: int = Field(128, ge=2)
    """Longest response, in tokens."""
    draws: int = Field(1, ge=1)
    """Responses per prompt."""
    concurrency: int = Field(16, ge=1)
    """Requests in flight while responses are generated or states extracted."""


class DrafterConfig(Frozen):
    name: str = Field("drafter", pattern=NAME)
    """Name of the drafter in tables and reports."""
    points: tuple[int, ...] = (1, 2, 3)
    """Three hidden_states indices (0 = embeddings, k = after k layers) whose states are fused."""
    draft_vocab_size: int = Field(1024, ge=2)
    """Tokens that the drafter can propose (draft vocabulary)."""
    unroll_steps: int = Field(4, ge=1, le=16)
    """Steps of the train-time-test unroll."""
    step_loss_decay: float = Field(0.8, gt=0, le=1)
    """Weight of unroll step k is this to the power k."""
    epochs: int = Field(8, ge=1)
    """Passes over the training samples."""
    batch_size: int = Field(8, ge=1)
    """Samples per optimizer step."""
    learning_rate: float = Field(1.5e-3, gt=0)
    """Peak learning rate (AdamW)."""
    warmup_steps: int = Field(20, ge=0)
    """Optimizer steps of linear warm-up before the cosine decay."""
    gradient_clip: float = Field(1.0, gt=0)
    """Largest gradient norm."""
    seed: int = 0
    """Seed of initialisation and sample order."""
    checkpoint_every_steps: int = Field(50, ge=1)
    """Optimizer steps between checkpoints."""

    @field_validator("points")
    @classmethod
    def _three_distinct(cls, points: tuple[int, ...]) -> tuple[int, ...]:
        if len(points) != 3 or len(set(points)) != 3 or min(points) < 0:
            raise ValueError(f"needs three distinct hidden_states indices from 0 on, got {list(points)}")
        return tuple(sorted(points))


class Thresholds(Frozen):
    state_rel_error: float = Field(1e-5, gt=0)
    """Largest relative error of captured states at the mapped point (1e-5 in fp32, 0.02 in bf16)."""
    next_best_rel_error: float = Field(0.2, ge=0)
    """Smallest relative error that the next-best index must have, so that the mapping is unambiguous."""
    align_samples: int = Field(8, ge=1)
    """Samples that align compares with a transformers forward."""
    max_nll_per_token: float = Field(4.0, gt=0)
    """Largest mean negative log-likelihood per response token under the target, in nats."""
    top2_margin: float = Field(1e-4, ge=0)
    """Greedy outputs may first differ only where the top-2 log-probability margin is at most this."""
    replay_gap: float = Field(0.02, gt=0)
    """Largest relative gap between replayed and served accept length."""
    min_accept_length: float = Field(1.05, ge=1)
    """Replay stops the campaign below this accept length: the drafter does not draft."""
    client_lag_ms: float = Field(50.0, gt=0)
    """A measurement whose client event loop lagged more than this (p99) is void."""


class Campaign(Frozen):
    """One campaign: serve, measure, extract, align, train, replay, and measure speculation."""

    name: str = Field(pattern=NAME)
    """Name of the campaign in tables, reports and run names."""
    target: Target
    """The model that is served."""
    machine: Machine = Machine()
    """Where and with which engine environments it runs."""
    arms: tuple[Arm, ...] = Field(min_length=1)
    """Server configurations, started one after another in this order, unless they are up side by side."""
    workloads: tuple[Workload, ...] = Field(min_length=1)
    """Loads that every base and speculative arm is measured under."""
    prompts: Prompts
    """Training and held-out prompts."""
    sampling: Sampling = Sampling()
    """How the training responses are generated."""
    drafter: DrafterConfig = DrafterConfig()
    """The EAGLE-3 drafter and its training."""
    thresholds: Thresholds = Thresholds()
    """Limits at which a seam check stops the campaign."""
    strict: bool = True
    """Stop before the benchmark when a requested setting did not take effect."""

    @model_validator(mode="after")
    def _consistent(self) -> Campaign:
        for kind, names in (("arms", [a.name for a in self.arms]), ("workloads", [w.name for w in self.workloads])):
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise ValueError(f"{kind}: name used twice: {', '.join(twice)}")
        self._side_by_side_is_possible()
        extracting = {a.engine for a in self.arms if a.role is Role.extraction}
        if extracting and not any(a.role is Role.base for a in self.arms):
            raise ValueError("arms: extraction needs a base arm, whose server generates the responses")
        measured = {a.engine for a in self.arms if a.role is Role.base}
        for arm in self.arms:
            spec = arm.speculative
            if spec and arm.engine not in measured:
                raise ValueError(f"arms: {arm.name} needs a base arm on {arm.engine} to be compared with")
            if spec and spec.drafter == "own" and spec.extracted_on not in extracting:
                raise ValueError(f"arms: {arm.name} wants a drafter from {spec.extracted_on}, no arm extracts there")
        return self

    def _side_by_side_is_possible(self) -> None:
        for word in sorted({a.side_by_side for a in self.arms if a.side_by_side}):
            group = [a for a in self.arms if a.side_by_side == word]
            names = ", ".join(a.name for a in group)
            if len(group) < 2:
                raise ValueError(f"arms: {names} is alone with side_by_side {word!r}: give it to a second arm too")
            if len({a.role for a in group}) > 1 or group[0].role is Role.extraction:
                raise ValueError(
                    f"arms: side_by_side {word!r} names {names}; only base arms, or only speculative arms, take turns"
                )
            if self.machine.port:
                raise ValueError(f"machine.port is one port, and {names} are up together: leave it empty")

    def arms_of(self, role: Role) -> tuple[Arm, ...]:
        """Arms of one role, in order."""
        return tuple(a for a in self.arms if a.role is role)

    def arms_together(self, role: Role) -> list[list[Arm]]:
        """Arms of one role that are up at the same time, in order of the first of each group."""
        groups: dict[tuple[str, str], list[Arm]] = {}
        for arm in self.arms_of(role):
            groups.setdefault(("group", arm.side_by_side) if arm.side_by_side else ("arm", arm.name), []).append(arm)
        return list(groups.values())

    @property
    def key(self) -> str:
        """Content key of the whole config."""
        return content_key(self.model_dump(mode="json"))
