"""Is there a server of that engine at an address that the user named? One request, before any measurement."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

import requests
from requests.exceptions import InvalidSchema, InvalidURL, MissingSchema

from tasks.engines.http import ask
from tasks.errors import EngineError, InputError, ServerLost

MODELS: Final = "/v1/models"
_OWNERS: Final = ("vllm", "sglang")  # each engine names itself as the owner of its models


def require_server(url: str, engine: str) -> str:
    """The address without a trailing slash or /v1; raises InputError if it is none, EngineError if nothing fits."""
    base = url.rstrip("/").removesuffix("/v1")
    if not _is_address(base):
        raise _no_address(url)
    try:
        answer = ask("GET", base, MODELS)
    except ServerLost as error:
        if isinstance(error.__cause__, InvalidURL | InvalidSchema | MissingSchema):
            raise _no_address(url) from error
        reason = type(error.__cause__).__name__
        raise EngineError(f"no server answers at {url} ({reason}); start it or correct --url") from error
    if problem := _problem(answer, engine):
        raise EngineError(f"{url} answers, but {problem}")
    return base


def _problem(answer: requests.Response, engine: str) -> str:
    status = answer.status_code
    if status in (401, 403):
        return f"wants a key ({status} at {MODELS}), and none is sent; start it without one"
    if status >= 500:
        return f"is not ready ({status} at {MODELS}); wait, or see its log"
    models = _models(answer) if status == 200 else None
    if models is None:
        found = "no list of models" if status == 200 else str(status)
        return f"not as {engine} does ({found} at {MODELS}); is it another server?"
    others = [name for name in _OWNERS if name != engine and any(m.get("owned_by") == name for m in models)]
    return f"as {others[0]} and not as {engine}; add --engine {others[0]}" if others and engine in _OWNERS else ""


def _models(answer: requests.Response) -> list[dict[str, Any]] | None:
    try:
        told = answer.json()
    except ValueError:
        return None
    models = told.get("data") if isinstance(told, dict) else None
    return [m for m in models if isinstance(m, dict)] if isinstance(models, list) else None


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _no_address(url: str) -> InputError:
    return InputError(f"{url or repr(url)}: not an http(s) address; write --url like http://127.0.0.1:8000")
