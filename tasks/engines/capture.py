"""Asking a server for the hidden states of token sequences: sent, acknowledged, read back, checked."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from tasks.engines.ask import answer_to, ask
from tasks.engines.base import Engine
from tasks.errors import CaptureLost
from tasks.store.captured import find_checked, record_checked, why_wrong
from tasks.store.keys import content_key
from tasks.store.states import read_acks

log = logging.getLogger(__name__)
Wanted = dict[str, list[int]]  # state key -> token ids
_POLL_S = 0.05
_NAMED = 5


class Capture:
    """One environment's folder of a pool, and the server that writes into it."""

    def __init__(
        self, adapter: Engine, folder: Path, points: tuple[int, ...], dtype: str, *, model: str, run_id: str,
        concurrency: int, ack_timeout_s: float,
    ) -> None:
        self.folder, self.points, self.dtype, self.sent = folder, points, dtype, 0
        self._adapter, self._model, self._run_id = adapter, model, run_id
        self._concurrency, self._ack_timeout_s = concurrency, ack_timeout_s

    def look_up(self, wanted: Wanted) -> dict[str, dict[str, Any]]:
        """Checked samples of any environment in the pool, by state key.

        Samples that a killed run left acknowledged but unchecked are checked first.
        """
        pool = self.folder.parent
        found = find_checked(pool, set(wanted))
        for folder in sorted(f for f in pool.iterdir() if f.is_dir()) if len(found) < len(wanted) else []:
            unchecked = {k: ack for k, ack in read_acks(folder).items() if k in wanted and k not in found}
            right = [a for k, a in unchecked.items() if not why_wrong(folder, a, wanted[k], self.points, self.dtype)]
            record_checked(folder, right, self._run_id)
        return find_checked(pool, set(wanted)) if len(found) < len(wanted) else found

    def probe(self, url: str, token_ids: list[int]) -> dict[str, Any]:
        """Acknowledgement of the states of a fixed text, under a key that no sample has."""
        key = content_key("probe", token_ids, time.time_ns())
        return self.take(url, {key: token_ids}, rounds=2)[key]

    def take(self, url: str, wanted: Wanted, rounds: int = 3) -> dict[str, dict[str, Any]]:
        """Acknowledgements of all `wanted`, each checked and recorded; asks up to `rounds` times for a sample.

        Raises CaptureLost that names those which never came or came wrong; they are neither padded nor kept.
        """
        good: dict[str, dict[str, Any]] = {}
        reasons = dict.fromkeys(wanted, "never acknowledged")
        for _ in range(rounds):
            left = {key: ids for key, ids in wanted.items() if key not in good}
            came = self._ask(url, left, reasons)
            for key, ack in came.items():
                reasons[key] = why_wrong(self.folder, ack, wanted[key], self.points, self.dtype)
            right = {key: ack for key, ack in came.items() if not reasons[key]}
            record_checked(self.folder, right.values(), self._run_id)
            good |= right
            if len(good) == len(wanted):
                return good
        bad = [f"{key} ({reasons[key]})" for key in wanted if key not in good]
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise CaptureLost(
            f"{len(bad)} of {len(wanted)} samples have no usable states after {rounds} requests each: "
            f"{'; '.join(bad[:_NAMED])}{more}; what was right is kept. If all are missing the capture is off "
            "(on SGLang: prefill inside CUDA graphs)"
        )

    def _ask(self, url: str, left: Wanted, reasons: dict[str, str]) -> dict[str, dict[str, Any]]:
        before = read_acks(self.folder)
        bodies = {
            key: self._adapter.completion_body(self._model, ids, 1, stream=False, sample_key=key)
            for key, ids in left.items()
        }

        def see(key: str, answer: dict[str, Any]) -> None:
            answer_to(self._adapter, left[key], answer)  # raises what the plugin has to say

        asked = ask(url, bodies, see, concurrency=self._concurrency)
        self.sent += asked.sent
        log.info("extract: %s", asked)
        reasons.update(asked.unanswered)
        expected = set(left) - set(asked.unanswered)
        came: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + self._ack_timeout_s
        while len(came) < len(expected) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            acks = {k: a for k, a in read_acks(self.folder).items() if k in expected and a != before.get(k)}
            if len(acks) > len(came):  # as long as any come, the disk is slow and nothing is lost
                came, deadline = acks, time.monotonic() + self._ack_timeout_s
        return came
