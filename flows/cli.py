"""The `drafthouse` command. It exits 0 only when what it was asked for holds, and prints one line otherwise."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Annotated

import typer

from flows import cli_tools
from flows.local_server import prefect_server
from flows.shell import AsJson, ConfigFile, Overrides, RunId, StoreDir, at_least, one_line_errors, out, print_json
from tasks.campaign_file import load_campaign
from tasks.config import Campaign
from tasks.errors import DrafthouseError
from tasks.store.files import require_writable

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(cli_tools.app)
DEFAULT_STORE = Path("store")


@app.command()
@one_line_errors
def run(
    config: ConfigFile, overrides: Overrides = None, store: StoreDir = DEFAULT_STORE, as_json: AsJson = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be launched, and start nothing.")] = False,
) -> None:
    """Run a campaign to its report."""
    parsed = load_campaign(config, overrides)
    if dry_run:
        show_plan(parsed, store, as_json)
        return
    require_writable(store)
    begun = time.monotonic()
    with prefect_server():
        from flows.campaign import campaign  # Prefect reads its settings when it is imported

        expected_errors_in_one_line()
        run_id = campaign(parsed, str(store.resolve()))
    show_run(store, run_id, as_json, f"{time.monotonic() - begun:.0f} s")


def expected_errors_in_one_line() -> None:
    """Prefect logs a traceback for each task and flow that an error passes; ours are told once, at the end."""

    def without_traceback(record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], DrafthouseError):
            record.exc_info = None
        return True

    for name in ("prefect.task_runs", "prefect.flow_runs", "prefect.task_engine", "prefect.flow_engine"):
        logging.getLogger(name).addFilter(without_traceback)


def show_plan(config: Campaign, store: Path, as_json: bool) -> None:
    """Every command line and environment, the loads, and estimates of disk, time and memory."""
    from tasks.dry_run import lines, render

    plan = render(config, store)
    if as_json:
        print_json(plan.to_json())
    else:
        for line in lines(plan):
            out.print(line, highlight=False, soft_wrap=True, markup=False)
    if plan.refused:
        raise typer.Exit(1)


def show_run(store: Path, run_id: str, as_json: bool, took: str = "") -> None:
    """The final table of a run, on standard output."""
    from tasks.report import summary
    from tasks.store.tables import Store

    facts = summary(Store(store, run_id))
    if as_json:
        print_json(facts)
        return
    from flows.terminal import print_summary

    print_summary(out, facts)
    out.print(f"run [bold]{run_id}[/bold] {took}  report: {store / 'runs' / run_id / 'report.html'}")


@app.command()
@one_line_errors
def report(run_id: RunId = "last", store: StoreDir = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Write report.html of a run again and print its table."""
    from tasks.report import write_report
    from tasks.store.tables import Store, find_run

    found = find_run(store, run_id)
    require_writable(store)
    write_report(store=Store(store, found))
    show_run(store, found, as_json)


@app.command()
@one_line_errors
def compare(a: RunId, b: RunId, store: StoreDir = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Two runs side by side; numbers that must not be compared are not."""
    from flows.terminal import print_comparison
    from tasks.report import comparison
    from tasks.store.tables import Store, find_run

    rows = comparison(Store(store, find_run(store, a)), Store(store, find_run(store, b)))
    if as_json:
        print_json(rows)
    else:
        print_comparison(out, rows, a, b)


@app.command()
@one_line_errors
def nightly(
    config: ConfigFile, overrides: Overrides = None, store: StoreDir = DEFAULT_STORE, as_json: AsJson = False,
    window: Annotated[int, typer.Option(help="Earlier runs whose median is the expectation.")] = 7,
    tolerance_pct: Annotated[float, typer.Option(help="Worse by more than this is a regression, in percent.")] = 10.0,
) -> None:
    """Run a campaign and compare it with its last runs; exits 1 only for a regression measured twice."""
    at_least(1, window=window)
    at_least(0, tolerance_pct=tolerance_pct)
    parsed = load_campaign(config, overrides)
    require_writable(store)
    with prefect_server():
        from flows.nightly import nightly as measure_and_judge

        expected_errors_in_one_line()
        run_id = measure_and_judge(parsed, str(store.resolve()), window=window, tolerance_pct=tolerance_pct)
    show_run(store, run_id, as_json)


@app.command()
@one_line_errors
def deploy(
    store: StoreDir = DEFAULT_STORE, as_json: AsJson = False,
    webhook: Annotated[str | None, typer.Option(help="URL that gets a POST for every confirmed regression.")] = None,
    retry_crashed: Annotated[bool, typer.Option("--retry-crashed", help="Retry crashed runs by themselves.")] = False,
) -> None:
    """Create or update deployments, forms and automations on the Prefect server (PREFECT_API_URL)."""
    from flows.deploy import deploy as create

    names = create(store, webhook=webhook, retry_crashed=retry_crashed)
    if as_json:
        print_json({"deployments": names})
        return
    for name in names:
        out.print(f"deployed {name}", highlight=False)
    out.print("start a worker on every GPU host: prefect worker start --pool gpu-hosts", highlight=False)


@app.command()
@one_line_errors
def diagnose(
    run_id: RunId = "last", store: StoreDir = DEFAULT_STORE, as_json: AsJson = False,
    drafter: Annotated[Path | None, typer.Option(help="Judge this drafter folder instead of the run's own.")] = None,
) -> None:
    """Say what is wrong with a run's drafter, with the evidence; exits 0 only if nothing is."""
    from tasks.diagnose import diagnose as examine
    from tasks.store.inventory import require_parts
    from tasks.store.tables import Store, find_run

    chosen = find_run(store, run_id)
    require_parts(store, chosen)
    found = examine(Store(store, chosen), drafter)
    if as_json:
        print_json(found)
    else:
        for cause in found["causes"]:
            out.print(f"[red]{cause['id']}[/red] {cause['score']:.2f}: {cause['sentence']}", highlight=False)
            out.print(f"  evidence: {cause['evidence']}\n  remedy: {cause['remedy']}", highlight=False, markup=False)
        for note in found["notes"]:
            out.print(f"  note: {note}", highlight=False, markup=False)
        out.print("healthy" if found["healthy"] else "not healthy", highlight=False)
    if not found["healthy"]:
        raise typer.Exit(1)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
