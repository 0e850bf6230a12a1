"""A finished run whose tables lose a part says so; what is added, rewritten by us or older is read as before."""

from __future__ import annotations

import errno
import json
import tempfile
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from test_verdict import write_run

from flows.runs import recorded
from tasks.errors import InputError, StoreError
from tasks.report import comparison, read_run
from tasks.store import files
from tasks.store.inventory import remember_parts, require_parts
from tasks.store.tables import Store, find_run, rows_to_table, write_parquet
from tasks.verdict import verdict
from tests.unit.stub_kit import campaign


def part_of(store: Store, table: str, part: str) -> Path:
    return store.root / "tables" / table / f"run={store.run_id}" / f"{part}.parquet"


def finished(root: Path, number: int = 0, tok_s: float = 100) -> Store:
    store = write_run(root, number, tok_s)
    remember_parts(root, store.run_id)
    return store


def test_a_run_that_ends_has_its_parts_written_down_with_their_rows(tmp_path: Path) -> None:
    store = Store(tmp_path, "r")
    with recorded(campaign(), store):
        store.write("benchmarks", [{"arm": "a"}, {"arm": "b"}], "p")
        assert not (tmp_path / "runs" / "r" / "tables.json").exists()
    assert json.loads((tmp_path / "runs" / "r" / "tables.json").read_text()) == {"benchmarks/p": 2, "runs/run": 1}


@pytest.mark.parametrize("error", [None, StoreError, KeyboardInterrupt])
def test_a_retry_may_write_parts_anew_and_however_it_ends_the_list_is_the_last_one(
    tmp_path: Path, error: type[BaseException] | None
) -> None:
    store = Store(tmp_path, "r")
    with recorded(campaign(), store):
        store.write("benchmarks", [{"arm": "a"}, {"arm": "b"}], "p")
    with pytest.raises(error) if error else nullcontext(), recorded(campaign(), store):
        write_parquet(rows_to_table("benchmarks", [{"arm": "a"}]), part_of(store, "benchmarks", "p"))
        require_parts(tmp_path, "r")  # at work again: nothing is lost yet
        if error:
            raise error
    assert json.loads((tmp_path / "runs" / "r" / "tables.json").read_text())["benchmarks/p"] == 1
    require_parts(tmp_path, "r")


def test_a_part_that_was_lost_before_a_retry_is_missed_after_it_too(tmp_path: Path) -> None:
    store = Store(tmp_path, "r")
    with recorded(campaign(), store):
        store.write("benchmarks", [{"arm": "a"}], "p")
        store.write("benchmarks", [{"arm": "b"}], "q")
    part_of(store, "benchmarks", "p").unlink()
    part_of(store, "benchmarks", "q").unlink()
    with recorded(campaign(), store):
        store.write("benchmarks", [{"arm": "b"}], "q")  # made again, as a stage does that looks at its files
    with pytest.raises(StoreError, match=r"benchmarks/run=r/p.parquet: missing") as told:
        require_parts(tmp_path, "r")
    assert "q.parquet" not in str(told.value)
    assert not list(tmp_path.glob("runs/r/*before*"))


@pytest.mark.parametrize("damage", ["gone", "fewer rows", "no parquet"])
def test_a_lost_or_changed_part_is_named_to_report_compare_and_nightly(tmp_path: Path, damage: str) -> None:
    old, new = finished(tmp_path, 0), finished(tmp_path, 1)
    path = part_of(old, "benchmarks", "base")
    if damage == "gone":
        path.unlink()
    elif damage == "fewer rows":
        pq.write_table(pq.read_table(path).slice(0, 0), path)
    else:
        path.write_bytes(b"no parquet")
    for read in (lambda: read_run(old), lambda: comparison(new, old), lambda: verdict(old), lambda: verdict(new)):
        with pytest.raises(StoreError, match=r"benchmarks/run=run-00/base.parquet: .*campaign"):
            read()


