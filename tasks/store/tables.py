"""The store on disk: tables of Parquet files and immutable artifacts.

    <root>/tables/<table>/run=<run_id>/<part>.parquet     rows, one declared schema per table
    <root>/objects/<kind>/<key>/manifest.json + files      immutable, content-keyed artifacts
    <root>/pools/<kind>/<key>/*.parquet                    growing sets of immutable shards
    <root>/runs/<run_id>/                                  logs, reports and scratch files of one run

Everything is written beside its final name, re-opened and counted, and only then renamed, so a
killed or disk-full writer leaves no half file under a name that a reader looks at.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from tasks.errors import ArtifactDamaged, InputError, SchemaMismatch, StoreError
from tasks.store.files import cannot_write, made_folder, require_folder
from tasks.store.inventory import recount
from tasks.store.keys import file_checksum
from tasks.store.schemas import SCHEMA_VERSION, TABLES

log = logging.getLogger(__name__)
ROW_GROUP_BYTES = 64 << 20  # arrow cannot read back nested columns over 2 GiB in one row group
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,180}\Z")


def safe_name(name: str) -> str:
    """`name` if it can be a file name that stays in its folder; raises StoreError otherwise."""
    if not _SAFE_NAME.match(name):
        raise StoreError(f"{name!r} cannot be a file name: letters, digits and . _ = - only")
    return name


def write_parquet(table: pa.Table, path: Path) -> None:
    """Write `table` atomically with bounded row groups, re-open it and count its rows.

    Raises StoreError if the disk is full or the file does not read back.
    """
    made_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    rows_per_group = max(1, table.num_rows * ROW_GROUP_BYTES // max(table.nbytes, 1))
    try:
        pq.write_table(table, temporary, compression="zstd", row_group_size=min(rows_per_group, 1 << 20))
        written = pq.ParquetFile(temporary).metadata.num_rows
        if written != table.num_rows:
            raise StoreError(f"{path}: wrote {table.num_rows} rows, found {written} on re-opening")
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def rows_to_table(name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table of the declared schema; a key that the schema lacks is an error, never dropped."""
    schema = TABLES[name]
    unknown = {key for row in rows for key in row} - set(schema.names)
    if unknown:
        raise StoreError(f"table {name}: no column {', '.join(sorted(unknown))} in its schema")
    columns = {field.name: [row.get(field.name) for row in rows] for field in schema}
    return pa.table({n: pa.array(v, type=schema.field(n).type) for n, v in columns.items()}, schema=schema)


