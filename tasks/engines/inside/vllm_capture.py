"""Worker side of state capture in vLLM: from the KV cache to shards. Only tensor-parallel rank 0 has one.

vLLM's `extract_hidden_states` method writes the residual stream at the asked points into a cache
layer of its own, in the blocks of the request, chunk by chunk. When a request is finished its blocks
hold the states of every token whatever the chunks and the batch were, so they are read only then.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tasks.store.states import Sample, ShardWriter

PENDING_BYTES = 2 << 30  # states that may wait for the disk in host memory
STUCK_S = 120.0
logger = logging.getLogger("vllm.drafthouse")  # below vLLM's own logger, so that its handlers print it


@dataclass(frozen=True)
class CacheLayer:
    """Where the states lie: KV cache group, layer name and the shape of a block."""

    group: int
    name: str
    block_size: int
    points: int
    width: int


@dataclass(frozen=True)
class Pending:
    """A finished request whose states are to be stored."""

    request_id: str
    sample_key: str
    token_ids: list[int]
    block_ids: tuple[list[int], ...]  # of every KV cache group


def find_cache_layer(kv_cache_config: Any) -> CacheLayer:
    """The one cache layer of hidden states; raises RuntimeError if there is not exactly one.

    Only a worker's configuration says it: the scheduler's keeps one arbitrary spec per group.
    """
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec

    found = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            # A group of layers with unequal specs holds them by name.
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            if isinstance(spec, HiddenStateCacheSpec):
                found.append(CacheLayer(index, name, spec.block_size, spec.num_kv_heads, spec.head_size))
    if len(found) != 1:
        raise RuntimeError(f"drafthouse: expected one cache layer of hidden states, found {[c.name for c in found]}")
    return found[0]


def token_first(cache: torch.Tensor, layer: CacheLayer) -> torch.Tensor:
    """View of the layer's cache as [blocks, block_size, points, width], whichever of both orders vLLM uses."""
    wanted = (layer.block_size, layer.points, layer.width)
    if layer.block_size == layer.points:
        raise RuntimeError(f"drafthouse: {layer.points} points equal the KV block size, so the axes are ambiguous")
    if tuple(cache.shape[1:]) == wanted:
        return cache
    if cache.dim() == 4 and tuple(cache.transpose(1, 2).shape[1:]) == wanted:
        return cache.transpose(1, 2)
    raise RuntimeError(f"drafthouse: hidden-state cache has shape {tuple(cache.shape)}, expected blocks of {wanted}")


@dataclass
class _Copy:
    pending: Pending
    states: torch.Tensor  # [tokens, points, width] on the host, valid once `done` has happened
    done: torch.cuda.Event | None
    since: float


class StateCapture:
    """Copies states of finished requests to the host and hands them to the shard writer.

    Nothing here waits for a device or a disk: a copy that is under way, or a full writer queue, only
    keeps the request's blocks until a later step.
    """

    def __init__(self, folder: Path, cache: torch.Tensor, layer: CacheLayer, points: list[int], max_tokens: int):
        if len(points) != layer.points:
            raise RuntimeError(f"drafthouse: asked for points {points}, vLLM captures {layer.points}")
        self.points = points
        self.cache = token_first(cache, layer)
        self.layer = layer
        self.error: str | None = None
        self._copies: deque[_Copy] = deque()
        self._stream = torch.cuda.Stream(cache.device) if cache.is_cuda else None  # type: ignore[no-untyped-call]
        sample_bytes = max_tokens * layer.points * layer.width * cache.element_size()
        self._writer = ShardWriter(folder, max_pending=max(2, min(64, PENDING_BYTES // sample_bytes)))
        self._report(folder)

    def _report(self, folder: Path) -> None:
        """Say that the plugin is on: a JSON file beside the shards and a log line that names it."""
        report = {
            "plugin": "drafthouse", "version": version("drafthouse"), "engine": "vllm",
            "engine_version": _engine_version(), "points": self.points, "hooks": ["kv_connector"],
            "dtype": str(self.cache.dtype).removeprefix("torch."), "pid": os.getpid(), "started_at": time.time(),
        }
        file = folder / f"capture-{os.getpid()}.json"
        file.with_suffix(".tmp").write_text(json.dumps(report))
        file.with_suffix(".tmp").replace(file)
        logger.info("drafthouse capture %s is on: points %s, report %s", report["version"], self.points, file.name)

    def start(self, pending: Pending) -> None:
        """Begin to copy the states of one finished request."""
        positions = torch.arange(len(pending.token_ids))
        own_blocks = torch.tensor(pending.block_ids[self.layer.group])
        assert len(own_blocks) * self.layer.block_size >= len(positions), "finished before its prompt was computed"
        blocks = own_blocks[positions // self.layer.block_size]
        offsets = positions % self.layer.block_size
        if self._stream is None:
            states, done = self.cache[blocks, offsets], None  # indexing copies
        else:
            states, done = self._copy_from_device(blocks, offsets)
        self._copies.append(_Copy(pending, states, done, time.monotonic()))

    def _copy_from_device(self, blocks: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        assert self._stream is not None
        # The forward that wrote the cache was queued on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream(self.cache.device))
        with torch.cuda.stream(self._stream):
            where = torch.stack([blocks, offsets]).pin_memory().to(self.cache.device, non_blocking=True)
            on_device = self.cache[where[0], where[1]]
            states = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            states.copy_(on_device, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return states, done

    def poll(self) -> set[str]:
        """Ids of requests whose blocks are not needed any more; sets `error` once the writer has failed."""
        released = set()
        for _ in range(len(self._copies)):
            copy = self._copies.popleft()
            arrived = copy.done is None or copy.done.query()  # type: ignore[no-untyped-call]
            if arrived and self._stored(copy):
                released.add(copy.pending.request_id)
            else:
                self._copies.append(copy)
        return released

    def _stored(self, copy: _Copy) -> bool:
        """True when the writer has the sample or never will."""
        sample = Sample(copy.pending.sample_key, copy.pending.token_ids, copy.states, self.points)
        try:
            self._writer.put(sample, timeout_s=0.0)
        except OSError as failure:
            behind = self._writer.error is None and time.monotonic() - copy.since < STUCK_S
            if behind:
                return False
            if self.error is None:
                self.error = str(failure)
                logger.error("drafthouse capture failed, no further states are stored: %s", failure)
        return True

    def close(self) -> None:
        """Write what is queued; a failure was logged when it happened."""
        while self._copies and self.error is None:
            self.poll()
            time.sleep(0.001)
        try:
            self._writer.close()
        except OSError as failure:
            logger.error("drafthouse capture: %s", failure)


def _engine_version() -> str:
    import vllm

    return str(vllm.__version__)
