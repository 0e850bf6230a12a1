"""What can be wrong with a drafter, by fixed ids, and what to do about it. docs/diagnose.md lists the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

CAUSES: Final[dict[str, tuple[str, str]]] = {  # id -> (sentence, remedy)
    "layer_shift": (
        "the drafter gets the states of other layers than it was trained on",
        "write ids by which the engine taps the trained points (Engine.layer_ids); extract again if the states are off",
    ),
    "point_order": (
        "the three fused points stand in another order than the drafter expects",
        "fuse points in ascending order on both sides; extract or export again",
    ),
    "norm_mixup": (
        "states are taken on the wrong side of a norm",
        "capture the residual stream before the final norm and without any layer's own norm",
    ),
    "token_shift": (
        "states are shifted against their tokens",
        "row t must hold the state of token t; look at how the capture cuts requests out of a batch",
    ),
    "other_request": (
        "samples hold the states of other requests",
        "remove these shards and extract again; look at how the capture tells requests of a batch apart",
    ),
    "embedding_not_shifted": (
        "the drafter is fed the embedding of the same token instead of the next one",
        "at position i the drafter reads the state of token i and the embedding of token i + 1; train again",
    ),
    "d2t_mismatch": (
        "draft ids are mapped to other target tokens than the drafter was trained for",
        "export d2t as offsets (target id = draft id + d2t) of this drafter's own vocabulary",
    ),
    "t2d_mismatch": (
        "t2d marks other tokens than d2t maps to",
        "export t2d from the same vocabulary as d2t",
    ),
    "head_random_or_missing": (
        "the drafter's head is missing or holds untrained numbers",
        "export lm_head.weight with the drafter; servers start without it and accept nothing",
    ),
    "embedding_not_target": (
        "the drafter reads other token embeddings than the target's",
        "leave embed_tokens out of the drafter or export the target's own",
    ),
    "rope_mismatch": (
        "the drafter's rotary embedding differs from the one that it was trained with",
        "write rope_theta and rope_scaling of the training into the drafter's config.json",
    ),
    "max_positions": (
        "the drafter's max_position_embeddings is smaller than the texts that are served",
        "set max_position_embeddings in the drafter's config.json to the target's",
    ),
    "dtype_overflow": (
        "states are cut off at the largest number of their format, or not finite",
        "capture in bfloat16 or float32; float16 ends at 65504",
    ),
    "quantisation_mismatch": (
        "states come from the target in another number format or quantisation",
        "extract and serve with the same weights, dtype and quantisation",
    ),
    "loss_mask": (
        "training looked at other tokens than the target's responses",
        "take the mask from the number of prompt tokens that was sent, and train again",
    ),
    "chat_template": (
        "prompts were rendered by another chat template than the target's",
        "render with the target's tokenizer and template, then regenerate and train again",
    ),
    "garbage_responses": (
        "the responses are not the target's own text",
        "regenerate on a server whose sampling is right; the rejected answers must not be trained on",
    ),
    "prefix_truncated": (
        "states of a part of the prompt are missing",
        "extract with the prefix cache off and every chunk of the prefill captured",
    ),
    "undertrained": (
        "the drafter was trained too little",
        "train longer or on more samples",
    ),
    "weights_damaged": (
        "weights of the drafter, other than its head, are not those that were trained",
        "export the drafter again from its last checkpoint",
    ),
    "serving_differs": (
        "served acceptance differs from replay, and no tested hypothesis gives the served numbers",
        "serve with the serving probe on and compare what the drafter receives (table alignment)",
    ),
    "unexplained": (
        "something is off, and no tested hypothesis explains it",
        "the evidence says which comparison fails; start there",
    ),
}


@dataclass
class Finding:
    """A hypothesis that a computation supports: `score` in [0, 1] = share of the damage that it explains."""

    id: str
    score: float
    evidence: str

    def __post_init__(self) -> None:
        assert self.id in CAUSES, self.id
        self.score = round(min(max(self.score, 0.0), 1.0), 4)

    def as_json(self) -> dict[str, Any]:
        sentence, remedy = CAUSES[self.id]
        return {"id": self.id, "score": self.score, "evidence": self.evidence, "sentence": sentence, "remedy": remedy}


@dataclass
class Findings:
    """All findings of a diagnosis, and what could not be looked at."""

    found: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, id: str, score: float, evidence: str) -> None:
        """Keep a finding; scores of nothing are left out."""
        if score > 0:
            self.found.append(Finding(id, score, evidence))

    def ranked(self) -> list[Finding]:
        """One finding per id, the best evidence first."""
        best: dict[str, Finding] = {}
        for finding in sorted(self.found, key=lambda f: -f.score):
            if finding.id in best:
                kept = best[finding.id]
                if finding.evidence not in kept.evidence:
                    kept.evidence += f"; {finding.evidence}"
            else:
                best[finding.id] = finding
        return sorted(best.values(), key=lambda f: -f.score)
