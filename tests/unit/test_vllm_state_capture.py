"""The worker side of vLLM's state capture on a KV cache made by hand, without vLLM."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tasks.engines.inside import vllm_capture
from tasks.engines.inside.vllm_capture import CacheLayer, Pending, StateCapture
from tasks.store.states import read_acks, read_sample

BLOCKS, BLOCK, POINTS, WIDTH = 8, 4, [1, 2, 6], 5
LAYER = CacheLayer(group=1, name="cache", block_size=BLOCK, points=len(POINTS), width=WIDTH)


def wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_capture, "_engine_version", lambda: "0.32.0")


@pytest.fixture
def cache() -> torch.Tensor:
    """[blocks, block_size, points, width]: every number tells where it lies."""
    shape = (BLOCKS, BLOCK, len(POINTS), WIDTH)
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


@pytest.fixture(params=["blocks first", "points first"])
def capture(cache: torch.Tensor, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[StateCapture]:
    """vLLM 0.26 and 0.32 lay the same numbers out in two orders."""
    given = cache if request.param == "blocks first" else cache.transpose(1, 2)
    made = StateCapture(tmp_path, given, LAYER, POINTS, max_tokens=64)
    yield made
    made.close()


def pending(name: str, tokens: int, blocks: list[int]) -> Pending:
    return Pending(f"id-{name}", name, list(range(tokens)), ([0, 0], blocks))


def test_scattered_blocks_become_one_sequence(capture: StateCapture, cache: torch.Tensor, tmp_path: Path) -> None:
    capture.start(pending("a", 10, [6, 1, 3]))
    assert capture.poll() == {"id-a"}
    wait(lambda: "a" in read_acks(tmp_path))
    ack = read_acks(tmp_path)["a"]
    sample = read_sample(tmp_path, ack["shard"], ack["row_group"])
    assert torch.equal(sample.states, torch.cat([cache[6], cache[1], cache[3, :2]]))
    assert sample.points == POINTS
    assert sample.token_ids == list(range(10))


def test_the_copy_is_taken_before_the_blocks_are_used_again(
    capture: StateCapture, cache: torch.Tensor, tmp_path: Path
) -> None:
    before = cache[2].clone()
    capture.start(pending("a", 4, [2]))
    capture.poll()
    cache.zero_()
    wait(lambda: "a" in read_acks(tmp_path))
    ack = read_acks(tmp_path)["a"]
    assert torch.equal(read_sample(tmp_path, ack["shard"], ack["row_group"]).states, before)


def test_the_plugin_reports_itself(capture: StateCapture, tmp_path: Path) -> None:
    report = json.loads(next(tmp_path.glob("capture-*.json")).read_text())
    assert report["plugin"] == "drafthouse"
    assert report["points"] == POINTS
    assert report["hooks"] == ["kv_connector"]
    assert (report["engine"], report["engine_version"], report["dtype"]) == ("vllm", "0.32.0", "float32")


def test_blocks_are_kept_while_the_writer_is_behind(capture: StateCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(sample: object, timeout_s: float) -> None:
        raise OSError("states writer is behind")

    with monkeypatch.context() as patch:
        patch.setattr(capture._writer, "put", full)
        capture.start(pending("a", 4, [2]))
        assert capture.poll() == set()
        assert capture.error is None
    assert capture.poll() == {"id-a"}


def test_a_full_disk_frees_the_blocks_and_is_told(capture: StateCapture, tmp_path: Path) -> None:
    capture._writer.error = OSError(28, "No space left on device")
    capture.start(pending("a", 4, [2]))
    assert capture.poll() == {"id-a"}
    assert capture.error is not None
    assert "No space left on device" in capture.error
    assert read_acks(tmp_path) == {}
    capture._writer.error = None


def test_a_writer_that_is_stuck_is_given_up(capture: StateCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(sample: object, timeout_s: float) -> None:
        raise OSError("states writer is behind; is the disk stuck?")

    monkeypatch.setattr(vllm_capture, "STUCK_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(capture._writer, "put", full)
        capture.start(pending("a", 4, [2]))
        assert capture.poll() == {"id-a"}
    assert capture.error == "states writer is behind; is the disk stuck?"


def test_a_cache_of_unknown_shape_is_refused(cache: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="expected blocks of"):
        StateCapture(tmp_path, cache[..., :2], LAYER, POINTS, max_tokens=64)
    with pytest.raises(RuntimeError, match="ambiguous"):
        vllm_capture.token_first(cache, CacheLayer(1, "cache", 3, 3, WIDTH))
    with pytest.raises(RuntimeError, match="vLLM captures 3"):
        StateCapture(tmp_path, cache, LAYER, [1, 2], max_tokens=64)
