"""What a campaign will cost: loads, disk, memory and time per stage, each with the assumption behind it.

These are sizes to plan with (is the disk big enough, does it fit a night), not predictions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tasks.config import Arm, Campaign, Device, Role, TargetShape

GIB: Final = 2**30
LOAD_GIB_S: Final = {Device.cuda: 1.2, Device.cpu: 0.5}  # weights to a ready server; 547 GB took 5 to 10 min
START_S: Final = {Device.cuda: 90.0, Device.cpu: 30.0}  # process, compilation and graphs beside the weights
STREAM_TOK_S: Final = {Device.cuda: 70.0, Device.cpu: 100.0}  # one request alone
PEAK_TOK_S: Final = {Device.cuda: 2000.0, Device.cpu: 400.0}  # many requests; 1,536 and 2,370 were measured at 128
PREFILL_TOK_S: Final = {Device.cuda: 4000.0, Device.cpu: 1000.0}
TRAIN_FLOP_S: Final = {Device.cuda: 1e14, Device.cpu: 3e10}
MEAN_SHARE: Final = 0.5  # prompts and answers reach half of their limits on average


@dataclass(frozen=True)
class Estimate:
    """One stage; None = does not apply."""

    stage: str
    loads: int
    minutes: float
    disk_gib: float
    memory_gib: float | None
    assumption: str


def estimate(campaign: Campaign, shape: TargetShape) -> list[Estimate]:
    """One row per stage that costs anything, in order."""
    device = campaign.machine.device
    load_minutes = (START_S[device] + shape.weights_gib / LOAD_GIB_S[device]) / 60
    rows = []
    for role in (Role.base, Role.extraction, Role.speculative):
        for arm in campaign.arms_of(role):
            told = f"{shape.weights_gib:.1f} GiB at {LOAD_GIB_S[device]:g} GiB/s and {START_S[device]:g} s to start"
            rows.append(Estimate(f"serve {arm.name}", 1, load_minutes, 0.01, memory_per_gpu_gib(arm, shape), told))
            if role is Role.extraction:
                rows += _extraction(campaign, shape, arm)
            else:
                rows.append(_benchmark(campaign, arm))
        if role is Role.base and campaign.arms_of(Role.extraction):
            rows.append(_regenerate(campaign))
    return rows


def memory_per_gpu_gib(arm: Arm, shape: TargetShape) -> float:
    """Weights on one GPU (or host); the KV cache takes what is left of it."""
    return shape.weights_gib / arm.tuning.tensor_parallel


def response_tokens(campaign: Campaign) -> int:
    """Expected tokens of all training samples, prompt and answer."""
    sampling, prompts = campaign.sampling, campaign.prompts
    each = MEAN_SHARE * (prompts.max_prompt_tokens + sampling.max_tokens)
    return round(prompts.train_samples * sampling.draws * each)


def states_gib(campaign: Campaign, shape: TargetShape) -> float:
    """Disk for the hidden states of one extraction: tokens x (points + last) x width x bytes."""
    item = 4 if campaign.target.dtype == "float32" else 2
    return response_tokens(campaign) * (len(campaign.drafter.points) + 1) * shape.width * item / GIB


def drafter_parameters(campaign: Campaign, shape: TargetShape) -> float:
    """Of the trained part: fusion of three states, one decoder layer on twice the width, draft head."""
    width = shape.width
    return 3 * width**2 + 22 * width**2 + width * campaign.drafter.draft_vocab_size


def disk_needed_gib(campaign: Campaign, shape: TargetShape) -> float:
    """Free disk that a campaign needs from nothing, with a tenth to spare."""
    return 1.1 * sum(row.disk_gib for row in estimate(campaign, shape))


def _benchmark(campaign: Campaign, arm: Arm) -> Estimate:
    device, seconds = campaign.machine.device, 0.0
    for load in campaign.workloads:
        for concurrency in load.concurrencies:
            speed = min(STREAM_TOK_S[device] * concurrency, PEAK_TOK_S[device])
            seconds += load.repeats * (load.requests + load.warmup_requests) * load.output_tokens / speed
    told = f"{STREAM_TOK_S[device]:g} tok/s for one request, at most {PEAK_TOK_S[device]:g} together, full answers"
    return Estimate(f"benchmark {arm.name}", 0, seconds / 60, 0.05, None, told)


def _regenerate(campaign: Campaign) -> Estimate:
    device, sampling = campaign.machine.device, campaign.sampling
    tokens = campaign.prompts.train_samples * sampling.draws * sampling.max_tokens * MEAN_SHARE
    speed = min(STREAM_TOK_S[device] * sampling.concurrency, PEAK_TOK_S[device])
    told = f"{tokens:,.0f} tokens at {speed:,.0f} tok/s; answers reach half of max_tokens; none if they are imported"
    return Estimate("regenerate", 0, tokens / speed / 60, tokens * 8 / GIB, None, told)


def _extraction(campaign: Campaign, shape: TargetShape, arm: Arm) -> list[Estimate]:
    device, tokens = campaign.machine.device, response_tokens(campaign)
    gib, points = states_gib(campaign, shape), len(campaign.drafter.points) + 1
    item = 4 if campaign.target.dtype == "float32" else 2
    took = f"{tokens:,} tokens (half of the limits) x {points} points x {shape.width} x {item} bytes"
    prefill = f"{PREFILL_TOK_S[device]:,.0f} prompt tok/s"
    parameters = drafter_parameters(campaign, shape)
    flops = 6 * parameters * tokens * campaign.drafter.epochs * campaign.drafter.unroll_steps
    size = parameters * 16 / GIB + 2 * shape.vocab_size * shape.width * 2 / GIB
    epochs = campaign.drafter.epochs
    trained = f"{parameters / 1e6:,.0f} M parameters, {epochs} epochs at {TRAIN_FLOP_S[device]:.0e} FLOP/s"
    # A target that does not fit is streamed once for all samples, layer by layer.
    aligned = "one layer at a time from the weights, for a sample of prompts"
    return [
        Estimate(f"extract {arm.engine}", 0, tokens / PREFILL_TOK_S[device] / 60, gib, None, f"{took}; {prefill}"),
        Estimate(f"align {arm.engine}", 0, shape.weights_gib / LOAD_GIB_S[device] / 60 + 1, 0.01,
                 4 * shape.weights_gib / shape.num_layers, aligned),
        Estimate(f"train {arm.engine}", 0, flops / TRAIN_FLOP_S[device] / 60, 3 * parameters * 16 / GIB, size, trained),
        Estimate(f"replay {arm.engine}", 0, 1.0, 0.01, size, "held-out prompts only"),
    ]
