"""Adapter of SGLang (0.5.16 on CUDA, 0.5.23 on CPUs): its command line, requests, facts and refusals.

Requests go to SGLang's own /generate: it takes and returns token ids in both versions, which its
/v1/completions does not in 0.5.16.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, ClassVar

import requests

from tasks.config import Device, EngineEnvironment, Role
from tasks.engines.all_reduce import uses_custom_all_reduce
from tasks.engines.base import Command, Completion, Engine, LaunchPlan, Observed, SpecCounters
from tasks.engines.http import TIMEOUT_S, ask, get_metrics
from tasks.engines.inside.sglang_plugin import CAPTURE_DIR, CAPTURE_POINTS, CAPTURE_VERSION, PLATFORM, SAMPLE_KEY
from tasks.engines.prometheus import by_label, total
from tasks.engines.sglang_check import capture_points, check_plan, environment, kv_tokens, layer_ids
from tasks.engines.sglang_settings import effective_settings
from tasks.errors import CaptureLost, EngineError

# The log tells of loading in this order; shares of the start were seen on both devices.
PROGRESS: tuple[tuple[re.Pattern[str], float, float, str], ...] = tuple(
    (re.compile(pattern), start, width, what)
    for pattern, start, width, what in (
        (r"server_args=", 0.1, 0.0, "starting the processes"),
        (r"Init torch distributed begin", 0.2, 0.0, "connecting the ranks"),
        (r"Load weight begin", 0.25, 0.0, "loading weights"),
        (r"shards:\s+(\d+)% Completed", 0.25, 0.4, "loading weights"),
        (r"Load weight end", 0.65, 0.0, "weights loaded"),
        (r"KV Cache is allocated", 0.7, 0.0, "KV cache allocated"),
        (r"Capture .*CUDA graph begin", 0.75, 0.0, "capturing CUDA graphs"),
        (r"Capturing (?:num tokens|batches).*:\s+(\d+)%", 0.75, 0.2, "capturing CUDA graphs"),
        (r"Uvicorn running on", 0.97, 0.0, "opening the port"),
        (r"The server is fired up and ready to roll", 1.0, 0.0, "up"),
    )
)


class SglangEngine(Engine):
    name: ClassVar[str] = "sglang"
    endpoint: ClassVar[str] = "/generate"

    def check(self, plan: LaunchPlan) -> None:
        check_plan(plan)

    def command(self, plan: LaunchPlan) -> Command:
        tuning, target, cpu = plan.arm.tuning, plan.target, plan.machine.device is Device.cpu
        argv = [plan.python, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(plan.port)]
        argv += ["--model-path", target.model, "--served-model-name", target.name, "--dtype", target.dtype.value]
        argv += ["--context-length", str(target.max_model_len), "--tp-size", str(tuning.tensor_parallel)]
        # With speculation SGLang would otherwise lower this cap to 48 by itself.
        argv += ["--max-running-requests", str(tuning.max_running_requests), "--enable-metrics"]
        if target.trust_remote_code:
            argv += ["--trust-remote-code"]
        if not tuning.prefix_cache:
            argv += ["--disable-radix-cache"]
        if tuning.chunked_prefill_size is not None:
            argv += ["--chunked-prefill-size", str(tuning.chunked_prefill_size)]
        if (tokens := kv_tokens(plan)) is not None:
            argv += ["--max-total-tokens", str(tokens)]
        if tuning.memory_fraction is not None:
            # SGLang's is a share of what is free when it starts, ours (and vLLM's) of the whole card.
            argv += ["--mem-fraction-static", f"{tuning.memory_fraction / (1 - plan.memory_taken):.4g}"]
        if cpu or plan.arm.side_by_side:
            argv += ["--sleep-on-idle"]  # its scheduler would spin on a core beside what is being measured
        if cpu:
            argv += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        elif tuning.attention_backend is not None:
            argv += ["--attention-backend", tuning.attention_backend]
        if tuning.cuda_graph is False and not cpu:
            argv += ["--cuda-graph-backend-decode", "disabled"]
        if not cpu and (tuning.cuda_graph is False or plan.arm.role is Role.extraction):
            # Inside a prefill graph no Python runs, so nothing would be captured while the server is healthy.
            argv += ["--cuda-graph-backend-prefill", "disabled"]
        if uses_custom_all_reduce(plan) is False:
            argv += ["--disable-custom-all-reduce"]
        argv += _speculation(plan) + list(tuning.extra_args)
        return Command(tuple(argv), _variables(plan))

    def load_progress(self, line: str) -> tuple[float, str] | None:
        for pattern, start, width, what in PROGRESS:
            if found := pattern.search(line):
                return start + width * (int(found[1]) / 100 if found.groups() else 0.0), what
        return None

    def versions(self, where: EngineEnvironment) -> dict[str, str]:
        found = environment(where.python, where.pairs)
        return {name: value for name, value in found.items() if name not in ("folder", "platforms")}

    def effective_settings(self, url: str, log: Path, plan: LaunchPlan) -> list[Observed]:
        return effective_settings(url, log, plan)

    def requested_settings(self, plan: LaunchPlan) -> dict[str, str]:
        tuning, cpu = plan.arm.tuning, plan.machine.device is Device.cpu
        asked: dict[str, Any] = {
            "max_running_requests": tuning.max_running_requests, "prefix_cache": tuning.prefix_cache,
            "dtype": plan.target.dtype.value, "tensor_parallel": tuning.tensor_parallel, "kv_tokens": kv_tokens(plan),
            "chunked_prefill_size": tuning.chunked_prefill_size,
            "attention_backend": "torch_native" if cpu else tuning.attention_backend,
            "cuda_graph": tuning.cuda_graph, "custom_all_reduce": uses_custom_all_reduce(plan),
        }
        if plan.arm.speculative is not None:
            asked["speculative.method"] = "eagle3"
            asked["speculative.num_speculative_tokens"] = plan.arm.speculative.num_speculative_tokens
            asked["speculative.topk"] = 1
        if plan.arm.role is Role.extraction:
            asked["capture.points"] = ",".join(map(str, capture_points(plan)))
            asked["plugin"] = f"drafthouse {CAPTURE_VERSION}"
            asked["cuda_graph.prefill"] = False
        return {name: str(value).lower() for name, value in asked.items() if value is not None}

    def completion_body(
        self, model: str, token_ids: list[int], max_tokens: int, *, temperature: float = 0.0, top_p: float = 1.0,
        ignore_eos: bool = False, stream: bool = True, logprobs: bool = False, sample_key: str | None = None,
    ) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "temperature": temperature, "top_p": top_p, "max_new_tokens": max_tokens, "ignore_eos": ignore_eos,
            # Written out, since SGLang takes what a request leaves open from the model's generation_config.json.
            "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        }
        if sample_key is not None:
            sampling["custom_params"] = {SAMPLE_KEY: sample_key}
        return {"input_ids": token_ids, "sampling_params": sampling, "stream": stream, "return_logprob": logprobs}

    def parse_completion(self, body: dict[str, Any]) -> Completion:
        """Raises CaptureLost when the capture plugin failed this request, EngineError for other aborts."""
        if "error" in body or "meta_info" not in body:
            raise EngineError(f"SGLang answered {str(body.get('error', body))[:300]}")
        meta = body["meta_info"]
        reason = meta["finish_reason"] or {}
        if reason.get("type") == "abort":
            message = str(reason.get("message", "aborted"))
            raise (CaptureLost if message.startswith("hidden states:") else EngineError)(f"SGLang: {message}")
        logprobs = [chosen[0] for chosen in meta.get("output_token_logprobs") or []]
        return Completion(
            token_ids=body["output_ids"], prompt_tokens=meta["prompt_tokens"], finish_reason=str(reason.get("type")),
            logprobs=logprobs, meta={"speculative": self.chunk_spec(body)} if self.chunk_spec(body) else {},
        )

    def spec_counters(self, url: str) -> SpecCounters | None:
        return None  # the gauges of /metrics are those of the last log line, not totals

    def as_completion_chunk(self, chunk: dict[str, Any], tokens_before: int) -> dict[str, Any]:
        if "error" in chunk or "meta_info" not in chunk:
            return chunk
        meta = chunk["meta_info"]
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            return {"error": {"message": str(reason.get("message", "aborted")), "type": "abort"}}
        usage = {name: meta[name] for name in ("prompt_tokens", "completion_tokens") if name in meta}
        new = chunk["output_ids"][tokens_before:]  # a chunk repeats the answer from its start
        choice = {"index": 0, "text": "", "token_ids": new, "finish_reason": reason.get("type")}
        return {"choices": [choice], "usage": usage}

    def chunk_spec(self, chunk: dict[str, Any]) -> dict[str, Any] | None:
        """From meta_info: a server that drafted nothing for this request, or does not say, gives None."""
        meta = chunk.get("meta_info") or {}
        drafts, accepted = meta.get("spec_verify_ct"), meta.get("spec_num_correct_drafts")
        if not drafts or accepted is None:
            return None
        facts: dict[str, Any] = {"drafts": int(drafts), "accepted": int(accepted)}
        if meta.get("spec_accept_length") is not None:
            facts["accept_length"] = float(meta["spec_accept_length"])
        histogram, proposed = meta.get("spec_correct_drafts_histogram"), meta.get("spec_num_proposed_drafts")
        if histogram and proposed and sum(histogram) == drafts:
            # histogram[j] = steps with exactly j accepted drafts, cut after the last that occurred
            facts["per_position"] = [sum(histogram[i + 1 :]) for i in range(int(proposed) // int(drafts))]
        return facts

    def cache_counters(self, url: str) -> tuple[int, int] | None:
        samples = get_metrics(url)
        prompt = total(samples, "sglang:prompt_tokens_total")
        computed = total(samples, "sglang:uncached_prompt_tokens_histogram_sum")
        return None if prompt is None or computed is None else (round(prompt), round(prompt - computed))

    def flush_cache(self, url: str) -> None:
        answer: requests.Response = ask("POST", url, f"/flush_cache?timeout={TIMEOUT_S / 2:g}")
        if answer.status_code != 200:
            raise EngineError("SGLang did not empty its cache: requests are still running; flush when idle")

    def running_requests(self, url: str) -> int | None:
        ranks = by_label(get_metrics(url), "sglang:num_running_reqs", "tp_rank")
        return round(ranks[min(ranks)]) if ranks else None  # every rank reports the same requests

    def layer_ids(self, model_class: str, num_layers: int, points: tuple[int, ...]) -> list[int]:
        return layer_ids(model_class, num_layers, points)


def _speculation(plan: LaunchPlan) -> list[str]:
    if plan.arm.speculative is None:
        return []
    steps = plan.arm.speculative.num_speculative_tokens
    return [
        "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(plan.drafter_dir),
        # One chain of k drafts; SGLang counts the token that starts it among the draft tokens.
        "--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(steps + 1),
    ]


def _variables(plan: LaunchPlan) -> dict[str, str]:
    env = {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false",
    }
    if plan.machine.device is Device.cpu:
        threads = plan.machine.cpu_threads or len(os.sched_getaffinity(0))
        env |= {"SGLANG_PLATFORM": PLATFORM, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads)}
    elif plan.machine.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, plan.machine.gpus[: plan.arm.tuning.tensor_parallel]))
    if plan.arm.role is Role.extraction:
        env |= {CAPTURE_DIR: str(plan.capture_dir), CAPTURE_POINTS: ",".join(map(str, capture_points(plan)))}
    return env
