"""Hypotheses on a drafter folder without a forward: tensors, mapping and config against what they follow from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from tasks.config import EngineName
from tasks.diagnosis.case import Case
from tasks.diagnosis.causes import Findings
from tasks.eagle3.data import Row, draft_vocabulary
from tasks.eagle3.export import WEIGHTS, expected_shapes, spelling
from tasks.eagle3.model import Drafter, drafter_config
from tasks.eagle3.target import TargetHead, model_class, target_config
from tasks.engines.registry import engine
from tasks.errors import DrafthouseError, InputError
from tasks.store.keys import template_fingerprint

_CAUSE_OF = {"lm_head.weight": "head_random_or_missing", "d2t": "d2t_mismatch", "t2d": "t2d_mismatch",
             "embed_tokens.weight": "embedding_not_target"}


@dataclass
class Folder:
    """A drafter as its folder has it; what is missing or misshapen is filled in, so that the rest can be judged."""

    path: Path
    config: dict[str, Any]
    stored: dict[str, Tensor]
    drafter: Drafter
    target_ids: Tensor
    embeddings_VD: Tensor | None
    points: tuple[int, ...]
    trained: dict[str, Tensor] | None  # weights of the newest checkpoint, if the run has one


def read_folder(case: Case, findings: Findings) -> Folder:
    """Load whatever can be loaded; raises InputError if it is no drafter at all."""
    assert case.drafter_dir is not None
    path = case.drafter_dir
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text())
        stored = {spelling(name): tensor for name, tensor in load_file(path / WEIGHTS).items()}
        shapes = expected_shapes(config)
        sizes = {"draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"]}
        drafter = Drafter(LlamaConfig(**{**config, **sizes}))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, RuntimeError) as error:
        raise InputError(f"{path}: cannot be read as a drafter ({' '.join(str(error).split())[:200]})") from error
    state = drafter.state_dict()
    for name, shape in shapes.items():
        if name not in stored:
            findings.add(_CAUSE_OF.get(name, "weights_damaged"), 1.0, f"{WEIGHTS} has no {name}, expected {shape}")
        elif list(stored[name].shape) != shape:
            text = f"{name} is {list(stored[name].shape)}, expected {shape}"
            findings.add(_CAUSE_OF.get(name, "weights_damaged"), 1.0, text)
        elif name in state:
            state[name] = stored[name].float()
    drafter.load_state_dict({n: torch.nan_to_num(t, posinf=0.0, neginf=0.0) for n, t in state.items()})
    draft, vocab = int(drafter.config.draft_vocab_size), int(config["vocab_size"])
    d2t = stored.get("d2t")
    offsets = d2t.long() if d2t is not None and len(d2t) == draft else torch.zeros(draft, dtype=torch.int64)
    said = (torch.arange(draft) + offsets).clamp(0, vocab - 1)
    points = tuple(config.get("hidden_states_points") or _campaign_points(case))
    trained = None
    if case.checkpoint is not None:
        try:
            trained = torch.load(case.checkpoint, map_location="cpu", weights_only=True)["weights"]
        except Exception as error:  # a torn zip raises whatever its reader trips over
            findings.notes.append(f"{case.checkpoint.name}: unreadable checkpoint ({error})")
    return Folder(
        path, config, stored, drafter.eval(), said, stored.get("embed_tokens.weight"), points, trained
    )


def _campaign_points(case: Case) -> tuple[int, ...]:
    return tuple(case.campaign.drafter.points)


def check_folder(folder: Folder, head: TargetHead, case: Case, findings: Findings) -> None:
    """All checks that compare the folder with the target, the responses and the training checkpoint."""
    for name, tensor in folder.stored.items():
        if tensor.is_floating_point():
            bad = not torch.isfinite(tensor).all()
            if bad or (tensor.numel() > 1 and float(tensor.float().std()) == 0 and "norm" not in name):
                text = f"{name} {'holds NaN or infinite numbers' if bad else 'is one number repeated'}"
                findings.add(_CAUSE_OF.get(name, "weights_damaged"), 1.0, text)
    _check_mapping(folder, head, case, findings)
    _check_embeddings(folder, head, findings)
    _check_config(folder, case, findings)
    _check_ids(folder, case, findings)
    if folder.trained is not None:
        _check_against_checkpoint(folder, findings)


def _check_mapping(folder: Folder, head: TargetHead, case: Case, findings: Findings) -> None:
    config, d2t, t2d = folder.config, folder.stored.get("d2t"), folder.stored.get("t2d")
    vocab, draft = int(config["vocab_size"]), int(folder.drafter.config.draft_vocab_size)
    if d2t is None or len(d2t) != draft:
        return
    said = d2t.long() + torch.arange(draft)
    outside, distinct = int(((said < 0) | (said >= vocab)).sum()), len(set(said.tolist()))
    if outside or distinct < draft:
        text = f"i + d2t[i] gives {distinct} distinct ids for {draft} drafts, {outside} not below {vocab}"
        findings.add("d2t_mismatch", 1.0, text)
    wanted = _vocabulary(case, vocab, draft)
    if wanted is not None and not torch.equal(said, wanted):
        same = float((said == wanted).float().mean())
        text = f"{same:.0%} of draft ids say the token that the responses' vocabulary gives them"
        # A drafter of other data has another vocabulary: only a proof together with the head's rows.
        findings.add("d2t_mismatch", 0.55 if same < 0.98 else 0.3, text)
    heads = torch.nn.functional.normalize(head.head_VD.float(), dim=-1)
    own = folder.stored.get("lm_head.weight")
    if own is not None and list(own.shape) == [draft, heads.shape[1]]:
        likeness_VV = torch.nn.functional.normalize(torch.nan_to_num(own.float()), dim=-1) @ heads.T
        best = likeness_VV.max(-1)
        mapped = likeness_VV.gather(1, said.clamp(0, vocab - 1)[:, None])[:, 0]
        # Rare tokens have nearly equal rows in the target: only a row that is clearly another one counts.
        wrong = float(((best.values > 0.5) & (best.values - mapped > 0.2)).float().mean())
        if wrong > 0.02:
            text = f"{wrong:.0%} of the head's rows resemble the target's row of another token than d2t maps them to"
            findings.add("d2t_mismatch", min(1.0, 0.6 + wrong), text)
    if t2d is not None:
        marked = t2d.bool().nonzero()[:, 0]
        kept = set(said.tolist())
        if len(t2d) != vocab or set(marked.tolist()) != kept:
            differs = len(set(marked.tolist()) ^ kept)
            right = wanted is not None and torch.equal(said, wanted)
            # One of both is wrong; which one is told by the vocabulary of the responses.
            text = f"t2d and d2t disagree about {differs} target tokens"
            findings.add("t2d_mismatch", 0.98 if right or wanted is None else 0.75, text)


def _vocabulary(case: Case, vocab: int, draft: int) -> Tensor | None:
    rows = [Row(r["sample_key"], list(r["token_ids"]), r["prompt_tokens"], "", 0) for r in case.responses]
    try:
        return draft_vocabulary(rows, template_fingerprint(case.model), vocab, draft).target_ids if rows else None
    except DrafthouseError:
        return None


def _check_embeddings(folder: Folder, head: TargetHead, findings: Findings) -> None:
    own = folder.embeddings_VD
    if own is None or own.shape != head.embeddings_VD.shape:
        return
    error = float((own.float() - head.embeddings_VD.float()).norm() / head.embeddings_VD.float().norm())
    if error > 0.02:
        text = f"its embed_tokens differ from the target's by {error:.2g}"
        findings.add("embedding_not_target", min(1.0, 0.6 + error), text)


def _check_config(folder: Folder, case: Case, findings: Findings) -> None:
    wanted = drafter_config(target_config(case.model), int(folder.drafter.config.draft_vocab_size))
    have, want = dict(folder.drafter.config.rope_parameters), dict(wanted.rope_parameters)
    flat = folder.config.get("rope_theta")
    if have != want or (flat is not None and float(flat) != float(want["rope_theta"])):
        own = folder.trained is not None
        text = f"rope {have} (rope_theta {flat}) where the target gives {want}"
        findings.add("rope_mismatch", 0.97 if own else 0.45, text)
    positions = int(folder.config.get("max_position_embeddings") or 0)
    longest = max([case.campaign.target.max_model_len, *(int(r["tokens"]) for r in case.states_index)])
    if positions < longest:
        findings.add("max_positions", 0.99, f"max_position_embeddings is {positions}, texts reach {longest} tokens")
    for name in ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"):
        if folder.trained is not None and folder.config.get(name) != getattr(wanted, name):
            text = f"config.json: {name} is {folder.config.get(name)}, trained with {getattr(wanted, name)}"
            findings.add("weights_damaged", 0.9, text)


def _check_ids(folder: Folder, case: Case, findings: Findings) -> None:
    """The ids by which the serving engine taps the layers, against the points that were trained."""
    arms = [a for a in case.campaign.arms if a.speculative is not None]
    name = folder.path.name if folder.path.name in ("vllm", "sglang", "stub") else arms[0].engine if arms else None
    ids = folder.config.get("eagle_aux_hidden_state_layer_ids")
    nested = (folder.config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    trained = _trained_points(case) or folder.points
    if name is None or ids is None:
        return
    try:
        layers = int(target_config(case.model)["num_hidden_layers"])
        wanted = engine(EngineName(name)).layer_ids(model_class(case.model), layers, trained)
    except DrafthouseError as error:
        findings.notes.append(f"layer ids are not checked: {error}")
        return
    for found in (ids, nested):
        if found is not None and list(found) != wanted:
            order = sorted(found) == sorted(wanted)
            text = f"config.json has layer ids {list(found)}; {name} taps points {list(trained)} by {wanted}"
            findings.add("point_order" if order else "layer_shift", 1.0, text)


def _trained_points(case: Case) -> tuple[int, ...] | None:
    if case.own_drafter is None:
        return None
    try:
        return tuple(json.loads((case.own_drafter / "manifest.json").read_text())["points"])
    except (OSError, ValueError, KeyError):
        return None


def _check_against_checkpoint(folder: Folder, findings: Findings) -> None:
    """Tensors that are not those of the last training step, if most others are."""
    assert folder.trained is not None
    known = {n: t for n, t in folder.trained.items() if n in folder.stored and folder.stored[n].shape == t.shape}
    changed = [n for n, t in known.items() if not same_numbers(folder.stored[n], t)]
    if not known or len(changed) > 0.7 * len(known):
        return  # another drafter altogether
    for name in changed:
        id = _CAUSE_OF.get(name, "weights_damaged")
        if name == "fc.weight" and _permuted(folder.stored[name].float(), folder.trained[name].float()):
            id = "point_order"
        if name == "lm_head.weight" and _rows_permuted(folder.stored[name].float(), folder.trained[name].float()):
            id = "d2t_mismatch"
        findings.add(id, 0.98, f"{name} is not what the last checkpoint of the training holds")


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Equal but for the rounding of a half-precision export."""
    return bool(torch.allclose(a.float(), b.float(), rtol=1e-2, atol=1e-3))


def _permuted(found: Tensor, trained: Tensor) -> bool:
    ours, theirs = found.chunk(3, dim=1), trained.chunk(3, dim=1)
    return all(any(torch.allclose(a, b, atol=1e-3) for b in theirs) for a in ours)


def _rows_permuted(found: Tensor, trained: Tensor) -> bool:
    return bool(torch.allclose(found.sum(1).sort().values, trained.sum(1).sort().values, atol=1e-3))
