"""Commands around a campaign: doctor, clean, serve, bench, align."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.shell import (
    AsJson,
    ConfigFile,
    Overrides,
    RunId,
    StoreDir,
    at_least,
    err,
    one_line_errors,
    out,
    print_json,
)
from tasks.config import EngineName, Workload, WorkloadKind
from tasks.errors import DrafthouseError, InputError, MachineError
from tasks.store.files import require_writable
from tasks.store.tables import Store, find_run

app = typer.Typer()


@app.command()
@one_line_errors
def doctor(
    config: Annotated[Path | None, typer.Argument(help="Campaign file (YAML); without it the host alone.")] = None,
    overrides: Overrides = None, store: StoreDir = Path("store"), as_json: AsJson = False,
) -> None:
    """What a campaign would meet on this host. Looks only; exits 1 if something is known to fail."""
    from tasks.campaign_file import load_campaign
    from tasks.doctor import doctor as examine
    from tasks.machine.doctor import lines

    require_writable(store)
    report = examine(load_campaign(config, overrides) if config else None, store)
    if as_json:
        print_json(report.to_json())
    else:
        for line in lines(report):
            out.print(line, highlight=False, soft_wrap=True, markup=False)
    if not report.healthy:
        raise typer.Exit(1)


@app.command()
@one_line_errors
def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List exactly what a run would do.")] = False,
    take_over: Annotated[bool, typer.Option("--take-over", help="Dedicated hosts: also what --uid left here.")] = False,
    uid: Annotated[list[int] | None, typer.Option("--uid", help="User id for --take-over (repeatable).")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show what belongs to others, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Stop and remove what earlier runs provably left on this host; exits 1 where somebody has to look."""
    from tasks.clean import clean_host

    if take_over != bool(uid):
        raise InputError("--take-over needs --uid U (and --uid needs --take-over): name whose leftovers may go")
    swept = clean_host(dry_run=dry_run, take_over_uids=uid or ())
    if as_json:
        problem = str(swept.problem) if swept.problem else None
        print_json({"dry_run": dry_run, "rows": [vars(row) for row in swept.rows], "problem": problem})
    else:
        from flows.terminal import print_clean

        print_clean(out, [vars(row) for row in swept.rows], dry_run=dry_run, everything=everything)
    if swept.problem:
        raise swept.problem


