"""What a running vLLM says of itself. A format that is not known yields nothing, never a guess.

What the log says it did outweighs what a configuration says it was told: vLLM changes its mind after
reading its configuration (graphs that a backend does not support, all-reduce without peer access).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.engines.base import LaunchPlan, Observed, Source
from tasks.engines.http import get_json, get_metrics
from tasks.engines.prometheus import Sample

REPORTED = (  # every canonical setting that gets a row, reported or not
    "engine_version", "dtype", "kv_dtype", "quantization", "tensor_parallel", "max_running_requests", "kv_tokens",
    "chunked_prefill_size", "prefix_cache", "attention_backend", "cuda_graph", "cuda_graph.sizes",
    "cuda_graph.max_batch", "custom_all_reduce", "nccl.version", "speculative.method",
    "speculative.num_speculative_tokens", "speculative.points", "plugin", "capture.points",
)
CAPTURE_PID = "capture.pid"


def effective_settings(url: str, log: Path, plan: LaunchPlan) -> list[Observed]:
    """One row per setting of `REPORTED`; raises ServerLost if the server does not answer."""
    info = get_json(url, "/server_info?config_format=json")
    told = get_json(url, "/version")
    seen = from_server_info(info, str(told["version"]) if "version" in told else None)
    with log.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        done = from_log(lines)
    return merged([*_capture_report(done, plan), *done, *from_metrics(get_metrics(url)), *seen])


def merged(observed: Iterable[Observed]) -> list[Observed]:
    """One row per setting: the first that is known wins, a later one that differs is named in its detail."""
    chosen: dict[str, Observed] = {}
    for row in observed:
        first = chosen.get(row.setting)
        if row.value is None:
            continue
        if first is None:
            chosen[row.setting] = row
        elif first.value != row.value:
            chosen[row.setting] = replace(first, detail=f"{first.detail}; {row.source} says {row.value}".strip("; "))
    missing = Observed("", "", None, "log", "not reported by this server")
    return [chosen.get(name, replace(missing, setting=name)) for name in REPORTED]


def _row(setting: str, engine_setting: str, value: Any, source: Source, detail: str = "") -> Observed:
    text = None if value is None else str(value).removeprefix("torch.").lower()
    return Observed(setting, engine_setting, text, source, detail)


def from_server_info(info: dict[str, Any], engine_version: str | None = None) -> list[Observed]:
    """Rows of GET /server_info?config_format=json (development mode) and GET /version."""
    config = info.get("vllm_config")
    parts = config if isinstance(config, dict) else {}

    def get(part: str, name: str) -> Any:
        section = parts.get(part)
        return section.get(name) if isinstance(section, dict) else None

    def row(setting: str, part: str, name: str) -> Observed:
        return _row(setting, f"{part}.{name}", get(part, name), "server_info")

    rows = [
        _row("engine_version", "version", engine_version, "server_info"),
        row("dtype", "model_config", "dtype"),
        row("tensor_parallel", "parallel_config", "tensor_parallel_size"),
        row("max_running_requests", "scheduler_config", "max_num_seqs"),
        row("prefix_cache", "cache_config", "enable_prefix_caching"),
        row("attention_backend", "attention_config", "backend"),
        row("speculative.method", "speculative_config", "method"),
        row("speculative.num_speculative_tokens", "speculative_config", "num_speculative_tokens"),
    ]
    if parts.get("model_config"):
        rows.append(_row("quantization", "model_config.quantization", get("model_config", "quantization") or "none",
                         "server_info"))
    if get("scheduler_config", "enable_chunked_prefill") is True:
        rows.append(row("chunked_prefill_size", "scheduler_config", "max_num_batched_tokens"))
    if get("model_config", "enforce_eager") is True:
        rows.append(_row("cuda_graph", "model_config.enforce_eager", False, "server_info"))
    if get("parallel_config", "disable_custom_all_reduce") is True:
        rows.append(_row("custom_all_reduce", "parallel_config.disable_custom_all_reduce", False, "server_info"))
    return rows


def from_metrics(samples: list[Sample]) -> list[Observed]:
    """Rows of the cache configuration in /metrics; engines of one server that differ report nothing."""
    rows = []
    series = [sample.labels for sample in samples if sample.name == "vllm:cache_config_info"]
    for setting, label in (("kv_tokens", "kv_cache_size_tokens"), ("prefix_cache", "enable_prefix_caching"),
                           ("kv_dtype", "cache_dtype")):
        values = {labels.get(label) for labels in series}
        value = values.pop() if len(values) == 1 else None
        rows.append(_row(setting, f"vllm:cache_config_info.{label}", None if value == "None" else value, "metrics"))
    return rows


@dataclass(frozen=True)
class _Line:
    """A log line that tells one setting; group 1 is the value unless `value` is given."""

    setting: str
    engine_setting: str
    pattern: re.Pattern[str]
    value: str | None = None


def _line(setting: str, engine_setting: str, pattern: str, value: str | None = None) -> _Line:
    return _Line(setting, engine_setting, re.compile(pattern), value)


_CONFIG = re.compile(r"Initializing a V1 LLM engine \(v[^)]+\) with config: ")
_DONE = (  # what vLLM did
    _line("attention_backend", "attention backend", r"Using (\w+) attention backend out of"),
    _line("cuda_graph", "graph capture", r"Graph capturing finished in", "true"),
    _line("custom_all_reduce", "custom all-reduce", r"Custom allreduce is disabled", "false"),
    _line("custom_all_reduce", "custom all-reduce", r"Registering \d+ cuda graph addresses", "true"),
    _line("nccl.version", "nccl", r"vLLM is using nccl==([\d.]+)"),
    _line("kv_tokens", "KV cache size", r"(?:GPU|CPU) KV cache size: ([\d,]+) tokens"),
    _line("chunked_prefill_size", "max_num_batched_tokens",
          r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)"),
    _line("speculative.points", "auxiliary layers",
          r"Using (?:Eagle3 )?auxiliary layers from (?:model|config|speculative config): \(([\d, ]+)\)"),
    _line("plugin", "drafthouse", r"(drafthouse) (?:plugin|capture) (\S+) is on"),
    _line("capture.points", "drafthouse", r"drafthouse capture \S+ is on: points \[([\d, ]+)\]"),
    _line(CAPTURE_PID, "drafthouse", r"drafthouse capture .* report capture-(\d+)\.json"),
)
_TOLD = (  # parts of the one line with vLLM's resolved configuration
    _line("engine_version", "config", r"Initializing a V1 LLM engine \(v([^)]+)\)"),
    _line("dtype", "config.dtype", r", dtype=torch\.(\w+)"),
    _line("tensor_parallel", "config.tensor_parallel_size", r", tensor_parallel_size=(\d+)"),
    _line("quantization", "config.quantization", r", quantization=(\w+)"),
    _line("kv_dtype", "config.kv_cache_dtype", r", kv_cache_dtype=(\w+)"),
    _line("prefix_cache", "config.enable_prefix_caching", r", enable_prefix_caching=(True|False)"),
    _line("cuda_graph", "config.enforce_eager", r", enforce_eager=True", "false"),
    _line("cuda_graph", "config.cudagraph_mode", r"'cudagraph_mode': <CUDAGraphMode\.NONE", "false"),
    _line("cuda_graph.max_batch", "config.max_cudagraph_capture_size", r"'max_cudagraph_capture_size': (\d+)"),
    _line("custom_all_reduce", "config.disable_custom_all_reduce", r", disable_custom_all_reduce=True", "false"),
    _line("speculative.method", "config.speculative_config", r"SpeculativeConfig\(method='(\w+)'"),
    _line("speculative.num_speculative_tokens", "config.speculative_config", r"num_spec_tokens=(\d+)\)"),
)
_GRAPHS = re.compile(r"Capturing CUDA graphs \((?:mixed prefill-decode, |decode, )?(\w+)\): +100%\|[^|]*\| (\d+)/(\d+)")


def from_log(lines: Iterable[str]) -> list[Observed]:
    """Rows of a server's log: what it did first, then what its configuration line says."""
    done: list[Observed] = []
    told: list[Observed] = []
    graphs: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        for pattern in _DONE:
            if found := pattern.pattern.search(line):
                done.append(_seen(pattern, found, number))
        if _CONFIG.search(line):
            matches = [(pattern, pattern.pattern.search(line)) for pattern in _TOLD]
            told += [_seen(pattern, match, number) for pattern, match in matches if match]
        if graph := _GRAPHS.search(line):
            graphs.setdefault(graph[1].lower(), graph[3])
    if graphs:
        sizes = ", ".join(f"{count} {kind}" for kind, count in graphs.items())
        done.append(_row("cuda_graph.sizes", "captured sizes", sizes, "log"))
    return [*done, *told]


def _seen(line: _Line, found: re.Match[str], number: int) -> Observed:
    value = line.value or " ".join(found.groups())
    if line.setting in ("kv_tokens", "speculative.points", "capture.points"):
        value = value.replace(" ", "") if line.setting != "kv_tokens" else value.replace(",", "")
        value = value.strip(",")
    return _row(line.setting, line.engine_setting, value, "log", f"log line {number}")


def _capture_report(seen: list[Observed], plan: LaunchPlan) -> list[Observed]:
    """The plugin's own report beside the shards, of the process that this log names."""
    pids = [int(row.value) for row in seen if row.setting == CAPTURE_PID and row.value]
    if plan.capture_dir is None or not pids:
        return []
    file = plan.capture_dir / f"capture-{pids[-1]}.json"
    try:
        report = json.loads(file.read_text())
        points, name = ",".join(map(str, report["points"])), f"{report['plugin']} {report['version']}"
        detail = f"{file.name}: hooks {','.join(report['hooks'])}, {report['dtype']}"
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [
        _row("plugin", "drafthouse", name, "probe", detail),
        _row("capture.points", "drafthouse", points, "probe", detail),
    ]
