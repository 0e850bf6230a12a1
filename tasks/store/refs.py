"""References that pass between stages: a kind, a content key and a few facts, never the data.

Each names an immutable artifact `objects/<kind>/<key>/` in the store.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Ref(BaseModel):
    """Base of all references."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    kind: ClassVar[str]
    key: str


class ResponsesRef(Ref):
    """Answers of the target to the training prompts: `responses.parquet`, a row per sample."""

    kind: ClassVar[str] = "responses"
    samples: int
    tokens: int


class StatesRef(Ref):
    """Hidden states of each response: `index.parquet` points into the shards of a pool."""

    kind: ClassVar[str] = "states"
    samples: int
    tokens: int
    engine: str
    points: tuple[int, ...]
    dtype: str


class AlignmentRef(Ref):
    """Proof that the states are the target's: `alignment.parquet`."""

    kind: ClassVar[str] = "alignment"
    states_key: str
    worst_rel_error: float


class DrafterRef(Ref):
    """A trained drafter: one weights file, a config.json per engine and model class."""

    kind: ClassVar[str] = "drafter"
    name: str
    extracted_on: str
    points: tuple[int, ...]


class ReplayRef(Ref):
    """Predicted acceptance of a drafter: `replay.parquet`, a row per prompt block and position."""

    kind: ClassVar[str] = "replay"
    drafter_key: str
    accept_length: float


class BenchmarkRef(Ref):
    """A finished measurement of one arm and workload: outputs.parquet holds every greedy output."""

    kind: ClassVar[str] = "benchmark"
    arm: str
    workload: str
    accept_length: float | None = None
