"""From a batch's states to samples on disk, as the SGLang plugin does it, without an engine."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch

from tasks.engines.inside import sglang_states
from tasks.engines.inside.sglang_states import Progress, Staged, StatesWriter
from tasks.store.states import read_acks, read_sample

WIDTH, POINTS = 4, [1, 2]


def batch(token_ids: list[int]) -> tuple[Staged, torch.Tensor]:
    """A staged batch and its states [T, P, D]: value = token id * 10 + point."""
    ids = torch.tensor(token_ids)
    states = [(ids * 10 + point).float().unsqueeze(1).expand(-1, WIDTH).clone() for point in POINTS]
    return Staged(states, ids), torch.stack(states, dim=1)


def wait_for(folder: Path, key: str) -> dict[str, object]:
    deadline = time.monotonic() + 20
    while key not in (acks := read_acks(folder)):
        assert time.monotonic() < deadline, "never acknowledged"
        time.sleep(0.02)
    return acks[key]


def finished(key: str, token_ids: list[int], staged: Staged | None = None) -> Progress:
    progress = Progress(key, token_ids)
    progress.add(staged or batch(token_ids)[0], 0, len(token_ids))
    return progress


def test_chunks_of_several_batches_become_one_sample(tmp_path: Path) -> None:
    writer = StatesWriter(tmp_path, POINTS)
    progress = Progress("a", [5, 6, 7, 8, 9])
    first, second = batch([1, 5, 6, 7]), batch([8, 9, 2])
    progress.add(first[0], 1, 3)
    assert progress.missing == 2
    progress.add(second[0], 0, 2)
    assert progress.missing == 0
    writer.put(progress)
    ack = wait_for(tmp_path, "a")
    sample = read_sample(tmp_path, str(ack["shard"]), int(str(ack["row_group"])))
    assert torch.equal(sample.states, torch.cat([first[1][1:], second[1][:2]]))
    assert sample.points == POINTS
    assert progress.parts == []


def test_the_engines_id_buffer_may_be_overwritten_by_the_next_batch(tmp_path: Path) -> None:
    writer = StatesWriter(tmp_path, POINTS)
    ids = torch.tensor([3, 4])
    staged = Staged([torch.ones(2, WIDTH), torch.ones(2, WIDTH)], ids)
    ids.fill_(0)
    writer.put(finished("a", [3, 4], staged))
    assert wait_for(tmp_path, "a")["tokens"] == 2


def test_rows_of_another_prompt_are_never_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = StatesWriter(tmp_path, POINTS)
    with caplog.at_level(logging.ERROR):
        writer.put(finished("mixed-up", [1, 2, 3], batch([1, 9, 3])[0]))
        writer.put(finished("right", [4, 5]))
        wait_for(tmp_path, "right")
    assert set(read_acks(tmp_path)) == {"right"}
    assert "not this prompt's tokens" in caplog.text


def test_a_prompt_that_is_computed_again_starts_anew() -> None:
    progress = Progress("a", [1, 2, 3])
    progress.add(batch([1, 2])[0], 0, 2)
    progress.restart()
    assert (progress.missing, progress.parts) == (3, [])


def test_a_dead_writer_says_why_and_is_replaced_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pool"
    writer = StatesWriter(folder, POINTS)
    assert writer.failure() is None
    folder.rmdir()
    writer.put(finished("lost", [1, 2]))
    monkeypatch.setattr(sglang_states, "SPARE_BYTES", 1 << 80)  # a full disk
    deadline = time.monotonic() + 20
    while (reason := writer.failure()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert "states writer stopped" in reason or "No such file" in reason
    folder.mkdir()
    assert writer.failure() is not None
    monkeypatch.undo()
    assert writer.failure() is None
    writer.put(finished("found", [3, 4]))
    wait_for(folder, "found")
    assert "lost" not in read_acks(folder)
