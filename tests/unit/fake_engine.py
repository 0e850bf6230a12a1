"""A small HTTP engine for tests of the stages that ask one: its answers and states come from the reference.

Everything around it is real: HTTP, the shard writer, the store. `fault` makes it lie or fail as engines do.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import torch

from tasks import reference
from tasks.campaign_file import parse_campaign
from tasks.config import Arm, Campaign, EngineEnvironment
from tasks.engines.base import Command, Completion, Engine, LaunchPlan, Observed, SpecCounters
from tasks.store.states import Sample, ShardWriter

VERSIONS = {"vllm": "1.0", "torch": "2.0", "plugin": "0.1.0"}


class FakeEngine(Engine):
    """Speaks a dialect of its own, so that nothing in a stage can rely on one engine's."""

    name = "vllm"
    endpoint = "/answer"
    versions_now: ClassVar[dict[str, str]] = dict(VERSIONS)

    def completion_body(
        self, model: str, token_ids: list[int], max_tokens: int, *, temperature: float = 0.0, top_p: float = 1.0,
        ignore_eos: bool = False, stream: bool = True, logprobs: bool = False, sample_key: str | None = None,
    ) -> dict[str, Any]:
        assert not stream
        return {"ids": token_ids, "n": max_tokens, "logprobs": logprobs, "key": sample_key}

    def parse_completion(self, body: dict[str, Any]) -> Completion:
        return Completion(body["out"], body["prompt_tokens"], body["why"], body["logprobs"])

    def versions(self, where: EngineEnvironment) -> dict[str, str]:
        return dict(self.versions_now)

    def check(self, plan: LaunchPlan) -> None: ...
    def command(self, plan: LaunchPlan) -> Command: ...
    def load_progress(self, line: str) -> None: ...
    def effective_settings(self, url: str, log: Path, plan: LaunchPlan) -> list[Observed]: ...
    def requested_settings(self, plan: LaunchPlan) -> dict[str, str]: ...
    def spec_counters(self, url: str) -> SpecCounters | None: ...
    def flush_cache(self, url: str) -> None: ...
    def running_requests(self, url: str) -> int | None: ...
    def layer_ids(self, model_class: str, num_layers: int, points: tuple[int, ...]) -> list[int]: ...


