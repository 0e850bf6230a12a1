"""Pools of captured hidden states, as the orchestrator sees them.

    <pool>/<environment>/shard-*.parquet, acks-*.jsonl   written inside the engine's process (states.py)
    <pool>/<environment>/checked.jsonl                   samples that were read back and are right
    <pool>/<environment>/probe.json                      fingerprint of that environment's states

An acknowledged sample is on disk, a checked one is also what was asked for; only checked ones are used.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from tasks.errors import ArtifactDamaged
from tasks.store.refs import StatesRef
from tasks.store.states import NAMES, Sample, read_sample
from tasks.store.tables import Store, safe_name

log = logging.getLogger(__name__)
Row = dict[str, Any]


def states_index(store: Store, states: StatesRef) -> tuple[Path, list[Row]]:
    """Pool folder, and index rows in prompt order: sample_key, state_key, shard (below the pool), row_group, ..."""
    manifest = store.require(states.kind, states.key)
    rows: list[Row] = pq.read_table(store.artifact(states.kind, states.key) / "index.parquet").to_pylist()
    return store.pool("states", manifest["pool"]), rows


def read_states(pool: Path, row: Row) -> Sample:
    """Token ids and states [tokens, points, width] of one index row, under the response's sample key.

    `points` are sorted; the last is N, before the final norm. Raises ArtifactDamaged if the shard is gone,
    broken or not the one that the index means.
    """
    try:
        sample = read_sample(pool, row["shard"], row["row_group"])
    except Exception as error:  # arrow raises a dozen kinds for a broken file
        with suppress(OSError):
            os.utime(pool / row["shard"])  # no longer the file that was checked: the next extraction reads it again
        raise ArtifactDamaged(f"{pool / row['shard']}: {error}; rerun to extract these states again") from error
    if len(sample.token_ids) != row["tokens"] or sample.points != list(row["points"]):
        raise ArtifactDamaged(f"{pool / row['shard']} row group {row['row_group']}: not what the index says")
    return Sample(row["sample_key"], sample.token_ids, sample.states, sample.points)


def captured(store: Store, states: StatesRef) -> Iterator[Sample]:
    """All samples in prompt order, one in memory at a time."""
    pool, rows = states_index(store, states)
    for row in rows:
        yield read_states(pool, row)


def why_wrong(folder: Path, ack: Row, token_ids: Sequence[int], points: Sequence[int], dtype: str) -> str:
    """Why an acknowledged sample is not what was asked for; empty if it is. Nothing is ever padded or cut."""
    try:
        sample = read_sample(folder, safe_name(ack["shard"]), ack["row_group"])
    except Exception as error:  # arrow raises a dozen kinds for a broken file
        return f"cannot be read back: {error}"
    states = sample.states
    if states.shape[0] != len(token_ids) or len(sample.token_ids) != len(token_ids):
        return f"{states.shape[0]} rows for {len(token_ids)} tokens (prefix cache, or only the last chunk?)"
    if sample.token_ids != list(token_ids):
        return "token ids are not those that were sent"
    if sample.points != list(points):
        return f"points {sample.points}, asked for {list(points)}"
    if NAMES[states.dtype] != dtype:
        return f"dtype {NAMES[states.dtype]}, asked for {dtype}"
    with _one_thread():
        finite, empty = bool(torch.isfinite(states).all()), int((states == 0).all(dim=-1).any(dim=-1).sum())
    if not finite:
        return "states that are not finite"
    if empty > 0:
        return f"{empty} of {len(token_ids)} tokens have all-zero states"
    return ""


@contextmanager
def _one_thread() -> Iterator[None]:
    """For a sample's megabyte: all 32 threads of a GPU host took 100 ms, most of it waiting for each other; one, 8."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def record_checked(folder: Path, acks: Iterable[Row], made_by: str) -> None:
    """Append samples that were found right; on disk when this returns."""
    checked = [{**ack, "made_by": made_by, "file": _seen(folder / ack["shard"])} for ack in acks]
    lines = "".join(json.dumps(entry) + "\n" for entry in checked)
    if lines:
        with (folder / "checked.jsonl").open("a") as stream:
            stream.write(lines)
            stream.flush()
            os.fsync(stream.fileno())


def find_checked(pool: Path, state_keys: set[str]) -> dict[str, Row]:
    """State key -> its checked sample, of whichever environment, as it is on disk now.

    A shard that was written to since it was checked, or came with a copied store, is read again.
    """
    found: dict[str, Row] = {}
    seen: dict[str, list[int] | None] = {}
    for file in sorted(pool.glob("*/checked.jsonl")):
        for line in file.read_text().splitlines():
            try:
                entry = json.loads(line)
                shard = f"{file.parent.name}/{safe_name(entry['shard'])}"
            except ValueError:
                continue  # the torn last line of a killed run: checked again
            if entry["sample_key"] not in state_keys:
                continue
            if shard not in seen:
                seen[shard] = _seen(pool / shard)
            if seen[shard] is not None and (seen[shard] == entry.get("file") or _reads_back(pool, shard, entry)):
                found[entry["sample_key"]] = {**entry, "shard": shard}
    return found


def _seen(shard: Path) -> list[int] | None:
    """Size and time of the last change in ns; None for a file that is gone."""
    try:
        info = shard.stat()
    except OSError:
        log.warning("%s: gone, its states are extracted again", shard)
        return None
    return [info.st_size, info.st_mtime_ns]


def _reads_back(pool: Path, shard: str, entry: Row) -> bool:
    try:
        return bool(read_sample(pool, shard, entry["row_group"]).sample_key == entry["sample_key"])
    except Exception as error:  # arrow raises a dozen kinds for a broken file
        log.warning("%s: damaged, sample %s is extracted again (%s)", pool / shard, entry["sample_key"], error)
        return False
