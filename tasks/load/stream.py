"""One streamed answer: server-sent events in, facts with arrival times out. No clock and no socket here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple, Protocol

ABORTED = frozenset({"abort", "error"})  # finish reasons by which an engine says that it gave up


class Dialect(Protocol):
    """What the recorder must know of an engine; its adapter provides it."""

    endpoint: ClassVar[str]

    def as_completion_chunk(self, chunk: dict[str, Any], tokens_before: int) -> dict[str, Any]: ...

    def chunk_tokens(self, chunk: dict[str, Any]) -> list[int] | None: ...

    def chunk_spec(self, chunk: dict[str, Any]) -> dict[str, Any] | None: ...


class TokenChunk(NamedTuple):
    """Arrival of a chunk that carried tokens; `tokens` None = the server did not say how many."""

    at: float
    tokens: int | None


class SseDecoder:
    """Splits bytes, however the network cut them, into the data of server-sent events.

    Format: https://html.spec.whatwg.org/multipage/server-sent-events.html
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, received: bytes) -> Iterable[str]:
        """Data of every event that these bytes complete."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for raw in lines:
            line = raw.rstrip(b"\r").decode("utf-8", "replace")
            if line.startswith("data:"):
                self._data.append(line[5:].removeprefix(" "))
            elif not line and self._data:
                yield "\n".join(self._data)
                self._data = []


class AnswerReader:
    """Facts of one answer, built chunk by chunk.

    A chunk has tokens if it names token ids or carries text: content, reasoning or a tool call.
    Chunks with only a role, with empty text or with only usage have none. Times are seconds of the
    caller's monotonic clock.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self.chunks: list[TokenChunk] = []
        self.first_content: float | None = None
        self.token_ids: list[int] | None = None
        self.finish_reason: str | None = None
        self.done = False
        self.error: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.usage_tokens: int | None = None
        self.spec: dict[str, Any] | None = None
        self._usage_in_every_chunk = True

    def feed(self, data: str, at: float) -> None:
        """Take in one event that arrived at `at`."""
        if data.strip() == "[DONE]":
            self.done = True
            return
        try:
            raw = json.loads(data)
        except ValueError:
            raw = None
        if not isinstance(raw, dict):
            self.error = f"stream chunk is not a JSON object: {data[:200]}"
            return
        self.spec = self._dialect.chunk_spec(raw) or self.spec
        chunk = self._dialect.as_completion_chunk(raw, len(self.token_ids or ()))
        if chunk.get("error"):
            self.error = f"error in the stream: {json.dumps(chunk['error'])[:500]}"
            return
        usage_before = self.usage_tokens or 0
        has_usage = self._read_usage(chunk.get("usage"))
        choices = chunk.get("choices") or []
        if not choices:
            return
        self.finish_reason = choices[0].get("finish_reason") or self.finish_reason
        ids = self._dialect.chunk_tokens(chunk)
        content, other = chunk_texts(choices[0])
        if not (ids or content or other):
            return
        self._usage_in_every_chunk &= has_usage
        if ids is not None:
            if self.token_ids is None:
                self.token_ids = []
            self.token_ids.extend(ids)
            tokens: int | None = len(ids)
        elif self._usage_in_every_chunk and self.usage_tokens is not None:
            tokens = self.usage_tokens - usage_before
        else:
            tokens = None
        self.chunks.append(TokenChunk(at, tokens))
        if self.first_content is None and (content or (ids and not other)):
            self.first_content = at

    def _read_usage(self, usage: Any) -> bool:
        if not isinstance(usage, dict):
            return False
        self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
        self.usage_tokens = _count(usage.get("completion_tokens"), self.usage_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = _count(details.get("cached_tokens"), self.cached_tokens)
        return isinstance(usage.get("completion_tokens"), int)

    @property
    def completion_tokens(self) -> tuple[int, str]:
        """(n, source): the server's own count, else what this client could count."""
        if self.usage_tokens is not None:
            return self.usage_tokens, "server"
        return (len(self.chunks) if self.token_ids is None else len(self.token_ids)), "client"

    @property
    def first_chunk_tokens(self) -> int | None:
        """Tokens in the first chunk that had any; None = unknown."""
        if not self.chunks:
            return None
        if self.chunks[0].tokens is not None:
            return self.chunks[0].tokens
        n, source = self.completion_tokens
        return 1 if source == "server" and n == len(self.chunks) else None  # as many chunks as tokens: one each

    def outcome(self) -> tuple[str, str | None]:
        """(status, detail) of a stream that ended without a transport error."""
        if self.error is not None:
            return "http_error", self.error
        if self.finish_reason is None or not self.done:
            lacks = "a finish reason" if self.finish_reason is None else "the end mark [DONE]"
            return "truncated", f"stream ended without {lacks} after {len(self.chunks)} chunks with tokens"
        if self.finish_reason in ABORTED:
            return "truncated", f"server gave up: finish_reason {self.finish_reason}"
        if not self.chunks:
            return "empty", "stream ended well but carried no token"
        if self.token_ids is not None and self.usage_tokens not in (None, len(self.token_ids)):
            return "ok", f"server counted {self.usage_tokens} tokens, stream carried {len(self.token_ids)} token ids"
        return "ok", None


def chunk_texts(choice: dict[str, Any]) -> tuple[str, str]:
    """(content, reasoning and tool calls) of a choice of /v1/completions or /v1/chat/completions."""
    delta = choice.get("delta") or {}
    content = choice.get("text") or delta.get("content") or ""
    other = delta.get("reasoning_content") or delta.get("reasoning") or ""
    for call in delta.get("tool_calls") or []:
        function = call.get("function") or {}
        other += (function.get("name") or "") + (function.get("arguments") or "")
    return content, other


def _count(value: Any, otherwise: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise
