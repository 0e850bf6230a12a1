"""Benchmark: one workload on one arm's server, measurement by measurement, and its outputs against the base arm's.

Arms that are up together are measured in turns (`alternate`); `benchmark` then finds every measurement finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tasks.config import Arm, Campaign, Dtype, Workload
from tasks.engines.base import RunningServer
from tasks.errors import SeamMismatch
from tasks.load import outputs
from tasks.load.metrics import Acceptance, add_up
from tasks.measurement import Facts, Measurements, Progress, cap_of
from tasks.reference import top2_margin
from tasks.store.refs import BenchmarkRef, DrafterRef
from tasks.store.tables import Store


def benchmark(
    server: RunningServer, workload: Workload, campaign: Campaign, store: Store, *, baseline: BenchmarkRef | None,
    drafter: DrafterRef | None, progress: Progress | None = None,
) -> BenchmarkRef:
    """Measure; writes requests, benchmarks, acceptance and, against `baseline`, losslessness.

    Raises MeasurementInvalid if no request of a measurement succeeds, DrafterBroken if no draft token is
    ever accepted, and SeamMismatch if greedy outputs differ from the baseline's beyond near-ties.
    """
    taken = Measurements(server, workload, campaign, store, drafter)
    manifest = store.manifest("benchmark", taken.key)
    if manifest is None:
        manifest = _measure_all(taken, campaign, store, baseline, progress)
    return BenchmarkRef(
        key=taken.key, arm=server.arm.name, workload=workload.name, accept_length=manifest["accept_length"]
    )


def alternate(
    servers: Sequence[RunningServer], workload: Workload, campaign: Campaign, store: Store, *,
    baselines: Sequence[BenchmarkRef | None], drafters: Sequence[DrafterRef | None], progress: Progress | None = None,
) -> None:
    """Measure arms that are up together in turns, so that no drift of the machine favours one of them.

    Every other repeat goes through the arms from the last to the first. Arms without a baseline are compared
    with the first one. Raises as `benchmark` does.
    """
    subjects = [Measurements(s, workload, campaign, store, d) for s, d in zip(servers, drafters, strict=True)]
    turns = [(p, i) for p in subjects[0].points for i in _order(len(subjects), p.repeat)]
    if all(subjects[i].taken(point) for point, i in turns):
        return
    for server in servers:
        server.url()  # all are up before the first is measured: a server that loads disturbs its neighbour
    caps = [cap_of(baseline, store) for baseline in baselines]
    caps[1:] = [subjects[0].running_cap() if cap is None else cap for cap in caps[1:]]
    for number, (point, i) in enumerate(turns):
        report = None if progress is None else partial(_add, progress, number, len(turns))
        subjects[i].take(point, caps[i], report)


def _order(arms: int, repeat: int) -> Sequence[int]:
    return range(arms) if repeat % 2 == 0 else range(arms - 1, -1, -1)


def _measure_all(
    taken: Measurements, campaign: Campaign, store: Store, baseline: BenchmarkRef | None, progress: Progress | None
) -> Facts:
    done: list[Facts] = []
    for point in taken.points:
        report = None if progress is None else partial(_add, progress, len(done), len(taken.points))
        done.append(taken.take(point, cap_of(baseline, store), report))
    answers = [row for facts in done for row in outputs.read_outputs(taken.folder / facts["answers"])]
    if baseline is not None:
        _check_lossless(taken.arm, taken.workload, answers, baseline, campaign, store)
    manifest = {
        "arm": taken.arm.name, "workload": taken.workload.name,
        "running_requests_cap": done[0]["running_requests_cap"],
        "accept_length": add_up([Acceptance(facts["drafts"], facts["accepted"]) for facts in done]).accept_length,
    }
    with store.new_artifact("benchmark", taken.key, manifest) as new:
        outputs.write_outputs(outputs.one_per_prompt(answers), new / "outputs.parquet")
        outputs.write_outputs(answers, new / "all_outputs.parquet")
    return manifest


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
