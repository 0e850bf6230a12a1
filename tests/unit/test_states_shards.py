"""Shards of hidden states: what is acknowledged can be read, what failed is never acknowledged."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from tasks.store.states import Sample, ShardWriter, read_acks, read_sample, read_shard


def sample(key: str, tokens: int, dtype: torch.dtype = torch.float32) -> Sample:
    states = torch.randn(tokens, 4, 8).to(dtype)
    return Sample(key, list(range(tokens)), states, [1, 2, 3, 4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    written = [sample(f"k{n}", n + 1, dtype) for n in range(5)]
    writer = ShardWriter(tmp_path)
    for one in written:
        writer.put(one)
    writer.close()
    acks = read_acks(tmp_path)
    for one in written:
        ack = acks[one.sample_key]
        back = read_sample(tmp_path, ack["shard"], ack["row_group"])
        assert torch.equal(back.states, one.states)
        assert back.token_ids == one.token_ids


def test_each_sample_is_a_row_group_of_its_own(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    for n in range(3):
        writer.put(sample(f"k{n}", 4))
    writer.close()
    (shard,) = tmp_path.glob("shard-*.parquet")
    assert pq.ParquetFile(shard).num_row_groups == 3
    assert [s.sample_key for s in read_shard(shard)] == ["k0", "k1", "k2"]


def test_an_idle_writer_acknowledges_without_being_closed(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, idle_s=0.01)
    writer.put(sample("k", 4))
    while not read_acks(tmp_path):
        pass
    writer.close()


def test_a_failing_disk_fails_the_next_sample_and_acknowledges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", no_space)
    writer = ShardWriter(tmp_path)
    writer.put(sample("k", 4))
    with pytest.raises(OSError, match="No space left"):
        writer.close()
    with pytest.raises(OSError, match="states writer stopped"):
        writer.put(sample("k2", 4))
    assert read_acks(tmp_path) == {}


def test_a_changed_byte_is_found(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    writer.put(sample("k", 64))
    writer.close()
    ack = read_acks(tmp_path)["k"]
    path = tmp_path / ack["shard"]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        read_sample(tmp_path, ack["shard"], 0)


def test_a_torn_acknowledgement_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "acks-x.jsonl").write_text('{"sample_key": "a", "shard": "s", "row_group": 0}\n{"sample_key": "b", "sh')
    assert list(read_acks(tmp_path)) == ["a"]
