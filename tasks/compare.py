"""How captured states differ from the reference's, and what they really are.

T = tokens, P = captured points, K = candidates: hidden_states 0 to N, then the one after the final norm, D = width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.reference import token_errors

# A match: far above the rounding of bf16 through a deep model, far below what a wrong index gives (0.3 and more).
_IS = 0.1


@dataclass(frozen=True)
class Pair:
    """One sample as captured and as the reference computes it."""

    sample_key: str
    token_ids: list[int]
    captured_TPD: Tensor
    expected_TKD: Tensor


def score(errors_T: Tensor, dtype: str) -> float:
    """One number for a sample: root mean square over tokens in fp32, else the median.

    Each token counts by its own norm, since the first one is often a thousand times larger. In bf16 a few
    tokens of huge activations differ by 0.1 between right implementations, hence the median; see `bad_share`.
    """
    return float(errors_T.square().mean().sqrt() if dtype == "float32" else errors_T.median())


def scores(pair: Pair, dtype: str) -> Tensor:
    """Score of every captured point against every candidate: [P, K]."""
    points, candidates = pair.captured_TPD.shape[1], pair.expected_TKD.shape[1]
    found = torch.empty(points, candidates)
    for candidate in range(candidates):
        errors_TP = token_errors(pair.captured_TPD, pair.expected_TKD[:, candidate : candidate + 1])
        for point in range(points):
            found[point, candidate] = score(errors_TP[:, point], dtype)
    return found


def bad_share(pairs: Sequence[Pair], place: int, candidate: int, limit: float) -> float:
    """Share of tokens whose own error reaches `limit`: what a median over tokens would hide."""
    errors = [token_errors(p.captured_TPD[:, place], p.expected_TKD[:, candidate]) for p in pairs]
    return float((torch.cat(errors) >= limit).float().mean())


def name_of(candidate: int, last: int) -> str:
    """A candidate as users know it."""
    if candidate > last:
        return f"the state after the final norm instead of hidden_states[{last}] before it"
    return f"hidden_states[{candidate}]"


def explain(pairs: Sequence[Pair], place: int, candidate: int, dtype: str) -> str:
    """What the captured point at `place`, which should be `candidate`, really holds."""
    last = pairs[0].expected_TKD.shape[1] - 2
    worst_K = torch.stack([scores(pair, dtype)[place] for pair in pairs]).max(dim=0).values
    best = int(worst_K.argmin())
    if best != candidate and worst_K[best] <= _IS:
        return f"holds {name_of(best, last)}"
    for shift in (1, -1):
        if all(_shifted(pair, place, candidate, shift, dtype) <= _IS for pair in pairs):
            return f"has its rows shifted by one token: row t holds the state of token t{shift:+d}"
    for pair in pairs:
        errors_T = token_errors(pair.captured_TPD[:, place], pair.expected_TKD[:, candidate])
        if score(errors_T, dtype) <= _IS and float((errors_T > 2 * _IS).float().mean()) == 0:
            continue
        for other in pairs:
            if other is not pair and _of_other(pair, other, place, candidate, dtype) <= _IS:
                return f"holds, for sample {pair.sample_key}, the states of sample {other.sample_key}"
        first = int((errors_T > 2 * _IS).nonzero()[0]) if bool((errors_T > 2 * _IS).any()) else 0
        if first > 0:
            return (
                f"is right in sample {pair.sample_key} up to token {first} of {len(errors_T)} and wrong from there on "
                "(a chunk boundary, a cached prefix, or another request's rows)"
            )
    if best == candidate and worst_K[best] <= _IS:
        return f"is {name_of(best, last)} but not exactly: another number format, quantisation or revision of weights"
    return f"is no hidden state of this target: nearest {name_of(best, last)} at relative error {worst_K[best]:.2g}"


def _shifted(pair: Pair, place: int, candidate: int, shift: int, dtype: str) -> float:
    captured, expected = pair.captured_TPD[:, place], pair.expected_TKD[:, candidate]
    if len(captured) < 3:
        return 1.0
    inner = slice(1, -1)  # the rows at the ends have nowhere to come from
    return score(token_errors(captured[inner], expected.roll(-shift, dims=0)[inner]), dtype)


def _of_other(pair: Pair, other: Pair, place: int, candidate: int, dtype: str) -> float:
    length = min(len(pair.token_ids), len(other.token_ids))
    same = next((i for i in range(length) if pair.token_ids[i] != other.token_ids[i]), length)
    if same == length:  # a common beginning has common states: nothing to tell them apart by
        return 1.0
    rows = slice(same, length)
    return score(token_errors(pair.captured_TPD[rows, place], other.expected_TKD[rows, candidate]), dtype)
