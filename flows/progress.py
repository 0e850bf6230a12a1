"""Progress of long stages: bars in a terminal; the Prefect UI gets its own artifacts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Report = Callable[[int, int], None]


class ProgressBars:
    """Bars on standard error when it is a terminal, silent otherwise."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)

    @contextmanager
    def bar(self, name: str) -> Iterator[Report]:
        """A callback `(done, total)`; the bar appears with the first call, so short stages show none."""
        if not sys.stderr.isatty():
            yield lambda done, total: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as shown:
            row = None

            def report(done: int, total: int) -> None:
                nonlocal row
                if row is None:
                    row = shown.add_task(name, total=total)
                shown.update(row, completed=done, total=total)

            yield report
