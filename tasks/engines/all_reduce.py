"""Whether GPUs may reach each other, and custom all-reduce, which needs that: one rule for both engines."""

from __future__ import annotations

from tasks.engines.base import LaunchPlan


def peer_access_off(plan: LaunchPlan) -> bool:
    """Is peer access turned off, by a variable or by the NCCL profile?"""
    variables = {v.name: v.value for v in plan.arm.tuning.variables}
    named = plan.arm.tuning.nccl_profile in ("pcie-no-nvlink", "p2p-off")
    return named or (plan.env | variables).get("NCCL_P2P_DISABLE", "0") != "0"


def uses_custom_all_reduce(plan: LaunchPlan) -> bool | None:
    """What the launch asks for; None on one GPU and where nothing says that peers cannot reach each other."""
    tuning = plan.arm.tuning
    if tuning.tensor_parallel == 1:
        return None
    if tuning.custom_all_reduce is None and peer_access_off(plan):
        return False  # vLLM itself turns it off on PCIe above two GPUs only
    return tuning.custom_all_reduce
