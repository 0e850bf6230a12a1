"""Training data: states from the store's shards, the loss mask, and the draft vocabulary.

B = samples, T = tokens, D = width of the target, A = 3 D (three fused points).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.errors import CaptureLost, InputError, SeamMismatch
from tasks.store.keys import content_key
from tasks.store.states import read_sample

CACHE_BYTES = 2 << 30  # states that stay in memory between epochs


@dataclass(frozen=True)
class Row:
    """One response and where its states lie."""

    sample_key: str
    token_ids: list[int]
    prompt_tokens: int
    shard: str
    row_group: int


@dataclass(frozen=True)
class Batch:
    """Padded samples. `mask` marks the tokens that the target itself wrote: the response, end token included."""

    token_ids: Tensor  # [B, T]
    mask: Tensor  # [B, T] bool
    auxiliary: Tensor  # [B, T, A]
    last: Tensor  # [B, T, D], after the last layer, before the final norm
    sample_keys: list[str]


def join_rows(index: Iterable[Mapping[str, Any]], responses: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows of the `responses` table with the place of their states from `states_index`, in response order.

    Raises CaptureLost for responses without states.
    """
    places = {place["sample_key"]: place for place in index}
    rows, lost = [], []
    for response in responses:
        key = response["sample_key"]
        if key not in places:
            lost.append(key)
            continue
        place = places[key]
        rows.append(
            Row(key, list(response["token_ids"]), response["prompt_tokens"], place["shard"], place["row_group"])
        )
    if lost:
        raise CaptureLost(f"{len(lost)} responses have no states, first {lost[0]}; run extract again")
    return rows


def response_mask(token_ids: Sequence[int], prompt_tokens: int) -> list[bool]:
    """True where the target wrote the token.

    From the number of prompt tokens that was sent, never from chat template markers: stock templates
    have none, and a mask built on them is silently all false.
    """
    return [position >= prompt_tokens for position in range(len(token_ids))]


class Dataset:
    """Samples of a pool, read when needed; samples without a response token are left out and named.

    `points` are the three fused hidden_states indices, `last_point` is N. Raises InputError if no sample
    has a supervised token.
    """

    def __init__(self, pool: Path, rows: Sequence[Row], points: Sequence[int], last_point: int) -> None:
        self.pool, self.points, self.last_point = pool, list(points), last_point
        self.rows = [row for row in rows if any(response_mask(row.token_ids, row.prompt_tokens)[1:])]
        kept = {row.sample_key for row in self.rows}
        self.skipped = [row.sample_key for row in rows if row.sample_key not in kept]
        if not self.rows:
            first = f"; first sample {self.skipped[0]}" if self.skipped else ""
            raise InputError(f"no training sample has a response token ({len(self.skipped)} without one{first})")
        self._cache: dict[str, tuple[Tensor, Tensor]] = {}
        self._cached_bytes = 0

    def __len__(self) -> int:
        return len(self.rows)

    def states(self, row: Row) -> tuple[Tensor, Tensor]:
        """Auxiliary [T, A] and last [T, D] states; raises SeamMismatch if they are not this response's."""
        if row.sample_key in self._cache:
            return self._cache[row.sample_key]
        try:
            sample = read_sample(self.pool, row.shard, row.row_group)
        except (OSError, ValueError) as error:
            raise CaptureLost(f"states of sample {row.sample_key} cannot be read: {error}; extract it again") from error
        if sample.token_ids != row.token_ids:
            raise SeamMismatch(f"states of sample {row.sample_key} belong to other token ids; run extract again")
        missing = {*self.points, self.last_point} - set(sample.points)
        if missing:
            raise SeamMismatch(f"states of sample {row.sample_key} lack points {sorted(missing)}, have {sample.points}")
        if not torch.isfinite(sample.states).all():
            raise SeamMismatch(f"states of sample {row.sample_key} hold NaN or infinite numbers; extract it again")
        places = [sample.points.index(point) for point in self.points]
        pair = (sample.states[:, places].flatten(1), sample.states[:, sample.points.index(self.last_point)])
        size = sum(t.numel() * t.element_size() for t in pair)
        if self._cached_bytes + size <= CACHE_BYTES:
            self._cache[row.sample_key] = pair
            self._cached_bytes += size
        return pair

    def batch(self, numbers: Sequence[int], device: torch.device) -> Batch:
        """Samples by number, padded at the end with zeros that no loss sees."""
        rows = [self.rows[number] for number in numbers]
        states = [self.states(row) for row in rows]
        longest = max(len(row.token_ids) for row in rows)

        def pad(tensors: Sequence[Tensor]) -> Tensor:
            out = tensors[0].new_zeros(len(tensors), longest, *tensors[0].shape[1:])
            for place, tensor in zip(out, tensors, strict=True):
                place[: len(tensor)] = tensor
            return out.to(device)

        return Batch(
            token_ids=pad([torch.tensor(row.token_ids) for row in rows]),
            mask=pad([torch.tensor(response_mask(row.token_ids, row.prompt_tokens)) for row in rows]),
            auxiliary=pad([auxiliary for auxiliary, _ in states]).float(),
            last=pad([last for _, last in states]).float(),
            sample_keys=[row.sample_key for row in rows],
        )


@dataclass(frozen=True)
class DraftVocabulary:
    """The target tokens that the drafter can say, in ascending order of target id."""

    target_ids: Tensor  # [draft vocabulary] int64: draft id -> target id
    t2d: Tensor  # [target vocabulary] bool: can be said
    key: str
    coverage: float  # share of the response tokens that can be said

    @property
    def d2t(self) -> Tensor:
        """Offsets: draft id i says target id i + d2t[i] (int64, as engines read it)."""
        return self.target_ids - torch.arange(len(self.target_ids), device=self.target_ids.device)

    def to(self, device: torch.device) -> DraftVocabulary:
        return DraftVocabulary(self.target_ids.to(device), self.t2d.to(device), self.key, self.coverage)


def draft_vocabulary(rows: Sequence[Row], tokenizer_key: str, vocab_size: int, size: int) -> DraftVocabulary:
    """The `size` most frequent tokens of the responses (ties: the lower id).

    Computed anew each time and named by a key over counts, tokenizer and size, so that a mapping made
    for other data can never be taken for this one. Raises InputError for ids outside the vocabulary.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in rows:
        said = torch.tensor(row.token_ids[row.prompt_tokens :], dtype=torch.int64)
        if len(said) and not 0 <= int(said.min()) <= int(said.max()) < vocab_size:
            raise InputError(f"sample {row.sample_key}: token ids outside the target's vocabulary of {vocab_size}")
        counts += torch.bincount(said, minlength=vocab_size)
    if not int(counts.sum()):
        raise InputError("no response token in the training samples; is every prompt answered?")
    target_ids = counts.argsort(descending=True, stable=True)[:size].sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[target_ids] = True
    used = {str(token): int(counts[token]) for token in counts.nonzero()[:, 0].tolist()}
    key = content_key("draft vocabulary", used, tokenizer_key, vocab_size, size)
    return DraftVocabulary(target_ids, t2d, key, float(counts[target_ids].sum() / counts.sum()))
