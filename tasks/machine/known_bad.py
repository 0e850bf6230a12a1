"""Combinations of settings, topology and capability that are known to fail, each with its source and remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from tasks.config import Arm, Campaign, Device, EngineName, Interconnect, Role, TargetShape
from tasks.errors import DrafthouseError, NotSupported
from tasks.machine import backends, nccl
from tasks.machine.facts import Facts

Level = Literal["ok", "info", "warning", "unknown", "error"]
SM120: Final = "https://github.com/sgl-project/sglang/issues/24633"
ALL_REDUCE: Final = "https://github.com/vllm-project/vllm/pull/45004"
ACS: Final = "https://github.com/NVIDIA/nccl/issues/2079"
CAP: Final = "https://github.com/sgl-project/sglang/pull/34290"
PREFIX: Final = "https://github.com/vllm-project/vllm/issues/44485"
GRAPH_FLAGS: Final = ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode", "--max-cudagraph-capture-size")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor; `unknown` is not `ok`."""

    id: str
    level: Level
    what: str
    remedy: str = ""
    source: str = ""

    def __str__(self) -> str:
        remedy = f" -> {self.remedy}" if self.remedy else ""
        source = f" [{self.source}]" if self.source else ""
        return f"{self.level:8} {self.id}: {self.what}{remedy}{source}"


def judge_campaign(campaign: Campaign, facts: Facts, shape: TargetShape | None) -> list[Finding]:
    """Everything that is wrong with a campaign on these GPUs before anything is loaded."""
    found: list[Finding] = []
    for arm in campaign.arms:
        found += _caps(campaign, arm)
        found += _extraction(arm, shape)
        if campaign.machine.device is Device.cuda:
            found += _gpus(campaign, arm, facts, shape)
    found += _equal_caps(campaign)
    if campaign.machine.device is Device.cuda:
        found += _peers(campaign, facts)
    found += _memory_split(campaign)
    return found


def _memory_split(campaign: Campaign) -> Iterator[Finding]:
    """Arms that are up together share the memory; contexts and graphs come on top of their fractions of a GPU."""
    for group in [g for role in Role for g in campaign.arms_together(role) if len(g) > 1]:
        if campaign.machine.device is Device.cpu:
            for arm in [a for a in group if a.engine is EngineName.vllm and a.tuning.kv_cache_gib is None]:
                what = f"{arm.name}: side by side, and vLLM on a CPU takes nearly all memory for its cache unless told"
                yield Finding("memory-split", "error", what, "set tuning.kv_cache_gib")
            continue
        names, shares = ", ".join(a.name for a in group), [a.tuning.memory_fraction for a in group]
        together = sum(share or 0 for share in shares)
        what = f"{names}: side by side with tuning.memory_fraction {' + '.join(str(s or 'unset') for s in shares)}"
        if None in shares:
            yield Finding("memory-split", "error", what, "give each arm its share; the first would take nearly all")
        elif together > 0.9:
            level: Level = "error" if together > 1 else "warning"
            yield Finding("memory-split", level, f"{what} = {together:g}", "let them sum to 0.9 at most")


def _gpus(campaign: Campaign, arm: Arm, facts: Facts, shape: TargetShape | None) -> Iterator[Finding]:
    tuning = arm.tuning
    if tuning.tensor_parallel > max(len(campaign.machine.gpus), 1):
        what = f"{arm.name}: tensor_parallel {tuning.tensor_parallel}, machine.gpus lists {len(campaign.machine.gpus)}"
        yield Finding("too-few-gpus", "error", what, "list as many GPUs in machine.gpus")
    try:
        backend = backends.resolve(arm.engine, facts.capability, bool(shape and shape.mla), tuning.attention_backend)
        if backend.note:
            level: Level = "unknown" if "unknown" in backend.note or "not a known" in backend.note else "info"
            remedy = "set machine.compute_capability" if facts.capability is None else ""
            what = f"{arm.name}: {backend.note} -> {backend.name or 'engine default'}"
            yield Finding("attention-backend", level, what, remedy, SM120)
    except NotSupported as error:
        yield Finding("attention-backend", "error", f"{arm.name}: {error}", "leave attention_backend empty", SM120)
    yield from _collectives(arm, facts)
    if shape and facts.gpu_memory_gib:
        need = shape.weights_gib / tuning.tensor_parallel
        room = facts.gpu_memory_gib * (tuning.memory_fraction or 0.9)
        if need > room:
            what = f"{arm.name}: {need:.0f} GiB of weights per GPU, {room:.0f} GiB allowed"
            yield Finding("does-not-fit", "error", what, "raise tensor_parallel or memory_fraction, or quantise")
    yield from _graphs(campaign, arm)


