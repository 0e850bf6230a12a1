"""Calls of a served drafter on disk: one Parquet file of one row each. Imported inside the engines' own processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

_SCHEMA = pa.schema([
    ("token_ids", pa.list_(pa.int32())), ("positions", pa.list_(pa.int64())), ("next_token_id", pa.int64()),
    ("drafts", pa.list_(pa.int64())), ("states", pa.large_binary()), ("width", pa.int32()),
    ("logits", pa.large_binary()),
])


@dataclass(frozen=True)
class Call:
    """One call of the drafter for one request; states [tokens, fused width] and logits [vocabulary] in float32."""

    token_ids: list[int]  # -1 = the engine does not tell
    positions: list[int]
    states: torch.Tensor
    next_token_id: int  # the token behind the last row
    drafts: list[int]
    logits: torch.Tensor | None = None  # of the first draft, over target ids (-inf = cannot be said)


def write_call(folder: Path, number: int, call: Call) -> None:
    """Write one call under a name that sorts by its number."""
    row = {
        "token_ids": call.token_ids, "positions": call.positions, "next_token_id": call.next_token_id,
        "drafts": call.drafts, "states": call.states.contiguous().numpy().tobytes(), "width": call.states.shape[-1],
        "logits": None if call.logits is None else call.logits.contiguous().numpy().tobytes(),
    }
    name = f"call-{os.getpid()}-{number:06d}.parquet"
    temporary = folder / f".{name}.tmp"
    pq.write_table(pa.Table.from_pylist([row], schema=_SCHEMA), temporary)
    temporary.replace(folder / name)


def read_calls(folder: Path) -> Iterator[Call]:
    """All calls in the order in which they were made."""
    for file in sorted(folder.glob("call-*.parquet")):
        row = pq.read_table(file).to_pylist()[0]
        states = torch.frombuffer(bytearray(row["states"]), dtype=torch.float32).view(-1, row["width"])
        logits = row["logits"]
        yield Call(
            row["token_ids"], row["positions"], states, row["next_token_id"], row["drafts"],
            None if logits is None else torch.frombuffer(bytearray(logits), dtype=torch.float32),
        )
