"""Hypotheses on responses: right template, right number of prompt tokens, the target's own text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tasks import reference
from tasks.diagnosis.case import Case, Row, spread
from tasks.diagnosis.causes import Findings
from tasks.errors import DrafthouseError, InputError
from tasks.load.prompts import Prompt, read_prompts, render

SAMPLES = 16
EXCESS_NATS = 0.7  # mean NLL above the target's own entropy that no sampling from it gives over whole answers


def check_responses(case: Case, findings: Findings) -> None:
    """Template and mask of every response, likelihood of a sample of them."""
    if not case.responses:
        return
    _check_rendering(case, findings)
    _check_policy(case, findings)


@dataclass(frozen=True)
class Rendering:
    """Responses against their messages rendered now: which begin with other tokens, and which only begin elsewhere."""

    rows: int
    other: list[str]
    moved: list[str]


def rendering(responses: Sequence[Row], model: Path) -> Rendering:
    """Render the messages of each response again; raises InputError if the target cannot render."""
    rows = [r for r in responses if r["messages_json"]]
    prompts = [Prompt(r["sample_key"], None, tuple(json.loads(r["messages_json"]))) for r in rows]
    prompts = [p for p in prompts if p.messages]
    rendered = {x.prompt.key: x.token_ids for x in render(prompts, model, 1 << 30)} if prompts else {}
    other, moved = [], []
    for row in rows:
        ids = rendered.get(row["sample_key"])
        if ids is None:
            continue
        if list(row["token_ids"][: len(ids)]) != ids:
            other.append(_difference(f"sample {row['sample_key']}", list(row["token_ids"]), ids))
        elif row["prompt_tokens"] != len(ids):
            recorded = f"{row['prompt_tokens']} prompt tokens recorded, the template gives {len(ids)}"
            moved.append(f"sample {row['sample_key']}: {recorded}")
    return Rendering(len(rendered), other, moved)


def prompts_row(responses: Iterable[Row], model: str) -> Row:
    """Row `response_prompts` of table `alignment`: all responses begin as the template renders them."""
    row: Row = {"check": "response_prompts", "subject": "responses", "threshold": 0.0}
    try:
        found = rendering(list(responses), Path(model))
    except InputError as error:
        return row | {"detail": f"not rendered again: {error}"}
    wrong = found.other + found.moved
    first = f"; {wrong[0]}" if wrong else ""
    detail = f"{len(wrong)} of {found.rows} prompts are not what the chat template gives{first}"
    return row | {"value": float(len(wrong)), "passed": not wrong, "detail": detail}


def _check_rendering(case: Case, findings: Findings) -> None:
    try:
        found = rendering(case.responses, case.model)
    except DrafthouseError as error:
        findings.notes.append(f"responses are not rendered again: {error}")
        found = Rendering(0, [], [])
    for id, wrong, what in (("chat_template", found.other, "prompts differ"),
                            ("loss_mask", found.moved, "responses begin elsewhere")):
        if wrong:
            text = f"{len(wrong)} of {found.rows} {what}; {wrong[0]}"
            findings.add(id, _share(len(wrong) / found.rows), text)
    empty = sum(r["prompt_tokens"] >= len(r["token_ids"]) for r in case.responses)
    text = f"{empty} of {len(case.responses)} responses have no token that is trained on"
    findings.add("loss_mask", _share(empty / len(case.responses)), text)
    _check_heldout(case, findings)


def _check_heldout(case: Case, findings: Findings) -> None:
    """What the base arm was sent, against the same prompts rendered now."""
    try:
        prompts = read_prompts(case.campaign.prompts.heldout_file, case.campaign.prompts.heldout_samples)
        ids = {x.prompt.key: x.token_ids for x in render(prompts, case.model, 1 << 30)}
    except DrafthouseError as error:
        findings.notes.append(f"held-out prompts are not rendered again: {error}")
        return
    known = [r for r in case.outputs if r["prompt_key"] in ids]
    wrong = [r for r in known if list(r["prompt_token_ids"]) != ids[r["prompt_key"]]]
    if wrong:
        first = _difference(wrong[0]["prompt_key"], list(wrong[0]["prompt_token_ids"]), ids[wrong[0]["prompt_key"]])
        findings.add("chat_template", _share(len(wrong) / len(known)), f"{len(wrong)} of {len(known)} served; {first}")


def _difference(key: str, got: list[int], wanted: list[int]) -> str:
    place = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), min(len(got), len(wanted)))
    return f"{key}: from token {place} on {got[place : place + 4]} instead of {wanted[place : place + 4]}"


def _share(share: float) -> float:
    """A few of many are already a fault, since none may be: 5 % count as certain."""
    return min(1.0, 0.5 + 10 * share) if share > 0 else 0.0


def _check_policy(case: Case, findings: Findings) -> None:
    """Text that was sampled from the target is about as unlikely as the target is unsure: NLL near its entropy."""
    rows = spread([r for r in case.responses if 0 < r["prompt_tokens"] < len(r["token_ids"])], SAMPLES)
    if not rows:
        return
    try:
        last = reference.num_layers(case.model)
        batch = reference.layer_states(case.model, [r["token_ids"] for r in rows], [last])
        bad, total, sure = [], 0.0, 0.0
        for row, states in zip(rows, batch, strict=True):
            scores_TV = reference.logits(case.model, states[row["prompt_tokens"] - 1 : -1, 0]).log_softmax(-1)
            chosen = torch.tensor(list(row["token_ids"][row["prompt_tokens"] :]))
            nll_T = -scores_TV.gather(1, chosen[:, None])[:, 0]
            entropy_T = -(scores_TV.exp() * scores_TV).sum(-1)
            spread_T = ((scores_TV + entropy_T[:, None]).square() * scores_TV.exp()).sum(-1)
            excess, noise = float((nll_T - entropy_T).mean()), float(spread_T.sum().sqrt()) / len(chosen)
            total, sure = total + float(nll_T.mean()) / len(rows), sure + float(entropy_T.mean()) / len(rows)
            if excess > max(EXCESS_NATS, 4 * noise):
                bad.append(row["sample_key"])
    except DrafthouseError as error:
        findings.notes.append(f"responses are not scored: {error}")
        return
    # One answer of many may wander off by chance; a tenth of them may not.
    if len(bad) / len(rows) > 0.1:
        findings.add(
            "garbage_responses", 0.5 + 0.5 * min(1.0, 2 * len(bad) / len(rows)),
            f"{len(bad)} of {len(rows)} responses are far less likely than the target's own text would be: "
            f"{total:.2f} nats per token where its entropy is {sure:.2f}; first {bad[0]}",
        )
