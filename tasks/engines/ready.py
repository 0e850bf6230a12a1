"""When a server is ready: its /health says so and then one real token comes back.

`/v1/models` answers long before an engine can serve, and a hung first collective leaves a server
that is healthy for ever and never generates.
"""

from __future__ import annotations

import threading
from typing import Final

import requests

from tasks.engines.base import Engine

PROBE_TOKENS: Final = [1, 2, 3]  # ids that every vocabulary has


class Readiness:
    """Asks one server again and again; `reason` says what is missing."""

    def __init__(self, engine: Engine, url: str, model: str) -> None:
        self.engine, self.url, self.model = engine, url, model
        self.reason = "the server never answered /health"
        self._healthy = False
        self._request: threading.Thread | None = None
        self._token = False
        # A proxy of the user's shell must never come between us and the loopback.
        self._session = requests.Session()
        self._session.trust_env = False

    def ready(self, timeout_s: float) -> bool:
        """True once a token came. Never blocks for long: the probe runs beside the caller, who watches the process."""
        if self._token:
            return True
        if not self._healthy:
            self._ask_health()
        elif self._request is None or not self._request.is_alive():
            self._request = threading.Thread(target=self._ask_token, args=(timeout_s,), daemon=True)
            self._request.start()
        return self._token

    def _ask_health(self) -> None:
        try:
            status = self._session.get(f"{self.url}/health", timeout=1).status_code
        except requests.RequestException:
            return
        self._healthy = status == 200
        self.reason = (
            "/health answers 200 but no token has come yet" if self._healthy else f"/health answers {status}"
        )

    def _ask_token(self, timeout_s: float) -> None:
        body = self.engine.completion_body(self.model, PROBE_TOKENS, 1, stream=False)
        try:
            answer = self._session.post(self.url + self.engine.endpoint, json=body, timeout=max(timeout_s, 0.1))
            if answer.status_code != 200:
                self.reason = f"/health answers 200 but a completion answers {answer.status_code}: {answer.text[:200]}"
            elif self.engine.parse_completion(answer.json()).token_ids:
                self._token = True
            else:
                self.reason = "/health answers 200 but a completion holds no token"
        except requests.RequestException as error:
            self.reason = f"/health answers 200 but a completion gives no token ({type(error).__name__})"
        except (ValueError, KeyError, IndexError, TypeError) as error:
            self.reason = f"/health answers 200 but a completion cannot be read ({type(error).__name__}: {error})"
