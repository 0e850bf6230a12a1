"""Loss of the train-time-test unroll: soft cross-entropy to the target over the draft vocabulary.

B = samples, T = tokens, D = width, V = draft vocabulary; M = supervised positions of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.eagle3.data import Batch, DraftVocabulary
from tasks.eagle3.model import Drafter
from tasks.eagle3.target import TargetHead


@dataclass(frozen=True)
class StepResult:
    """Loss of a batch and, per unroll step, how many supervised tokens the drafter would have hit."""

    loss: Tensor
    hits: list[int]
    tokens: list[int]

    @property
    def accuracy(self) -> list[float]:
        """Share of hits per unroll step, on teacher-forced prefixes."""
        return [hit / max(count, 1) for hit, count in zip(self.hits, self.tokens, strict=True)]


def unroll_loss(
    drafter: Drafter, target: TargetHead, vocabulary: DraftVocabulary, batch: Batch, steps: int, decay: float
) -> StepResult:
    """Mean over supervised tokens of each step's cross-entropy, summed with weights decay ** step.

    The target's distribution is its softmax over the draft vocabulary, as in EAGLE-3 (Li et al., 2025);
    tokens whose most likely successor the drafter cannot say are not supervised, but count in `tokens`.
    """
    ids_BT, mask_BT = batch.token_ids, batch.mask.clone()
    mask_BT[:, 0] = False  # nothing stands before the first token that could have chosen it
    wanted_M3 = mask_BT.nonzero()  # position p: the token at p is the target's own choice, made at p - 1
    best_BT = torch.full_like(ids_BT, -1)
    row = torch.full_like(ids_BT, -1)  # position -> row of soft_MV
    with torch.no_grad():
        scores_MV, best_M = target.draft_scores(batch.last[mask_BT.roll(-1, 1)], vocabulary.target_ids)
        soft_MV = scores_MV.softmax(-1)
        best_BT[mask_BT] = best_M
        row[mask_BT] = torch.arange(len(wanted_M3), device=ids_BT.device)
    sayable_BT = mask_BT & vocabulary.t2d[best_BT.clamp(min=0)]
    padded_ids = F.pad(ids_BT, (0, steps))
    count = ids_BT.shape[1] - 1  # starts: a state at i, token i + 1, prediction of i + 2

    def embed_next(step: int, _: Tensor | None) -> Tensor:
        return target.embed(padded_ids[:, 1 + step : 1 + step + count])

    loss, hits, tokens = torch.zeros((), device=ids_BT.device), [], []
    for step, logits in enumerate(drafter.unroll(batch.auxiliary[:, :count], steps, embed_next)):
        seen = max(0, count - 1 - step)  # starts whose prediction lies inside the batch
        place = slice(2 + step, 2 + step + seen)
        use = sayable_BT[:, place]
        if use.any():
            chosen = logits[:, :seen][use].float()
            weight = decay**step
            loss = loss + weight * F.cross_entropy(chosen, soft_MV[row[:, place][use]])
        said = vocabulary.target_ids[logits[:, :seen].detach().argmax(-1)]
        hits.append(int(((said == best_BT[:, place]) & mask_BT[:, place]).sum()))
        tokens.append(int(mask_BT[:, place].sum()))
    return StepResult(loss, hits, tokens)
