"""The study of `drafthouse diagnose`: every fault, several seeds, and healthy runs; resumable.

    python tests/faults/diagnose/study_diagnose.py [--faults FILE.py]... [--seeds 3] [--healthy 20] [--only TEXT]

The base is one small campaign on real vLLM (64 samples; made when it is missing); each fault gets a world of its own
on 48 of its samples (see diagnose_world.py). A finished case is a line in cases.jsonl and is not run again.
Writes tests/bench/results/diagnose.json and the confusion matrix in docs/diagnose.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from diagnose_faults import FAULTS  # noqa: E402
from diagnose_world import Fault, suffer, world_from  # noqa: E402

WORK = ROOT / ".study" / "diagnose"
RESULTS = ROOT / "tests" / "bench" / "results" / "diagnose.json"
DOCS = ROOT / "docs" / "diagnose.md"
MARKS = ("<!-- study -->", "<!-- /study -->")
CAMPAIGN = ROOT / "deployments" / "campaigns" / "demo-vllm.yaml"
SMALL = ("name=diagnose-base", "prompts.train_samples=64", "drafter.epochs=6", "drafter.batch_size=4",
         "workloads.0.concurrencies=[8]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=WORK / "base", help="store of a campaign that extracted states")
    parser.add_argument("--model", type=Path, default=ROOT / "deployments" / "models" / "tiny_llama" / "model")
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--faults", type=Path, action="append", default=[], help="file with a list FAULTS (repeatable)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--only", default="", help="faults whose name holds this text")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    if not (wanted.base / "tables").exists():
        make_base(wanted.base)
    faults = [("ours", f) for f in FAULTS]
    faults += [(file.stem, f) for file in wanted.faults for f in read_faults(file)]
    cases = wanted.work / "cases.jsonl"
    wanted.work.mkdir(parents=True, exist_ok=True)
    done = {(c["set"], c["fault"], c["seed"]) for c in read_cases(cases)}
    for seed in range(max(wanted.seeds, wanted.healthy)):
        healthy = wanted.work / f"healthy-{seed}"
        todo = [(s, f) for s, f in faults if wanted.only in f.name and (s, f.name, seed) not in done]
        todo = todo if seed < wanted.seeds else []
        if (("ours", "healthy", seed) not in done and seed < wanted.healthy) or (todo and not healthy.exists()):
            shutil.rmtree(healthy, ignore_errors=True)
            keep(cases, "ours", None, seed, run(wanted, healthy, None, seed, None))
        for name, fault in todo:
            folder = wanted.work / "world"
            shutil.rmtree(folder, ignore_errors=True)
            keep(cases, name, fault, seed, run(wanted, folder, fault, seed, healthy / "store"))
        if seed >= wanted.seeds:
            shutil.rmtree(healthy, ignore_errors=True)
    report(read_cases(cases))


def make_base(base: Path) -> None:
    """A campaign on real vLLM; that its short training may draft badly does not matter."""
    command = [str(ROOT / ".venv" / "bin" / "drafthouse"), "run", str(CAMPAIGN), "--store", str(base)]
    subprocess.run([*command, *(part for s in SMALL for part in ("--set", s))], check=False)


def read_faults(file: Path) -> list[Fault]:
    """The list FAULTS of a file."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: list[Fault] = module.FAULTS
    return found


def run(
    wanted: argparse.Namespace, folder: Path, fault: Fault | None, seed: int, trained: Path | None
) -> dict[str, Any]:
    begun = time.monotonic()
    world = world_from(wanted.base, wanted.model, folder, seed)
    try:
        found = suffer(world, fault, trained)
    except Exception as error:  # a fault that breaks the campaign itself is a case too
        return {"causes": [], "error": f"{type(error).__name__}: {error}", "stopped_by": None, "seconds": 0.0}
    causes = [(c["id"], c["score"]) for c in found["causes"]]
    return {"causes": causes, "stopped_by": world.stopped_by, "seconds": round(time.monotonic() - begun, 1)}


