"""What a retry says first: how the run ended before, and which code changed since it began."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from tasks.errors import MachineError
from tasks.store.keys import file_checksum
from tasks.store.tables import Store

logger = logging.getLogger(__name__)
MAX_STARTS = 20
PROJECT = Path(__file__).resolve().parents[1]


def tell_what_continues(store: Store) -> None:
    """Log it if this run has begun before; else remember the code that it begins with.

    Work is known by content keys, which hold inputs, settings and versions but not our own code: a
    finished stage is kept although its code changed, and the user is told which.
    """
    remembered, now = store.run_dir / "code.json", _code()
    earlier = store.read("runs", store.run_id).to_pylist()
    if not earlier or not remembered.exists():
        remembered.write_text(json.dumps(now))
        return
    logger.info("run %s continues; it was %s (%s)", store.run_id, earlier[0]["state"], earlier[0]["note"] or "no note")
    before: dict[str, str] = json.loads(remembered.read_text())
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        logger.warning(
            "code changed since this run began (%s): what is unfinished is done with the new code; finished stages, "
            "samples and measurements are kept, since their keys hold inputs and versions, not code; "
            "to redo them start a new run with a store of its own", ", ".join(changed),
        )


def stop_endless_retries(starts: int) -> None:
    """Raise MachineError at the 21st start of a run: one that always crashes would be retried for ever."""
    if starts > MAX_STARTS:
        raise MachineError(
            f"this run was started {MAX_STARTS} times and never completed; look into its log, then start a new run, "
            "which reuses finished responses, states and drafters"
        )


def _code() -> dict[str, str]:
    files = sorted([*PROJECT.glob("tasks/**/*.py"), *PROJECT.glob("flows/*.py")])
    return {str(path.relative_to(PROJECT)): file_checksum(path)[:16] for path in files}
