"""Capture inside SGLang: does it lose, double or mix up samples, does memory stay flat, and what does it cost.

    python tests/bench/sglang_capture.py [--requests 2000] [--aborted 0.05] [--rounds 5] [--compared 400] [--model DIR]

Writes tests/bench/results/sglang_capture.json. Two servers of one model run side by side, one that
captures and one that does not; rounds of equal prompts alternate between them. Then prompts of random
length go to the capturing one and a share of them is aborted; the token ids of every acknowledged sample
are compared with the prompt, and the states of some with transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tasks.campaign_file import parse_campaign
from tasks.config import EngineEnvironment, Role
from tasks.engines.sglang import SglangEngine
from tasks.reference import layer_states
from tasks.serve import serving
from tasks.store.states import read_acks, read_sample
from tasks.store.tables import Store

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results" / "sglang_capture.json"
ENGINE = SglangEngine()
CONCURRENCY, PROMPT_TOKENS, PROMPTS_A_ROUND = 16, 300, 150
Prompts = dict[str, list[int]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--aborted", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compared", type=int, default=400, help="samples whose states are compared with transformers")
    parser.add_argument("--model", type=Path, default=ROOT / "deployments" / "models" / "tiny_llama" / "model")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        os.environ["XDG_STATE_HOME"] = scratch
        place = Path(scratch)
        urls = {}
        for role in (Role.base, Role.extraction):
            # The host's lock is for one engine at a time; this bench wants two side by side.
            os.environ["XDG_STATE_HOME"] = str(place / role)
            campaign = _campaign(wanted.model)
            arm = campaign.arms_of(role)[0]
            folder = place / "pool" if role is Role.extraction else None
            if folder is not None:
                folder.mkdir()
            store = Store(place / role / "store", "bench")
            server = serving(campaign, arm, store, before_start=lambda: None, capture_dir=folder)
            urls[role] = stack.enter_context(server).url()
        rows = _throughput(urls, wanted.rounds, place / "pool")
        print(rows, flush=True)
        rows += _losses(urls[Role.extraction], wanted, place / "pool")
    RESULTS.write_text(json.dumps([{**row, **_facts()} for row in rows], indent=1) + "\n")
    print(RESULTS.read_text())


def _campaign(model: Path) -> Any:
    tuning = {"chunked_prefill_size": 512, "max_running_requests": CONCURRENCY, "kv_tokens": 16384}
    return parse_campaign({
        "name": "bench", "target": {"model": str(model), "max_model_len": 1024},
        "machine": {"cpu_threads": 1, "ready_timeout_s": 600},
        "arms": [{"name": str(role), "engine": "sglang", "role": str(role), "tuning": tuning}
                 for role in (Role.base, Role.extraction)],
        "workloads": [{"name": "any"}], "prompts": {"train_file": "none", "heldout_file": "none"},
        "drafter": {"points": [1, 2, 3]},
    })


def _throughput(urls: dict[Role, str], rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Prefill tokens per second, capture on and off, in alternating rounds; the first round is warm-up."""
    draw, speeds = random.Random(0), {role: [] for role in urls}  # type: ignore[var-annotated]
    for number in range(rounds + 1):
        for role in sorted(urls, reverse=bool(number % 2)):
            prompts = _prompts(draw, f"t{number}", [PROMPT_TOKENS] * PROMPTS_A_ROUND)
            started = time.perf_counter()
            asyncio.run(_send(urls[role], prompts, keyed=role is Role.extraction, aborted=0.0, draw=draw))
            if number:
                speeds[role].append(PROMPT_TOKENS * PROMPTS_A_ROUND / (time.perf_counter() - started))
    _wait_for(folder, f"t{rounds}-{PROMPTS_A_ROUND - 1}")
    ratios = [on / off for on, off in zip(speeds[Role.extraction], speeds[Role.base], strict=True)]
    named = (
        ("prefill_capture_off", speeds[Role.base], "tok/s"),
        ("prefill_capture_on", speeds[Role.extraction], "tok/s"), ("prefill_on_over_off", ratios, "ratio"),
    )
    return [
        {"metric": metric, "value": round(statistics.median(values), 3), "unit": unit,
         "spread": [round(min(values), 3), round(max(values), 3)]}
        for metric, values, unit in named
    ]


