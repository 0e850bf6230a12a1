"""Hypotheses on a drafter: mend one supposed fault in how it is used, and see whether it predicts the target better.

Every repair is judged by one number, the drafter's likelihood of the target's own choices on the target's
own states, paired position by position with the drafter as it is. No repair knows a symptom. What lowers the
likelihood's cost by much and beyond chance names the cause; a healthy drafter is at its best as it is.

T = tokens, D = width, A = 3 D, K = candidates (hidden_states 0 to N, then N behind the final norm), V = drafts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig

from tasks import reference
from tasks.eagle3.model import Drafter, drafter_config
from tasks.eagle3.target import TargetHead, target_config

FLOOR = 1e-3  # share of the probability that is spread evenly, so that what cannot be said costs a finite amount
GAIN_NATS = 0.03  # per token: less is not worth a cause
STANDARD_ERRORS = 5.0


@dataclass(frozen=True)
class Text:
    """A text with the target's states and, per position, the target's choice of the next token."""

    token_ids: Tensor  # [T]
    prompt_tokens: int
    states_TKD: Tensor
    choice_T: Tensor


@dataclass(frozen=True)
class Setup:
    """One way of using a drafter: which states, which embeddings, which head and mapping."""

    drafter: Drafter
    target_ids: Tensor  # [V] draft id -> target id
    embeddings_VD: Tensor
    places: tuple[int, ...]  # candidate per fused point
    rows: int = 0  # row t gets the state of token t + rows
    ahead: int = 1  # which token's embedding stands beside the state

    def auxiliary(self, text: Text) -> Tensor:
        """Fused states [T, A]."""
        fused = text.states_TKD[:, list(self.places)].flatten(1)
        return fused.roll(-self.rows, 0) if self.rows else fused

    def embedded(self, text: Text, step: int = 0) -> Tensor:
        """Embeddings of the tokens that go with each start [T - 1, D]."""
        count = len(text.token_ids) - 1
        place = (torch.arange(count) + self.ahead + step).clamp(max=count)
        return F.embedding(text.token_ids[place], self.embeddings_VD)


def read_texts(model: Path, rows: Sequence[tuple[list[int], int]]) -> list[Text]:
    """States of every candidate and the target's choices, by one forward of the reference."""
    last = reference.num_layers(model)
    texts = []
    batch = reference.layer_states(model, [ids for ids, _ in rows], range(last + 1))
    for (ids, prompt), states in zip(rows, batch, strict=True):
        after = reference.after_norm(model, states[:, last])[:, None]
        choice = reference.logits(model, states[:, last]).argmax(-1)
        texts.append(Text(torch.tensor(ids), prompt, torch.cat([states, after], 1), choice))
    return texts


@torch.no_grad()
def costs(setup: Setup, texts: Sequence[Text], prompt: bool = False) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood of the target's choices, and hits, at each response (or prompt) position."""
    vocab = setup.embeddings_VD.shape[0]
    losses, hits = [], []
    for text in texts:
        embedded = setup.embedded(text)[None]
        logits = next(iter(setup.drafter.unroll(setup.auxiliary(text)[None, :-1], 1, lambda *_, e=embedded: e)))[0]
        share_TV = torch.full((len(logits), vocab), FLOOR / vocab)
        share_TV.index_add_(1, setup.target_ids, (1 - FLOOR) * logits.float().softmax(-1))
        wanted = text.choice_T[1:]  # the start at i predicts token i + 2, the choice made at i + 1
        place = torch.arange(len(wanted)) + 2
        use = place < text.prompt_tokens if prompt else place >= text.prompt_tokens
        losses.append(-share_TV.gather(1, wanted[:, None])[use, 0].log())
        hits.append(share_TV.argmax(-1)[use] == wanted[use])
    return torch.cat(losses), torch.cat(hits)


Repair = tuple[str, str, Setup]  # id, what it does, the drafter with it


def repairs(setup: Setup, head: TargetHead, model: Path) -> Iterator[Repair]:
    """Every supposed fault, undone."""
    yield from wirings(setup)
    yield from embeddings(setup, head)
    yield from mappings(setup, head)
    yield from ropes(setup, model)


def wirings(setup: Setup) -> Iterator[Repair]:
    """Other states for the fused points, other rows, other tokens."""
    points, behind = setup.places, _last(setup) + 1
    for shift in (1, -1, 2, -2):
        moved = tuple(p + shift for p in points)
        if min(moved) >= 0 and max(moved) < behind:
            yield "layer_shift", f"points {list(moved)} instead of {list(points)}", replace(setup, places=moved)
    for place in range(len(points)):
        for shift in (1, -1):
            moved = (*points[:place], points[place] + shift, *points[place + 1 :])
            if 0 <= moved[place] < behind and sorted(set(moved)) != sorted(set(points)):
                yield "layer_shift", f"points {list(moved)} instead of {list(points)}", replace(setup, places=moved)
    for order in permutations(points):
        if order != points:
            yield "point_order", f"points in the order {list(order)}", replace(setup, places=order)
    top = (*points[:-1], behind)
    yield "norm_mixup", "the last fused point behind the final norm", replace(setup, places=top)
    for shift in (1, -1):
        yield "token_shift", f"states of token t{shift:+d} at row t", replace(setup, rows=shift)
    for ahead in (0, 2):
        text = f"the embedding of token i{f' + {ahead}' if ahead else ''} instead of i + 1"
        yield "embedding_not_shifted", text, replace(setup, ahead=ahead)


