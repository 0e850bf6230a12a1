"""What all commands share: option types, consoles, JSON, and errors as one line."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError
from rich.console import Console

from tasks.errors import DrafthouseError, InputError
from tasks.store.files import require_folder

log = logging.getLogger(__name__)
out = Console(width=None if sys.stdout.isatty() else 160)  # a pipe has no width, and a cut table no use
err = Console(stderr=True)
F = TypeVar("F", bound=Callable[..., Any])
_answered: ContextVar[bool] = ContextVar("answered", default=False)  # standard output holds one JSON value, not two

ConfigFile = Annotated[Path, typer.Argument(help="Campaign file (YAML).")]
RunId = Annotated[str, typer.Argument(help="Run id, its unique beginning, or `last`.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a field: a.b=c (repeatable).")]
StoreDir = Annotated[Path, typer.Option("--store", envvar="DRAFTHOUSE_STORE", help="Folder of tables and artifacts.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output and nothing else.")]


def print_json(value: Any) -> None:
    """The answer of a command that was asked for JSON."""
    _answered.set(True)
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")
    sys.stdout.flush()


def at_least(least: float, **options: float | Sequence[float]) -> None:
    """Raises InputError for the first option (of this name, one number or several) that is smaller."""
    for name, given in options.items():
        for value in given if isinstance(given, Sequence) else (given,):
            if not value >= least:
                raise InputError(f"--{name.replace('_', '-')} {value}: has to be {least:g} or more")


def one_line_errors(command: F) -> F:
    """Errors that we raise on purpose become one line and exit code 1; others keep their traceback.

    With --json the error is also the JSON answer, unless the command had answered already.
    """

    @wraps(command)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        as_json = bool(kwargs.get("as_json"))
        _answered.set(False)
        try:
            if isinstance(kwargs.get("store"), Path):
                require_folder(kwargs["store"])
            return command(*args, **kwargs)
        except DrafthouseError as error:
            _tell(type(error).__name__, str(error), as_json)
            raise typer.Exit(1) from None
        except ValidationError as error:
            log.debug("refused", exc_info=True)
            _tell(InputError.__name__, _in_one_line(error), as_json)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            told = "stopped; run the same command again to continue where it stopped"
            _tell("", told, as_json)
            raise typer.Exit(130) from None

    return guarded  # type: ignore[return-value]


def _tell(kind: str, message: str, as_json: bool) -> None:
    err.print(f"{kind}: {message}" if kind else message, highlight=False, soft_wrap=True, markup=False)
    if as_json and not _answered.get():
        print_json({"error": {"kind": kind or "Stopped", "message": message}})


def _in_one_line(error: ValidationError) -> str:
    """Every refused field with what it was given."""
    return "; ".join(map(_of_field, error.errors()))


def _of_field(found: Mapping[str, Any]) -> str:
    told = found["msg"].removeprefix("Value error, ")
    return f"{'.'.join(map(str, found['loc'])) or 'options'}: {told} (got {found['input']!r:.80})"
