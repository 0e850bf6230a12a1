"""A flow that only holds the lock of a GPU host: `python holder.py RUN_ID SECONDS`; prints when it got it."""

from __future__ import annotations

import sys
import time

from prefect import flow

from flows.lock import locked_host


@flow(name="holder")
def hold(run_id: str, seconds: float) -> None:
    with locked_host(run_id, ["cpu"]):
        print("held", time.time(), flush=True)
        time.sleep(seconds)


if __name__ == "__main__":
    hold(sys.argv[1], float(sys.argv[2]))