def embeddings(setup: Setup, head: TargetHead) -> Iterator[Repair]:
    """The target's embeddings, or none: a drafter that is better off without was not trained with them."""
    if not torch.equal(setup.embeddings_VD, head.embeddings_VD):
        yield "embedding_not_target", "the target's embeddings", replace(setup, embeddings_VD=head.embeddings_VD)
    blind = torch.zeros_like(head.embeddings_VD)
    yield "embedding_not_target", "no embeddings at all", replace(setup, embeddings_VD=blind)
    if head.head_VD.shape == head.embeddings_VD.shape and not torch.equal(head.head_VD, head.embeddings_VD):
        yield "embedding_not_target", "the target's head in place of embeddings", replace(
            setup, embeddings_VD=head.head_VD
        )


def mappings(setup: Setup, head: TargetHead) -> Iterator[Repair]:
    """The head's rows told apart by the target's rows that they resemble; and the target's own rows as head."""
    own, draft = setup.drafter.lm_head.weight.detach(), len(setup.target_ids)
    likeness = F.normalize(own.float(), dim=-1) @ F.normalize(head.head_VD.float(), dim=-1).T
    yield "d2t_mismatch", "draft ids mapped by what the head's rows resemble", replace(
        setup, target_ids=likeness.argmax(-1)
    )
    offsets = setup.target_ids - torch.arange(draft)
    if int(offsets.min()) >= 0 and int(offsets.max()) < head.head_VD.shape[0]:
        yield "d2t_mismatch", "d2t read as target ids instead of offsets", replace(setup, target_ids=offsets)
    borrowed = copy.deepcopy(setup.drafter)
    with torch.no_grad():
        borrowed.lm_head.weight.copy_(head.head_VD[setup.target_ids])
    yield "head_random_or_missing", "the target's rows as head", replace(setup, drafter=borrowed)


def ropes(setup: Setup, model: Path) -> Iterator[Repair]:
    """The target's rotary embedding, and common ones."""
    have = dict(setup.drafter.config.rope_parameters)
    want = dict(drafter_config(target_config(model), len(setup.target_ids)).rope_parameters)
    plain = [{"rope_type": "default", "rope_theta": theta} for theta in (1e4, 5e5, 1e6)]
    for rope in [want, *plain]:
        if rope != have:
            yield "rope_mismatch", f"rope {rope}", replace(setup, drafter=with_rope(setup.drafter, rope))


def with_rope(drafter: Drafter, rope: dict[str, Any]) -> Drafter:
    """The drafter with other rotary angles."""
    config = LlamaConfig(**{**drafter.config.to_dict(), "rope_parameters": rope, "rope_theta": rope["rope_theta"]})
    other = Drafter(config)
    other.load_state_dict(drafter.state_dict())
    return other.eval()


def _last(setup: Setup) -> int:
    """N, which no setup knows by itself: kept beside the drafter by `setup_of`."""
    return int(setup.drafter.config.target_layers)


def setup_of(
    drafter: Drafter, target_ids: Tensor, embeddings_VD: Tensor, points: Sequence[int], num_layers: int
) -> Setup:
    """The drafter as it is meant to be used."""
    drafter.config.target_layers = num_layers
    return Setup(drafter, target_ids, embeddings_VD.float(), tuple(points))


@dataclass(frozen=True)
class Gain:
    """What a repair is worth, per token, with its standard error."""

    id: str
    text: str
    nats: float
    error: float
    hits_before: float
    hits_after: float

    @property
    def real(self) -> bool:
        beyond_chance = self.nats > GAIN_NATS and self.nats > STANDARD_ERRORS * self.error
        return beyond_chance and self.hits_after > self.hits_before + 0.01  # from bad to bad is no repair


def gains(setup: Setup, tried: Iterator[Repair], texts: Sequence[Text]) -> list[Gain]:
    """The worth of each repair, best first."""
    before, hit_before = costs(setup, texts)
    found = []
    for id, text, mended in tried:
        after, hit_after = costs(mended, texts)
        saved = before - after
        error = float(saved.std()) / math.sqrt(max(1, len(saved)))
        found.append(Gain(
            id, text, float(saved.mean()), error, float(hit_before.float().mean()), float(hit_after.float().mean())
        ))
    return sorted(found, key=lambda g: -g.nats)
