"""Serving probe inside vLLM: what the drafter really receives, and what it says first.

Off but for servers that were started with DRAFTHOUSE_PROBE_DIR, and there only while the file `on` lies in that
folder: then every call of the drafter is written as one Parquet file. Requests must come one at a time, so that
a call belongs to one of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from tasks.store.served import Call, write_call

FOLDER = "DRAFTHOUSE_PROBE_DIR"
logger = logging.getLogger("vllm.drafthouse")
_calls = 0


def install() -> None:
    """Wrap the drafter's `propose`; raises AttributeError where this vLLM has none, which ends the start."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    folder = Path(os.environ[FOLDER])
    original = SpecDecodeBaseProposer.propose
    if not hasattr(original, "__wrapped__"):
        SpecDecodeBaseProposer.propose = recorded(original, folder)
        logger.info("drafthouse serving probe is on: folder %s", folder.name)


def recorded(original: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """`propose` that writes a call while the switch file exists."""

    @wraps(original)
    def propose(
        self: Any, num_speculative_tokens: int, target_token_ids: torch.Tensor, target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor, next_token_ids: torch.Tensor, token_indices_to_sample: Any,
        common_attn_metadata: Any, *args: Any, **kwargs: Any,
    ) -> Any:
        rest = (token_indices_to_sample, common_attn_metadata, *args)
        inputs = (target_token_ids, target_positions, target_hidden_states, next_token_ids)
        if not (folder / "on").exists():
            return original(self, num_speculative_tokens, *inputs, *rest, **kwargs)
        starts = common_attn_metadata.query_start_loc.tolist()
        before = [tensor.detach().clone() for tensor in inputs]  # buffers that the next step overwrites
        last = [end - 1 for end in starts[1:]] if token_indices_to_sample is None else token_indices_to_sample.tolist()
        with _first_logits(self.model) as logits:
            drafts = original(self, num_speculative_tokens, *inputs, *rest, **kwargs)
        if len(last) == 1:
            global _calls
            _calls += 1
            ids, positions, states, following = before
            end = last[0] + 1  # rows behind it are drafts that were rejected
            write_call(folder, _calls, Call(
                ids[:end].tolist(), positions[:end].tolist(), states[:end].float().cpu(), int(following[0]),
                drafts[0].tolist(), logits[0][0].float().cpu() if logits else None,
            ))
        return drafts

    return propose


class _first_logits:
    """Keeps what the drafter's head returns while the block runs."""

    def __init__(self, model: Any) -> None:
        self.model, self.kept = model, list[torch.Tensor]()

    def __enter__(self) -> list[torch.Tensor]:
        original = self.model.compute_logits

        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not self.kept and result is not None:
                self.kept.append(result.detach().clone())
            return result

        self.model.compute_logits = compute_logits
        return self.kept

    def __exit__(self, *_: object) -> None:
        del self.model.compute_logits  # the class's own is seen again
