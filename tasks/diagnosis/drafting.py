"""The drafter on the target's own states: repairs, training and mask judged by likelihood; served against replayed."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tasks import reference
from tasks.diagnosis.case import Case, texts_of
from tasks.diagnosis.causes import Findings
from tasks.diagnosis.folder import Folder, same_numbers
from tasks.diagnosis.repairs import Gain, Repair, Setup, Text, costs, gains, read_texts, repairs, setup_of, wirings
from tasks.eagle3.drafting import walk
from tasks.eagle3.target import TargetHead

TEXTS = 14
MOST_TEXTS = 64  # for what was served, which is compared prompt by prompt
CONTINUED_STEPS = 24
LEARNING_RATE = 1e-3
# Nats per token on unseen texts: 20 healthy small drafters gained up to 0.4, undertrained ones over 1.4.
WORTH_TRAINING = 0.6


def check_drafter(folder: Folder, head: TargetHead, case: Case, findings: Findings) -> None:
    """Judge the drafter on texts of this run."""
    rows = texts_of(case, TEXTS)
    if not rows:
        findings.notes.append("no text to judge the drafter on")
        return
    texts = read_texts(case.model, rows)
    own = folder.embeddings_VD
    embeddings = own if own is not None and own.shape == head.embeddings_VD.shape else head.embeddings_VD
    setup = setup_of(folder.drafter, folder.target_ids, embeddings, folder.points, texts[0].states_TKD.shape[1] - 2)
    tried = gains(setup, iter(_all_repairs(setup, folder, head, case)), texts)
    real = [g for g in tried if g.real]
    before, hits = costs(setup, texts)
    findings.notes.append(
        f"drafter on {len(texts)} texts: {float(before.mean()):.3f} nats per token, "
        f"{float(hits.float().mean()):.1%} of first drafts right; best repair: {tried[0].text} ({tried[0].nats:+.3f})"
    )
    _check_mask(setup, texts, case, findings)
    if max((f.score for f in findings.found), default=0.0) < 0.5:
        # More training mends every fault: it is the cause only by what it gains beyond the best repair.
        mended = real[0].nats if real else 0.0
        gained = _check_training(setup, head, texts, mended, case, findings)
        if gained - mended > WORTH_TRAINING:
            real = [g for g in real if g.nats > 0.5 * gained]
    _rank(real, findings)
    _check_served(setup, head, texts, case, findings)


def _all_repairs(setup: Setup, folder: Folder, head: TargetHead, case: Case) -> Iterable[Repair]:
    yield from repairs(setup, head, case.model)
    for name, tensor in (folder.trained or {}).items():
        if name in setup.drafter.state_dict() and name in folder.stored and folder.stored[name].shape == tensor.shape:
            if same_numbers(folder.stored[name], tensor):
                continue
            mended = copy.deepcopy(setup.drafter)
            mended.load_state_dict({**mended.state_dict(), name: tensor.float()})
            id = "head_random_or_missing" if name.startswith("lm_head") else "weights_damaged"
            yield id, f"{name} of the last checkpoint", replace(setup, drafter=mended)


def _rank(real: Sequence[Gain], findings: Findings) -> None:
    """The best repair names the cause; others count by their share of its gain."""
    if not real:
        return
    best = real[0].nats
    for gain in real:
        score = 0.94 * (1 - math.exp(-gain.nats / 0.05)) * (gain.nats / best) ** 3
        text = (
            f"with {gain.text} the drafter gains {gain.nats:.3f} ± {gain.error:.3f} nats per token and "
            f"its first drafts are right in {gain.hits_after:.1%} instead of {gain.hits_before:.1%}"
        )
        findings.add(gain.id, score, text)


def _check_mask(setup: Setup, texts: Sequence[Text], case: Case, findings: Findings) -> None:
    """A drafter of responses imitates the target on responses; one that learnt prompts does so on prompts.

    Measured by the share of the way from a uniform guess to the target's own distribution.
    """
    learnt: dict[bool, float] = {}
    for prompt in (False, True):
        pairs = [_imitation(setup, text, case, prompt) for text in texts]
        missed, uniform = (float(torch.cat([pair[n] for pair in pairs]).mean()) for n in (0, 1))
        learnt[prompt] = 1 - missed / max(uniform, 1e-9)
    if learnt[True] > learnt[False] + 0.1 and learnt[True] > 0.2:
        text = f"it has learnt {learnt[True]:.0%} of the target's choices in prompts, {learnt[False]:.0%} in responses"
        findings.add("loss_mask", 0.75 + 0.25 * min(1.0, learnt[True] - learnt[False]), text)


@torch.no_grad()
def _imitation(setup: Setup, text: Text, case: Case, prompt: bool) -> tuple[Tensor, Tensor]:
    """Kullback-Leibler distance over the draft vocabulary of the drafter, and of a uniform guess, from the target."""
    embedded = setup.embedded(text)[None]
    logits = next(iter(setup.drafter.unroll(setup.auxiliary(text)[None, :-1], 1, lambda *_: embedded)))[0]
    states = text.states_TKD[1:, -2]  # hidden_states[N] of the position that makes the choice
    wanted = reference.logits(case.model, states)[:, setup.target_ids].log_softmax(-1)
    place = torch.arange(len(wanted)) + 2
    use = (place > 2) & (place < text.prompt_tokens) if prompt else place >= text.prompt_tokens
    log_share = logits.float().log_softmax(-1)[use]
    chosen = wanted[use]
    distance = (chosen.exp() * (chosen - log_share)).sum(-1)
    return distance, (chosen.exp() * chosen).sum(-1) + math.log(len(setup.target_ids))


def _check_training(
    setup: Setup, head: TargetHead, texts: Sequence[Text], repaired: float, case: Case, findings: Findings
) -> float:
    """Train a copy a little further on the run's responses; returns what it gains on the judged texts, in nats."""
    rows = [r for r in case.responses if 1 < r["prompt_tokens"] < len(r["token_ids"]) - 1][:64]
    if len(rows) < 8 or not case.outputs:
        findings.notes.append("too few texts to tell whether more training would help")
        return 0.0
    fresh = read_texts(case.model, [(list(r["token_ids"]), r["prompt_tokens"]) for r in rows])
    before, hits = costs(setup, texts)
    mended = replace(setup, drafter=copy.deepcopy(setup.drafter).train())
    optimizer = torch.optim.AdamW(mended.drafter.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    where = torch.full((head.head_VD.shape[0],), -1)
    where[setup.target_ids] = torch.arange(len(setup.target_ids))
    order = torch.randperm(len(fresh), generator=torch.Generator().manual_seed(0)).tolist()
    for step in range(CONTINUED_STEPS):
        chosen = [fresh[order[(4 * step + n) % len(order)]] for n in range(4)]
        losses = [loss for text in chosen if (loss := _loss(mended, text, where)) is not None]
        if losses:
            torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(mended.drafter.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    after, hits_after = costs(replace(mended, drafter=mended.drafter.eval()), texts)
    gained = float((before - after).mean())
    text = (
        f"{CONTINUED_STEPS} more training steps gain {gained:.2f} nats per token on unseen texts "
        f"({float(hits.float().mean()):.1%} to {float(hits_after.float().mean()):.1%} of first drafts right)"
    )
    findings.notes.append(text)
    if gained - repaired > WORTH_TRAINING:
        findings.add("undertrained", min(0.95, 0.5 + 0.4 * (gained - repaired - WORTH_TRAINING)), text)
    return gained


def _loss(setup: Setup, text: Text, where: Tensor) -> Tensor | None:
    embedded = setup.embedded(text)[None]
    logits = next(iter(setup.drafter.unroll(setup.auxiliary(text)[None, :-1], 1, lambda *_: embedded)))[0]
    wanted = where[text.choice_T[1:]]
    use = (torch.arange(len(wanted)) + 2 >= text.prompt_tokens) & (wanted >= 0)
    return F.cross_entropy(logits[use], wanted[use]) if bool(use.any()) else None


# served against replayed ------------------------------------------------------------------------


@torch.no_grad()
def accept_rates(setup: Setup, texts: Sequence[Text], k: int) -> tuple[Counter[int], int]:
    """Drafts whose first n tokens were accepted, by n >= 1, and drafts, for a drafter used in this way."""
    reached: Counter[int] = Counter()
    drafts = 0
    for text in texts:
        said: list[Tensor] = []

        def embed(step: int, logits: Tensor | None, text: Text = text, said: list[Tensor] = said) -> Tensor:
            if logits is None:
                return setup.embedded(text)[None]
            said.append(setup.target_ids[logits[0].argmax(-1)])
            return F.embedding(said[-1], setup.embeddings_VD)[None]

        for logits in setup.drafter.unroll(setup.auxiliary(text)[None, :-1], k, embed):
            last = logits
        said.append(setup.target_ids[last[0].argmax(-1)])
        rows = torch.cat([torch.full((1, k), -1), torch.stack(said, 1)])
        for count in walk(rows, text.token_ids.tolist(), text.prompt_tokens).accepted:
            drafts += 1
            reached.update(range(1, count + 1))
    return reached, drafts


def _check_served(
    setup: Setup, head: TargetHead, texts: Sequence[Text], case: Case, findings: Findings
) -> None:
    """Where serving accepts less than replay: which wrong use of this drafter would give the served numbers?

    The outputs are greedy and the same on both sides, so a right server counts what replay counts but for
    rounding: the distance is measured in a fraction of the noise that two independent samples would have.
    """
    served = _served(case)
    if served and case.outputs:
        texts = read_texts(case.model, texts_of(case, MOST_TEXTS))
    noise = 0.05 if case.campaign.target.dtype == "float32" else 0.5
    for arm, k, drafts, accepted in served:
        healthy = accept_rates(setup, texts, k)
        if not healthy[1] or _unlikely(healthy, drafts, accepted, noise) < 25 or not _lower(healthy, drafts, accepted):
            continue
        if max((f.score for f in findings.found), default=0.0) > 0.9:
            return  # explained already, and served with the same fault
        scored = [(_unlikely(healthy, drafts, accepted, noise), "", "as it is")]
        for id, text, broken in [*wirings(setup), *_breaks(setup)]:
            scored.append((_unlikely(accept_rates(broken, texts, k), drafts, accepted, noise), id, text))
        worst, best = scored[0][0], min(scored)
        length = 1 + sum(accepted) / max(1, drafts)
        told = f"{arm} accepts {length:.2f} tokens per step over {drafts} drafts, replay predicts "
        told += f"{1 + sum(healthy[0].values()) / healthy[1]:.2f}"
        if best[1] and best[0] < 0.25 * worst:
            for value, id, text in sorted(scored)[:4]:
                if id and value < 0.25 * worst:
                    score = 0.9 * (1 - value / worst) * (best[0] + 4) / (value + 4)
                    findings.add(id, score, f"{told}; served with {text} it would be so")
        else:
            findings.add("serving_differs", 0.6, told)


def _breaks(setup: Setup) -> Iterable[Repair]:
    identity = torch.arange(len(setup.target_ids))
    yield "d2t_mismatch", "draft ids taken for target ids", replace(setup, target_ids=identity)
    blind = torch.zeros_like(setup.embeddings_VD)
    yield "embedding_not_target", "embeddings that say nothing", replace(setup, embeddings_VD=blind)
    random = copy.deepcopy(setup.drafter)
    torch.manual_seed(0)
    torch.nn.init.normal_(random.lm_head.weight, std=0.02)
    yield "head_random_or_missing", "an untrained head", replace(setup, drafter=random)


def _served(case: Case) -> list[tuple[str, int, int, list[int]]]:
    """Arm, k, drafts and accepted per position, summed over the measurements with held-out prompts."""
    chat = {w.name for w in case.campaign.workloads if w.kind == "prompts"}
    found: dict[tuple[str, int], tuple[int, list[int]]] = {}
    for row in case.tables["acceptance"]:
        if row["category"] is None and row["position"] is not None and row["workload"] in chat and row["drafts"]:
            k = int(row["num_speculative_tokens"])
            drafts, accepted = found.get((row["arm"], k), (0, [0] * k))
            if row["position"] == 0:
                drafts += row["drafts"]
            accepted[row["position"]] += row["accepted"]
            found[row["arm"], k] = drafts, accepted
    return [(arm, k, drafts, accepted) for (arm, k), (drafts, accepted) in found.items()]


def _unlikely(predicted: tuple[Counter[int], int], drafts: int, accepted: Sequence[int], noise: float) -> float:
    """Sum over positions of the squared distance of served and predicted rates, in (reduced) standard errors."""
    reached, count = predicted
    total = 0.0
    for position, served in enumerate(accepted):
        pooled = (served + reached[position + 1]) / (drafts + count)
        variance = noise * max(pooled * (1 - pooled), 1e-3) * (1 / max(1, drafts) + 1 / max(1, count)) + 2e-5
        total += (served / max(1, drafts) - reached[position + 1] / max(1, count)) ** 2 / variance
    return total


def _lower(predicted: tuple[Counter[int], int], drafts: int, accepted: Sequence[int]) -> bool:
    return sum(accepted) / max(1, drafts) < sum(predicted[0].values()) / predicted[1]