def _collectives(arm: Arm, facts: Facts) -> Iterator[Finding]:
    try:
        _resolved(arm, facts)
    except NotSupported as error:
        yield Finding("all-reduce", "error", f"{arm.name}: {error}", "let flag and variables agree", ALL_REDUCE)


def _peers(campaign: Campaign, facts: Facts) -> Iterator[Finding]:
    """Whether GPUs that share layers can reach each other at all; once for all arms."""
    arms = [a for a in campaign.arms if a.tuning.tensor_parallel > 1 and not _p2p_off(a, facts)]
    names = ", ".join(a.name for a in arms)
    if not arms:
        return
    if facts.interconnect is None:
        what = f"{names}: nobody knows how the GPUs reach each other"
        yield Finding("topology", "unknown", what, "set machine.interconnect to nvlink or pcie", ALL_REDUCE)
    elif facts.interconnect is Interconnect.pcie and facts.acs.state == "on":
        bridges = ", ".join(facts.acs.bridges)
        what = f"{names}: ACS redirect is on at {bridges}: peer traffic takes the IOMMU, and all-reduce may hang"
        yield Finding("acs-redirect", "warning", what, "nccl_profile: p2p-off (or auto), or turn ACS off", ACS)
    elif facts.interconnect is Interconnect.pcie and facts.acs.state == "unknown":
        what = f"{names}: whether ACS redirect is on is unknown ({facts.acs.reason})"
        yield Finding("acs-redirect", "unknown", what, "run the doctor as root on the GPU host", ACS)


def _p2p_off(arm: Arm, facts: Facts) -> bool:
    try:
        resolved = _resolved(arm, facts)
    except NotSupported:
        return False
    return (resolved.variables | {v.name: v.value for v in arm.tuning.variables}).get("NCCL_P2P_DISABLE", "0") != "0"


def _resolved(arm: Arm, facts: Facts) -> nccl.Resolved:
    tuning = arm.tuning
    return nccl.resolve(
        name=tuning.nccl_profile, tensor_parallel=tuning.tensor_parallel, interconnect=facts.interconnect,
        acs=facts.acs, custom_all_reduce=tuning.custom_all_reduce,
        own_variables={v.name: v.value for v in tuning.variables},
    )


def _graphs(campaign: Campaign, arm: Arm) -> Iterator[Finding]:
    largest = _flag(arm, GRAPH_FLAGS)
    wanted = _largest_concurrency(campaign)
    if largest is not None and largest < min(wanted, arm.tuning.max_running_requests):
        what = f"{arm.name}: CUDA graphs up to {largest} requests, benchmark up to {wanted}: the rest has none"
        yield Finding("graphs-below-concurrency", "warning", what, "raise the flag to the largest concurrency")


def _flag(arm: Arm, names: tuple[str, ...]) -> int | None:
    words = [word for argument in arm.tuning.extra_args for word in argument.split("=", 1)]
    for word, value in pairwise(words):
        if word in names and value.isdigit():
            return int(value)
    return None


def _largest_concurrency(campaign: Campaign) -> int:
    return max(c for load in campaign.workloads for c in load.concurrencies)


def _caps(campaign: Campaign, arm: Arm) -> Iterator[Finding]:
    wanted, cap = _largest_concurrency(campaign), arm.tuning.max_running_requests
    if arm.role is not Role.extraction and cap < wanted:
        what = f"{arm.name}: max_running_requests {cap} is below the benchmark's concurrency {wanted}"
        remedy = "raise it in all arms; rows above it do not compare"
        yield Finding("cap-below-concurrency", "warning", what, remedy, CAP)


def _equal_caps(campaign: Campaign) -> Iterator[Finding]:
    measured = [a for a in campaign.arms if a.role is not Role.extraction]
    caps = {a.tuning.max_running_requests for a in measured}
    if len(caps) > 1:
        shown = ", ".join(f"{a.name} {a.tuning.max_running_requests}" for a in measured)
        yield Finding("unequal-caps", "warning", f"max_running_requests differ: {shown}", "make them equal", CAP)


def _extraction(arm: Arm, shape: TargetShape | None) -> Iterator[Finding]:
    if arm.role is not Role.extraction:
        return
    if any(a.split("=")[0] in ("--enable-prefix-caching", "--enable-radix-cache") for a in arm.tuning.extra_args):
        what = f"{arm.name}: extra_args turn the prefix cache on: cached tokens have no hidden states"
        yield Finding("extraction-prefix-cache", "error", what, "remove the flag", PREFIX)
    if arm.engine is EngineName.vllm and shape and shape.mla:
        what = f"{arm.name}: vLLM's extraction does not support MLA models"
        yield Finding("extraction-mla", "error", what, "extract through SGLang")


def as_error(finding: Finding) -> DrafthouseError:
    """The finding as the error that stops a campaign."""
    return NotSupported(f"{finding.what}; {finding.remedy}" if finding.remedy else finding.what)
