"""Benchmark: one workload on one arm's server, measurement by measurement, and speculation against its base arm.

A measurement is a concurrency and a repeat. Each leaves its rows and answers behind when it ends, so a
retry of the same run goes on at the next one; another run measures anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tasks.config import Arm, Campaign, Dtype, Workload
from tasks.engines.base import RunningServer
from tasks.engines.registry import engine as adapter_of
from tasks.errors import DrafterBroken, MeasurementInvalid, SeamMismatch
from tasks.load import outputs, rows
from tasks.load.measure import measure
from tasks.load.metrics import Acceptance, add_up
from tasks.load.prompts import RenderedPrompt
from tasks.load.workloads import Point, blocks, heldout_prompts, points, warmup
from tasks.reference import text_config, top2_margin
from tasks.store.keys import content_key
from tasks.store.refs import BenchmarkRef, DrafterRef
from tasks.store.tables import Store

Progress = Callable[[int, int], None]
Facts = dict[str, Any]


def benchmark(
    server: RunningServer, workload: Workload, campaign: Campaign, store: Store, *, baseline: BenchmarkRef | None,
    drafter: DrafterRef | None, progress: Progress | None = None,
) -> BenchmarkRef:
    """Measure; writes requests, benchmarks, acceptance and, against `baseline`, losslessness.

    Raises MeasurementInvalid if no request of a measurement succeeds, DrafterBroken if no draft token is
    ever accepted, and SeamMismatch if greedy outputs differ from the baseline's beyond near-ties.
    """
    arm, config = server.arm.model_dump(mode="json"), workload.model_dump(mode="json")
    key = content_key("benchmark", store.run_id, arm, config, drafter.key if drafter else None)
    manifest = store.manifest("benchmark", key)
    if manifest is None:
        manifest = _measure_all(server, workload, campaign, store, key, baseline, drafter, progress)
    return BenchmarkRef(key=key, arm=server.arm.name, workload=workload.name, accept_length=manifest["accept_length"])


def _measure_all(
    server: RunningServer, workload: Workload, campaign: Campaign, store: Store, key: str,
    baseline: BenchmarkRef | None, drafter: DrafterRef | None, progress: Progress | None,
) -> Facts:
    prompts, folder = heldout_prompts(workload, campaign), store.run_dir / "benchmark" / key
    done: list[Facts] = []
    planned = points(workload)
    for point in planned:
        finished = folder / f"{point.name}.json"
        if not finished.exists():
            report = None if progress is None else partial(_add, progress, len(done), len(planned))
            _one(server, workload, point, prompts, campaign, store, finished, baseline, drafter, report)
        done.append(json.loads(finished.read_text()))  # also after a retry, so that every check sees it again
        if server.arm.speculative and done[-1]["drafts"] and not done[-1]["accepted"]:
            raise DrafterBroken(
                f"{server.arm.name} {workload.name} {point.name}: accept length 1.0, none of "
                f"{done[-1]['drafts']} drafts had a token accepted; drafter not working"
            )
    answers = [row for facts in done for row in outputs.read_outputs(folder / facts["answers"])]
    if baseline is not None:
        _check_lossless(server.arm, workload, answers, baseline, campaign, store)
    manifest = {
        "arm": server.arm.name, "workload": workload.name, "running_requests_cap": done[0]["running_requests_cap"],
        "accept_length": add_up([Acceptance(facts["drafts"], facts["accepted"]) for facts in done]).accept_length,
    }
    with store.new_artifact("benchmark", key, manifest) as new:
        outputs.write_outputs(outputs.one_per_prompt(answers), new / "outputs.parquet")
        outputs.write_outputs(answers, new / "all_outputs.parquet")
    return manifest


def _one(
    server: RunningServer, workload: Workload, point: Point, prompts: list[RenderedPrompt], campaign: Campaign,
    store: Store, finished: Path, baseline: BenchmarkRef | None, drafter: DrafterRef | None,
    progress: Progress | None,
) -> None:
    """One measurement: its rows, then its answers, then the mark that it is finished."""
    arm, spec, url = server.arm, server.arm.speculative, server.url()
    vocab_size = int(text_config(campaign.target.model).vocab_size)
    measured = measure(
        adapter_of(arm.engine), url, campaign.target.name, workload, point,
        blocks(workload, point, prompts, vocab_size, campaign.name),
        warmup(workload, point, prompts, vocab_size, campaign.name),
        running_cap=_running_cap(arm, store), speculative=spec is not None, progress=progress,
        baseline_cap=store.require("benchmark", baseline.key)["running_requests_cap"] if baseline else None,
    )
    where = {"concurrency": point.concurrency, "repeat": point.repeat}
    shared: Facts = {"arm": arm.name, "workload": workload.name, **where}
    served, part = {**shared, "engine": arm.engine.value}, f"{arm.name}-{workload.name}-{point.name}"
    store.write("requests", rows.request_rows(measured, shared), part)
    store.write("benchmarks", [rows.benchmark_row(measured, served, campaign.thresholds)], part)
    if spec is not None:
        name = drafter.name if drafter else Path(spec.drafter).name
        of_drafter = {**served, "drafter": name, "extracted_on": spec.extracted_on.value}
        store.write("acceptance", rows.acceptance_rows(measured, of_drafter, spec.num_speculative_tokens), part)
    if not measured.ok:
        server.url()  # a server that died says so itself, with the end of its log
        raise MeasurementInvalid(f"{arm.name} {workload.name} {point.name}: no request succeeded: {measured.failed()}")
    answers = outputs.output_rows(measured.records, point.concurrency, point.repeat)
    outputs.write_outputs(answers, finished.with_suffix(".parquet"))
    total, _ = rows.total_acceptance(measured)
    facts = {"answers": finished.with_suffix(".parquet").name, "running_requests_cap": measured.running_cap,
             "drafts": total.drafts, "accepted": total.accepted}
    unfinished = finished.with_suffix(".tmp")
    unfinished.write_text(json.dumps(facts))
    unfinished.replace(finished)


def _running_cap(arm: Arm, store: Store) -> int:
    """Requests that the server runs at once: what it reports, else what was asked for."""
    told = [
        row["effective"] for row in store.read("servers", store.run_id).to_pylist()
        if row["arm"] == arm.name and row["setting"] == "max_running_requests" and (row["effective"] or "").isdigit()
    ]
    return int(told[-1]) if told else arm.tuning.max_running_requests


def _check_lossless(
    arm: Arm, workload: Workload, answers: list[outputs.Row], baseline: BenchmarkRef, campaign: Campaign, store: Store
) -> None:
    """Compare every greedy answer with the base arm's; rows first, then the error."""
    base = outputs.read_outputs(store.artifact(baseline.kind, baseline.key) / "all_outputs.parquet")
    model, limit = campaign.target.model, campaign.thresholds.top2_margin
    found = outputs.compare(answers, base, lambda ids: top2_margin(model, ids), limit)
    facts = {"arm": arm.name, "base_arm": baseline.arm, "workload": workload.name}
    store.write("losslessness", [{**facts, **row} for row in found], f"{arm.name}-{workload.name}")
    compared = [row for row in found if row.get("verdict")]
    if not compared:
        raise SeamMismatch(f"{arm.name} {workload.name}: no answer to compare with {baseline.arm}'s (no token ids)")
    wrong = [row for row in compared if row["verdict"] == "different"]
    # Two engines may round bf16 differently at any token; one engine with and without speculation must agree.
    if wrong and (arm.speculative or campaign.target.dtype is Dtype.float32):
        raise SeamMismatch(
            f"{arm.name} {workload.name}: {len(wrong)} of {len(compared)} greedy outputs are not {baseline.arm}'s; "
            f"prompt {wrong[0]['prompt_key']} differs at token {wrong[0]['first_difference']}, top-2 margin "
            f"{wrong[0]['top2_margin']:.2g} > thresholds.top2_margin {limit:g}"
        )


def _add(progress: Progress, finished: int, points: int, done: int, requests: int) -> None:
    progress(finished * requests + done, points * requests)
