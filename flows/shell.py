"""What all commands share: option types, consoles, and errors as one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from tasks.errors import DrafthouseError

out = Console(width=None if sys.stdout.isatty() else 160)  # a pipe has no width, and a cut table no use
err = Console(stderr=True)
F = TypeVar("F", bound=Callable[..., Any])

ConfigFile = Annotated[Path, typer.Argument(help="Campaign file (YAML).")]
RunId = Annotated[str, typer.Argument(help="Run id, its unique beginning, or `last`.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a field: a.b=c (repeatable).")]
StoreDir = Annotated[Path, typer.Option("--store", envvar="DRAFTHOUSE_STORE", help="Folder of tables and artifacts.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")]


def one_line_errors(command: F) -> F:
    """Errors that we raise on purpose become one line and exit code 1; others keep their traceback."""

    @wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except DrafthouseError as error:
            err.print(f"{type(error).__name__}: {error}", highlight=False, soft_wrap=True, markup=False)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            err.print("stopped; run the same command again to continue where it stopped")
            raise typer.Exit(130) from None

    return guarded  # type: ignore[return-value]
