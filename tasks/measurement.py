"""The measurements of one arm under one load, each kept in the run's folder as soon as it ends.

A measurement is a concurrency and a repeat. A retry of the same run goes on at the next one; another run
measures anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from tasks.config import Campaign, Workload
from tasks.engines.base import RunningServer
from tasks.engines.registry import engine as adapter_of
from tasks.errors import DrafterBroken, MeasurementInvalid
from tasks.load import outputs, rows
from tasks.load.measure import measure
from tasks.load.prompts import RenderedPrompt
from tasks.load.workloads import Point, blocks, heldout_prompts, points, warmup
from tasks.reference import text_config
from tasks.store.files import write_whole
from tasks.store.keys import content_key
from tasks.store.refs import BenchmarkRef, DrafterRef
from tasks.store.tables import Store

Progress = Callable[[int, int], None]
Facts = dict[str, Any]


class Measurements:
    """All measurements of one arm under one load, and the folder in which they are kept."""

    def __init__(
        self, server: RunningServer, workload: Workload, campaign: Campaign, store: Store, drafter: DrafterRef | None
    ) -> None:
        self.server, self.arm, self.workload = server, server.arm, workload
        self.points = points(workload)
        self._campaign, self._store, self._drafter = campaign, store, drafter
        arm, load = self.arm.model_dump(mode="json"), workload.model_dump(mode="json")
        self.key = content_key("benchmark", store.run_id, arm, load, drafter.key if drafter else None)
        self.folder = store.run_dir / "benchmark" / self.key

    def taken(self, point: Point) -> bool:
        """Is this one finished?"""
        return self._finished(point).exists()

    def take(self, point: Point, baseline_cap: int | None, progress: Progress | None = None) -> Facts:
        """What came of one measurement; it is made if it is not finished yet.

        Raises MeasurementInvalid if no request succeeds, DrafterBroken if no draft token is accepted, also
        for a measurement that an earlier try finished.
        """
        if not self.taken(point):
            self._measure(point, baseline_cap, progress)
        facts: Facts = json.loads(self._finished(point).read_text())
        if self.arm.speculative and facts["drafts"] and not facts["accepted"]:
            raise DrafterBroken(
                f"{self.arm.name} {self.workload.name} {point.name}: accept length 1.0, none of "
                f"{facts['drafts']} drafts had a token accepted; drafter not working"
            )
        return facts

    def running_cap(self) -> int:
        """Requests that the server runs at once: what it reports, else what was asked for."""
        told = [
            row["effective"] for row in self._store.read("servers", self._store.run_id).to_pylist()
            if row["arm"] == self.arm.name and row["setting"] == "max_running_requests"
            and (row["effective"] or "").isdigit()
        ]
        return int(told[-1]) if told else self.arm.tuning.max_running_requests

    def _finished(self, point: Point) -> Path:
        return self.folder / f"{point.name}.json"

    @cached_property
    def _prompts(self) -> list[RenderedPrompt]:
        return heldout_prompts(self.workload, self._campaign)

    def _measure(self, point: Point, baseline_cap: int | None, progress: Progress | None) -> None:
        """Its rows, then its answers, then the mark that it is finished."""
        arm, workload, campaign, store = self.arm, self.workload, self._campaign, self._store
        url, spec = self.server.url(), arm.speculative
        vocab_size = int(text_config(campaign.target.model).vocab_size)
        measured = measure(
            adapter_of(arm.engine), url, campaign.target.name, workload, point,
            blocks(workload, point, self._prompts, vocab_size, campaign.name),
            warmup(workload, point, self._prompts, vocab_size, campaign.name),
            running_cap=self.running_cap(), speculative=spec is not None, progress=progress, baseline_cap=baseline_cap,
        )
        where = {"concurrency": point.concurrency, "repeat": point.repeat}
        shared: Facts = {"arm": arm.name, "workload": workload.name, **where}
        served, part = {**shared, "engine": arm.engine.value}, f"{arm.name}-{workload.name}-{point.name}"
        store.write("requests", rows.request_rows(measured, shared), part)
        store.write("benchmarks", [rows.benchmark_row(measured, served, campaign.thresholds)], part)
        if spec is not None:
            name = self._drafter.name if self._drafter else Path(spec.drafter).name
            of_drafter = {**served, "drafter": name, "extracted_on": spec.extracted_on.value}
            store.write("acceptance", rows.acceptance_rows(measured, of_drafter, spec.num_speculative_tokens), part)
        if not measured.ok:
            self.server.url()  # a server that died says so itself, with the end of its log
            what = f"{arm.name} {workload.name} {point.name}"
            raise MeasurementInvalid(f"{what}: no request succeeded: {measured.failed()}")
        finished = self._finished(point)
        answers = finished.with_suffix(".parquet")
        outputs.write_outputs(outputs.output_rows(measured.records, point.concurrency, point.repeat), answers)
        total, _ = rows.total_acceptance(measured)
        facts = {"answers": answers.name, "running_requests_cap": measured.running_cap,
                 "drafts": total.drafts, "accepted": total.accepted}
        write_whole(finished, json.dumps(facts))


def cap_of(baseline: BenchmarkRef | None, store: Store) -> int | None:
    """Requests at once of the arm that is compared with."""
    return None if baseline is None else int(store.require("benchmark", baseline.key)["running_requests_cap"])
