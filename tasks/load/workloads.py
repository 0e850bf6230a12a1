"""Which requests a measurement sends: held-out prompts in order, or random token ids that no cache knows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.config import Campaign, Workload, WorkloadKind
from tasks.errors import ConfigError, InputError
from tasks.load.prompts import RenderedPrompt, check_disjoint, read_prompts, render
from tasks.store.keys import content_key


@dataclass(frozen=True)
class Planned:
    """One request before an engine's dialect makes a body of it."""

    request_id: str
    prompt_key: str
    category: str | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Point:
    """One measurement of a workload."""

    concurrency: int
    repeat: int

    @property
    def name(self) -> str:
        return f"c{self.concurrency}-r{self.repeat}"


def heldout_prompts(workload: Workload, campaign: Campaign) -> list[RenderedPrompt]:
    """Rendered held-out prompts of a load, none for random ids.

    Raises InputError for unusable files or a prompt that is also trained on, ConfigError if a prompt and
    its answer do not fit into the model's length.
    """
    target, chosen, prompts = campaign.target, campaign.prompts, list[RenderedPrompt]()
    if workload.kind is WorkloadKind.prompts:
        heldout = read_prompts(chosen.heldout_file, chosen.heldout_samples)
        check_disjoint(read_prompts(chosen.train_file, chosen.train_samples), heldout)
        prompts = render(
            heldout, target.model, chosen.max_prompt_tokens, trust_remote_code=target.trust_remote_code
        )
    longest = max((len(p.token_ids) for p in prompts), default=workload.input_tokens)
    check_length(workload, longest, target.max_model_len)
    return prompts


def check_length(workload: Workload, prompt_tokens: int, max_model_len: int) -> None:
    """Raises ConfigError if a prompt of that length and its answer do not fit into the model's length."""
    if prompt_tokens + workload.output_tokens > max_model_len:
        raise ConfigError(
            f"workloads.{workload.name}.output_tokens: {prompt_tokens} prompt tokens and {workload.output_tokens} "
            f"more exceed target.max_model_len {max_model_len}; lower one or raise the other"
        )


def points(workload: Workload) -> list[Point]:
    """All measurements; repeats alternate over the concurrencies so that drift does not favour one of them."""
    return [Point(c, repeat) for repeat in range(workload.repeats) for c in workload.concurrencies]


def blocks(
    workload: Workload, point: Point, prompts: Sequence[RenderedPrompt], vocab_size: int, seed: str
) -> list[list[Planned]]:
    """Requests of one measurement: one block, or one per category (in order of appearance) if by_category."""
    planned = [
        Planned(f"{workload.name}-{point.name}-{i}", key, category, ids)
        for i, (key, category, ids) in enumerate(_contents(workload, point, prompts, vocab_size, seed))
    ]
    if not workload.by_category:
        return [planned]
    by_category: dict[str | None, list[Planned]] = {}
    for request in planned:
        by_category.setdefault(request.category, []).append(request)
    return list(by_category.values())


def warmup(
    workload: Workload, point: Point, prompts: Sequence[RenderedPrompt], vocab_size: int, seed: str
) -> list[Planned]:
    """Requests before a measurement: random ids of the load's length, so that they warm no prompt's cache entry."""
    input_tokens = max((len(p.token_ids) for p in prompts), default=workload.input_tokens)
    random_ids = random.Random(content_key("warmup", seed, workload.name, point.name))
    contents = [_random_prompt(random_ids, vocab_size, input_tokens) for _ in range(workload.warmup_requests)]
    return [Planned(f"{workload.name}-{point.name}-warmup-{i}", "", None, ids) for i, ids in enumerate(contents)]


def _contents(
    workload: Workload, point: Point, prompts: Sequence[RenderedPrompt], vocab_size: int, seed: str
) -> list[tuple[str, str | None, tuple[int, ...]]]:
    if workload.kind is WorkloadKind.prompts:
        if not prompts:
            raise InputError(f"workloads.{workload.name}: no held-out prompt to send")
        cycle = [prompts[i % len(prompts)] for i in range(workload.requests)]
        return [(p.prompt.key, p.prompt.category, tuple(p.token_ids)) for p in cycle]
    # Other ids at every point and repeat: a warm prefix cache raised throughput by up to 86 % unseen. Arms and
    # runs get the same ids, each on a server of its own, so that outputs can be compared and replays reused.
    random_ids = random.Random(content_key("random load", seed, workload.name, point.name))
    ids = [_random_prompt(random_ids, vocab_size, workload.input_tokens) for _ in range(workload.requests)]
    return [(content_key("random prompt", list(i)), None, i) for i in ids]


def _random_prompt(source: random.Random, vocab_size: int, length: int) -> tuple[int, ...]:
    return tuple(source.randrange(vocab_size) for _ in range(length))