def _losses(url: str, wanted: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    draw = random.Random(1)
    scheduler = psutil.Process(json.loads(next(folder.glob("capture-*.json")).read_text())["pid"])
    resident, finished, prompts = [], set[str](), {}
    for part in range(4):
        lengths = [draw.randint(1, 700) for _ in range(wanted.requests // 4)]
        batch = _prompts(draw, f"loss{part}", lengths)
        prompts |= batch
        finished |= asyncio.run(_send(url, batch, keyed=True, aborted=wanted.aborted, draw=draw))
        resident.append(scheduler.memory_info().rss / (1 << 20))
    time.sleep(3)
    lines = [json.loads(line) for f in folder.glob("acks-*.jsonl") for line in f.read_text().splitlines()]
    counts = Counter(line["sample_key"] for line in lines if line["sample_key"] in prompts)
    acks, worst, mixed = read_acks(folder), 0.0, 0
    compared = set(draw.sample(sorted(counts), min(wanted.compared, len(counts))))
    for key in counts:
        sample = read_sample(folder, acks[key]["shard"], acks[key]["row_group"])
        if sample.token_ids != prompts[key]:
            mixed += 1
        if key not in compared or sample.token_ids != prompts[key]:
            continue
        reference = layer_states(wanted.model, [prompts[key]], sample.points)[0]
        error = float((sample.states - reference).norm() / reference.norm())
        worst, mixed = max(worst, error), mixed + (error > 1e-5)
    figures = (
        ("requests", wanted.requests, "count"), ("requests_aborted", wanted.requests - len(finished), "count"),
        ("samples_missing", len(finished - set(counts)), "count"),
        ("samples_doubled", sum(n > 1 for n in counts.values()), "count"), ("samples_mixed_up", mixed, "count"),
        ("samples_compared", len(compared), "count"), ("worst_rel_error", worst, "ratio"),
        ("scheduler_rss_growth_last_half", round(resident[3] - resident[1], 1), "MiB"),
    )
    return [{"metric": metric, "value": value, "unit": unit, "spread": None} for metric, value, unit in figures]


def _prompts(draw: random.Random, name: str, lengths: list[int]) -> Prompts:
    return {f"{name}-{i}": [draw.randrange(5, 2000) for _ in range(length)] for i, length in enumerate(lengths)}


async def _send(url: str, prompts: Prompts, *, keyed: bool, aborted: float, draw: random.Random) -> set[str]:
    """Keys of the requests that were answered."""
    finished, waiting = set[str](), iter(prompts.items())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def slot() -> None:
            for key, ids in waiting:
                body = ENGINE.completion_body("m", ids, 1, stream=False, sample_key=key if keyed else None)
                patience = draw.uniform(0.001, 0.05) if draw.random() < aborted else 300
                try:
                    async with asyncio.timeout(patience), session.post(url + ENGINE.endpoint, json=body) as response:
                        ENGINE.parse_completion(await response.json())
                        finished.add(key)
                except TimeoutError:
                    continue

        await asyncio.gather(*(slot() for _ in range(CONCURRENCY)))
    return finished


def _wait_for(folder: Path, key: str) -> None:
    deadline = time.monotonic() + 60
    while key not in read_acks(folder) and time.monotonic() < deadline:
        time.sleep(0.1)


def _facts() -> dict[str, Any]:
    environment = EngineEnvironment(name="sglang-cpu", python=str(ROOT / ".venvs" / "sglang-cpu" / "bin" / "python"))
    return {
        "command": "python " + " ".join(sys.argv), "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": ENGINE.versions(environment),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


if __name__ == "__main__":
    main()