class FakeServer:
    """The lazy handle of such an engine: `starts` counts first uses, `requests` counts POSTs."""

    def __init__(
        self, model: Path, arm: Arm, capture_dir: Path | None = None, points: tuple[int, ...] = (), fault: str = ""
    ) -> None:
        self.model, self.arm, self.points, self.fault = model, arm, points, fault
        self.starts = self.requests = 0
        self.asked: list[list[int]] = []
        self._capture_dir, self._http = capture_dir, None
        self._writer: ShardWriter | None = None
        self._lock = threading.Lock()
        self._previous: Sample | None = None

    def url(self) -> str:
        if self._http is None:
            self.starts += 1
            if self._capture_dir is not None:
                self._writer = ShardWriter(self._capture_dir, idle_s=0.05)
            self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
            self._http.daemon_threads = True
            threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def stop(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
        if self._writer is not None:
            self._writer.close()

    def answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self._lock:
            self.requests += 1
            self.asked.append(body["ids"])
            if self.fault.startswith("503 until ") and self.requests <= int(self.fault.split()[-1]):
                return 503, {"error": "busy"}
            if self.fault == "400 for the third" and self.asked.index(body["ids"]) == 2:
                return 400, {"error": "too long"}
            if self.fault.startswith("dies after ") and self.requests > int(self.fault.split()[-1]):
                threading.Thread(target=self._die, daemon=True).start()
                return 0, {}
            if body["key"] is not None:
                self._capture(body["ids"], body["key"])
            out, logprobs = self._generate(body["ids"], body["n"])
        prompt_tokens = len(body["ids"]) + (self.fault == "second BOS")
        return 200, {"out": out, "logprobs": logprobs, "why": "length", "prompt_tokens": prompt_tokens}

    def _die(self) -> None:
        assert self._http is not None
        self._http.shutdown()
        self._http.server_close()

    def _generate(self, ids: list[int], count: int) -> tuple[list[int], list[float]]:
        out: list[int] = []
        logprobs: list[float] = []
        last = reference.num_layers(self.model)
        while len(out) < count:
            states = reference.layer_states(self.model, [ids + out], [last], threads=1)[0][-1:, 0]
            scores = reference.logits(self.model, states)[0].log_softmax(-1)
            chosen = random.randrange(3, len(scores)) if self.fault.startswith("garbage") else int(scores.argmax())
            if self.fault == "empty" and len(self.asked) == 2:
                break
            out.append(chosen)
            logprobs.append(-0.5 if self.fault == "garbage, vouched for" else float(scores[chosen]))
        return out, logprobs

    def _capture(self, ids: list[int], key: str) -> None:
        assert self._writer is not None
        if self.fault == "drops" or (self.fault == "drops once" and self.asked.count(ids) == 1 and len(ids) % 2):
            return
        points, last = list(self.points), max(self.points)
        shift = 1 if self.fault == "layers + 1" else -1 if self.fault == "layers - 1" else 0
        taken = [p if p == last else p + shift for p in points]
        states = reference.layer_states(self.model, [ids], taken, threads=1)[0].clone()
        if self.fault == "after the norm":
            states[:, -1] = reference.after_norm(self.model, states[:, -1])
        if self.fault == "suffix only" or (self.fault == "suffix once" and self.asked.count(ids) == 1):
            states = states[len(ids) // 2 :]
        if self.fault == "suffix padded":
            states[: len(ids) // 2] = 0
        if self.fault == "not finite":
            states[3, 1, 5] = float("nan")
        if self.fault == "rows + 1":
            states = states.roll(-1, dims=0)
        if self.fault == "half garbage":
            states[len(ids) // 2 + 1 :] = torch.randn_like(states[len(ids) // 2 + 1 :])
        if self.fault == "drifted":
            states *= 1.01
        tokens, sample = list(ids), Sample(key, list(ids), states, points)
        if self.fault == "wrong tokens":
            tokens[-1] += 1
        if self.fault == "wrong points":
            points = [p + 1 for p in points]
        if self.fault == "states of another" and self._previous is not None and not key.startswith("probe"):
            rows = torch.arange(len(ids)) % len(self._previous.token_ids)
            states = self._previous.states[rows]
        self._previous = sample
        if states.shape[0] != len(tokens):
            tokens = tokens[-states.shape[0] :]
        self._writer.put(Sample(key, tokens, states, points))


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            status, answer = server.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if not status:
                self.close_connection = True
                return
            payload = json.dumps(answer).encode()
            with suppress(ConnectionError):  # a client that was cancelled
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

        def log_message(self, *_: object) -> None: ...

    return Handler


@contextmanager
def serving(server: FakeServer) -> Iterator[FakeServer]:
    try:
        yield server
    finally:
        server.stop()


def campaign_of(model: Path, prompts: Path, **changes: Any) -> Campaign:
    """A campaign on the tiny target: one base and one extraction arm, short greedy responses."""
    data: dict[str, Any] = {
        "name": "test", "target": {"model": str(model)},
        "arms": [
            {"name": "base", "engine": "vllm", "role": "base"},
            {"name": "extraction", "engine": "vllm", "role": "extraction"},
        ],
        "workloads": [{"name": "load"}],
        "prompts": {"train_file": str(prompts), "heldout_file": str(prompts), "train_samples": 6},
        "sampling": {"max_tokens": 4, "concurrency": 4},
        "drafter": {"points": [1, 2, 3]},
        "machine": {"cpu_threads": 1, "environments": [{"name": "vllm-cpu", "python": "/nowhere/python"}]},
    }
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        here = data
        for step in parents:
            here = here.setdefault(step, {})
        here[last] = value
    return parse_campaign(data)
