"""The final table of a run and the comparison of two, in a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_summary(console: Console, facts: dict[str, Any]) -> None:
    """Arms side by side: throughput, latency, acceptance served and replayed, losslessness."""
    table = Table(title=f"{facts['campaign']}: {facts['state']}")
    for column in ("arm", "workload", "C", "ok/failed", "output tok/s", "decode tok/s", "TTFT ms p50", "TPOT ms p50",
                   "accept length", "note"):
        table.add_column(column, justify="left" if column in ("arm", "workload", "note") else "right")
    lengths = {(r["arm"], r["workload"], r["concurrency"]): r["accept_length"] for r in facts["acceptance"]}
    for row in facts["benchmarks"]:
        length = lengths.get((row["arm"], row["workload"], row["concurrency"]))
        table.add_row(
            row["arm"], row["workload"], str(row["concurrency"]), f"{row['requests_ok']}/{row['requests_failed']}",
            _number(row["output_tok_s"], 1), _number(row["decode_tok_s"], 1), _number(row["ttft_ms_p50"], 1),
            _number(row["tpot_ms_p50"], 2), _number(length, 3), row["note"] or "",
        )
    console.print(table)
    for row in facts["replay"]:
        console.print(f"replayed {row['drafter']} on {row['workload']} ({row['auxiliary']} auxiliary states): "
                      f"accept length {_number(row['accept_length'], 3)}")
    for row in facts["losslessness"]:
        console.print(f"outputs of {row['arm']} against its base arm: {row['prompts']} {row['verdict']}")
    worst = [r["value"] for r in facts["alignment"] if r["check"] == "state_rel_error" and r["value"] is not None]
    if worst:
        console.print(f"captured states against the target: worst relative error {max(worst):.2g}")
    for row in facts["stages"]:
        if row["executed"] is not None and row["stage"] != "benchmark":
            console.print(f"{row['stage']} {row['arm'] or ''}: {row['executed']:.0f} done, {row['reused']:.0f} reused, "
                          f"{row['wall_s']:.1f} s", highlight=False)


def print_benchmarks(console: Console, rows: list[dict[str, Any]], title: str) -> None:
    """Measurements of one server."""
    table = Table("C", "ok/failed", "output tok/s", "decode tok/s", "TTFT ms p50", "TPOT ms p50", "note", title=title)
    for row in rows:
        table.add_row(
            str(row["concurrency"]), f"{row['requests_ok']}/{row['requests_failed']}", _number(row["output_tok_s"], 1),
            _number(row["decode_tok_s"], 1), _number(row["ttft_ms_p50"], 1), _number(row["tpot_ms_p50"], 2),
            row["note"] or "",
        )
    console.print(table)


def print_comparison(console: Console, rows: list[dict[str, Any]], a: str, b: str) -> None:
    """Metrics of two runs; no change is printed where the numbers must not be compared."""
    table = Table("arm", "workload", "C", "metric", a, b, "change", title="comparison")
    for row in rows:
        table.add_row(row["arm"], row["workload"], str(row["concurrency"]), row["metric"], _number(row["a"], 2),
                      _number(row["b"], 2), _change(row))
    console.print(table)


def print_clean(console: Console, rows: list[dict[str, Any]], *, dry_run: bool, everything: bool) -> None:
    """What clean did or would do with what is ours; files of others are only counted unless `everything`."""
    shown = [row for row in rows if everything or not _of_others(row)]
    table = Table("action", "kind", "what", "proof", "detail", title="dry run" if dry_run else "clean")
    for row in shown:
        table.add_row(*(escape(str(row[name] or "")) for name in ("action", "kind", "what", "proof", "detail")))
    if shown:
        console.print(table)
    else:
        console.print("nothing of ours" if rows else "nothing of ours, and nothing that looks like it")
    if left := len(rows) - len(shown):
        told = "entry of others" if left == 1 else "entries of others"
        console.print(f"{left} {told} left alone (--all lists them)", highlight=False)


def _of_others(row: dict[str, Any]) -> bool:
    """A file that nothing ties to us; leases and ports that were refused are ours to look at."""
    return bool(row["action"] == "refused" and row["proof"] == "none" and row["kind"] in ("shm", "lock"))


def _change(row: dict[str, Any]) -> str:
    if row["a"] is None or row["b"] is None:
        return "–"
    return "not comparable" if row["change_pct"] is None else f"{row['change_pct']:+.1f} %"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None or value != value else f"{value:.{digits}f}"
