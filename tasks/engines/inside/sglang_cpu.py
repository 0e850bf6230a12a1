"""SGLang on a CPU with nothing but torch: no sgl_kernel, no Triton.

The platform and the hooks replace only what has no torch path of its own: pieces of EAGLE drafting
(sglang_chain.py) and two choices of the MLA attention. Correctness comes first; it is for tests,
demos and small targets.

SGLang asks for the platform while it is still importing itself, so the hooks, which need its modules,
are imported only when they are registered.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

BACKEND = "torch_native"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A plain CPU: float tensors, gloo, scaled_dot_product_attention."""

    _enum = PlatformEnum.OOT

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return BACKEND

    def get_dispatch_key_name(self) -> str:
        return "native"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "EAGLE3"

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return BACKEND

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == BACKEND

    def get_speculative_cache_locs_fn(self) -> Any:
        from tasks.engines.inside import sglang_chain

        return sglang_chain.window_slots

    def apply_server_args_defaults(self, server_args: Any) -> None:
        # Wrappers such as Kimi-K2.5 are served for their text: image processors need what a CPU folder lacks.
        server_args.enable_multimodal = False
        topk = getattr(server_args, "speculative_eagle_topk", None)
        if topk is not None and topk > 1:
            raise ValueError(
                f"drafthouse CPU platform drafts one chain: speculative_eagle_topk is {topk}, set it to 1"
            )

    def post_load_model(self, model: torch.nn.Module) -> None:
        from tasks.engines.inside import sglang_hooks

        sglang_hooks.require(_hooks())


def _rope_of_torch(
    head_size: int, rotary_dim: int, max_position: int, base: float, is_neox_style: bool = True,
    rope_scaling: dict[str, Any] | None = None, dtype: torch.dtype | None = None, device: str | None = None,
    **_ignored: Any,
) -> Any:
    # On a CPU the engine's own wrapper picks a class whose kernels live in sgl_kernel.
    from sglang.srt.layers.rotary_embedding import get_rope

    return get_rope(head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype)


def _absorbed_mla(attention: Any, forward_batch: Any) -> Any:
    # Only the absorbed form keeps keys and values in the latent cache that torch_native reads.
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return AttnForwardMethod.MLA


def _hooks() -> list[Any]:
    from sglang.srt.plugins.hook_registry import HookType

    from tasks.engines.inside import sglang_chain
    from tasks.engines.inside.sglang_hooks import Hook

    rope = Hook("sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper", _rope_of_torch, HookType.REPLACE)
    return [*sglang_chain.HOOKS, rope]


def register() -> None:
    """Register the hooks of the CPU platform."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    from tasks.engines.inside import sglang_hooks

    sglang_hooks.register(_hooks())
    AttentionBackendRegistry.register(BACKEND, _absorbed_mla)
