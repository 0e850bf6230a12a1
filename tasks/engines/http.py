"""Small HTTP requests to a running engine; no answer is always ServerLost."""

from __future__ import annotations

from typing import Any

import requests

from tasks.engines import prometheus
from tasks.errors import ServerLost

TIMEOUT_S = 20.0


def ask(method: str, url: str, path: str) -> requests.Response:
    """One request without a body; raises ServerLost if the server does not answer."""
    with requests.Session() as session:
        session.trust_env = False  # a proxy must not stand between us and the loopback
        try:
            return session.request(method, f"{url.rstrip('/')}{path}", timeout=TIMEOUT_S)
        except requests.RequestException as error:
            raise ServerLost(f"{url}{path}: no answer ({type(error).__name__}); see the server's log") from error


def get_json(url: str, path: str) -> dict[str, Any]:
    """A JSON object, empty if this server does not offer it; raises ServerLost if it does not answer."""
    answer = ask("GET", url, path)
    try:
        data = answer.json() if answer.status_code == 200 else {}
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def get_metrics(url: str) -> list[prometheus.Sample]:
    """All samples of /metrics; raises ServerLost if the server does not answer with them."""
    answer = ask("GET", url, "/metrics")
    if answer.status_code != 200:
        raise ServerLost(f"{url}/metrics answered {answer.status_code}")
    return prometheus.parse(answer.text)
