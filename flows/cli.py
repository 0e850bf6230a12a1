"""The `drafthouse` command. It exits 0 only when what it was asked for holds, and prints one line otherwise."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from tasks.config import Campaign, load_campaign
from tasks.errors import ConfigError, DrafthouseError, InputError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
out = Console()
err = Console(stderr=True)
F = TypeVar("F", bound=Callable[..., Any])

ConfigFile = Annotated[Path, typer.Argument(help="Campaign file (YAML).")]
RunId = Annotated[str, typer.Argument(help="Run id, or `last`.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a field: a.b=c (repeatable).")]
StoreDir = Annotated[Path, typer.Option("--store", envvar="DRAFTHOUSE_STORE", help="Folder of tables and artifacts.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")]
DEFAULT_STORE = Path("store")


def one_line_errors(command: F) -> F:
    """Errors that we raise on purpose become one line and exit code 1; others keep their traceback."""

    @wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except DrafthouseError as error:
            err.print(f"[red]{type(error).__name__}[/red]: {error}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            err.print("stopped; run the same command again to continue where it stopped")
            raise typer.Exit(130) from None

    return guarded  # type: ignore[return-value]


@app.command()
@one_line_errors
def run(
    config: ConfigFile, overrides: Overrides = None, store: StoreDir = DEFAULT_STORE, as_json: AsJson = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be launched, and start nothing.")] = False,
) -> None:
    """Run a campaign to its report."""
    parsed = load_campaign(config, overrides)
    if dry_run:
        show_plan(parsed, as_json)
        return
    prepare_prefect()
    from flows.campaign import campaign  # Prefect reads its settings when it is imported

    begun = time.monotonic()
    run_id = campaign(parsed, str(store.resolve()))
    show_run(store, run_id, as_json, f"{time.monotonic() - begun:.0f} s")


def prepare_prefect() -> None:
    """Settings for a run without a Prefect server of the user's: a slow laptop needs time to start one."""
    if "PREFECT_API_URL" not in os.environ:
        os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "180")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")


def show_plan(config: Campaign, as_json: bool) -> None:
    raise ConfigError(f"{config.name}: --dry-run is not there yet")


def show_run(store: Path, run_id: str, as_json: bool, took: str = "") -> None:
    """The final table of a run, on standard output."""
    from tasks.report import summary
    from tasks.store.tables import Store

    facts = summary(Store(store, run_id))
    if as_json:
        sys.stdout.write(json.dumps(facts, default=str, indent=1) + "\n")
        return
    from flows.terminal import print_summary

    print_summary(out, facts)
    out.print(f"run [bold]{run_id}[/bold] {took}  report: {store / 'runs' / run_id / 'report.html'}")


@app.command()
@one_line_errors
def report(run_id: RunId = "last", store: StoreDir = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Write report.html of a run again and print its table."""
    from tasks.report import write_report
    from tasks.store.tables import Store

    found = find_run(store, run_id)
    write_report(store=Store(store, found))
    show_run(store, found, as_json)


@app.command()
@one_line_errors
def compare(a: RunId, b: RunId, store: StoreDir = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Two runs side by side; numbers that must not be compared are not."""
    from flows.terminal import print_comparison
    from tasks.report import comparison
    from tasks.store.tables import Store

    rows = comparison(Store(store, find_run(store, a)), Store(store, find_run(store, b)))
    if as_json:
        sys.stdout.write(json.dumps(rows, default=str, indent=1) + "\n")
    else:
        print_comparison(out, rows, a, b)


def find_run(store: Path, run_id: str) -> str:
    """A run id of the store, also by a unique beginning, or the newest for `last`."""
    from tasks.store.tables import Store

    rows = Store(store, "reader").read("runs", columns=["run_id", "started_at"]).to_pylist()
    known = [row["run_id"] for row in sorted(rows, key=lambda row: row["started_at"])]
    matches = known[-1:] if run_id == "last" else [k for k in known if k == run_id] or [
        k for k in known if k.startswith(run_id)
    ]
    if len(matches) == 1:
        return str(matches[0])
    where = f"{store} has {', '.join(known[-5:]) or 'no runs'}"
    raise InputError(f"run {run_id}: {'several match' if matches else 'not found'}; {where}")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
