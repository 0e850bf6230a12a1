"""Sanity probe: what a server that has just become ready says to a few fixed prompts, greedily.

Broken kernels, weights of another quantisation or a wrong rope give a server that is healthy and talks nonsense.
Its answers must not be empty or one symbol, must be the target's own where the target can be computed here, and
must stay what they were when this target was first served well on this engine.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any, Final

import requests
import torch

from tasks import reference
from tasks.config import Campaign
from tasks.engines.base import Engine, LaunchPlan
from tasks.errors import DrafthouseError, LaunchFailed
from tasks.load.prompts import Prompt, render
from tasks.store.keys import content_key, template_fingerprint, weights_fingerprint
from tasks.store.tables import Store

log = logging.getLogger(__name__)
QUESTIONS: Final = (
    "List the months of the year.", "What is the capital of France?", "Write one sentence about the sea.",
)
TOKENS: Final = 24
TIMEOUT_S: Final = 60.0
REPEATED: Final = 0.8  # share of one token in an answer of eight or more tokens that is no text any more
AGREEMENT: Final = 0.8  # share of tokens that the reference must choose too; rounding changes few
COMPUTED_BYTES: Final = 2 << 30  # targets up to this size are computed for comparison
Answer = tuple[list[int], list[int]]  # prompt, answer


def check_sanity(engine: Engine, url: str, plan: LaunchPlan, campaign: Campaign, store: Store, number: int) -> None:
    """Ask, judge and write a row of table `servers`; raises LaunchFailed for nonsense.

    A probe that gets no answer is a `not_reported` row: the stages that follow will say so themselves.
    """
    row: dict[str, Any] = {
        "arm": plan.arm.name, "engine": engine.name, "load": number, "setting": "sanity", "engine_setting": "probe",
        "requested": "the target's own text", "source": "probe",
    }
    try:
        answers = _ask(engine, url, plan)
    except (DrafthouseError, requests.RequestException, ValueError, KeyError, TypeError) as error:
        told = f"no answer to judge ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        log.warning("%s: sanity probe: %s", plan.arm.name, told)
        row |= {"status": "not_reported", "detail": told}
        answers, wrong = [], ""
    else:
        wrong = judge(answers, plan) or _changed(answers, plan, campaign, store)
        share = ", ".join(f"{len(answer)} tokens" for _, answer in answers)
        row |= {"status": "mismatch" if wrong else "match", "effective": wrong or "text", "detail": wrong or share}
    store.write("servers", [row], f"{plan.arm.name}-load{number}-sanity")
    if wrong:
        raise LaunchFailed(f"{plan.arm.name}: is up but talks nonsense: {wrong}; mend the engine or its settings")


def _ask(engine: Engine, url: str, plan: LaunchPlan) -> list[Answer]:
    prompts = [Prompt(text, None, ({"role": "user", "content": text},)) for text in QUESTIONS]
    rendered = render(prompts, plan.target.model, plan.target.max_model_len - TOKENS)
    answers = []
    with requests.Session() as session:
        session.trust_env = False
        for prompt in rendered:
            body = engine.completion_body(plan.target.name, prompt.token_ids, TOKENS, stream=False)
            answer = session.post(url + engine.endpoint, json=body, timeout=TIMEOUT_S)
            answer.raise_for_status()
            answers.append((prompt.token_ids, engine.parse_completion(answer.json()).token_ids))
    return answers


def judge(answers: list[Answer], plan: LaunchPlan) -> str:
    """What is wrong with the answers; empty if nothing is."""
    agreement = _agreement(answers, plan)
    if agreement is not None:
        if agreement >= AGREEMENT:
            return ""  # also where the target itself repeats one symbol
        return f"only {agreement:.0%} of its tokens are those that the target chooses in transformers"
    if not any(answer for _, answer in answers):
        return "every answer is empty"
    shares = [max(Counter(answer).values()) / len(answer) for _, answer in answers if len(answer) >= 8]
    if shares and min(shares) > REPEATED:
        return f"every answer repeats one token ({min(shares):.0%} of it)"
    return ""


def _agreement(answers: list[Answer], plan: LaunchPlan) -> float | None:
    """Share of the answers' tokens that the target chooses itself; None where it cannot be computed here."""
    folder = Path(plan.target.model)
    spoken = [(prompt, answer) for prompt, answer in answers if answer]
    if not spoken or sum(f.stat().st_size for f in folder.glob("*.safetensors")) > COMPUTED_BYTES:
        return None
    try:
        last = reference.num_layers(folder)
        states = reference.layer_states(folder, [p + a for p, a in spoken], [last], threads=plan.machine.cpu_threads)
        hits = total = 0
        for (prompt, answer), states_TPD in zip(spoken, states, strict=True):
            chosen = reference.logits(folder, states_TPD[len(prompt) - 1 : -1, 0]).argmax(-1)
            hits += int((chosen == torch.tensor(answer)).sum())
            total += len(answer)
    except DrafthouseError as error:
        log.info("sanity probe: the target is not computed here: %s", error)
        return None
    return hits / total


def _changed(answers: list[Answer], plan: LaunchPlan, campaign: Campaign, store: Store) -> str:
    """Keep the answers of the first good run; later, say where they differ beyond a near-tie."""
    model = Path(plan.target.model)
    key = content_key(
        "sanity", weights_fingerprint(model), template_fingerprint(model), plan.arm.engine, plan.target.dtype,
        plan.machine.device, [prompt for prompt, _ in answers],
    )
    file = store.pool("sanity", key) / "answers.json"
    if not file.exists():
        temporary = file.with_suffix(f".{store.run_id}.tmp")
        temporary.write_text(json.dumps({"run": store.run_id, "answers": [answer for _, answer in answers]}))
        temporary.replace(file)
        return ""
    kept = json.loads(file.read_text())
    for (prompt, answer), before in zip(answers, kept["answers"], strict=True):
        place = next((i for i, (a, b) in enumerate(zip(answer, before, strict=False)) if a != b), None)
        if place is None and len(answer) == len(before):
            continue
        place = min(len(answer), len(before)) if place is None else place
        if not _near_tie(prompt + before[:place], plan, campaign):
            question = QUESTIONS[[p for p, _ in answers].index(prompt)]
            return f"answer to {question!r} differs from run {kept['run']}'s at token {place}"
    return ""


def _near_tie(token_ids: list[int], plan: LaunchPlan, campaign: Campaign) -> bool:
    limit = campaign.thresholds.top2_margin if plan.target.dtype == "float32" else 0.1
    try:
        return reference.top2_margin(plan.target.model, token_ids, threads=plan.machine.cpu_threads) <= limit
    except DrafthouseError:
        return True  # cannot be told apart here; the comparison with the base arm's outputs still is
