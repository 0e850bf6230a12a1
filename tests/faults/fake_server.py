"""A small server that misbehaves on request; run as a program, so that its processes are real.

    python fake_server.py PORT [--health-after S] [--token-after S] [--exit-after S CODE] [--double-fork]
                          [--ignore-term] [--segment NAME] [--scrub] [--children N]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--health-after", type=float, default=0.0)
    parser.add_argument("--token-after", type=float, default=0.0)
    parser.add_argument("--exit-after", type=float)
    parser.add_argument("--exit-code", type=int, default=1)
    parser.add_argument("--double-fork", action="store_true")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--segment")
    parser.add_argument("--lock")
    parser.add_argument("--scrub", action="store_true", help="lose the markers, as a process title does")
    parser.add_argument("--children", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.scrub and "DRAFTHOUSE_RUN" in os.environ:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTHOUSE_")}
        os.execve(sys.executable, [sys.executable, *sys.argv], clean)
    if arguments.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if arguments.double_fork:
        if os.fork():
            time.sleep(1e9)  # the visible parent stays until it is told to go
        os.setsid()
        if os.fork():
            os._exit(0)
    for _ in range(arguments.children):
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1e9)"
        subprocess.Popen([sys.executable, "-c", deaf])
    held = []
    if arguments.segment:
        handle = os.open(f"/dev/shm/{arguments.segment}", os.O_CREAT | os.O_RDWR, 0o600)
        os.ftruncate(handle, 1 << 20)
        held.append(mmap.mmap(handle, 1 << 20))
        os.close(handle)
    if arguments.lock:
        held.append(os.open(arguments.lock, os.O_CREAT | os.O_RDWR, 0o600))
    print(f"fake server pid {os.getpid()} on port {arguments.port}", flush=True)
    if arguments.exit_after is not None:
        def leave() -> None:
            time.sleep(arguments.exit_after)
            print("CUDA error: something went wrong", flush=True)
            os._exit(arguments.exit_code)
        threading.Thread(target=leave, daemon=True).start()
    serve(arguments)


def serve(arguments: argparse.Namespace) -> None:
    born = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def answer(self, status: int, body: object) -> None:
            payload = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def do_GET(self) -> None:
            late = self.path == "/health" and time.monotonic() - born < arguments.health_after
            self.answer(503 if late else 200, {})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            while time.monotonic() - born < arguments.token_after:
                time.sleep(0.05)
            choice = {"text": "x", "token_ids": [7], "finish_reason": "length"}
            self.answer(200, {"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
