"""What a running SGLang says of itself. A format that is not known yields nothing, never a guess.

/server_info may repeat what was asked for after a fallback, so every fact that the log tells as well
is read there too, and tasks/engines/settings.py lets the log decide.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tasks.config import Role
from tasks.engines.base import LaunchPlan, Observed, Source
from tasks.engines.http import get_json
from tasks.errors import SettingsMismatch

# Samplers, grammars and MoE runners fall back as well, in the same words.
_ATTENTION = "triton|flashinfer|fa3|fa4|flashmla|cutlass_mla|trtllm_m[lh]a|torch_native|flex_attention|intel_amx|aiter"
_LINES: tuple[tuple[str, re.Pattern[str], str | None], ...] = tuple(
    # setting, pattern, value (None = group 1); a later line of a setting overrules an earlier one
    (setting, re.compile(pattern), value)
    for setting, pattern, value in (
        ("attention_backend", r"Attention backend not specified\. Use (\w+) backend by default", None),
        ("attention_backend", r"Using (\w+) as attention backend for", None),
        ("attention_backend", rf"(?i)fall(?:ing|s)? ?back to (?:the )?({_ATTENTION})(?: attention)? backend", None),
        ("max_running_requests", r"Max running requests is reset to (\d+) for speculative", None),
        ("max_running_requests", r"max_total_num_tokens=.*max_running_requests=(\d+)", None),
        ("kv_tokens", r"max_total_num_tokens=(\d+)", None),
        ("chunked_prefill_size", r"max_total_num_tokens=.*chunked_prefill_size=(-?\d+)", None),
        ("kv_dtype", r"KV Cache is allocated\. dtype: torch\.(\w+)", None),
        ("cuda_graph", r"(?i)cuda graph is disabled because", "false"),
        ("cuda_graph", r"Capture (?:target )?(?:decode|verify) CUDA graph end", "true"),
        ("cuda_graph.max_batch", r"Capture (?:target )?(?:decode|verify) CUDA graph begin.* bs=\[.*?(\d+)\]", None),
        ("cuda_graph.prefill", r"Disable (?:target )?prefill CUDA graph because", "false"),
        ("cuda_graph.prefill", r"Capture (?:target )?prefill CUDA graph end", "true"),
        ("custom_all_reduce", r"(?i)custom all-?reduce is disabled", "false"),
        ("plugin", r"(drafthouse) capture (\S+) is on", None),
        ("capture.points", r"drafthouse capture \S+ is on: points \[([\d, ]+)\]", None),
        ("capture.pid", r"drafthouse capture .* report capture-(\d+)\.json", None),
    )
)


def effective_settings(url: str, log: Path, plan: LaunchPlan) -> list[Observed]:
    """Rows of /server_info, of the log and of the capture plugin's report.

    Raises ServerLost if the server does not answer, SettingsMismatch for an extraction server on which
    the capture is not in force.
    """
    info = get_json(url, "/server_info")
    with log.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        told = from_log(lines)
    rows = [*from_server_info(info), *told]
    if plan.arm.role is Role.extraction:
        rows += capture_report(told, plan, log)
    return [row for row in rows if row.setting != "capture.pid"]


def from_server_info(info: dict[str, Any]) -> list[Observed]:
    """Rows of GET /server_info."""

    def row(setting: str, key: str, value: Any) -> Observed:
        text = None if value is None or value == "auto" else str(value).removeprefix("torch.").lower()
        return Observed(setting, key, text, "server_info")

    def opposite(key: str) -> bool | None:
        return not info[key] if isinstance(info.get(key), bool) else None

    graphs = info.get("cuda_graph_config")
    graphs = graphs if isinstance(graphs, dict) else {}

    def graph(phase: str) -> bool | None:
        backend = (graphs.get(phase) or {}).get("backend")
        return None if backend is None else backend != "disabled"

    # `disable_cuda_graph` stays false however graphs were turned off, so it is not read. And graphs that are
    # configured are not graphs that were captured: that only the log tells.
    decode, prefill = graph("decode"), graph("prefill")
    tensor_parallel = info.get("tp_size")
    algorithm = info.get("speculative_algorithm")
    rows = [
        row("engine_version", "version", info.get("version")),
        row("dtype", "dtype", info.get("dtype")),
        row("tensor_parallel", "tp_size", tensor_parallel),
        row("max_running_requests", "max_running_requests", info.get("max_running_requests")),
        row("kv_tokens", "max_total_num_tokens", info.get("max_total_num_tokens")),
        row("chunked_prefill_size", "chunked_prefill_size", info.get("chunked_prefill_size")),
        row("prefix_cache", "disable_radix_cache", opposite("disable_radix_cache")),
        row("attention_backend", "attention_backend", info.get("attention_backend")),
        row("quantization", "quantization", info.get("quantization") or "none"),
        row("cuda_graph", "cuda_graph_config.decode.backend", decode),
        row("cuda_graph.max_batch", "cuda_graph_config.decode.max_bs", (graphs.get("decode") or {}).get("max_bs")),
        row("cuda_graph.prefill", "cuda_graph_config.prefill.backend", prefill),
        row("speculative.method", "speculative_algorithm", algorithm),
    ]
    if tensor_parallel is not None and tensor_parallel != 1:
        rows.append(row("custom_all_reduce", "disable_custom_all_reduce", opposite("disable_custom_all_reduce")))
    if algorithm is not None:
        rows += [
            row("speculative.num_speculative_tokens", "speculative_num_steps", info.get("speculative_num_steps")),
            row("speculative.topk", "speculative_eagle_topk", info.get("speculative_eagle_topk")),
        ]
    return rows


def from_log(lines: Iterable[str]) -> list[Observed]:
    """The last fact that the log tells of each setting."""
    found: dict[str, Observed] = {}
    for number, line in enumerate(lines, 1):
        if "server_args=" in line:
            continue  # what was asked for
        for setting, pattern, value in _LINES:
            if match := pattern.search(line):
                text = value or " ".join(match.groups()).lower()
                text = text.replace(" ", "") if setting == "capture.points" else text
                found[setting] = Observed(setting, "log", text, "log", f"log line {number}")
    return list(found.values())


def capture_report(told: list[Observed], plan: LaunchPlan, log: Path) -> list[Observed]:
    """The plugin's own report, of the process that this log names.

    Raises SettingsMismatch if there is none, or a hook of it did not take: such a server would be healthy
    and capture nothing.
    """
    pids = [row.value for row in told if row.setting == "capture.pid"]
    if plan.capture_dir is None or not pids:
        raise SettingsMismatch(
            f"plugin: drafthouse's capture never said in {log} that it is on; look there for errors of the plugin"
        )
    file = plan.capture_dir / f"capture-{pids[-1]}.json"
    try:
        report = json.loads(file.read_text())
        points, plugin = ",".join(map(str, report["points"])), f"{report['plugin']} {report['version']}"
        hooks: dict[str, bool] = report["hooks"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsMismatch(f"plugin: no readable report {file} ({error}); is the folder writable?") from error
    missing = sorted(name for name, took in hooks.items() if not took)
    if missing or not hooks:
        raise SettingsMismatch(f"plugin: hooks did not take: {', '.join(missing) or 'none reported'}; see {log}")
    probe: Source = "probe"
    detail = f"{file.name}: {len(hooks)} hooks took, {report.get('dtype')}"
    return [
        Observed("plugin", "drafthouse", plugin, probe, detail),
        Observed("capture.points", "drafthouse", points, probe, detail),
    ]