def keep(cases: Path, name: str, fault: Fault | None, seed: int, outcome: dict[str, Any]) -> None:
    case = {"set": name, "fault": fault.name if fault else "healthy", "stage": fault.stage if fault else None,
            "cause": fault.cause if fault else None, "also": list(fault.also) if fault else [], "seed": seed, **outcome}
    with cases.open("a") as stream:
        stream.write(json.dumps(case) + "\n")
    print(case, flush=True)


def read_cases(cases: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in cases.read_text().splitlines()] if cases.exists() else []


def place_of(case: dict[str, Any]) -> int | None:
    """Rank of the right cause, from 0; None if it was not named."""
    right = {case["cause"], *case["also"]}
    return next((n for n, (id, _) in enumerate(case["causes"]) if id in right), None)


def report(cases: list[dict[str, Any]]) -> None:
    """Results file, and the matrix in the docs."""
    sick = [c for c in cases if c["cause"]]
    healthy = [c for c in cases if not c["cause"]]
    if not sick or not healthy:
        return
    figures = {}
    for name in sorted({c["set"] for c in sick}):
        of_it = [c for c in sick if c["set"] == name]
        figures[f"first_{name}"] = sum(place_of(c) == 0 for c in of_it) / len(of_it)
        figures[f"first_two_{name}"] = sum(place_of(c) in (0, 1) for c in of_it) / len(of_it)
    figures["healthy_accused"] = sum(bool(c["causes"]) for c in healthy) / len(healthy)
    now, versions = datetime.now(UTC).isoformat(timespec="seconds"), {"torch": torch.__version__}
    shared = {"unit": "share", "spread": None, "command": "make study-diagnose", "versions": versions,
              "device": f"{os.cpu_count()} CPU cores, {platform.machine()}", "date": now}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"metric": f"diagnose.{metric}", "value": round(value, 4), **shared} for metric, value in figures.items()]
    counts = {"diagnose.cases": len(sick), "diagnose.healthy_runs": len(healthy),
              "diagnose.faults": len({(c["set"], c["fault"]) for c in sick})}
    rows += [{"metric": m, "value": v, **shared, "unit": "count"} for m, v in counts.items()]
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    before, _, rest = DOCS.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    DOCS.write_text(before + MARKS[0] + "\n" + matrix(sick, healthy, figures) + MARKS[1] + after)
    print(json.dumps(figures, indent=1))


def matrix(sick: list[dict[str, Any]], healthy: list[dict[str, Any]], figures: dict[str, float]) -> str:
    """A row per fault: what was ranked first, how often the right cause was first or second, and who stopped it."""
    lines = [f"{len(sick)} cases and {len(healthy)} healthy runs: " + ", ".join(
        f"{name} {value:.0%}" for name, value in figures.items()) + ".\n"]
    lines += ["| fault | stage | expected | ranked first | first | first two | stopped by |", "|---" * 7 + "|"]
    for key in dict.fromkeys((c["set"], c["fault"]) for c in sick):
        of_it = [c for c in sick if (c["set"], c["fault"]) == key]
        first = Counter(c["causes"][0][0] if c["causes"] else "nothing" for c in of_it)
        by = Counter(c["stopped_by"] or "nobody" for c in of_it)
        hits = [sum(place_of(c) in range(n) for c in of_it) for n in (1, 2)]
        named = ", ".join(f"{id} {n}" for id, n in first.most_common())
        who = ", ".join(by)
        lines.append(f"| {key[1]} ({key[0]}) | {of_it[0]['stage']} | {of_it[0]['cause']} | {named} | "
                     f"{hits[0]}/{len(of_it)} | {hits[1]}/{len(of_it)} | {who} |")
    accused = Counter(c["causes"][0][0] if c["causes"] else "nothing" for c in healthy)
    lines.append(f"| healthy | – | nothing | {', '.join(f'{i} {n}' for i, n in accused.most_common())} | | | |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
