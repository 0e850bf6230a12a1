"""From a batch's states on the device to samples on disk, off the scheduler's path."""

from __future__ import annotations

import logging
import queue
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tasks.store.states import Sample, ShardWriter

QUEUED_SAMPLES = 32  # finished prompts whose states wait in memory; then the scheduler waits for the disk
WAIT_S = 10.0  # longest wait of the scheduler for a stuck disk; the server's health check must outlive it
SPARE_BYTES = 256 << 20  # free space at which a writer that died of a full disk is tried again
logger = logging.getLogger(__name__)
_streams: dict[torch.device, Any] = {}


class Staged:
    """States [P, T, D] and token ids [T] of one batch on their way to the host."""

    def __init__(self, states: list[torch.Tensor], input_ids: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        input_ids = input_ids.clone()  # a buffer that the next batch overwrites; the states are this batch's own
        if input_ids.is_cuda:
            self._copy(states, input_ids)
        else:
            self._states, self._ids = states, input_ids

    def _copy(self, states: list[torch.Tensor], input_ids: torch.Tensor) -> None:
        device = input_ids.device
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side = _streams[device]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            # Whole contiguous copies: a strided one would go through a blocking temporary.
            self._states = [_to_pinned(state) for state in states]
            self._ids = _to_pinned(input_ids)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(side)
        for tensor in (*states, input_ids):
            tensor.record_stream(side)  # its memory must not be reused before the copy is through

    def rows(self, start: int, stop: int) -> tuple[torch.Tensor, list[int]]:
        """States [tokens, P, D] and ids of some rows; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return torch.stack([state[start:stop] for state in self._states], dim=1), self._ids[start:stop].tolist()


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return host


@dataclass
class Progress:
    """How far the prompt of one request is captured."""

    sample_key: str
    token_ids: list[int]
    captured: int = 0
    failed: bool = False
    parts: list[tuple[Staged, int, int]] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Prompt tokens without states."""
        return len(self.token_ids) - self.captured

    def add(self, staged: Staged | None, start: int, length: int) -> None:
        """The next `length` tokens are rows start.. of a batch; None on a rank that only keeps count."""
        if staged is not None:
            self.parts.append((staged, start, start + length))
        self.captured += length

    def restart(self) -> None:
        """Forget what is captured: the prompt is computed again from its first token."""
        self.captured, self.parts = 0, []

    def fail(self) -> None:
        """Give up and free the states."""
        self.failed, self.parts = True, []


class StatesWriter:
    """Thread that puts finished prompts together and hands them to the shard writer."""

    def __init__(self, folder: Path, points: list[int]) -> None:
        self._folder, self._points = folder, points
        self._shards = ShardWriter(folder)
        self._error: str | None = None
        self._queue: queue.Queue[tuple[str, list[int], list[tuple[Staged, int, int]]]] = queue.Queue(QUEUED_SAMPLES)
        threading.Thread(target=self._run, name="drafthouse-capture", daemon=True).start()

    def put(self, progress: Progress) -> None:
        """Queue a finished prompt; if the queue stays full, the sample is never acknowledged."""
        parts, progress.parts = progress.parts, []
        try:
            self._queue.put((progress.sample_key, progress.token_ids, parts), timeout=WAIT_S)
        except queue.Full:
            self._error = f"the disk of {self._folder} is {WAIT_S:.0f} s behind"

    def failure(self) -> str | None:
        """Why states cannot be stored now, or None. A writer that died is replaced once there is room again."""
        if self._error is None and self._shards.error is None:
            return None
        reason = self._error or f"states writer stopped: {self._shards.error}"
        try:
            if self._queue.empty() and shutil.disk_usage(self._folder).free >= SPARE_BYTES:
                self._shards, self._error = ShardWriter(self._folder), None
                return None
        except OSError as error:
            return f"{reason}; and again: {error}"
        return reason

    def _run(self) -> None:
        while True:
            sample_key, token_ids, parts = self._queue.get()
            try:
                states, ids = zip(*(staged.rows(start, stop) for staged, start, stop in parts), strict=True)
                if [token for part in ids for token in part] != token_ids:
                    raise ValueError("captured rows are not this prompt's tokens")
                self._shards.put(Sample(sample_key, token_ids, torch.cat(states), self._points))
            except OSError as error:
                self._error = str(error)
            except Exception:  # one sample is lost, and never acknowledged; the thread has to live on
                logger.exception("drafthouse capture: a sample is not stored")
