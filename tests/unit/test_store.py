"""Tables and artifacts: nothing half-written is visible, nothing is silently lost or mistyped."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.errors import ArtifactDamaged, SchemaMismatch, StoreError
from tasks.store import keys, tables
from tasks.store.schemas import TABLES
from tasks.store.tables import Store, safe_name, write_parquet


def acceptance(length: float | None) -> dict[str, object]:
    return {"arm": "spec", "workload": "w", "accept_length": length, "reason": None if length else "not reported"}


def test_three_nights_read_as_one_table_though_the_first_has_no_accept_length(tmp_path: Path) -> None:
    for night, length in (("n1", None), ("n2", 2.7), ("n3", 3.0)):
        Store(tmp_path, night).write("acceptance", [acceptance(length)], "part")
    lengths = Store(tmp_path, "reader").read("acceptance").to_pandas().sort_values("run")["accept_length"].tolist()
    assert lengths[1:] == [2.7, 3.0]
    assert pd.isna(lengths[0])


def test_a_whole_number_does_not_change_a_real_column(tmp_path: Path) -> None:
    Store(tmp_path, "n1").write("benchmarks", [{"arm": "a", "output_tok_s": 100}], "p")
    Store(tmp_path, "n2").write("benchmarks", [{"arm": "a", "output_tok_s": 100.5}], "p")
    assert sorted(Store(tmp_path, "r").read("benchmarks").column("output_tok_s").to_pylist()) == [100.0, 100.5]


def test_a_key_missing_from_the_first_row_is_kept(store: Store) -> None:
    store.write("requests", [{"arm": "a"}, {"arm": "b", "ttft_ms": 3.5}], "p")
    assert store.read("requests").column("ttft_ms").to_pylist() == [None, 3.5]


def test_an_unknown_column_is_an_error_and_not_dropped(store: Store) -> None:
    with pytest.raises(StoreError, match="acceptance: no column accept_lenght"):
        store.write("acceptance", [{"accept_lenght": 2.0}], "p")


def test_a_column_that_an_older_file_lacks_reads_as_null(store: Store) -> None:
    old = tables.rows_to_table("stages", [{"stage": "clean", "arm": "a"}]).drop_columns(["cpu_s"])
    path = store.root / "tables" / "stages" / "run=old" / "p.parquet"
    write_parquet(old, path)
    assert store.read("stages").column("cpu_s").to_pylist() == [None]


def test_a_table_of_a_newer_schema_is_refused(store: Store) -> None:
    newer = tables.rows_to_table("stages", [{"stage": "clean"}]).replace_schema_metadata({"drafthouse_schema": "99"})
    write_parquet(newer, store.root / "tables" / "stages" / "run=new" / "p.parquet")
    with pytest.raises(SchemaMismatch, match="schema 99"):
        store.read("stages")


def test_pandas_duckdb_and_pyarrow_read_the_same_rows_of_every_table(store: Store) -> None:
    for name in TABLES:
        store.write(name, [{TABLES[name].names[0]: "x"}], "p")
        pattern = f"{store.root}/tables/{name}/*/*.parquet"
        by_duckdb = duckdb.sql(f"select * from read_parquet('{pattern}', hive_partitioning=true)").fetchall()
        by_pandas = pd.read_parquet(store.root / "tables" / name)
        assert len(by_duckdb) == len(by_pandas) == store.read(name).num_rows == 1


def test_times_are_utc_microseconds(store: Store) -> None:
    moment = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
    store.write("stages", [{"stage": "s", "started_at": moment}], "p")
    assert store.read("stages").column("started_at").to_pylist() == [moment]


def test_writing_a_part_again_replaces_it(store: Store) -> None:
    store.write("stages", [{"stage": "a"}], "p")
    store.write("stages", [{"stage": "b"}], "p")
    assert store.read("stages").column("stage").to_pylist() == ["b"]


def test_a_full_disk_leaves_no_file_and_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", no_space)
    with pytest.raises(StoreError, match="No space left on device"):
        store.write("stages", [{"stage": "a"}], "p")
    assert not list(store.root.rglob("*.parquet"))


def test_big_nested_rows_are_split_into_readable_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROW_GROUP_BYTES", 1000)
    table = pa.table({"t": pa.array([[{"s": "x" * 400}]] * 20)})
    write_parquet(table, tmp_path / "big.parquet")
    assert pq.ParquetFile(tmp_path / "big.parquet").num_row_groups >= 8


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "a\n", "x" * 300])
def test_names_that_could_leave_the_folder_are_refused(name: str) -> None:
    with pytest.raises(StoreError):
        safe_name(name)


def test_an_artifact_appears_only_when_its_block_succeeds(store: Store) -> None:
    with pytest.raises(RuntimeError), store.new_artifact("responses", "k", {}) as folder:
        (folder / "x").write_text("half")
        raise RuntimeError
    assert store.manifest("responses", "k") is None
    assert not list((store.root / "objects" / "responses").iterdir())


def test_an_artifact_whose_file_was_deleted_or_changed_is_not_reused(store: Store) -> None:
    for damage in ("delete", "change"):
        with store.new_artifact("states", damage, {"inputs": 1}) as folder:
            (folder / "index").write_text("rows")
        assert store.manifest("states", damage) is not None
        path = store.artifact("states", damage) / "index"
        path.unlink() if damage == "delete" else path.write_text("other")
        assert store.manifest("states", damage) is None
        with pytest.raises(ArtifactDamaged, match="index"):
            store.require("states", damage)


def test_an_artifact_of_a_newer_schema_is_refused(store: Store) -> None:
    with store.new_artifact("states", "k", {}) as folder:
        (folder / "f").write_text("x")
    path = store.artifact("states", "k") / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
    with pytest.raises(SchemaMismatch):
        store.require("states", "k")


def test_keys_depend_on_content_and_not_on_paths(tmp_path: Path) -> None:
    fingerprints = []
    for folder, weights in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(weights)
        fingerprints.append(keys.weights_fingerprint(tmp_path / folder))
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_key_order_of_a_dict_does_not_matter_and_list_order_does() -> None:
    assert keys.content_key({"a": 1, "b": 2}) == keys.content_key({"b": 2, "a": 1})
    assert keys.content_key([1, 2]) != keys.content_key([2, 1])
