"""Drafting along known text, and what an engine would have accepted of it.

T = tokens of prompt and output, A = fused auxiliary width, k = draft tokens per step. After each
verification an engine feeds the true states of what it accepted through the drafter, so a draft that
starts at some position depends on the true prefix only, and the drafts of all starts come from one unroll.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.eagle3.model import Drafter


@torch.inference_mode()
def drafts_at_every_start(
    drafter: Drafter, target_ids: Tensor, embeddings_VD: Tensor, token_ids: Sequence[int], auxiliary_TA: Tensor, k: int
) -> Tensor:
    """Row e holds the k tokens drafted once token e is known, for e >= 1; row 0 is -1. [T, k]."""
    known = torch.tensor(token_ids, device=embeddings_VD.device)
    said: list[Tensor] = []

    def embed_next(step: int, logits: Tensor | None) -> Tensor:
        if logits is not None:
            said.append(target_ids[logits[0].argmax(-1)])
        return F.embedding(said[-1] if said else known[1:], embeddings_VD)[None]

    # The engine runs k steps: the last logits are read here, after the unroll has ended.
    for logits in drafter.unroll(auxiliary_TA[None, :-1], k, embed_next):
        last = logits
    said.append(target_ids[last[0].argmax(-1)])
    return torch.cat([torch.full((1, k), -1), torch.stack(said, dim=1).cpu()])


@dataclass
class Walk:
    """One request served with these drafts: how many tokens of each counted draft were accepted.

    `open_end` is the draft of the last step when it agrees with the output to its end: what the target
    would have said next decides about its remaining tokens, which engines count although they cut them.
    """

    accepted: list[int] = field(default_factory=list)
    open_end: list[int] = field(default_factory=list)


def walk(drafts_Tk: Tensor, token_ids: Sequence[int], prompt_tokens: int) -> Walk:
    """Advance through the output by the accepted tokens plus the target's own one, as an engine does.

    The first output token comes from the prefill and counts no draft; a step whose draft is cut by the end
    token or by max_tokens counts in full (vLLM 0.32, scheduler `update_from_output`).
    """
    rows, length = drafts_Tk.tolist(), len(token_ids)
    result, known = Walk(), prompt_tokens
    while known < length - 1:
        draft = rows[known]
        remaining = token_ids[known + 1 :]
        count = agreement(draft, remaining)
        result.accepted.append(count)
        if count == len(remaining) < len(draft):
            result.open_end = draft[count:]
        known += count + 1
    return result


def agreement(draft: Sequence[int], text: Sequence[int]) -> int:
    """Length of the common beginning."""
    count = 0
    for said, true in zip(draft, text, strict=False):
        if said != true:
            break
        count += 1
    return count
