"""Calls of a served drafter against stored states, their texts and the exported drafter in plain torch.

T = tokens, A = fused width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tasks import reference
from tasks.config import Campaign
from tasks.diagnosis.repairs import Setup
from tasks.store.captured import read_states
from tasks.store.served import Call

Row = dict[str, Any]


def compare(
    calls: list[tuple[Call, list[int], Row]], setup: Setup, points: tuple[int, ...], campaign: Campaign, arm: str,
    failed: str = "",
) -> list[Row]:
    """Rows `serving_state_rel_error`, `serving_token_mismatch` and `serving_logit_rel_error`; null where not seen."""
    exact = campaign.target.dtype == "float32"
    errors, logit_errors, tokens, strangers = list[Tensor](), list[float](), 0, 0
    for call, text, sample in calls:
        captured = read_states(sample["pool"], sample["place"])
        stored_TA = captured.states[:, [captured.points.index(p) for p in points]].flatten(1).float()
        known = _common(text, captured.token_ids)
        place = [(row, position) for row, position in enumerate(call.positions) if position < len(text)]
        tokens += len(call.positions) + 1
        # Drafts that are accepted at the very end run past the answer, which the limit of tokens cuts.
        strangers += sum(position >= len(text) + len(call.drafts) for position in call.positions)
        strangers += sum(call.token_ids[r] not in (-1, text[p]) for r, p in place)
        last = call.positions[-1]
        strangers += last + 1 < len(text) and text[last + 1] != call.next_token_id
        seen = [(row, position) for row, position in place if position < known]
        if seen and call.states.shape[-1] == stored_TA.shape[-1]:
            rows, positions = (list(part) for part in zip(*seen, strict=True))
            errors.append(reference.token_errors(call.states[rows], stored_TA[positions]))
        elif seen:
            errors.append(torch.ones(len(seen)))  # fused from another number of points
        if call.logits is not None and last < known:
            logit_errors.append(_logit_error(call, setup, text, stored_TA[: last + 1]))
    state_limit = max(campaign.thresholds.state_rel_error, 1e-4 if exact else 0.04)
    values: list[tuple[str, float | None, float, str]] = [
        ("serving_state_rel_error", float(torch.cat(errors).median()) if errors else None, state_limit,
         f"median of {sum(map(len, errors))} states in {len(calls)} drafter calls"),
        ("serving_token_mismatch", strangers / tokens if tokens else None, 0.0, f"{strangers} of {tokens} tokens"),
        ("serving_logit_rel_error", sorted(logit_errors)[len(logit_errors) // 2] if logit_errors else None,
         1e-3 if exact else 0.1, f"median of {len(logit_errors)} first drafts against plain torch"),
    ]
    return [
        {"check": check, "subject": arm, "value": value, "threshold": limit,
         "passed": None if value is None else value <= limit,
         "detail": (text if value is not None else "the engine's probe recorded nothing to compare") + failed}
        for check, value, limit, text in values
    ]


@torch.no_grad()
def _logit_error(call: Call, setup: Setup, text: list[int], stored_TA: Tensor) -> float:
    """Relative error of the served first logits over the draft vocabulary."""
    following = [*text[1 : len(stored_TA)], call.next_token_id]
    embedded = torch.nn.functional.embedding(torch.tensor(following), setup.embeddings_VD)[None]
    ours = next(iter(setup.drafter.unroll(stored_TA[None], 1, lambda *_: embedded)))[0, -1]
    assert call.logits is not None
    theirs = call.logits if len(call.logits) == len(ours) else call.logits[setup.target_ids]
    error = float((theirs - ours).norm() / (ours - ours.mean()).norm().clamp_min(1e-9))
    return error if error == error else 1.0  # a draft that the server cannot say at all is not a number


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
