"""Preflight: what would stop a campaign in the middle and can be known in seconds, without server, GPU or weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tasks.config import Campaign, EngineName, Role, TargetShape, WorkloadKind
from tasks.engines.registry import engine
from tasks.errors import ConfigError, DrafthouseError, InputError
from tasks.launch import shape_of
from tasks.load.prompts import Kept, Prompt, check_disjoint, read_prompts
from tasks.load.workloads import check_length, heldout_prompts
from tasks.machine.known_bad import Finding

TEMPLATE_TOKENS = 64  # what a chat template adds, generously: below it no tokenizer is loaded to count


def preflight(campaign: Campaign, shape: TargetShape, *, elsewhere: bool = False) -> list[Finding]:
    """Faults of the drafter's settings, the prompt files and the lengths of the loads.

    `elsewhere` = the campaign may be meant for another host: where the model folder is not on this one,
    files that are absent too are only warned about.
    """
    absent = not Path(campaign.target.model, "config.json").is_file()
    read: dict[str, Kept[Prompt]] = {}
    found = [*_files(campaign, absent, elsewhere), *_training(campaign, shape), *_prompts(campaign, read)]
    return found + list(_lengths(campaign, read, countable=not absent and not found))


def require_ready(campaign: Campaign) -> None:
    """Raises ConfigError that names every fault; a campaign that is about to run needs all of its files here."""
    errors = [f for f in preflight(campaign, shape_of(campaign.target)) if f.level == "error"]
    if errors:
        raise ConfigError("; ".join(f"{f.what}; {f.remedy}" if f.remedy else f.what for f in errors))


def _files(campaign: Campaign, absent: bool, elsewhere: bool) -> Iterator[Finding]:
    if absent and not elsewhere:
        what = f"target.model: no config.json in {campaign.target.model}"
        yield Finding("model", "error", what, "give a Hugging Face model folder on this machine")
    for field in ("train_file", "heldout_file"):
        path = Path(getattr(campaign.prompts, field))
        if not path.is_file():
            what = f"prompts.{field}: {path} is not a file on this machine"
            yield Finding("prompts", "warning" if absent and elsewhere else "error", what, "name a JSON lines file")
    for arm in campaign.arms_of(Role.speculative):
        drafter = arm.speculative.drafter if arm.speculative else "own"
        if drafter != "own" and not Path(drafter, "config.json").is_file():
            what = f"arms.{arm.name}.speculative.drafter: no config.json in {drafter}"
            yield Finding("drafter", "warning" if absent and elsewhere else "error", what, "name a drafter's folder")


def _training(campaign: Campaign, shape: TargetShape) -> Iterator[Finding]:
    """Only for campaigns that train: others need not set to what fits what they never use."""
    if not campaign.arms_of(Role.extraction):
        return
    drafter, sampling, last = campaign.drafter, campaign.sampling, shape.num_layers
    if sampling.temperature == 0 and sampling.draws > 1:
        what = f"sampling.draws: {sampling.draws} greedy draws are all the same text"
        yield Finding("sampling", "error", what, "set it to 1 or raise the temperature")
    if drafter.draft_vocab_size > shape.vocab_size:
        what = f"drafter.draft_vocab_size: {drafter.draft_vocab_size} is more than the target's {shape.vocab_size}"
        yield Finding("draft-vocabulary", "error", what, "lower it")
    if max(drafter.points) > last:
        what = f"drafter.points: {list(drafter.points)} go beyond the target's {last} layers"
        yield Finding("drafter-points", "error", what, f"choose three of 0 to {last}")
        return
    for name in _tapping(campaign):
        try:
            engine(name).layer_ids(shape.model_class, last, drafter.points)
        except DrafthouseError as error:
            yield Finding("drafter-points", "error", str(error))


def _tapping(campaign: Campaign) -> list[EngineName]:
    """Engines whose layer ids a trained drafter's folder will name: those that serve it, else the one it is from."""
    specs = [(arm.engine, arm.speculative) for arm in campaign.arms_of(Role.speculative)]
    found: set[EngineName] = set()
    for source in {arm.engine for arm in campaign.arms_of(Role.extraction)}:
        found |= {e for e, s in specs if s and s.drafter == "own" and s.extracted_on is source} or {source}
    return sorted(found)


def _prompts(campaign: Campaign, read: dict[str, Kept[Prompt]]) -> Iterator[Finding]:
    """Read the files that the campaign will use as far as it will use them, into `read`."""
    chosen, training = campaign.prompts, bool(campaign.arms_of(Role.extraction))
    loads = any(load.kind is WorkloadKind.prompts for load in campaign.workloads)
    # Without training, its prompts are only read to see that none of them is held out.
    wanted = {"train": (training or loads, training), "heldout": (loads, loads)}
    for kind, (used, counted) in wanted.items():
        path, samples = Path(getattr(chosen, f"{kind}_file")), getattr(chosen, f"{kind}_samples")
        if not used or not path.is_file():
            continue
        try:
            read[kind] = read_prompts(path, samples)
        except InputError as error:
            yield Finding("prompts", "error", f"prompts.{kind}_file: {error}")
            continue
        if counted and (count := len(read[kind])) < samples:
            dropped = "".join(f", {n} × {reason}" for reason, n in read[kind].dropped.most_common())
            what = f"prompts.{kind}_samples: {samples} are asked for, {path} has {count} usable prompts{dropped}"
            yield Finding("prompts", "error", what, f"add prompts or set it to {count}")
    if loads and len(read) == len(wanted):
        try:
            check_disjoint(read["train"], read["heldout"])
        except InputError as error:
            yield Finding("prompts", "error", str(error))


def _lengths(campaign: Campaign, read: dict[str, Kept[Prompt]], countable: bool) -> Iterator[Finding]:
    limit, longest = campaign.target.max_model_len, campaign.prompts.max_prompt_tokens
    texts = [str(prompt.messages).encode() for prompt in read.get("heldout", ())]
    at_most = min(longest, max(map(len, texts), default=longest) + TEMPLATE_TOKENS)  # no token is less than a byte
    for load in campaign.workloads:
        try:
            if load.kind is WorkloadKind.random:
                check_length(load, load.input_tokens, limit)
            elif load.output_tokens >= limit:
                what = f"workloads.{load.name}.output_tokens: {load.output_tokens} leave no room for a prompt"
                yield Finding("length", "error", f"{what} in target.max_model_len {limit}", "lower it")
            elif countable and at_most + load.output_tokens > limit:
                heldout_prompts(load, campaign)  # loads the tokenizer and counts
        except DrafthouseError as error:
            yield Finding("length", "error", str(error))