@app.command()
@one_line_errors
def serve(
    config: ConfigFile, arm: Annotated[str, typer.Option("--arm", help="Name of the arm to serve.")],
    overrides: Overrides = None, store: StoreDir = Path("store"), as_json: AsJson = False,
) -> None:
    """Start one arm's server, verified like in a campaign, and keep it up until Ctrl-C."""
    from tasks.campaign_file import load_campaign
    from tasks.clean import clean as sweep
    from tasks.config import Role
    from tasks.serve import serving

    campaign = load_campaign(config, overrides)
    chosen = next((a for a in campaign.arms if a.name == arm), None)
    if chosen is None:
        raise InputError(f"--arm {arm}: no such arm; there are {', '.join(a.name for a in campaign.arms)}")
    if chosen.role is Role.extraction:
        raise InputError(f"--arm {arm}: an extraction arm serves nothing but a campaign's extract stage")
    if chosen.speculative and chosen.speculative.drafter == "own":
        raise InputError(f"--arm {arm}: name its drafter: --set arms.{arm}.speculative.drafter=FOLDER")

    def tidy() -> None:
        sweep(campaign, chosen.name, held)

    require_writable(store)
    held = Store(store, f"serve-{campaign.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    with serving(campaign, chosen, held, before_start=tidy) as server:
        url = server.url()
        if as_json:
            print_json({"url": url, "model": campaign.target.name, "log": str(server.log)})
        else:
            out.print(f"{arm} is ready at {url} (model {campaign.target.name}); Ctrl-C stops it", highlight=False)
        while True:
            time.sleep(1)
            server.url()  # raises ServerLost with the end of its log


@app.command()
@one_line_errors
def bench(
    url: Annotated[str, typer.Option("--url", help="Server, for example http://127.0.0.1:8000")],
    model: Annotated[str, typer.Option("--model", help="Name under which the server serves its model.")],
    engine: Annotated[str, typer.Option("--engine", help="vllm or sglang: whose dialect to speak.")] = "vllm",
    concurrency: Annotated[list[int] | None, typer.Option("--concurrency", "-c", help="Requests in flight.")] = None,
    requests: Annotated[int, typer.Option(help="Requests per measurement.")] = 32,
    input_tokens: Annotated[int, typer.Option(help="Random prompt length, in tokens.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Answer length, in tokens.")] = 128,
    vocab_size: Annotated[int, typer.Option(help="Random token ids are below this.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """Measure a server that is already running, with random token ids; nothing is stored."""
    from tasks.engines.reach import require_server

    at_least(1, concurrency=concurrency or (), requests=requests, input_tokens=input_tokens, vocab_size=vocab_size)
    at_least(2, output_tokens=output_tokens)
    if engine not in list(EngineName):
        raise InputError(f"--engine {engine}: one of {', '.join(EngineName)}")
    load = Workload(
        name="bench", kind=WorkloadKind.random, input_tokens=input_tokens, output_tokens=output_tokens, ignore_eos=True,
        concurrencies=tuple(concurrency or (1, 8)), requests=requests,
    )
    rows = _measured(require_server(url, engine), model, EngineName(engine), load, vocab_size)
    if as_json:
        print_json(rows)
    else:
        from flows.terminal import print_benchmarks

        print_benchmarks(out, rows, title=f"{model} at {url}")
    failed = [row for row in rows if not row["valid"]]
    if failed:
        raise MachineError(f"{len(failed)} of {len(rows)} measurements are void: {failed[0]['note']}")


def _measured(url: str, model: str, engine: EngineName, load: Workload, vocab_size: int) -> list[dict[str, Any]]:
    from tasks.config import Thresholds
    from tasks.engines.registry import engine as adapter_of
    from tasks.load.measure import measure
    from tasks.load.rows import benchmark_row
    from tasks.load.workloads import blocks, points, warmup

    rows, seed = [], str(time.time_ns())  # other ids at every call: a prefix cache may remember the last ones
    for point in points(load):
        measured = measure(
            adapter_of(engine), url, model, load, point, blocks(load, point, [], vocab_size, seed),
            warmup(load, point, [], vocab_size, seed), running_cap=point.concurrency, baseline_cap=None,
            speculative=False,
        )
        facts = {"arm": url, "workload": load.name, "concurrency": point.concurrency, "repeat": point.repeat}
        rows.append(benchmark_row(measured, {**facts, "engine": engine}, Thresholds()))
    return rows


@app.command()
@one_line_errors
def align(run_id: RunId = "last", store: StoreDir = Path("store"), as_json: AsJson = False) -> None:
    """Compare a run's captured states with the target's forward once more; exits 1 at a miss."""
    from flows.runs import references_of
    from tasks.align import align as compare
    from tasks.campaign_file import parse_campaign
    from tasks.store.refs import StatesRef

    found = Store(store, find_run(store, run_id))
    require_writable(store)
    config = parse_campaign(json.loads(found.read("runs", found.run_id).to_pylist()[0]["config_json"]))
    references = [r for r in references_of(found) if isinstance(r, StatesRef)]
    if not references:
        raise InputError(f"run {found.run_id} extracted no states")
    problem: DrafthouseError | None = None
    for states in references:
        try:
            compare(states, config, found, fresh=True)
        except DrafthouseError as error:
            problem = error
    rows = found.read("alignment", found.run_id).to_pylist()
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            verdict = "ok" if row["passed"] else "MISS"
            out.print(f"{verdict:5}{row['check']:22}{row['subject']:18}{row['value']:.3g} (limit {row['threshold']:g})",
                      highlight=False)
    if problem:
        err.print(f"{type(problem).__name__}: {problem}", highlight=False, soft_wrap=True)
        raise typer.Exit(1)