def test_the_error_says_how_many_parts_are_lost_and_how_to_leave_the_run_out(tmp_path: Path) -> None:
    old, new = finished(tmp_path, 0), finished(tmp_path, 1)
    for table, part in (("benchmarks", "base"), ("acceptance", "spec"), ("servers", "base"), ("runs", "run")):
        part_of(old, table, part).unlink()
    with pytest.raises(StoreError, match=r"and 1 more; .*remove .*tables/runs/run=run-00") as told:
        require_parts(tmp_path, old.run_id)
    assert "\n" not in str(told.value)
    assert {row["verdict"] for row in verdict(new)} == {"not_enough_history"}  # its row is gone: it counts no more


def test_additions_rewrites_by_our_commands_and_runs_of_older_versions_are_no_loss(tmp_path: Path) -> None:
    store = finished(tmp_path)
    store.write("verdicts", [{"metric": "m"}], "verdict")
    store.write("servers", [{"arm": "base"}, {"arm": "base"}], "base")
    assert len(read_run(store)["servers"]) == 2
    part_of(store, "verdicts", "verdict").unlink()  # added later, so not missed
    read_run(store)
    part_of(store, "servers", "base").unlink()
    with pytest.raises(StoreError, match="ended with 2 rows"):
        read_run(store)
    older = write_run(tmp_path, 5, 100)
    part_of(older, "servers", "base").unlink()
    assert len(read_run(older)["benchmarks"]) == 1


def test_an_unreadable_list_is_one_clear_error(tmp_path: Path) -> None:
    store = finished(tmp_path)
    for text in ("{", "[]", '{"a/b": null}'):
        (tmp_path / "runs" / store.run_id / "tables.json").write_text(text)
        with pytest.raises(StoreError, match=r"tables.json: not a readable list"):
            read_run(store)


def uses(root: Path) -> list[Any]:
    store = Store(root, "r")
    return [
        lambda: store.write("stages", [{"stage": "a"}], "p"), lambda: store.run_dir, lambda: store.pool("k", "k"),
        lambda: store.new_artifact("k", "k", {}).__enter__(), lambda: files.require_writable(root),
        lambda: files.write_whole(root / "runs" / "x", "text"),
    ]


@pytest.mark.parametrize("place", ["file", "below a file", "/proc"])
def test_a_store_that_cannot_be_made_is_a_store_error_in_every_use(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    root = {"file": tmp_path / "file", "below a file": tmp_path / "file" / "store", "/proc": Path("/proc/store")}[place]
    reads = [lambda: find_run(root, "last"), lambda: Store(root, "r").read("runs")] if place != "/proc" else []
    for use in [*uses(root), *reads]:
        with pytest.raises(StoreError, match="--store or DRAFTHOUSE_STORE"):
            use()


def test_a_read_only_store_is_refused_and_a_new_one_is_not_made_by_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.require_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []

    def read_only(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    with pytest.raises(StoreError, match=r"cannot write \(Read-only file system\); choose a store"):
        files.require_writable(tmp_path)


def test_several_matching_runs_are_listed_and_not_the_newest_of_all(tmp_path: Path) -> None:
    for number, name in enumerate([*(f"mine-{i}" for i in range(7)), *(f"other-{i}" for i in range(6))]):
        moment = datetime(2026, 1, 1 + number, tzinfo=UTC)
        Store(tmp_path, name).write("runs", [{"run_id": name, "started_at": moment}], "run")
    with pytest.raises(InputError, match=r"run mine: several match; .*mine-2, .*mine-6 and 2 earlier ones$") as told:
        find_run(tmp_path, "mine")
    assert "other" not in str(told.value)
    with pytest.raises(InputError, match=r"run '': several match; .*other-5 and 8 earlier ones"):
        find_run(tmp_path, "")
    with pytest.raises(InputError, match=r"run x: not found; .* has .*other-5 and 8 earlier ones"):
        find_run(tmp_path, "x")
    assert find_run(tmp_path, "mine-3") == "mine-3"
