"""What clean and doctor cost on a host with 2,000 processes and 500 segments.

    python tests/bench/clean_doctor.py [--processes 2000] [--segments 500] [--rounds 5]

Writes tests/bench/results/clean_doctor.json. Starts sleeping processes and small segments of its own and
removes them; half of the segments are recorded by a dead lease and held open by the processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from tasks.clean import clean_host
from tasks.machine import doctor
from tasks.machine.leases import Lease, state_dir, write_lease
from tasks.machine.processes import Identity, boot_id
from tasks.machine.shm import FileId

RESULTS = Path(__file__).parent / "results" / "clean_doctor.json"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2000)
    parser.add_argument("--segments", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    children: list[subprocess.Popen[bytes]] = []
    paths = [Path("/dev/shm", f"psm_dhbench{os.getpid()}_{i}") for i in range(wanted.segments)]
    with tempfile.TemporaryDirectory() as home:
        os.environ["XDG_STATE_HOME"] = home
        try:
            for path in paths:
                path.write_bytes(b"\0" * 4096)
            handles = [os.open(path, os.O_RDONLY) for path in paths[: wanted.segments // 2]]
            for i in range(wanted.processes):
                held = [handles[i % len(handles)]]
                children.append(subprocess.Popen(["/bin/sleep", "600"], pass_fds=held))
            for handle in handles:
                os.close(handle)
            measure(wanted, paths)
        finally:
            for child in children:
                child.kill()
            for child in children:
                child.wait()
            for path in paths:
                path.unlink(missing_ok=True)


def measure(wanted: argparse.Namespace, paths: list[Path]) -> None:
    dead = Identity(2**22 + 1, 5)
    lease = Lease(
        "b" * 16, "bench", "base", boot_id(), socket.gethostname(), os.geteuid(), dead, dead, dead, dead.pid, ["x"], "",
        time.time(), segments=[FileId(str(p), p.stat().st_ino) for p in paths[: len(paths) // 2]],
    )
    write_lease(lease, state_dir())
    rows = [
        row("clean_s", lambda: clean_host(grace_s=1.0), wanted.rounds),
        row("clean_dry_run_s", lambda: clean_host(dry_run=True), wanted.rounds),
        row("doctor_s", lambda: doctor.lines(doctor.examine()), wanted.rounds),
    ]
    facts = {
        "command": f"python tests/bench/clean_doctor.py --processes {wanted.processes} --segments {wanted.segments}",
        "device": f"{os.cpu_count()} CPU cores, {platform.machine()}, {len(os.listdir('/proc'))} entries in /proc",
        "versions": {"python": platform.python_version(), "linux": platform.release()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps([r | facts for r in rows], indent=1) + "\n")
    for r in rows:
        print(f"{r['metric']:20} {r['value']} {r['unit']} {r['spread']}")


def row(metric: str, work: Callable[[], object], rounds: int) -> dict[str, object]:
    took = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    spread = {"min": round(min(took), 3), "max": round(max(took), 3), "rounds": rounds}
    return {"metric": metric, "value": round(statistics.median(took), 3), "unit": "s", "spread": spread}


if __name__ == "__main__":
    main()
