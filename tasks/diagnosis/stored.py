"""Hypotheses on stored states: undo each supposed damage and see how much of the error against the reference goes.

T = tokens, D = width, K = candidates: hidden_states 0 to N, then the one after the final norm. A cell is
one point of one sample; only cells that are off are looked at. A hypothesis scores the share of their error that
its repair removes, so that what explains a fault exactly scores near 1 and what merely resembles it does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks import reference
from tasks.diagnosis.case import Case, environment_of, spread
from tasks.diagnosis.causes import Findings
from tasks.diagnosis.engines import compare_engines
from tasks.errors import ArtifactDamaged, DrafthouseError

SAMPLES = 10  # compared in full
OWNERS = 96  # samples whose beginnings are tried as owners of foreign states
HEAD_TOKENS = 48
SHIFTS = (1, -1, 2, -2, 3, -3)


@dataclass
class Cell:
    """One point of one sample that is not what it should be."""

    sample_key: str
    point: int
    captured_TD: Tensor
    expected_TKD: Tensor  # with the state after the final norm as last candidate
    token_ids: list[int]
    error: float
    errors_T: Tensor


def tolerance(dtype: str, limit: float) -> float:
    """Above this a state is off: well above rounding, well below a wrong index (0.2 and more)."""
    return max(10 * limit, 1e-4) if dtype == "float32" else max(2 * limit, 0.04)


def distance(states_TD: Tensor, expected_TD: Tensor) -> float:
    """Mean over tokens of the relative error, cut at 1 so that one wild token does not drown the rest."""
    return float(_errors(states_TD, expected_TD).clamp(max=1).mean())


def _errors(states_TD: Tensor, expected_TD: Tensor) -> Tensor:
    return torch.nan_to_num(reference.token_errors(states_TD, expected_TD), nan=1.0, posinf=1.0)


def check_states(case: Case, findings: Findings) -> bool:
    """Compare a sample of the run's states; returns whether all of them are right."""
    if not case.states_index:
        return True
    chosen = []
    for environment in case.pools:  # the states of each engine
        rows = [row for row in case.states_index if environment_of(row) == environment]
        chosen += [max(rows, key=lambda r: int(r["tokens"])), *spread(rows, SAMPLES // len(case.pools) - 1)]
    samples, expected, broken = [], [], []
    for row in {(r["sample_key"], r["shard"]): r for r in chosen}.values():
        try:
            samples.append(case.states_of(row))
        except ArtifactDamaged as damage:
            broken.append(str(damage))
    if broken:
        short = [b for b in broken if "rows" in b or "tokens need" in b or "not what the index says" in b]
        findings.add("prefix_truncated", 0.7 * len(short) / len(chosen), f"states without all tokens: {broken[0]}")
        findings.add("unexplained", 0.3 * bool(broken), f"shards cannot be read: {broken[0]}")
    limit = tolerance(case.campaign.target.dtype, case.campaign.thresholds.state_rel_error)
    try:
        last = reference.num_layers(case.model)
        states = reference.layer_states(case.model, [s.token_ids for s in samples], range(last + 1))
        expected = [torch.cat([s, reference.after_norm(case.model, s[:, last])[:, None]], 1) for s in states]
    except DrafthouseError as error:
        findings.notes.append(f"stored states are not compared with a transformers forward: {error}")
        return compare_engines(case, findings, limit) and not broken
    cells, total = [], 0
    for sample, expected_TKD in zip(samples, expected, strict=True):
        for place, point in enumerate(sample.points):
            total += 1
            captured_TD = sample.states[:, place].float()
            errors_T = _errors(captured_TD, expected_TKD[:, point])
            off = float(errors_T.clamp(max=1).mean())
            if off > limit or not torch.isfinite(captured_TD).all():
                cells.append(Cell(sample.sample_key, point, captured_TD, expected_TKD, sample.token_ids, off, errors_T))
    if cells:
        _explain(cells, total, sorted(samples[0].points), limit, case, findings)
    return not cells and not broken


Guess = tuple[str, float, str]  # id, error that is left after its repair, what it says


def _explain(
    cells: list[Cell], total: int, points: list[int], limit: float, case: Case, findings: Findings
) -> None:
    owners = _Owners(case)
    shares: dict[str, float] = defaultdict(float)
    words: dict[str, str] = {}
    for cell in cells:
        best: dict[str, Guess] = {}
        for guess in _guesses(cell, limit, owners):
            if guess[0] not in best or guess[1] < best[guess[0]][1]:
                best[guess[0]] = guess
        for id, left, text in best.values():
            shares[id] += max(0.0, 1 - left / max(cell.error, 1e-9)) / len(cells)
            words.setdefault(id, f"sample {cell.sample_key} point {cell.point}: {text}")
    if "layer_shift" in shares and _is_permutation(cells, points):
        shares["point_order"], words["point_order"] = shares.pop("layer_shift"), words.pop("layer_shift")
    exact = max((share for id, share in shares.items() if id != "quantisation_mismatch"), default=0.0)
    if "quantisation_mismatch" in shares:
        shares["quantisation_mismatch"] *= 1 - exact  # the last resort: it is near everything
    off = f"{len(cells)} of {total} compared states are off by {sum(c.error for c in cells) / len(cells):.2g}"
    for id, share in shares.items():
        if share > 0.05:
            findings.add(id, share, f"{off}; {words[id]}")
    if max(shares.values(), default=0.0) < 0.5:
        findings.add("unexplained", 0.5, f"{off}, for which no repair was found")


def _guesses(cell: Cell, limit: float, owners: _Owners) -> Iterator[Guess]:
    captured, expected = cell.captured_TD, cell.expected_TKD
    right_TD, last = expected[:, cell.point], expected.shape[1] - 2
    finite = torch.isfinite(captured).all()
    for k in range(last + 1):
        if k != cell.point:
            yield "layer_shift", distance(captured, expected[:, k]), f"holds hidden_states[{k}]"
    yield "norm_mixup", distance(captured, expected[:, last + 1]), "holds the state after the final norm"
    if finite:
        yield from _norms(cell)
    for shift in SHIFTS:
        if len(captured) > 2 * abs(shift) + 2:
            inner = slice(abs(shift), -abs(shift))
            left = distance(captured[inner], right_TD.roll(-shift, 0)[inner])
            yield "token_shift", left, f"row t holds the state of token t{shift:+d}"
    yield from _moved_part(cell, limit)
    yield from _cut(cell, limit)
    yield from _ceiling(cell)
    yield from owners.of(cell)
    if finite:
        scale = float((captured * right_TD).sum() / right_TD.square().sum())
        if abs(scale - 1) > 0.02:
            left = distance(captured / scale, right_TD) if scale else 1.0
            yield "quantisation_mismatch", left, f"scaled by {scale:.3g}"
        others = min(distance(captured, expected[:, k]) for k in range(last + 2) if k != cell.point)
        even = float((cell.errors_T > limit / 10).float().mean())  # rounding touches every token alike
        if cell.error < 0.8 * others and even > 0.8:
            text = f"nearest to the right index, off by {cell.error:.2g} at {even:.0%} of the tokens"
            yield "quantisation_mismatch", cell.error * (0.1 + 0.4 * cell.error / others), text


def _norms(cell: Cell) -> Iterator[Guess]:
    """A norm with whatever weights: per channel one factor on the normalised state, fitted on half of the tokens."""
    half = len(cell.captured_TD) // 2
    if half < 8:
        return
    for k in range(cell.expected_TKD.shape[1] - 1):
        x_TD = cell.expected_TKD[:, k]
        x_TD = x_TD / x_TD.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-9)
        fit, test = slice(0, None, 2), slice(1, None, 2)
        weight_D = (cell.captured_TD[fit] * x_TD[fit]).sum(0) / x_TD[fit].square().sum(0).clamp_min(1e-9)
        left = distance(cell.captured_TD[test], (x_TD * weight_D)[test])
        if left < 0.2:
            yield "norm_mixup", left + 1e-3, f"is hidden_states[{k}] behind a norm"


def _moved_part(cell: Cell, limit: float) -> Iterator[Guess]:
    """The rows from some token on are moved, as a chunk of the prefill that begins a token early or late."""
    wrong = (cell.errors_T > max(limit, 1e-3)).nonzero()[:, 0]
    tokens = len(cell.errors_T)
    if not len(wrong) or not (first := int(wrong[0])):
        return
    right_TD = cell.expected_TKD[:, cell.point]
    for shift in SHIFTS:
        rows = torch.arange(first, tokens)
        rows = rows[(rows + shift >= 0) & (rows + shift < tokens)]
        if len(rows) > 2:
            left = distance(cell.captured_TD[rows], right_TD[rows + shift]) * len(rows) / tokens
            yield "token_shift", left, f"from token {first} of {tokens} on row t holds the state of token t{shift:+d}"


def _cut(cell: Cell, limit: float) -> Iterator[Guess]:
    """A part of the rows is right and the rest is missing, or all rows moved because the first ones are."""
    wrong_T = cell.errors_T > max(limit, 1e-3)
    tokens, zero_T = len(wrong_T), (cell.captured_TD == 0).all(-1)
    if bool(zero_T.any()):
        left = float(cell.errors_T[~zero_T].clamp(max=1).sum()) / tokens
        yield "prefix_truncated", left, f"{int(zero_T.sum())} of {tokens} tokens have no state"
    right = (~wrong_T).nonzero()[:, 0]
    if 0 < len(right) < tokens:
        first, end = int(right[0]), int(right[-1]) + 1
        if first and not bool(wrong_T[first:].any()):
            yield "prefix_truncated", 0.0, f"wrong before token {first} of {tokens} and right from there"
        elif not bool(wrong_T[:end].any()):
            yield "prefix_truncated", 0.15 * cell.error, f"right up to token {end} of {tokens} and wrong from there"
    right_TD = cell.expected_TKD[:, cell.point]
    start = int(_errors(cell.captured_TD[:1].expand_as(right_TD), right_TD).argmin())
    if start > max(SHIFTS) and tokens - start > 4:
        left = distance(cell.captured_TD[: tokens - start], right_TD[start:])
        yield "prefix_truncated", left, f"begins with the state of token {start}"


def _ceiling(cell: Cell) -> Iterator[Guess]:
    """Numbers beyond the format's range became infinite, not a number, or its largest number."""
    captured, right = cell.captured_TD, cell.expected_TKD[:, cell.point]
    lost = ~torch.isfinite(captured)
    if not bool(lost.any()):
        top = captured.abs().max()
        lost = (captured.abs() >= top * 0.999) & (right.abs() > top * 1.001)
        if int((captured.abs() >= top * 0.999).sum()) < 2:
            return
    mended = torch.where(lost, right, captured)
    text = f"{int(lost.sum())} numbers are not finite or stand at a ceiling that the right ones cross"
    if bool(lost.any()):
        yield "dtype_overflow", distance(mended, right), text


class _Owners:
    """Whose states these are, if another sample's: by the beginnings of many samples, computed when first asked."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._heads: dict[str, tuple[list[int], Tensor]] | None = None

    def of(self, cell: Cell) -> Iterator[Guess]:
        if self._heads is None:
            self._heads = self._compute()
        for key, (ids, states_TKD) in self._heads.items():
            if key == cell.sample_key:
                continue
            length = min(len(ids), len(cell.token_ids))
            same = next((i for i in range(length) if ids[i] != cell.token_ids[i]), length)
            if length - same < 4:  # a common beginning has common states
                continue
            left = distance(cell.captured_TD[same:length], states_TKD[same:length, cell.point])
            if left < 0.5:
                yield "other_request", left, f"holds the states of sample {key}"

    def _compute(self) -> dict[str, tuple[list[int], Tensor]]:
        rows = [r for r in self._case.responses if r["token_ids"]]
        rows = spread(rows, OWNERS)
        ids = [list(r["token_ids"][:HEAD_TOKENS]) for r in rows]
        if not ids:
            return {}
        last = reference.num_layers(self._case.model)
        states = reference.layer_states(self._case.model, ids, range(last + 1))
        return {r["sample_key"]: pair for r, pair in zip(rows, zip(ids, states, strict=True), strict=True)}


def _is_permutation(cells: list[Cell], points: list[int]) -> bool:
    """Whether the misplaced points hold one another's states rather than those of a neighbouring layer."""
    holds: dict[int, int] = {}
    for cell in cells:
        last = cell.expected_TKD.shape[1] - 2
        errors = [distance(cell.captured_TD, cell.expected_TKD[:, k]) for k in range(last + 1)]
        holds[cell.point] = min(range(last + 1), key=errors.__getitem__)
    return len(holds) > 1 and sorted(holds) == sorted(holds.values()) and set(holds) <= set(points)
