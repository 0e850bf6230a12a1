"""Serving probe inside SGLang: what the drafter receives with a prompt, and what it says first.

Off but for servers that were started with DRAFTHOUSE_PROBE_DIR, and there only while the file `on` lies in that
folder. Prompts alone are recorded: while decoding, rows of accepted and of rejected drafts stand side by side.
Requests must come one at a time; a drafter whose prefill runs inside a CUDA graph is not seen.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from tasks.engines.inside import sglang_hooks
from tasks.engines.inside.sglang_hooks import Hook
from tasks.store.served import Call, write_call

logger = logging.getLogger(__name__)
_folder = Path()
_seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # inputs of a pass whose logits are still to come
_calls = 0


def register(folder: str) -> None:
    """Register the hooks."""
    global _folder
    _folder = Path(folder)
    sglang_hooks.register(HOOKS)
    logger.info("drafthouse serving probe is on: folder %s", _folder.name)


def _on_drafter(
    original: Callable[..., Any], self: Any, input_ids: torch.Tensor, positions: torch.Tensor, batch: Any,
    *args: Any, **kwargs: Any,
) -> Any:
    mode = batch.forward_mode
    if mode.is_extend_without_speculative() and batch.batch_size == 1 and (_folder / "on").exists():
        states = batch.spec_info.hidden_states
        if states.shape[0] == input_ids.shape[0] > 0:
            _seen[:] = [(input_ids.clone(), positions.clone(), states.clone())]
    return original(self, input_ids, positions, batch, *args, **kwargs)


def _on_logits(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if _seen:
        global _calls
        _calls += 1
        following, positions, states = _seen.pop()
        ids = following.tolist()  # at row t stands the token behind t: its own is the one of the row before
        logits = result.next_token_logits[-1].float().cpu()
        write_call(
            _folder, _calls,
            Call([-1, *ids[:-1]], positions.tolist(), states.float().cpu(), ids[-1], [int(logits.argmax())], logits),
        )
    return result


HOOKS = [
    Hook("sglang.srt.models.llama_eagle3.LlamaModel.forward", _on_drafter, HookType.AROUND),
    Hook("sglang.srt.layers.logits_processor.LogitsProcessor.forward", _on_logits, HookType.AROUND),
]
