"""What a finished run wrote, so that a part of a table that is lost later does not go unnoticed.

    <root>/runs/<run_id>/tables.json     {"benchmarks/base-chat-c1-r0": 1, ...}: rows of each part

Parts that later commands add are not listed. A run of an older version has no such file and is read as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.errors import StoreError
from tasks.store.files import cannot_write, write_whole

_BEFORE: Final = "tables.before.json"  # the list of an earlier attempt, while a retry is at work
_NAMED: Final = 3  # lost parts that an error names


def remember_parts(root: Path, run_id: str) -> None:
    """Write down every part that this run has in the tables, and its rows; also what it had before a retry and lost."""
    files = sorted((root / "tables").glob(f"*/run={run_id}/*.parquet"))
    rows = {f"{file.parent.parent.name}/{file.stem}": _rows(file) for file in files}
    before = _list_of(root, run_id).with_name(_BEFORE)
    write_whole(_list_of(root, run_id), json.dumps(_read(before) | rows, indent=1))
    before.unlink(missing_ok=True)


def reopen_parts(root: Path, run_id: str) -> None:
    """The run is at work again: until it ends its parts may become others, but none may go."""
    path = _list_of(root, run_id)
    try:
        if path.exists():
            path.replace(path.with_name(_BEFORE))
    except OSError as error:
        raise cannot_write(path, error) from error


def recount(root: Path, run_id: str, part: str, rows: int) -> None:
    """A command wrote `part` of a finished run again (align does): that is no loss."""
    known = _known(root, run_id)
    if known.get(part, rows) != rows:
        write_whole(_list_of(root, run_id), json.dumps(known | {part: rows}, indent=1))


def require_parts(root: Path, run_id: str) -> None:
    """Raises StoreError that names the parts that a finished run wrote and that are gone or changed."""
    lost = [found for part, rows in _known(root, run_id).items() if (found := _loss(root, run_id, part, rows))]
    if lost:
        more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        raise StoreError(
            f"{'; '.join(lost[:_NAMED])}{more}; a new run of the same campaign measures it again "
            f"(to do without run {run_id}, remove {root / 'tables' / 'runs' / f'run={run_id}'})"
        )


def _loss(root: Path, run_id: str, part: str, rows: int) -> str:
    table, _, name = part.partition("/")
    path = root / "tables" / table / f"run={run_id}" / f"{name}.parquet"
    if not path.is_file():
        return f"{path}: missing, the run ended with {_count(rows)} in it"
    found = _rows(path)
    return "" if found == rows else f"{path}: changed, the run ended with {_count(rows)} in it and now has {found}"


def _count(rows: int) -> str:
    return f"{rows} row" if rows == 1 else f"{rows} rows"


def _rows(file: Path) -> int:
    try:
        return int(pq.read_metadata(file).num_rows)
    except (OSError, pa.ArrowInvalid) as error:
        raise StoreError(f"{file}: not a readable Parquet file ({error}); remove it and run the campaign "
                         "again") from error


def _list_of(root: Path, run_id: str) -> Path:
    return root / "runs" / run_id / "tables.json"


def _known(root: Path, run_id: str) -> dict[str, int]:
    return _read(_list_of(root, run_id))


def _read(path: Path) -> dict[str, int]:
    try:
        return {str(part): int(rows) for part, rows in json.loads(path.read_text()).items()}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"{path}: not a readable list of parts ({error}); remove it to read the run "
                         "unchecked") from error
