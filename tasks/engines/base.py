"""What a stage may ask of an engine, whichever engine it is.

An engine is a process reached over HTTP; an adapter only renders its command, reads what it says of
itself and speaks its dialect. Adapters hold no state and start nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from tasks.config import Arm, EngineEnvironment, Machine, Target

Source = Literal["server_info", "metrics", "log", "probe"]


@dataclass(frozen=True)
class Command:
    """A rendered launch: exactly what is executed and the variables added to the environment."""

    argv: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that a command depends on beside the campaign."""

    arm: Arm
    target: Target
    machine: Machine
    python: str
    port: int
    engine_points: tuple[int, ...] = ()  # Hugging Face indices to capture; empty unless extracting
    capture_dir: Path | None = None  # pool folder that the engine's plugin writes shards to
    drafter_dir: Path | None = None  # exported drafter folder; None unless speculative
    env: dict[str, str] = field(default_factory=dict)  # of the NCCL profile; serve adds them, adapters need not
    memory_taken: float = 0.0  # share of each GPU that servers beside this one took before it
    notes: dict[str, str] = field(default_factory=dict)  # setting -> why it was resolved so; for the servers table


@dataclass(frozen=True)
class Observed:
    """One effective setting as the running server reports it; `value` None = not reported."""

    setting: str
    engine_setting: str
    value: str | None
    source: Source
    detail: str = ""


@dataclass(frozen=True)
class SpecCounters:
    """Cumulative speculative counters of a server, summed over its engines.

    accept length = 1 + accepted / drafts (vLLM's definition). `per_position[i]` counts drafts whose
    token i was accepted. None = not reported, never 0.
    """

    drafts: int | None
    accepted: int | None
    per_position: tuple[int, ...] = ()
    engines: tuple[SpecCounters, ...] = ()  # each engine's own, so that a reset of one is not hidden by the others


@dataclass(frozen=True)
class Completion:
    """Answer of the engine to one non-streamed request with token ids in and out."""

    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    logprobs: list[float] = field(default_factory=list)  # of each chosen token; empty unless asked for
    meta: dict[str, Any] = field(default_factory=dict)


class RunningServer(Protocol):
    """The lazy handle of one arm's server, as the stages see it."""

    @property
    def arm(self) -> Arm:
        """The arm that it serves."""

    def url(self) -> str:
        """Base URL without a trailing slash; the first call starts the server and waits for a real token."""


class Engine(ABC):
    """Adapter of one engine; all methods are pure but for the HTTP request that they name."""

    name: ClassVar[str]
    endpoint: ClassVar[str] = "/v1/completions"  # path that `completion_body` is POSTed to

    @abstractmethod
    def check(self, plan: LaunchPlan) -> None:
        """Refuse before loading what cannot work: raises NotSupported with reason and remedy."""

    @abstractmethod
    def command(self, plan: LaunchPlan) -> Command:
        """Command line and environment of the server; loopback only."""

    @abstractmethod
    def load_progress(self, line: str) -> tuple[float, str] | None:
        """Share done [0, 1] and what is being done, if this log line tells."""

    @abstractmethod
    def versions(self, where: EngineEnvironment) -> dict[str, str]:
        """Versions of the engine, torch and our plugin in that environment, without starting a server."""

    @abstractmethod
    def effective_settings(self, url: str, log: Path, plan: LaunchPlan) -> list[Observed]:
        """What the running server says of itself: HTTP, metrics and log lines."""

    @abstractmethod
    def requested_settings(self, plan: LaunchPlan) -> dict[str, str]:
        """Canonical setting -> value that the plan asks for explicitly."""

    @abstractmethod
    def completion_body(
        self, model: str, token_ids: list[int], max_tokens: int, *, temperature: float = 0.0, top_p: float = 1.0,
        ignore_eos: bool = False, stream: bool = True, logprobs: bool = False, sample_key: str | None = None,
    ) -> dict[str, Any]:
        """JSON body for POST `endpoint`; `sample_key` asks the capture plugin for this request's states.

        Streams report usage in their last chunk and token ids wherever the engine can.
        """

    @abstractmethod
    def parse_completion(self, body: dict[str, Any]) -> Completion:
        """The non-streamed answer to such a body."""

    @abstractmethod
    def spec_counters(self, url: str) -> SpecCounters | None:
        """Cumulative counters, or None if this engine reports acceptance per request only."""

    def as_completion_chunk(self, chunk: dict[str, Any], tokens_before: int) -> dict[str, Any]:
        """A stream chunk in the shape of /v1/completions: choices[0].{text, token_ids, finish_reason}, usage.

        `tokens_before` = completion tokens received so far, for an engine whose chunks repeat them. An
        `{"error": ...}` chunk stays as it is. The default is for engines that stream this shape already.
        """
        return chunk

    def chunk_tokens(self, chunk: dict[str, Any]) -> list[int] | None:
        """Token ids that this stream chunk adds to the answer; None = the chunk does not tell."""
        choices = chunk.get("choices")
        return choices[0].get("token_ids") if choices else None

    def chunk_spec(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """Speculative facts of this request so far (SGLang meta_info), or None; the last in a stream counts.

        Keys, each absent when not reported: `drafts` (verify steps), `accepted` (draft tokens accepted),
        `per_position` (list: drafts whose token i was accepted), `accept_length` (as the engine says it).
        """
        return None

    def cache_counters(self, url: str) -> tuple[int, int] | None:
        """Cumulative (prompt tokens looked up, found) of the prefix cache; None = not reported."""
        return None

    @abstractmethod
    def flush_cache(self, url: str) -> None:
        """Empty the prefix cache; a no-op if the server has none."""

    @abstractmethod
    def running_requests(self, url: str) -> int | None:
        """Requests running right now, from metrics; None = not reported."""

    @abstractmethod
    def layer_ids(self, model_class: str, num_layers: int, points: tuple[int, ...]) -> list[int]:
        """The ids to write into a drafter's config.json so that this engine taps exactly `points`."""
