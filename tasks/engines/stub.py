"""Adapter of the stub engine: a whole campaign in seconds, without vLLM or SGLang.

Its server (tasks/load/mock_server.py) computes a tiny Llama in numpy in the orchestrator's own
environment; `fault` of its arm makes it fail in one known way (tasks.config.StubFault).
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import requests

from tasks.config import Dtype, EngineEnvironment
from tasks.engines.base import Command, Completion, Engine, LaunchPlan, Observed, SpecCounters
from tasks.engines.prometheus import by_label, scrape, total
from tasks.errors import EngineError, NotSupported

SERVER = "tasks.load.mock_server"
VERSION = "1"  # of what the stub computes and counts; part of its states' key


class StubEngine(Engine):
    """See the module's text."""

    name: ClassVar[str] = "stub"

    def check(self, plan: LaunchPlan) -> None:
        """Refuses anything but a plain Llama in float32 on one device."""
        try:
            config = json.loads((Path(plan.target.model) / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise NotSupported(f"target.model: {plan.target.model}: no readable config.json ({error})") from error
        if config.get("model_type") != "llama":
            raise NotSupported(
                f"target.model: the stub engine computes plain Llama models, not {config.get('model_type')}; "
                "set the arm's engine to vllm or sglang"
            )
        if plan.target.dtype is not Dtype.float32:
            raise NotSupported(f"target.dtype: the stub engine computes in float32, not {plan.target.dtype}")
        if plan.arm.tuning.tensor_parallel != 1:
            raise NotSupported(f"arms.{plan.arm.name}.tuning.tensor_parallel: the stub engine has one process, set 1")
        if plan.arm.speculative is not None:
            folder = plan.drafter_dir
            if folder is None or not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
                raise NotSupported(f"arms.{plan.arm.name}: no drafter (config.json, *.safetensors) in {folder}")

    def command(self, plan: LaunchPlan) -> Command:
        """The mock server in the interpreter of the plan."""
        tuning, spec = plan.arm.tuning, plan.arm.speculative
        argv = [
            plan.python, "-m", SERVER, "--model", plan.target.model, "--served-name", plan.target.name,
            "--port", str(plan.port), "--max-running-requests", str(tuning.max_running_requests),
        ]
        if tuning.attention_backend is not None:
            argv += ["--attention-backend", tuning.attention_backend]
        if tuning.prefix_cache:
            argv += ["--prefix-cache"]
        if spec is not None:
            argv += ["--num-speculative-tokens", str(spec.num_speculative_tokens)]
        if plan.capture_dir is not None:
            argv += ["--capture-dir", str(plan.capture_dir), "--points", *map(str, plan.engine_points)]
        if plan.arm.fault is not None:
            argv += ["--fault", plan.arm.fault]
        # One thread: matrices this small lose by more, and the cores belong to the stages.
        return Command((*argv, *tuning.extra_args), {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})

    def load_progress(self, line: str) -> tuple[float, str] | None:
        """Two steps: loading and loaded."""
        if "loaded 100%" in line:
            return 1.0, "loaded"
        return (0.0, "loading") if line.startswith("stub engine: loading") else None

    def versions(self, where: EngineEnvironment) -> dict[str, str]:
        """The stub runs in the orchestrator's environment, so `where` is this one."""
        return {"stub": VERSION, "numpy": version("numpy"), "plugin": VERSION}

    def effective_settings(self, url: str, log: Path, plan: LaunchPlan) -> list[Observed]:
        """From /server_info."""
        info = _get(f"{url}/server_info").json()
        found = [
            Observed(setting, setting, _text(info.get(setting)), "server_info")
            for setting in ("attention_backend", "max_running_requests", "prefix_cache", "dtype", "tensor_parallel")
        ]
        if plan.arm.speculative is not None:
            k = _text(info.get("num_speculative_tokens"))
            found.append(Observed("speculative.num_speculative_tokens", "num_speculative_tokens", k, "server_info"))
        return found

    def requested_settings(self, plan: LaunchPlan) -> dict[str, str]:
        """What the command asks for."""
        tuning, spec = plan.arm.tuning, plan.arm.speculative
        asked = {
            "attention_backend": tuning.attention_backend, "max_running_requests": tuning.max_running_requests,
            "prefix_cache": tuning.prefix_cache, "dtype": plan.target.dtype.value, "tensor_parallel": 1,
            "speculative.num_speculative_tokens": spec.num_speculative_tokens if spec else None,
        }
        return {setting: _text(value) or "" for setting, value in asked.items() if value is not None}

    def completion_body(
        self, model: str, token_ids: list[int], max_tokens: int, *, temperature: float = 0.0, top_p: float = 1.0,
        ignore_eos: bool = False, stream: bool = True, logprobs: bool = False, sample_key: str | None = None,
    ) -> dict[str, Any]:
        """vLLM's dialect; `sample_key` has the prompt's states written."""
        body: dict[str, Any] = {
            "model": model, "prompt": token_ids, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p,
            "ignore_eos": ignore_eos, "stream": stream, "return_token_ids": True,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        if logprobs:
            body["logprobs"] = 0
        if sample_key is not None:
            body["sample_key"] = sample_key
        return body

    def parse_completion(self, body: dict[str, Any]) -> Completion:
        """Raises EngineError for an error body."""
        if "choices" not in body:
            raise EngineError(f"stub engine: {body.get('error', body)}")
        choice = body["choices"][0]
        return Completion(
            list(choice["token_ids"]), body["usage"]["prompt_tokens"], choice["finish_reason"],
            list(choice["logprobs"]["token_logprobs"]),
        )

    def spec_counters(self, url: str) -> SpecCounters | None:
        """vLLM's counters."""
        samples = scrape(url)
        drafts = total(samples, "vllm:spec_decode_num_drafts_total")
        accepted = total(samples, "vllm:spec_decode_num_accepted_tokens_total")
        if drafts is None or accepted is None:
            return None
        positions = by_label(samples, "vllm:spec_decode_num_accepted_tokens_per_pos_total", "position")
        per_position = tuple(int(positions[p]) for p in sorted(positions, key=int))
        return SpecCounters(int(drafts), int(accepted), per_position)

    def cache_counters(self, url: str) -> tuple[int, int] | None:
        """Prompt tokens looked up and found in the prefix cache."""
        samples = scrape(url)
        looked_up, found = (total(samples, f"vllm:prefix_cache_{n}_total") for n in ("queries", "hits"))
        return None if looked_up is None or found is None else (int(looked_up), int(found))

    def flush_cache(self, url: str) -> None:
        """Empty the played prefix cache."""
        with requests.Session() as session:
            session.trust_env = False
            session.post(f"{url}/reset_prefix_cache", timeout=10).raise_for_status()

    def running_requests(self, url: str) -> int | None:
        """From /metrics."""
        value = total(scrape(url), "vllm:num_requests_running")
        return None if value is None else int(value)

    def layer_ids(self, model_class: str, num_layers: int, points: tuple[int, ...]) -> list[int]:
        """hidden_states indices as they are."""
        if len(set(points)) != len(points) or not all(0 <= p <= num_layers for p in points):
            raise NotSupported(f"drafter.points: {list(points)} must be distinct and within 0..{num_layers}")
        return sorted(points)


def _get(url: str) -> requests.Response:
    with requests.Session() as session:
        session.trust_env = False
        response = session.get(url, timeout=10)
    response.raise_for_status()
    return response


def _text(value: Any) -> str | None:
    return str(value).lower() if isinstance(value, bool) else None if value is None else str(value)
