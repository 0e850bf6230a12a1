"""Hidden states on disk. Imported inside the engines' own processes: torch, pyarrow, nothing else.

A shard is one Parquet file with one row, in its own row group, per sample:

    sample_key   string
    token_ids    list<int32>      [tokens]
    states       large_binary     [tokens, points, width] in `dtype`, little endian, C order
    dtype        string           "float32" | "bfloat16" | "float16"
    points       list<int32>      Hugging Face hidden_states indices; the last is N, before the final norm
    width        int32
    checksum     string           SHA-256 of the bytes of `states`

Beside the shards lies `acks-<writer>.jsonl`: one line per sample after its shard was closed, fsynced
and renamed. Only an acknowledged sample counts; a healthy server that stores nothing acknowledges
nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import torch

SCHEMA: Final = pa.schema(
    [
        ("sample_key", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("states", pa.large_binary()),
        ("dtype", pa.string()),
        ("points", pa.list_(pa.int32())),
        ("width", pa.int32()),
        ("checksum", pa.string()),
    ]
)
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Sample:
    """States of one token sequence; `states` is [tokens, points, width] on the CPU."""

    sample_key: str
    token_ids: list[int]
    states: torch.Tensor
    points: list[int]


class ShardWriter:
    """Writes samples to shards from a thread of its own, so the scheduler never waits for a disk.

    `put` blocks only when `max_pending` samples wait, and raises the writer's error (a full disk,
    say) so that the request fails and the server lives. A shard closes at `shard_bytes` or when no
    sample came for `idle_s`, since nothing is acknowledged before its shard is closed.
    """

    def __init__(
        self, folder: Path, *, shard_bytes: int = 128 << 20, idle_s: float = 0.25, max_pending: int = 64
    ) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shard_bytes, self.idle_s = shard_bytes, idle_s
        self.name = uuid.uuid4().hex[:12]
        self.error: BaseException | None = None
        self._queue: queue.Queue[Sample | None] = queue.Queue(max_pending)
        self._writer: pq.ParquetWriter | None = None
        self._temporary = self._final = folder
        self._acks: list[dict[str, Any]] = []
        self._bytes = self._shards = 0
        self._thread = threading.Thread(target=self._run, name="drafthouse-states", daemon=True)
        self._thread.start()

    def put(self, sample: Sample, timeout_s: float = 60.0) -> None:
        """Queue a sample; raises OSError if the writer died or cannot keep up."""
        if self.error is not None:
            raise OSError(f"states writer stopped: {self.error}") from self.error
        try:
            self._queue.put(sample, timeout=timeout_s)
        except queue.Full:
            raise OSError(f"states writer is {timeout_s} s behind; is the disk stuck?") from None

    def close(self) -> None:
        """Write what is queued, close the shard and acknowledge it."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if self.error is not None:
            raise OSError(f"states writer stopped: {self.error}") from self.error

    def _run(self) -> None:
        try:
            while True:
                try:
                    sample = self._queue.get(timeout=self.idle_s)
                except queue.Empty:
                    self._finish_shard()
                    continue
                if sample is None:
                    break
                self._write(sample)
            self._finish_shard()
        except BaseException as error:  # kept and raised by the next put: a thread has no caller
            self.error = error
            self._temporary.unlink(missing_ok=True) if self._writer is not None else None

    def _write(self, sample: Sample) -> None:
        states = sample.states.contiguous()
        payload = states.view(torch.uint8).numpy().tobytes()
        checksum = hashlib.sha256(payload).hexdigest()
        if self._writer is None:
            stem = f"shard-{time.time_ns():020d}-{self.name}"
            self._temporary, self._final = self.folder / f".{stem}.tmp", self.folder / f"{stem}.parquet"
            # Dictionaries and statistics of megabytes of floats cost eight times the writing itself.
            self._writer = pq.ParquetWriter(
                self._temporary, SCHEMA, compression="none", use_dictionary=False, write_statistics=False
            )
        row = {
            "sample_key": sample.sample_key, "token_ids": sample.token_ids, "states": payload,
            "dtype": NAMES[states.dtype], "points": sample.points, "width": states.shape[-1], "checksum": checksum,
        }
        columns = [pa.array([row[field.name]], type=field.type) for field in SCHEMA]
        self._writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA))
        self._acks.append(
            {"sample_key": sample.sample_key, "shard": self._final.name, "row_group": len(self._acks),
             "tokens": len(sample.token_ids), "bytes": len(payload), "checksum": checksum}
        )
        self._bytes += len(payload)
        if self._bytes >= self.shard_bytes:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        with self._temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        self._temporary.replace(self._final)
        with (self.folder / f"acks-{self.name}.jsonl").open("a") as acks:
            acks.write("".join(json.dumps(ack) + "\n" for ack in self._acks))
            acks.flush()
            os.fsync(acks.fileno())
        self._acks, self._bytes, self._shards = [], 0, self._shards + 1


def read_acks(folder: Path) -> dict[str, dict[str, Any]]:
    """Acknowledged samples by sample key, the newest of each; a torn last line was never acknowledged."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("acks-*.jsonl")):
        for line in file.read_text().splitlines():
            try:
                ack = json.loads(line)
            except ValueError:
                continue
            known = found.get(ack["sample_key"])
            if known is None or (known["shard"], known["row_group"]) < (ack["shard"], ack["row_group"]):
                found[ack["sample_key"]] = ack  # shard names begin with their time: a repeated request wins
    return found


def read_sample(folder: Path, shard: str, row_group: int) -> Sample:
    """One sample; raises ValueError when its bytes do not match their checksum."""
    row = pq.ParquetFile(folder / shard).read_row_group(row_group).to_pylist()[0]
    return _sample(row, f"{folder / shard} row group {row_group}")


def read_shard(path: Path) -> Iterator[Sample]:
    """All samples of a shard, one in memory at a time."""
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        yield _sample(file.read_row_group(group).to_pylist()[0], f"{path} row group {group}")


def _sample(row: dict[str, Any], where: str) -> Sample:
    payload: bytes = row["states"]
    if hashlib.sha256(payload).hexdigest() != row["checksum"]:
        raise ValueError(f"{where}: states do not match their checksum")
    points: Sequence[int] = row["points"]
    expected = len(row["token_ids"]) * len(points) * row["width"] * DTYPES[row["dtype"]].itemsize
    if len(payload) != expected:
        raise ValueError(f"{where}: {len(payload)} bytes of states, its {len(row['token_ids'])} tokens need {expected}")
    flat = torch.frombuffer(bytearray(payload), dtype=DTYPES[row["dtype"]])
    states = flat.view(len(row["token_ids"]), len(points), row["width"])
    return Sample(row["sample_key"], list(row["token_ids"]), states, list(points))