class Store:
    """The store as one run sees it: writes go to its own partition, reads see every run."""

    def __init__(self, root: Path | str, run_id: str) -> None:
        self.root = Path(root)
        self.run_id = safe_name(run_id)
        self.counts: dict[str, Counter[str]] = {}  # per stage: requests, executed, reused; for the table `stages`

    @property
    def run_dir(self) -> Path:
        """Folder of logs, reports and scratch files of this run."""
        return made_folder(self.root / "runs" / self.run_id)

    def count(self, stage: str, *, requests: int = 0, executed: int = 0, reused: int = 0) -> None:
        """Add to what a stage did in this process: HTTP requests sent, samples or steps made and found."""
        self.counts.setdefault(stage, Counter()).update(requests=requests, executed=executed, reused=reused)

    def count_load(self) -> None:
        """A server was started: loading is the dearest step, so it is counted apart from a stage's work."""
        self.counts.setdefault("serve", Counter()).update(loads=1)

    # tables ---------------------------------------------------------------------------------

    def write(self, table: str, rows: Sequence[Mapping[str, Any]], part: str) -> None:
        """Replace this run's `part` of `table`; writing a part twice is harmless, so retries are."""
        path = self.root / "tables" / table / f"run={self.run_id}" / f"{safe_name(part)}.parquet"
        write_parquet(rows_to_table(table, rows), path)
        recount(self.root, self.run_id, f"{table}/{part}", len(rows))

    def read(self, table: str, run: str | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows of `table`, of one run or of all, with `run` as the last column.

        Files of an older schema get nulls for the columns that they lack. Raises SchemaMismatch for
        files of a newer schema.
        """
        schema = TABLES[table].append(pa.field("run", pa.string())).remove_metadata()
        require_folder(self.root)
        folder = self.root / "tables" / table
        files = sorted(folder.glob(f"run={run or '*'}/*.parquet"))
        if not files:
            return schema.empty_table().select(list(columns) if columns else schema.names)
        for file in files:
            _check_version(file)
        partitioning = ds.partitioning(pa.schema([pa.field("run", pa.string())]), flavor="hive")
        dataset = ds.dataset(
            [str(f) for f in files], schema=schema, format="parquet", partitioning=partitioning,
            partition_base_dir=str(folder),
        )
        return dataset.to_table(columns=list(columns) if columns else None)

    # artifacts ------------------------------------------------------------------------------

    def artifact(self, kind: str, key: str) -> Path:
        """Folder of an artifact, whether or not it exists."""
        return self.root / "objects" / safe_name(kind) / safe_name(key)

    def pool(self, kind: str, key: str) -> Path:
        """Folder of a growing set of shards."""
        return made_folder(self.root / "pools" / safe_name(kind) / safe_name(key))

    @contextmanager
    def new_artifact(self, kind: str, key: str, manifest: Mapping[str, Any]) -> Iterator[Path]:
        """A scratch folder that becomes the artifact, with its manifest, when the block succeeds."""
        final = self.artifact(kind, key)
        scratch = final.with_name(f".{key}.{uuid.uuid4().hex[:8]}.tmp")
        try:
            scratch.mkdir(parents=True)
            yield scratch
            files = {str(f.relative_to(scratch)): file_checksum(f) for f in sorted(scratch.rglob("*")) if f.is_file()}
            body = {"schema": SCHEMA_VERSION, "made_by": self.run_id, **manifest, "files": files}
            (scratch / "manifest.json").write_text(json.dumps(body, indent=1, sort_keys=True))
            if final.exists():  # made meanwhile, or damaged: the new one is whole
                shutil.rmtree(final)
            scratch.rename(final)
        except OSError as error:
            raise cannot_write(final, error) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def manifest(self, kind: str, key: str) -> dict[str, Any] | None:
        """Manifest of a whole artifact, or None if it is absent or its files do not match."""
        try:
            return self.require(kind, key)
        except StoreError:
            return None

    def require(self, kind: str, key: str) -> dict[str, Any]:
        """Manifest of a whole artifact; raises ArtifactDamaged that says what is wrong with it."""
        folder = self.artifact(kind, key)
        try:
            manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
            files: dict[str, str] = manifest["files"]
            version = int(manifest["schema"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactDamaged(f"{folder}: absent or without a readable manifest; rerun the stage") from error
        if version > SCHEMA_VERSION:
            raise SchemaMismatch(f"{folder}: schema {version} is newer than this drafthouse ({SCHEMA_VERSION})")
        for name, checksum in files.items():
            path = folder / name
            if not path.is_file() or file_checksum(path) != checksum:
                raise ArtifactDamaged(f"{path}: missing or changed since it was written; rerun the stage")
        return manifest


def find_run(root: Path, run_id: str) -> str:
    """A run id of the store, also by a unique beginning, or the newest for `last`."""
    rows = Store(root, "reader").read("runs", columns=["run_id", "started_at"]).to_pylist()
    known = [row["run_id"] for row in sorted(rows, key=lambda row: row["started_at"])]
    matches = known[-1:] if run_id == "last" else [k for k in known if k == run_id] or [
        k for k in known if k.startswith(run_id)
    ]
    if len(matches) == 1:
        return str(matches[0])
    asked = f"run {run_id or repr(run_id)}"
    if matches:
        raise InputError(f"{asked}: several match; write more of one of {_newest(matches)}")
    raise InputError(f"{asked}: not found; {root} has {_newest(known) or 'no runs'}")


def _newest(run_ids: Sequence[str]) -> str:
    more = f" and {len(run_ids) - 5} earlier ones" if len(run_ids) > 5 else ""
    return ", ".join(run_ids[-5:]) + more


def _check_version(file: Path) -> None:
    try:
        metadata = pq.read_schema(file).metadata or {}
    except (OSError, pa.ArrowInvalid) as error:
        raise StoreError(f"{file}: not a readable Parquet file ({error}); remove it") from error
    version = int(metadata.get(b"drafthouse_schema", b"0"))
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{file}: written by schema {version}, this drafthouse knows {SCHEMA_VERSION}; upgrade drafthouse"
        )


def pool_rows(folder: Path, columns: Sequence[str] | None = None) -> Iterable[dict[str, Any]]:
    """Rows of all whole shards of a pool; a shard without a footer was never finished and is skipped."""
    for file in sorted(folder.glob("*.parquet")):
        try:
            table = pq.read_table(file, columns=list(columns) if columns else None)
        except (pa.ArrowInvalid, OSError) as error:
            log.warning("%s: not a whole shard, its rows are made again (%s)", file, error)
            continue
        yield from table.to_pylist()
