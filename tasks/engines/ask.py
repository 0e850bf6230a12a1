"""Many requests whose answers matter and whose times do not: bounded concurrency, retries, no streaming."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tasks.apart import run_apart
from tasks.engines.base import Completion, Engine
from tasks.errors import EngineError, ServerLost, SettingsMismatch

_FIRST_PAUSE_S = 0.25
_SHOWN = 300


@dataclass
class Asked:
    """What became of the requests: keys without an answer with the reason, and failures by kind, retried ones too."""

    sent: int = 0
    unanswered: dict[str, str] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(self.failures.items())) or "none"
        return f"{self.sent} requests, failures {kinds}"


def ask(
    url: str, bodies: Mapping[str, dict[str, Any]], on_answer: Callable[[str, dict[str, Any]], None], *,
    concurrency: int, attempts: int = 4, timeout_s: float = 600.0,
) -> Asked:
    """POST each body to `url` and hand every JSON answer to `on_answer(key, answer)` as it comes.

    A refused (4xx) body is not repeated; everything else is, with growing pauses. Raises ServerLost when
    nothing listens any more, and whatever `on_answer` raises, after cancelling what is in flight.
    """
    asked = Asked()
    run_apart(_ask_all(asked, url, bodies, on_answer, concurrency, attempts, timeout_s))
    return asked


def answer_to(adapter: Engine, token_ids: list[int], answer: dict[str, Any]) -> Completion:
    """The parsed answer; raises SettingsMismatch if the server saw another prompt than these token ids."""
    got = adapter.parse_completion(answer)
    if got.prompt_tokens != len(token_ids):
        raise SettingsMismatch(
            f"prompt_tokens: sent {len(token_ids)} token ids, the server counted {got.prompt_tokens}; it changes "
            "prompts (a second BOS?), so its answers belong to other prompts"
        )
    if got.logprobs and len(got.logprobs) != len(got.token_ids):
        raise SettingsMismatch(f"logprobs: {len(got.logprobs)} for {len(got.token_ids)} tokens; which is whose?")
    return got


async def _ask_all(
    asked: Asked, url: str, bodies: Mapping[str, dict[str, Any]], on_answer: Callable[[str, dict[str, Any]], None],
    concurrency: int, attempts: int, timeout_s: float,
) -> None:
    waiting = iter(bodies.items())
    connector = aiohttp.TCPConnector(limit=concurrency)
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def work() -> None:
            for key, body in waiting:
                try:
                    answer = await _ask_one(asked, session, url, body, attempts)
                except EngineError as error:
                    if isinstance(error, ServerLost):
                        raise
                    asked.unanswered[key] = str(error)
                else:
                    on_answer(key, answer)

        workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(bodies)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


async def _ask_one(
    asked: Asked, session: aiohttp.ClientSession, url: str, body: dict[str, Any], attempts: int
) -> dict[str, Any]:
    reason = ""
    for attempt in range(attempts):
        if attempt:
            await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
        asked.sent += 1
        try:
            async with session.post(url, json=body) as response:
                if response.status == 200:
                    answer: dict[str, Any] = await response.json(content_type=None)
                    return answer
                kind, reason = f"http_{response.status}", (await response.text())[:_SHOWN]
                if 400 <= response.status < 500 and response.status not in (408, 429):
                    attempt = attempts
        except TimeoutError:
            kind = reason = "timeout"
        except aiohttp.ClientConnectorError as error:
            kind, reason = "refused", str(error)
        except aiohttp.ClientError as error:
            kind, reason = "disconnected", str(error) or type(error).__name__
        except ValueError as error:
            kind, reason = "not_json", str(error)
        asked.failures[kind] += 1
        if attempt >= attempts:
            break
    if kind == "refused":
        raise ServerLost(f"{url}: nothing listens there any more ({reason}); see the server's log")
    raise EngineError(f"{kind}: {' '.join(reason.split())}" if kind != reason else kind)
