"""`make study-faults`: 200 random faults on the stub campaign, 20 on the real CPU engines, in resumable pieces.

    python tests/faults/study.py [--faults 200] [--pieces N] [--part 0/2] [--campaign stub|vllm|sglang]

Every outcome is a line in test-output/study-faults-<campaign>.jsonl; a second call goes on where the first
stopped; parts may run side by side. At the end the counts are written to tests/bench/results/faults-<campaign>.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "faults")]

from campaign_faults import Fault, Reference, suffer, undisturbed  # noqa: E402
from prefect_kit import PrefectStack, prefect_stack  # noqa: E402

SEED = 20260101


def plan(faults: int) -> list[tuple[int, Fault, float]]:
    """The same faults at the same moments in every call."""
    chance = random.Random(SEED)
    kinds = list(Fault)
    return [(number, kinds[number % len(kinds)], chance.uniform(0.02, 0.98)) for number in range(faults)]


def run_study(kind: str, faults: int, pieces: int, part: tuple[int, int]) -> list[dict[str, Any]]:
    """Run up to `pieces` of this part's faults that are not done yet; returns all outcomes so far."""
    journal = ROOT / "test-output" / f"study-faults-{kind}.jsonl"
    journal.parent.mkdir(exist_ok=True)
    known = {row["number"] for row in _outcomes(journal)}
    mine = [item for item in plan(faults) if item[0] // 8 % part[1] == part[0]]  # every part has all eight kinds
    waiting = [item for item in mine if item[0] not in known][:pieces]
    if waiting:
        with tempfile.TemporaryDirectory(prefix="drafthouse-study-") as folder, prefect_stack(Path(folder)) as stack:
            reference = undisturbed(stack, Path(folder) / "undisturbed", kind)
            for number, fault, share in waiting:
                row = _one(stack, Path(folder), number, fault, share, reference, kind)
                with journal.open("a") as stream:
                    stream.write(json.dumps(row) + "\n")
                what = f"{len(_outcomes(journal))}/{faults} {fault} at {share:.2f}"
                print(f"{what}: {row['states']} {row['problems'] or 'ok'}", flush=True)
    return _outcomes(journal)


def _outcomes(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


def _one(
    stack: PrefectStack, folder: Path, number: int, fault: Fault, share: float, reference: Reference, kind: str
) -> dict[str, Any]:
    return {"number": number, **asdict(suffer(stack, folder / f"fault-{number}", fault, share, reference, kind))}


def write_results(kind: str, done: list[dict[str, Any]]) -> None:
    """Counts per fault, in the form of all benches."""
    counts = Counter(row["fault"] for row in done)
    hurt = Counter(row["fault"] for row in done if row["problems"])
    facts = {
        "unit": "faults", "spread": None, "command": "make study-faults", "device": f"CPU, {platform.machine()}",
        "versions": {"prefect": version("prefect"), "drafthouse": version("drafthouse")},
        "date": datetime.now(UTC).date().isoformat(),
    }
    struck = Counter(row["fault"] for row in done if row["struck"])
    rows = [{"metric": f"faults without loss, {kind}: {fault}", "value": counts[fault] - hurt[fault],
             "of": counts[fault], "struck": struck[fault], **facts} for fault in sorted(counts)]
    path = ROOT / "tests" / "bench" / "results" / f"faults-{kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--pieces", type=int, default=10_000, help="stop after so many, to go on later")
    parser.add_argument("--part", default="0/1", help="which of how many parts: 0/2 and 1/2 run side by side")
    parser.add_argument("--campaign", choices=["stub", "vllm", "sglang"], default="stub")
    options = parser.parse_args()
    this, _, parts = options.part.partition("/")
    done = run_study(options.campaign, options.faults, options.pieces, (int(this), int(parts)))
    write_results(options.campaign, done)
    problems = [row for row in done if row["problems"]]
    struck = sum(row["struck"] for row in done)
    print(f"{len(done)} of {options.faults} faults, {struck} struck a run at work, {len(problems)} with problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
