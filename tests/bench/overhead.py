"""What the orchestration and the seam checks cost, from a run's own tables.

    python tests/bench/overhead.py STORE [RUN]

Between `runs.started_at` and `finished_at` lie stages (`stages` rows) and, between them, Prefect: the task
engine, state changes, artifacts. What is before (imports, the run's own server) is told by --process-wall-s.
Seams: the stages that only compare, and of each server's start the comparison of its settings and its sanity probe.
"""

from __future__ import annotations

import argparse
import json
import platform
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tasks.store.tables import Store, find_run


def covered(spans: list[tuple[datetime, datetime]]) -> timedelta:
    """Length of the union of time spans; a clean inside a benchmark counts once."""
    total, end = timedelta(), datetime.min.replace(tzinfo=UTC)
    for start, stop in sorted(spans):
        total += max(timedelta(), stop - max(start, end))
        end = max(end, stop)
    return total


def overhead(store: Store, process_wall_s: float | None) -> dict[str, float]:
    """Seconds of the run, seconds that no stage used, and their share."""
    run = store.read("runs", store.run_id).to_pylist()[0]
    stages = store.read("stages", store.run_id).to_pylist()
    wall = (run["finished_at"] - run["started_at"]).total_seconds()
    idle = wall - covered([(row["started_at"], row["finished_at"]) for row in stages]).total_seconds()
    found = {"run_s": wall, "stages": float(len(stages)), "outside_stages_s": idle, "outside_stages_share": idle / wall}
    if process_wall_s is not None:
        found |= {"process_s": process_wall_s, "before_and_after_s": process_wall_s - wall,
                  "orchestration_share": (process_wall_s - wall + idle) / process_wall_s}
    return found


SEAMS = ("align", "replay", "probe", "agree")


def seams(store: Store) -> dict[str, float]:
    """Seconds that seam checks took, and their share of the run."""
    run = store.read("runs", store.run_id).to_pylist()[0]
    stages = store.read("stages", store.run_id).to_pylist()
    times = [row for row in store.read("servers", store.run_id).to_pylist() if row["setting"] == "check_s"]
    found = {"servers_s": sum(float(row["effective"]) for row in times)}
    found |= {f"{stage}_s": sum(row["wall_s"] for row in stages if row["stage"] == stage) for stage in SEAMS}
    # The probe is the first to need its server: what starting that took is no check.
    probed = {row["arm"] for row in stages if row["stage"] == "probe"}
    nested = [row["wall_s"] for row in stages if row["stage"] in ("clean", "serve") and row["arm"] in probed]
    found["probe_s"] -= sum(nested)
    return found | {"share": sum(found.values()) / (run["finished_at"] - run["started_at"]).total_seconds()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("run", nargs="?", default="last")
    parser.add_argument("--process-wall-s", type=float, help="wall time of the whole `drafthouse run` command")
    options = parser.parse_args()
    store = Store(options.store, find_run(options.store, options.run))
    facts: dict[str, Any] = {
        "spread": None, "command": "drafthouse run; python tests/bench/overhead.py STORE", "device": platform.machine(),
        "versions": {"prefect": version("prefect")}, "date": datetime.now(UTC).date().isoformat(),
    }
    rows = []
    measured = {f"orchestration.{name}": value for name, value in overhead(store, options.process_wall_s).items()}
    measured |= {f"seams.{name}": value for name, value in seams(store).items()}
    for metric, value in measured.items():
        unit = "share" if metric.endswith("share") else "s" if metric.endswith("_s") else "stages"
        rows.append({"metric": metric, "value": round(value, 4), "unit": unit, **facts})
        print(f"{metric} {value:.3f} {unit}")
    path = Path(__file__).parent / "results" / "orchestration.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
