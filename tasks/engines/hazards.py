"""What follows from a server's effective settings for the loads that it is about to get.

Nothing here was asked for and refused, so nothing stops; but a number that is measured under one of these means
something else than its column says. Each hazard is a row of table `servers` with status `hazard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tasks.config import Campaign, Role, WorkloadKind
from tasks.engines.base import LaunchPlan, Observed
from tasks.engines.settings import same, strongest


def hazards(observed: Sequence[Observed], plan: LaunchPlan, campaign: Campaign) -> list[dict[str, Any]]:
    """Rows of table `servers` (setting `hazard.<name>`), each with what will suffer and what to set."""
    facts = strongest(observed)
    found: list[tuple[str, str, str]] = []  # name, effective value, what it means
    measured = () if plan.arm.role is Role.extraction else campaign.workloads
    most = max((c for w in measured for c in w.concurrencies), default=0)
    numbers = ("max_running_requests", "kv_tokens", "cuda_graph.max_batch")
    cap, tokens, largest = (_number(facts.get(name)) for name in numbers)
    if cap is not None and cap < most:
        found.append(("running_requests", str(cap), f"{most} requests in flight will wait for {cap} places; set "
                      "tuning.max_running_requests, equal in all arms (speculation lowers it by itself)"))
    if largest is not None and facts.get("cuda_graph") == "true" and largest < min(most, cap or most):
        found.append(("graph_size", str(largest), f"batches above {largest} run without CUDA graphs, and up to "
                      f"{most} requests are measured: expect a step in the curve"))
    for workload in measured:
        prompt = workload.input_tokens if workload.kind is WorkloadKind.random else campaign.prompts.max_prompt_tokens
        longest = min(prompt + workload.output_tokens, campaign.target.max_model_len)
        needed = longest * min(max(workload.concurrencies), cap or max(workload.concurrencies))
        if tokens is not None and tokens < needed:
            found.append(("kv_tokens", str(tokens), f"{workload.name} may hold {needed} tokens at once: requests will "
                          "be preempted or wait; set tuning.kv_tokens or lower the concurrency"))
            break
    if facts.get("prefix_cache") == "true" and any(w.kind is WorkloadKind.random for w in measured):
        found.append(("prefix_cache", "true", "random prompts repeat between measurements and may be found in the "
                      "cache; set tuning.prefix_cache to false or watch benchmarks.prefix_hit_share"))
    if plan.arm.role is Role.extraction and facts.get("cuda_graph.prefill") == "true":
        found.append(("capture", "true", "prefill runs in CUDA graphs, where hooks see nothing: no state may arrive"))
    for setting, claims in _contradictions(observed).items():
        found.append((f"contradiction.{setting}", facts[setting], f"{setting}: {claims}; the stronger source is used"))
    return [
        {"setting": f"hazard.{name}", "engine_setting": name, "effective": value, "source": "probe",
         "status": "hazard", "detail": detail}
        for name, value, detail in found
    ]


def _contradictions(observed: Sequence[Observed]) -> dict[str, str]:
    """Settings about which the server says two things."""
    said: dict[str, list[Observed]] = {}
    for o in observed:
        if o.value is not None:
            said.setdefault(o.setting, []).append(o)
    return {
        setting: " but ".join(f"{o.source} says {o.value}" for o in rows)
        for setting, rows in said.items()
        if any(not same(rows[0].value or "", o.value or "") for o in rows[1:])
    }


def _number(value: str | None) -> int | None:
    return int(value) if value is not None and value.isdigit() else None
