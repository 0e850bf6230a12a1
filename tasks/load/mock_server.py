"""The stub engine's server: OpenAI-style completions of a tiny Llama, computed in numpy.

    python -m tasks.load.mock_server --model DIR --served-name NAME --port PORT [--fault NAME]

Answers and hidden states are the model's own, so align, training and replay work on them as on a real
engine's. Speculation is played: the answer is cut into chunks by acceptance rates that a real server once
counted (mock_model.ACCEPT_RATES), and the counters on /metrics follow in vLLM's format; no drafter is ever loaded.
There is no tokenizer: prompts are token ids and the text of a token is its number.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from aiohttp import web

from tasks.config import StubFault
from tasks.load.mock_model import Answers
from tasks.load.tiny_forward import TinyLlama

BLOCK: Final = 16  # tokens per block of the played prefix cache


class StubServer:
    """State of the one model that is served."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.fault = options, StubFault(options.fault) if options.fault else None
        self.started = time.monotonic()
        self.model = TinyLlama(Path(options.model))
        self.answers = Answers(self.model, options.num_speculative_tokens, self.fault)
        cap = 2 if self.fault is StubFault.capped else options.max_running_requests
        self.cap, self.slots, self.running, self.streams = cap, asyncio.Semaphore(cap), 0, 0
        self.cached_blocks: set[tuple[int, ...]] = set()
        self.looked_up = self.found = 0
        self.prefix_cache = options.prefix_cache or self.fault is StubFault.cached_suffix
        self.writer: Any = None
        if options.capture_dir:
            from tasks.store.states import ShardWriter  # imports torch: seconds, and only needed here

            self.writer = ShardWriter(Path(options.capture_dir), idle_s=0.05)

    # states and prefix cache ------------------------------------------------------------------

    def look_up(self, prompt: tuple[int, ...]) -> int:
        """Prompt tokens that the prefix cache holds; the prompt's blocks are in it from now on."""
        if not self.prefix_cache:
            return 0
        prefixes = [prompt[:end] for end in range(BLOCK, len(prompt), BLOCK)]
        hit = BLOCK * sum(p in self.cached_blocks for p in prefixes)
        self.cached_blocks.update(prefixes)
        self.looked_up, self.found = self.looked_up + len(prompt), self.found + hit
        return hit

    async def capture(self, prompt: tuple[int, ...], sample_key: str, cached: int) -> None:
        """Queue the prompt's states; raises OSError as a full disk would."""
        if self.fault is StubFault.writer_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.fault is StubFault.extract:
            return
        import torch

        from tasks.store.states import Sample

        states, last = self.answers.greedy(prompt).prompt_states, self.model.layers
        shift = 1 if self.fault is StubFault.align else 0
        points = sorted({*self.options.points, last})
        stacked = np.stack([states[min(p + shift, last)] for p in points], axis=1)  # [tokens, points, width]
        sample = Sample(sample_key, list(prompt), torch.from_numpy(stacked[cached:]), points)
        await asyncio.to_thread(self.writer.put, sample)

    # HTTP ---------------------------------------------------------------------------------------

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._up_for(self.options.healthy_after_s) else 503)

    def _up_for(self, seconds: float) -> bool:
        return time.monotonic() - self.started >= seconds

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.options.served_name, "object": "model"}]})

    async def server_info(self, _: web.Request) -> web.Response:
        backend = "triton" if self.fault is StubFault.settings else self.options.attention_backend
        return web.json_response(
            {"attention_backend": backend, "max_running_requests": self.cap, "prefix_cache": self.prefix_cache,
             "dtype": "float32", "tensor_parallel": 1, "num_speculative_tokens": self.options.num_speculative_tokens,
             "points": list(self.options.points)}
        )

    async def reset(self, _: web.Request) -> web.Response:
        self.cached_blocks.clear()
        return web.Response()

    async def metrics(self, _: web.Request) -> web.Response:
        labels = f'engine="0",model_name="{self.options.served_name}"'
        values = {"num_requests_running": self.running, "prefix_cache_queries_total": self.looked_up,
                  "prefix_cache_hits_total": self.found}
        lines = [f"vllm:{name}{{{labels}}} {float(value)}" for name, value in values.items()]
        if self.options.num_speculative_tokens and self.fault is not StubFault.no_counters:
            counted = {"drafts": self.answers.drafts, "draft_tokens": self.answers.drafts * self.answers.k,
                       "accepted_tokens": self.answers.accepted}
            lines += [f"vllm:spec_decode_num_{n}_total{{{labels}}} {float(v)}" for n, v in counted.items()]
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{name}{{{labels},position="{i}"}} {float(v)}' for i, v in enumerate(self.answers.per_position)]
        return web.Response(text="\n".join(lines) + "\n")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not prompt or not all(isinstance(i, int) for i in prompt):
            return error(400, "prompt: the stub engine takes a list of token ids")
        if not self._up_for(self.options.generates_after_s):
            return error(503, "the model is not ready")
        if body.get("stream") and self.options.broken_while and Path(self.options.broken_while).exists():
            return error(500, f"broken while {self.options.broken_while} exists")
        fails = self.fault is (StubFault.benchmark if body.get("stream") else StubFault.regenerate)
        if fails and body["max_tokens"] > 1 and not body.get("sample_key"):
            return error(500, "the stub engine plays a fault here")
        ids = tuple(prompt)
        async with self.slots:
            self.running += 1
            try:
                cached = self.look_up(ids)
                if body.get("sample_key") and self.writer is not None:
                    await self.capture(ids, str(body["sample_key"]), cached)
                if body.get("stream"):
                    response: web.StreamResponse = await self._stream(request, ids, body, cached)
                else:
                    response = web.json_response(self._whole(ids, body, cached))
                self._note(ids, body)
                return response
            except OSError as failed:
                return error(500, f"states were not written: {failed}")
            finally:
                self.running -= 1

    def _note(self, prompt: tuple[int, ...], body: dict[str, Any]) -> None:
        """A line per answered request in the journal, so that a test can count what was really done."""
        if self.options.journal:
            facts = {"at": time.time(), "prompt": prompt, "logprobs": "logprobs" in body,
                     "stream": bool(body.get("stream")), "sample_key": body.get("sample_key")}
            with Path(self.options.journal).open("a") as stream:
                stream.write(json.dumps(facts) + "\n")

    def _usage(self, prompt: tuple[int, ...], completion: int, cached: int) -> dict[str, Any]:
        extra = 2 if self.fault is StubFault.template else 0
        return {"prompt_tokens": len(prompt) + extra, "completion_tokens": completion,
                "total_tokens": len(prompt) + extra + completion, "prompt_tokens_details": {"cached_tokens": cached}}

    def _choice(self, ids: list[int], finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": "".join(f"<{i}>" for i in ids), "token_ids": ids, "finish_reason": finish}

    def _whole(self, prompt: tuple[int, ...], body: dict[str, Any], cached: int) -> dict[str, Any]:
        answer = [] if self.fault is StubFault.silent else list(self.answers.tokens(prompt, body))
        ids = [token for token, _ in answer]
        choice = self._choice(ids, self.answers.finish_reason(ids, len(ids), body) or "stop")
        return {"object": "text_completion", "model": self.options.served_name,
                "choices": [{**choice, "logprobs": {"token_logprobs": [logprob for _, logprob in answer]}}],
                "usage": self._usage(prompt, len(ids), cached)}

    async def _stream(
        self, request: web.Request, prompt: tuple[int, ...], body: dict[str, Any], cached: int
    ) -> web.StreamResponse:
        self.streams += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.fault is StubFault.silent:
            await asyncio.sleep(3600)
        cut = self.fault is StubFault.cut and self.streams % 3 == 0
        if self.fault is StubFault.dies and self.streams >= 20:
            os._exit(3)
        async for event in self._events(prompt, body, cached, cut):
            await response.write(f"data: {event}\n\n".encode())
            await asyncio.sleep(self.options.step_s)
        return response

    async def _events(
        self, prompt: tuple[int, ...], body: dict[str, Any], cached: int, cut: bool
    ) -> AsyncIterator[str]:
        sent = 0
        for ids, finish in self.answers.chunks(prompt, body):
            sent += len(ids)
            yield json.dumps({"object": "text_completion", "choices": [self._choice(ids, None if cut else finish)]})
            if cut and sent > body["max_tokens"] // 2:
                break
        if cut:
            return
        yield json.dumps({"object": "text_completion", "choices": [], "usage": self._usage(prompt, sent, cached)})
        yield "[DONE]"

    async def close(self, _: web.Application) -> None:
        if self.writer is not None:
            await asyncio.to_thread(self.writer.close)


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def application(options: argparse.Namespace) -> web.Application:
    """The server with all its routes."""
    server = StubServer(options)
    app = web.Application(client_max_size=64 << 20)
    app.add_routes(
        [web.get("/health", server.health), web.get("/v1/models", server.models), web.get("/metrics", server.metrics),
         web.get("/server_info", server.server_info), web.post("/reset_prefix_cache", server.reset),
         web.post("/v1/completions", server.completions)]
    )
    app.on_cleanup.append(server.close)
    return app


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the tiny Llama")
    parser.add_argument("--served-name", default="target")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--attention-backend", default="numpy")
    parser.add_argument("--max-running-requests", type=int, default=32)
    parser.add_argument("--prefix-cache", action="store_true")
    parser.add_argument("--num-speculative-tokens", type=int, default=0)
    parser.add_argument("--capture-dir", help="folder that states are written to")
    parser.add_argument("--points", type=int, nargs="*", default=[], help="hidden_states indices to capture")
    parser.add_argument("--healthy-after-s", type=float, default=0.1, help="/health answers 503 until then")
    parser.add_argument("--generates-after-s", type=float, default=0.2, help="completions answer 503 until then")
    parser.add_argument("--step-s", type=float, default=0.0, help="pause after each chunk of a stream")
    parser.add_argument("--journal", help="file that gets a line per answered request")
    parser.add_argument("--broken-while", help="file while which exists streamed requests are answered 500")
    parser.add_argument("--fault", choices=[f.value for f in StubFault])
    return parser.parse_args(arguments)


def main() -> None:
    """Serve until SIGTERM."""
    options = parse()
    print(f"stub engine: loading {options.model}", flush=True)
    if options.fault == StubFault.launch:
        raise SystemExit("stub engine: out of memory while loading weights (a fault that was asked for)")
    app = application(options)
    print("stub engine: loaded 100%", flush=True)
    web.run_app(app, host=options.host, port=options.port, print=None, access_log=None, shutdown_timeout=1.0)


if __name__ == "__main__":
    main()
