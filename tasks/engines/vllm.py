"""Adapter of vLLM (0.26 on CUDA, 0.32 on CPUs): its command line, requests, counters and refusals."""

from __future__ import annotations

import json
import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from tasks.config import Device, EngineEnvironment, Role
from tasks.engines.all_reduce import uses_custom_all_reduce
from tasks.engines.base import Command, Completion, Engine, LaunchPlan, Observed, SpecCounters
from tasks.engines.http import ask, get_metrics
from tasks.engines.model_folder import drafter_ids, num_layers
from tasks.engines.prometheus import Sample, by_label, total
from tasks.engines.vllm_check import BLOCK_TOKENS, check_plan, environment
from tasks.engines.vllm_settings import effective_settings
from tasks.errors import CaptureLost, EngineError, NotSupported

SAMPLE_KEY = "drafthouse_sample_key"

# The log tells of loading in this order; shares of the start were seen on both devices.
PROGRESS: tuple[tuple[re.Pattern[str], float, float, str], ...] = tuple(
    (re.compile(pattern), start, width, what)
    for pattern, start, width, what in (
        (r"Initializing a V1 LLM engine", 0.15, 0.0, "starting the engine"),
        (r"(?:Starting to load|Loading) model", 0.25, 0.0, "loading weights"),
        (r"Loading safetensors checkpoint shards:\s+(\d+)% Completed", 0.25, 0.4, "loading weights"),
        (r"Loading weights took", 0.65, 0.0, "weights loaded"),
        (r"torch\.compile took", 0.75, 0.0, "compiling"),
        (r"KV cache size", 0.8, 0.0, "KV cache allocated"),
        (r"Capturing CUDA graphs[^:]*:\s+(\d+)%", 0.8, 0.15, "capturing CUDA graphs"),
        (r"Starting vLLM server on", 0.97, 0.0, "opening the port"),
        (r"Application startup complete", 1.0, 0.0, "up"),
    )
)


