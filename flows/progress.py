"""Progress of long stages: bars in a terminal, and progress artifacts where there is a Prefect server to show them."""

from __future__ import annotations

import contextvars
import logging
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final
from uuid import UUID

from prefect import get_client
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext, TaskRunContext
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from flows.local_server import server_outlives_run

Report = Callable[[int, int], None]
logger = logging.getLogger(__name__)
UPDATE_EVERY_S: Final = 2.0


class ProgressBars:
    """Bars on standard error when it is a terminal; artifacts when a server of the user's shows them."""

    def __init__(self) -> None:
        self._terminal: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._terminal = Progress(*columns, console=Console(stderr=True), transient=True)

    @contextmanager
    def bar(self, name: str) -> Iterator[Report]:
        """A callback `(done, total)`; the bar appears with the first call, so short stages show none."""
        bar = _Bar(name, self._terminal)
        try:
            yield bar.report
        finally:
            bar.close()

    def loading(self, arm: str) -> Callable[[float, str], None]:
        """A callback `(share done, what is being done)` for the loading of a server; its bar ends at 1."""
        bars: list[_Bar] = []

        def report(share: float, what: str) -> None:
            if not bars:  # here and not earlier: the artifact belongs to the task that needs the server
                bars.append(_Bar(f"loading {arm}", self._terminal))
            bars[0].report(round(share * 100), 100)
            if share >= 1.0:
                bars.pop().close()

        return report


class _Bar:
    """One bar, in the terminal and as an artifact."""

    def __init__(self, name: str, terminal: Progress | None) -> None:
        self._name, self._terminal = name, terminal
        self._row: TaskID | None = None
        self._artifact = _Artifact(name) if server_outlives_run() else None

    def report(self, done: int, total: int) -> None:
        if self._artifact:
            self._artifact.show(done, total)
        if self._terminal:
            self._terminal.start()
            self._row = self._terminal.add_task(self._name, total=total) if self._row is None else self._row
            self._terminal.update(self._row, completed=done, total=total)

    def close(self) -> None:
        if self._artifact:
            self._artifact.finish()
        if self._terminal and self._row is not None:
            self._terminal.remove_task(self._row)
            if not self._terminal.tasks:
                self._terminal.stop()


class _Artifact:
    """One progress artifact of the task that opened it; a server that does not take it never fails a stage.

    It is sent from a thread, since who reports may be the event loop that measures an engine.
    """

    def __init__(self, name: str) -> None:
        task, flow = TaskRunContext.get(), FlowRunContext.get()
        self._task_run = task.task_run.id if task else None
        self._flow_run = flow.flow_run.id if flow and flow.flow_run else task.task_run.flow_run_id if task else None
        self._name = name
        self._id: UUID | None = None
        self._sent_at, self._failures, self._share = 0.0, 0, 0.0
        self._context = contextvars.copy_context()  # says which server
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="progress")
        self._client: SyncPrefectClient | None = None

    def show(self, done: int, total: int) -> None:
        """Send the share done, at most every two seconds."""
        self._share = 100.0 * done / total if total else 100.0
        if time.monotonic() - self._sent_at >= UPDATE_EVERY_S:
            self._sent_at = time.monotonic()
            self._sender.submit(self._context.run, self._send, f"{self._name}: {done} of {total}", self._share)

    def finish(self) -> None:
        """Send the last share, if anything was ever shown."""
        if self._sent_at:
            self._sender.submit(self._context.run, self._send, self._name, self._share)
            self._sender.submit(self._context.run, self._close)
        self._sender.shutdown(wait=True)

    def _send(self, text: str, share: float) -> None:
        if self._failures > 3:
            return
        try:
            if self._client is None:
                self._client = get_client(sync_client=True).__enter__()
            if self._id is None:
                key = re.sub(r"[^a-z0-9]+", "-", f"progress {self._name}".lower()).strip("-")
                made = ArtifactCreate(key=key, type="progress", description=text, data=share,
                                      flow_run_id=self._flow_run, task_run_id=self._task_run)
                self._id = self._client.create_artifact(made).id
            else:
                self._client.update_artifact(self._id, ArtifactUpdate(data=share, description=text))
        except Exception as error:
            self._failures += 1
            logger.debug("progress of %s not shown in the Prefect UI: %s", self._name, error)

    def _close(self) -> None:
        if self._client is not None:
            self._client.__exit__()
