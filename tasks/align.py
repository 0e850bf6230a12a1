"""Align: are the captured states the target's own, at the points that the config names?

A sample of them is compared with a transformers forward in fp32, every captured point with every index. The
mapping is found by the numbers: the configured index has to be the best one, and clearly so. A miss stops the
campaign before training, since a drafter trained on shifted states still drafts, only a little worse.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
import torch

from tasks import reference
from tasks.compare import Pair, bad_share, explain, name_of, scores
from tasks.config import Campaign
from tasks.diagnosis.data import prompts_row
from tasks.errors import AlignmentMiss, OffPolicy, SeamMismatch
from tasks.store.captured import read_states, states_index
from tasks.store.keys import content_key
from tasks.store.refs import AlignmentRef, StatesRef
from tasks.store.tables import Store, rows_to_table, write_parquet

log = logging.getLogger(__name__)
Row = dict[str, Any]
_BAD_TOKENS = {"float32": 0.0, "bfloat16": 0.02, "float16": 0.02}  # share of tokens that may be far off by rounding


def align(
    states: StatesRef, campaign: Campaign, store: Store, *, fresh: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> AlignmentRef:
    """Compare `thresholds.align_samples` samples at every point; writes rows of table `alignment` first.

    `fresh` compares again although these states were found aligned before.

    Raises AlignmentMiss that names the point and what it really holds, OffPolicy if the responses are not
    the target's text.
    """
    limits = campaign.thresholds
    key = content_key("alignment", states.key, limits.model_dump(mode="json"))
    part = f"align-{states.engine}-{states.key}"
    if not fresh and (manifest := store.manifest("alignment", key)) is not None:
        rows = pq.read_table(store.artifact("alignment", key) / "alignment.parquet").to_pylist()
        by = manifest["made_by"]
        store.write("alignment", [row | {"reused_from": by if by != store.run_id else None} for row in rows], part)
        store.count("align", reused=1)
        return AlignmentRef(key=key, states_key=states.key, worst_rel_error=manifest["worst_rel_error"])

    pairs, nll = _pairs(states, campaign, store, progress)
    rows, misses = _check_points(pairs, states, campaign)
    rows.append({
        "check": "response_nll", "subject": "responses", "value": nll, "threshold": limits.max_nll_per_token,
        "passed": nll <= limits.max_nll_per_token, "detail": f"nats per response token of {len(pairs)} samples",
    })
    rows.append(prompts := prompts_row(_responses(states, store).values(), campaign.target.model))
    store.write("alignment", rows, part)
    store.count("align", executed=1)
    if prompts["passed"] is False:
        raise SeamMismatch(f"responses: {prompts['detail']}; import or generate them with the target's own template")
    if misses:
        raise AlignmentMiss(f"{states.engine}: {'; '.join(misses)}; see table alignment")
    if not nll <= limits.max_nll_per_token:
        raise OffPolicy(
            f"responses: {nll:.2f} nats per token under the target, at most {limits.max_nll_per_token:g} "
            "(thresholds.max_nll_per_token); they are not its own text"
        )
    worst = max(row["value"] for row in rows if row["check"] == "state_rel_error")
    with store.new_artifact("alignment", key, {"states": states.key, "worst_rel_error": worst}) as folder:
        write_parquet(rows_to_table("alignment", rows), folder / "alignment.parquet")
    return AlignmentRef(key=key, states_key=states.key, worst_rel_error=worst)


def _pairs(
    states: StatesRef, campaign: Campaign, store: Store, progress: Callable[[int, int], None] | None
) -> tuple[list[Pair], float]:
    """Chosen samples as captured and as the reference has them, and the mean NLL of their responses in nats."""
    pool, index = states_index(store, states)
    responses = _responses(states, store)
    count, model, threads = campaign.thresholds.align_samples, campaign.target.model, campaign.machine.cpu_threads
    # Spread over the file, and the longest, where chunks and caches go wrong first.
    chosen = [max(index, key=lambda row: int(row["tokens"])), *index[:: max(1, len(index) // count)]]
    unique = list({row["state_key"]: row for row in chosen}.values())[:count]
    samples = [read_states(pool, row) for row in unique]
    for sample in samples:
        if sample.token_ids != responses[sample.sample_key]["token_ids"]:
            raise AlignmentMiss(f"sample {sample.sample_key}: its states belong to other token ids; extract again")
    last = reference.num_layers(model)
    expected = reference.layer_states(model, [s.token_ids for s in samples], range(last + 1), threads=threads)
    pairs, nlls = [], []
    for number, (sample, expected_TKD) in enumerate(zip(samples, expected, strict=True), start=1):
        before_norm_TD = expected_TKD[:, last]
        after_T1D = reference.after_norm(model, before_norm_TD, threads=threads)[:, None]
        pairs.append(Pair(sample.sample_key, sample.token_ids, sample.states, torch.cat([expected_TKD, after_T1D], 1)))
        prompt_tokens = responses[sample.sample_key]["prompt_tokens"]
        nlls.append(
            reference.token_nlls(model, sample.token_ids, prompt_tokens, states_TD=before_norm_TD, threads=threads)
        )
        if progress:
            progress(number, len(samples))
    return pairs, float(torch.cat(nlls).mean())


def _responses(states: StatesRef, store: Store) -> dict[str, Row]:
    key = store.require("states", states.key)["responses"]
    store.require("responses", key)
    rows = pq.read_table(store.artifact("responses", key) / "responses.parquet").to_pylist()
    return {row["sample_key"]: row for row in rows}


def _check_points(pairs: list[Pair], states: StatesRef, campaign: Campaign) -> tuple[list[Row], list[str]]:
    """Three rows per point, and a sentence for each point that missed."""
    limits, last = campaign.thresholds, pairs[0].expected_TKD.shape[1] - 2
    scores_SPK = torch.stack([scores(pair, states.dtype) for pair in pairs])
    rows, misses, shifts = [], [], set()
    for place, point in enumerate(states.points):
        best = int(scores_SPK[:, place].mean(dim=0).argmin())
        mapped = float(scores_SPK[:, place, point].max())
        others_K = scores_SPK[:, place].min(dim=0).values.clone()
        others_K[point] = torch.inf
        nearest = int(others_K.argmin())
        far = bad_share(pairs, place, point, max(limits.next_best_rel_error, 0.1))
        checks = [
            ("state_rel_error", mapped, limits.state_rel_error, best == point and mapped <= limits.state_rel_error,
             f"worst of {len(pairs)} samples; best is {name_of(best, last)}"),
            ("next_best_rel_error", float(others_K[nearest]), limits.next_best_rel_error,
             float(others_K[nearest]) >= limits.next_best_rel_error, name_of(nearest, last)),
            ("far_token_share", far, _BAD_TOKENS[states.dtype], far <= _BAD_TOKENS[states.dtype], "tokens far off"),
        ]
        subject = f"{states.engine} point {point}"
        columns = ("check", "value", "threshold", "passed", "detail")
        rows += [dict(zip(columns, check, strict=True)) | {"subject": subject} for check in checks]
        if not (checks[0][3] and checks[2][3]):
            misses.append(f"point {point} {explain(pairs, place, point, states.dtype)} (relative error {mapped:.2g})")
            shifts.add(best - point if best != point and best <= last else None)
        elif not checks[1][3]:
            misses.append(f"point {point} cannot be told from {name_of(nearest, last)}; choose points further apart")
    if len(shifts) == 1 and None not in shifts:
        misses.append(f"layer points are shifted by {shifts.pop():+d}: the engine reads layer ids in another way")
    return rows, misses
