"""Hidden states as later stages read them: by a reference, one sample in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq

from tasks.errors import ArtifactDamaged
from tasks.store.refs import StatesRef
from tasks.store.states import Sample, read_sample
from tasks.store.tables import Store


def states_index(store: Store, states: StatesRef) -> list[dict[str, Any]]:
    """Index rows in prompt order: sample_key, state_key, shard, row_group, tokens, points, dtype, ...

    `shard` is relative to the store's root.
    """
    store.require(states.kind, states.key)
    rows: list[dict[str, Any]] = pq.read_table(store.artifact(states.kind, states.key) / "index.parquet").to_pylist()
    return rows


def read_states(store: Store, row: dict[str, Any]) -> Sample:
    """Token ids and states [tokens, points, width] of one index row, under the response's sample key.

    `points` are those of the row, sorted; the last is N, before the final norm. Raises ArtifactDamaged
    if the shard is gone, broken or holds another token count.
    """
    try:
        sample = read_sample(store.root, row["shard"], row["row_group"])
    except (OSError, ValueError, IndexError) as error:
        raise ArtifactDamaged(f"{row['shard']}: {error}; rerun to extract these states again") from error
    if len(sample.token_ids) != row["tokens"] or sample.points != list(row["points"]):
        raise ArtifactDamaged(f"{row['shard']} row group {row['row_group']}: not the sample that the index names")
    return Sample(row["sample_key"], sample.token_ids, sample.states, sample.points)


def captured(store: Store, states: StatesRef) -> Iterator[Sample]:
    """All samples in prompt order."""
    for row in states_index(store, states):
        yield read_states(store, row)