class VllmEngine(Engine):
    name: ClassVar[str] = "vllm"

    def check(self, plan: LaunchPlan) -> None:
        check_plan(plan)

    def command(self, plan: LaunchPlan) -> Command:
        tuning, target, cpu = plan.arm.tuning, plan.target, plan.machine.device is Device.cpu
        # The `vllm` command needs a distribution of that name, which the CPU build does not have.
        argv = [plan.python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        argv += ["--port", str(plan.port), "--model", target.model, "--served-model-name", target.name]
        argv += ["--dtype", target.dtype.value, "--max-model-len", str(target.max_model_len)]
        argv += ["--max-num-seqs", str(tuning.max_running_requests), "--enable-chunked-prefill"]
        argv += ["--tensor-parallel-size", str(tuning.tensor_parallel)]
        argv += ["--enable-prefix-caching" if tuning.prefix_cache else "--no-enable-prefix-caching"]
        argv += ["--disable-uvicorn-access-log"]
        if target.trust_remote_code:
            argv += ["--trust-remote-code"]
        if tuning.chunked_prefill_size is not None:
            argv += ["--max-num-batched-tokens", str(tuning.chunked_prefill_size)]
        if tuning.kv_cache_gib is not None:
            # VLLM_CPU_KVCACHE_SPACE takes whole GiB only.
            argv += ["--kv-cache-memory-bytes", str(int(tuning.kv_cache_gib * (1 << 30)))]
        if tuning.kv_tokens is not None:
            block = BLOCK_TOKENS[plan.machine.device]
            argv += ["--block-size", str(block), "--num-gpu-blocks-override", str(tuning.kv_tokens // block)]
        if tuning.memory_fraction is not None:
            argv += ["--gpu-memory-utilization", str(tuning.memory_fraction)]
        if tuning.attention_backend is not None:
            argv += ["--attention-backend", tuning.attention_backend.upper()]
        if cpu or tuning.cuda_graph is False:
            argv += ["--enforce-eager"]
        if cpu and tuning.tensor_parallel == 1:
            argv += ["--distributed-executor-backend", "uni"]  # see `_variables`
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
        return {name: str(value) for name, value in environment(where.python, where.pairs).items() if name != "folder"}

    def effective_settings(self, url: str, log: Path, plan: LaunchPlan) -> list[Observed]:
        return effective_settings(url, log, plan)

    def requested_settings(self, plan: LaunchPlan) -> dict[str, str]:
        tuning = plan.arm.tuning
        asked: dict[str, Any] = {
            "max_running_requests": tuning.max_running_requests, "prefix_cache": tuning.prefix_cache,
            "dtype": plan.target.dtype.value, "tensor_parallel": tuning.tensor_parallel,
            "kv_tokens": tuning.kv_tokens, "chunked_prefill_size": tuning.chunked_prefill_size,
            "attention_backend": tuning.attention_backend, "cuda_graph": tuning.cuda_graph,
            "custom_all_reduce": uses_custom_all_reduce(plan),
        }
        if plan.arm.speculative is not None:
            asked["speculative.method"] = "eagle3"
            asked["speculative.num_speculative_tokens"] = plan.arm.speculative.num_speculative_tokens
            ids = drafter_ids(plan)
            asked["speculative.points"] = ",".join(map(str, ids)) if ids else None
        if plan.arm.role is Role.extraction:
            asked["speculative.method"] = "extract_hidden_states"
            asked["capture.points"] = ",".join(map(str, captured_points(plan)))
        if plan.arm.role is Role.extraction or _mends_sampling(plan):
            asked["plugin"] = f"drafthouse {version('drafthouse')}"
        return {name: str(value).lower() for name, value in asked.items() if value is not None}

    def completion_body(
        self, model: str, token_ids: list[int], max_tokens: int, *, temperature: float = 0.0, top_p: float = 1.0,
        ignore_eos: bool = False, stream: bool = True, logprobs: bool = False, sample_key: str | None = None,
    ) -> dict[str, Any]:
        # A seed is never sent: on CPUs vLLM dies of one in a partial prefill.
        body: dict[str, Any] = {
            "model": model, "prompt": token_ids, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p,
            # Written out, since vLLM takes what a request leaves open from the model's generation_config.json.
            "top_k": -1, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "ignore_eos": ignore_eos, "stream": stream, "return_token_ids": True,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        if logprobs:
            body["logprobs"] = 0  # of the chosen token alone
        if sample_key is not None:
            body["kv_transfer_params"] = {SAMPLE_KEY: sample_key}
        return body

    def parse_completion(self, body: dict[str, Any]) -> Completion:
        """Raises CaptureLost when the capture plugin says that it stores nothing any more."""
        capture = (body.get("kv_transfer_params") or {}).get("drafthouse") or {}
        if "error" in capture:
            raise CaptureLost(f"vLLM's capture plugin stores no states: {capture['error']}")
        choice = body["choices"][0]
        if not isinstance(choice.get("token_ids"), list):
            raise EngineError("vLLM answered without token_ids; is it older than 0.26?")
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        return Completion(
            token_ids=choice["token_ids"], prompt_tokens=body["usage"]["prompt_tokens"],
            finish_reason=choice["finish_reason"], logprobs=logprobs, meta={"capture": capture} if capture else {},
        )

    def spec_counters(self, url: str) -> SpecCounters | None:
        return counters_from(get_metrics(url))

    def flush_cache(self, url: str) -> None:
        answer = ask("POST", url, "/reset_prefix_cache")
        if answer.status_code == 404:
            raise NotSupported("vLLM has no /reset_prefix_cache: start it with VLLM_SERVER_DEV_MODE=1")
        if answer.status_code != 200 or answer.json().get("success") is not True:
            raise EngineError("vLLM did not empty its prefix cache: requests still hold blocks; flush when idle")

    def running_requests(self, url: str) -> int | None:
        running = total(get_metrics(url), "vllm:num_requests_running")
        return None if running is None else round(running)

    def layer_ids(self, model_class: str, num_layers: int, points: tuple[int, ...]) -> list[int]:
        """vLLM's ids are Hugging Face hidden_states indices, for every model class (measured)."""
        if list(points) != sorted(set(points)) or not points or points[0] < 0 or points[-1] > num_layers:
            # vLLM sorts and drops duplicates: anything else would feed the fused layer in another order.
            raise NotSupported(f"points {list(points)}: vLLM needs ascending distinct indices from 0 to {num_layers}")
        return list(points)


def captured_points(plan: LaunchPlan) -> list[int]:
    """Indices in the order in which the shards hold them: the asked points and N, before the final norm."""
    return sorted({*plan.engine_points, num_layers(plan)})


def counters_from(samples: list[Sample]) -> SpecCounters | None:
    """Counters summed over the server's engines; what the server does not report stays None."""
    drafts = total(samples, "vllm:spec_decode_num_drafts_total")
    accepted = total(samples, "vllm:spec_decode_num_accepted_tokens_total")
    if drafts is None and accepted is None:
        return None
    positions = by_label(samples, "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
    try:
        per_position = tuple(round(positions[str(p)]) for p in range(len(positions)))
    except KeyError:
        per_position = ()  # a position is missing, so none can be trusted
    return SpecCounters(_count(drafts), _count(accepted), per_position)


def _count(value: float | None) -> int | None:
    return None if value is None else round(value)


def _mends_sampling(plan: LaunchPlan) -> bool:
    return plan.machine.device is Device.cpu and plan.arm.role is not Role.base


def _speculation(plan: LaunchPlan) -> list[str]:
    if plan.arm.role is Role.extraction:
        draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": captured_points(plan)}}
        method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": draft}
        transfer = {
            "kv_connector": "DrafthouseConnector", "kv_role": "kv_producer",
            "kv_connector_module_path": "tasks.engines.inside.vllm_connector",
            "kv_connector_extra_config": {"capture_dir": str(plan.capture_dir)},
        }
        return ["--speculative-config", json.dumps(method), "--kv-transfer-config", json.dumps(transfer)]
    if plan.arm.speculative is not None:
        method = {
            "method": "eagle3", "model": str(plan.drafter_dir),
            "num_speculative_tokens": plan.arm.speculative.num_speculative_tokens,
        }
        return ["--speculative-config", json.dumps(method)]
    return []


def _variables(plan: LaunchPlan) -> dict[str, str]:
    env = {
        "VLLM_PLUGINS": "drafthouse", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false",
        # Opens /server_info and /reset_prefix_cache; the server listens on the loopback only.
        "VLLM_SERVER_DEV_MODE": "1",
    }
    if plan.machine.device is Device.cpu:
        threads = plan.machine.cpu_threads or len(os.sched_getaffinity(0))
        # vLLM's own binding pins every server to the same first cores.
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        if plan.arm.tuning.tensor_parallel == 1:
            # Worker and engine core in one process: vLLM starts a worker on CPUs only to bind its threads,
            # and importing vLLM once more is a third of a start.
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        env |= {"DRAFTHOUSE_MEND_CPU_SAMPLING": "1" if _mends_sampling(plan) else "0"}
    elif plan.machine.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, plan.machine.gpus[: plan.arm.tuning.tensor_parallel]))
    return env
