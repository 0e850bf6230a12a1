"""Regenerate: prompts -> the target's own responses, by the running base arm, as token ids.

A drafter learns to guess this text, so it has to be the target's. Finished answers go to a pool keyed by
target, chat template and sampling within seconds; a killed run loses only what was in flight, and a larger
campaign generates only what the pool lacks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tasks import reference
from tasks.config import Campaign
from tasks.engines.ask import answer_to, ask
from tasks.engines.base import RunningServer
from tasks.engines.registry import engine
from tasks.errors import ConfigError, EngineError, InputError, OffPolicy
from tasks.load.prompts import read_prompts, render
from tasks.store.keys import content_key, sample_key, template_fingerprint, weights_fingerprint
from tasks.store.parts import PartWriter, set_aside
from tasks.store.refs import ResponsesRef
from tasks.store.tables import Store, pool_rows, rows_to_table, write_parquet

log = logging.getLogger(__name__)
Row = dict[str, Any]


def regenerate(
    server: RunningServer, campaign: Campaign, store: Store, *, progress: Callable[[int, int], None] | None = None
) -> ResponsesRef:
    """One response per prompt and draw, in prompt order; starts the server only for what the pool lacks.

    Column `reused_from` of the artifact and of the pool names the run that generated the row.
    Raises OffPolicy when the text is not the target's, EngineError when requests stay unanswered (what
    was answered is kept), InputError or ConfigError for prompts or draws that make no sense.
    """
    if campaign.sampling.temperature == 0 and campaign.sampling.draws > 1:
        raise ConfigError("sampling.draws: greedy draws are all the same text; set it to 1 or raise the temperature")
    pool_key, wanted = _wanted(campaign)
    pool = store.pool("responses", pool_key)
    made = _in_pool(pool, wanted)
    missing = [row for key, row in wanted.items() if key not in made]
    reused = len(wanted) - len(missing)
    report = (lambda done: progress(reused + done, len(wanted))) if progress else None
    if missing:
        with PartWriter(pool, "responses", store) as parts:
            _generate(server, campaign, store, missing, parts, report)
        made = _in_pool(pool, wanted)
    store.count("regenerate", executed=len(missing), reused=reused)
    rows = [made[key] for key in wanted if made[key]["token_ids"][made[key]["prompt_tokens"] :]]
    if not rows:
        raise OffPolicy("responses: all answers are empty; does the chat template end with the assistant's header?")
    log.info("responses: %d of %d answers are empty and left out", len(wanted) - len(rows), len(wanted))
    key = content_key("responses", pool_key, [row["sample_key"] for row in rows])
    if store.manifest("responses", key) is None:
        _check_policy(rows, campaign, pool)
        with store.new_artifact("responses", key, {"pool": pool_key, "samples": len(rows)}) as folder:
            write_parquet(rows_to_table("responses", rows), folder / "responses.parquet")
    shown = [row | {"reused_from": None} if row["reused_from"] == store.run_id else row for row in rows]
    store.write("responses", shown, "all")
    return ResponsesRef(key=key, samples=len(rows), tokens=sum(len(row["token_ids"]) for row in rows))


def _wanted(campaign: Campaign) -> tuple[str, dict[str, Row]]:
    """Pool key, and per sample key the row without its answer, in prompt order."""
    model, sampling = Path(campaign.target.model), campaign.sampling
    target, template = weights_fingerprint(model), template_fingerprint(model)
    how, prompts = {"temperature": sampling.temperature, "top_p": sampling.top_p}, campaign.prompts
    wanted, no_room = dict[str, Row](), 0
    read = read_prompts(prompts.train_file, prompts.train_samples)
    for rendered in render(read, model, prompts.max_prompt_tokens, trust_remote_code=campaign.target.trust_remote_code):
        # Extraction sends prompt and response and lets the engine add one token, so that must fit too.
        room = campaign.target.max_model_len - 1 - len(rendered.token_ids)
        prompt, limit = rendered.prompt, min(sampling.max_tokens, room)
        no_room += limit < 2
        for draw in range(sampling.draws if limit >= 2 else 0):
            key = sample_key(prompt.key, draw, target, template, {**how, "max_tokens": limit})
            wanted[key] = {
                "sample_key": key, "draw": draw, "prompt_key": prompt.key, "category": prompt.category,
                "messages_json": json.dumps(list(prompt.messages), ensure_ascii=False), "max_tokens": limit,
                "token_ids": rendered.token_ids, "prompt_tokens": len(rendered.token_ids),
            }
    log.info("prompts: %d leave no room for a response in target.max_model_len and are dropped", no_room)
    if not wanted:
        raise InputError(f"{prompts.train_file}: no prompt leaves room to answer; raise target.max_model_len")
    return content_key("responses-pool", target, template, how), wanted


def _in_pool(pool: Path, wanted: dict[str, Row]) -> dict[str, Row]:
    return {row["sample_key"]: row for row in pool_rows(pool) if row["sample_key"] in wanted}


def _generate(
    server: RunningServer, campaign: Campaign, store: Store, missing: list[Row], parts: PartWriter,
    report: Callable[[int], None] | None,
) -> None:
    adapter, sampling, waiting = engine(server.arm.engine), campaign.sampling, {r["sample_key"]: r for r in missing}
    bodies = {
        key: adapter.completion_body(
            campaign.target.name, row["token_ids"], row.pop("max_tokens"), temperature=sampling.temperature,
            top_p=sampling.top_p, stream=False, logprobs=True,
        )
        for key, row in waiting.items()
    }

    def keep(key: str, answer: dict[str, Any]) -> None:
        prompt_ids = waiting[key]["token_ids"]
        got = answer_to(adapter, prompt_ids, answer)
        nll = -sum(got.logprobs) / len(got.logprobs) if got.logprobs else None
        made = {"token_ids": prompt_ids + got.token_ids, "finish_reason": got.finish_reason, "nll_per_token": nll,
                "reused_from": store.run_id}
        parts.add(waiting[key] | made)
        if report:
            report(parts.added)

    asked = ask(server.url() + adapter.endpoint, bodies, keep, concurrency=sampling.concurrency)
    store.count("regenerate", requests=asked.sent)
    log.info("regenerate: %s", asked)
    if asked.unanswered:
        raise EngineError(
            f"regenerate: {len(asked.unanswered)} of {len(bodies)} prompts unanswered ({asked}; first: "
            f"{next(iter(asked.unanswered.values()))}); what was answered is kept, rerun for the rest"
        )


def _check_policy(rows: list[Row], campaign: Campaign, pool: Path) -> None:
    """Per generating run: mean NLL by the server's own word, and by a reference forward of a sample of rows."""
    limit, count = campaign.thresholds.max_nll_per_token, campaign.thresholds.align_samples
    for run in sorted({row["reused_from"] for row in rows}):  # a good old run must not hide a bad new one
        of_run = [row for row in rows if row["reused_from"] == run]
        sample = [(r["token_ids"], r["prompt_tokens"]) for r in of_run[:: max(1, len(of_run) // count)][:count]]
        nlls = reference.response_nlls(campaign.target.model, sample, threads=campaign.machine.cpu_threads)
        found = {"a transformers forward": float(torch.cat(nlls).mean())}
        told = [(r["nll_per_token"], len(r["token_ids"]) - r["prompt_tokens"]) for r in of_run]
        if tokens := sum(n for nll, n in told if nll is not None):
            found["the server"] = sum(nll * n for nll, n in told if nll is not None) / tokens
        for who, nll in found.items():
            log.info("responses of run %s: %.3f nats per token by %s", run, nll, who)
            if not nll <= limit:  # also when it is not a number
                raise OffPolicy(
                    f"responses of run {run}: mean NLL per token {nll:.2f} by {who}, at most {limit:g} (thresholds."
                    f"max_nll_per_token): not the target's own text; {set_aside(pool, run)} parts are set aside in "
                    f"{pool / 'rejected'}: mend the engine's sampling and rerun"
                )
