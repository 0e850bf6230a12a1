"""vLLM general plugin: mends sampling in speculative modes on CPUs. Runs in every process of the server.

vLLM's CPU stand-in for the kernel `expand_kernel` converts its output to a copy in int64 and writes to
that copy, so that temperatures, top-k and top-p of a batch never arrive: every speculative mode then
samples noise at temperature > 0. The mend uses vLLM's own registry for kernel overrides and is proven
by numbers on both sides: it refuses to start where the function is gone or already right.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import version
from typing import Any

import torch

SWITCH = "DRAFTHOUSE_MEND_CPU_SAMPLING"
KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"
logger = logging.getLogger("vllm.drafthouse")
_waiting: list[bool] = []


def register() -> None:
    """Entry point `vllm.general_plugins`; does nothing unless the server was started with a switch."""
    if os.environ.get("DRAFTHOUSE_PROBE_DIR"):
        from tasks.engines.inside import vllm_probe

        vllm_probe.install()
    if os.environ.get(SWITCH) != "1" or _waiting:
        return
    from vllm.platforms.cpu import CpuPlatform

    overrides = CpuPlatform.register_triton_kernel_overrides
    _waiting.append(True)

    def overrides_and_mend(platform: Any) -> None:
        overrides()
        mend()

    # The kernel's stand-ins are registered by each worker, after plugins were loaded.
    CpuPlatform.register_triton_kernel_overrides = classmethod(overrides_and_mend)


def mend() -> None:
    """Replace the stand-in of `expand_kernel`; raises RuntimeError if that is impossible or not needed."""
    from vllm.triton_utils.dispatcher import register_kernels

    if expands_rightly():
        raise RuntimeError(f"drafthouse: this vLLM samples rightly on CPUs; start it without {SWITCH}")
    register_kernels({KERNEL: expand})
    if not expands_rightly():
        raise RuntimeError(f"drafthouse: replacing {KERNEL} did not mend sampling on this CPU")
    logger.info("drafthouse plugin %s is on: sampling with speculation mended", version("drafthouse"))


def expand(
    output: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, replace_from: int, replace_to: int, *_: Any
) -> None:
    """Write values[i] to output[ends[i-1]:ends[i]], with `replace_from` turned into `replace_to`."""
    counts = torch.diff(ends.to(torch.int64), prepend=torch.zeros(1, dtype=torch.int64))
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    expanded = replaced.repeat_interleave(counts)
    output[: expanded.shape[0]] = expanded


def expands_rightly() -> bool:
    """Whether vLLM's own helper gives the right answer for the number formats that it is used with."""
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    ends = torch.tensor([2, 3, 6], dtype=torch.int32)
    for dtype in (torch.float32, torch.int32, torch.int64):
        values = torch.tensor([7, 0, 5], dtype=dtype)
        got = expand_batch_to_tokens(values, ends, 6, replace_from=0, replace_to=3)
        if got.tolist() != [7, 7, 3, 5, 5, 5]:
            return False
    return True
