"""Replay: how much of the exported drafter's drafts the target would accept, before any server starts.

The reloaded drafter drafts along the base arm's greedy outputs on the target's states from a transformers
forward, and advances as the engine does, so its accept length predicts the served one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor

from tasks.config import Arm, Campaign, WorkloadKind
from tasks.eagle3.drafting import Walk, agreement, drafts_at_every_start, walk
from tasks.eagle3.export import load_drafter
from tasks.eagle3.target import read_target_head
from tasks.errors import DrafterBroken, InputError
from tasks.reference import device, layer_states, logits, num_layers
from tasks.store.keys import content_key
from tasks.store.refs import BenchmarkRef, DrafterRef, ReplayRef
from tasks.store.tables import Store, rows_to_table, write_parquet

TRUE, ZEROED = "true", "zeroed"  # auxiliary states that the drafter gets; zeroed shows what it owes to them


def replay(
    drafter: DrafterRef, baseline: BenchmarkRef, arm: Arm, campaign: Campaign, store: Store, *,
    progress: Callable[[int, int], None] | None = None,
) -> ReplayRef:
    """Accept rates per category and position, also with zeroed auxiliary states; writes the `replay` rows.

    Raises DrafterBroken below thresholds.min_accept_length, ExportMismatch if the folder is not whole.
    """
    assert arm.speculative is not None
    k, target = arm.speculative.num_speculative_tokens, Path(campaign.target.model)
    requests = _requests(baseline, store)
    key = content_key("replay", drafter.key, arm.engine, k, requests)
    labels = {"drafter": drafter.name, "workload": baseline.workload}
    if manifest := store.manifest("replay", key):
        rows = pq.read_table(store.artifact("replay", key) / "replay.parquet").to_pylist()
        rows = [row | labels | {"reused_from": manifest["made_by"]} for row in rows]
        store.count("replay", reused=len(requests))
    else:
        folder = store.artifact("drafter", drafter.key) / "serve" / arm.engine
        states = layer_states(target, [_text(request) for request in requests], drafter.points)
        rows = []
        for auxiliary, shown in ((TRUE, states), (ZEROED, [torch.zeros_like(s) for s in states])):
            walks = replay_requests(folder, target, requests, shown, k, progress)
            rows += [labels | {"auxiliary": auxiliary} | row for row in _rows(walks, requests, k)]
        with store.new_artifact("replay", key, {"drafter": drafter.key, "requests": len(requests)}) as place:
            write_parquet(rows_to_table("replay", rows), place / "replay.parquet")
        store.count("replay", executed=len(requests))
    store.write("replay", rows, f"{drafter.name}-{arm.name}-{baseline.workload}")
    whole = next(r for r in rows if r["auxiliary"] == TRUE and r["category"] is None and r["position"] is None)
    least = campaign.thresholds.min_accept_length
    random = any(w.name == baseline.workload and w.kind is WorkloadKind.random for w in campaign.workloads)
    if whole["accept_length"] < least and not random:  # after random tokens even a good drafter may be lost
        raise DrafterBroken(
            f"replay: accept length {whole['accept_length']:.3f} over {whole['drafts']} drafts is below {least} "
            f"(thresholds.min_accept_length); drafter {drafter.key} does not draft, so no server was started for it"
        )
    return ReplayRef(key=key, drafter_key=drafter.key, accept_length=whole["accept_length"])


def replay_requests(
    folder: Path, target: Path, requests: Sequence[dict[str, Any]], states: Sequence[Tensor], k: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Walk]:
    """Draft along `requests` (prompt_token_ids, output_token_ids) with the drafter in `folder`; one Walk each.

    `states` are the target's at the drafter's points [tokens, points, width], one tensor per request.
    """
    model, target_ids, own_embeddings = load_drafter(folder, target)
    head = read_target_head(target, torch.float32, torch.device("cpu"))
    embeddings = (head.embeddings_VD if own_embeddings is None else own_embeddings).to(device())
    model, target_ids = model.to(device()), target_ids.to(device())
    texts = [_text(request) for request in requests]
    walks = []
    for number, (text, states_TPD) in enumerate(zip(texts, states, strict=True)):
        drafts = drafts_at_every_start(model, target_ids, embeddings, text, states_TPD.flatten(1).to(device()), k)
        walks.append(walk(drafts, text, len(requests[number]["prompt_token_ids"])))
        if progress is not None:
            progress(number + 1, len(texts))
    _settle_ends(target, texts, walks)
    return walks


def _text(request: dict[str, Any]) -> list[int]:
    return [*request["prompt_token_ids"], *request["output_token_ids"]]


def _settle_ends(target: Path, texts: Sequence[list[int]], walks: Sequence[Walk]) -> None:
    """Let the target judge the drafted tokens behind the end of each output, in one more forward."""
    undecided = [(text, end) for text, end in zip(texts, walks, strict=True) if end.open_end]
    if not undecided:
        return
    last = num_layers(target)
    states = layer_states(target, [text + end.open_end for text, end in undecided], [last])
    for (text, end), states_TPD in zip(undecided, states, strict=True):
        choices = logits(target, states_TPD[len(text) - 1 : -1, 0]).argmax(-1).tolist()
        end.accepted[-1] += agreement(end.open_end, choices)
        end.open_end = []


def _requests(baseline: BenchmarkRef, store: Store) -> list[dict[str, Any]]:
    store.require("benchmark", baseline.key)
    columns = ["prompt_key", "category", "prompt_token_ids", "output_token_ids"]
    rows = pq.read_table(store.artifact("benchmark", baseline.key) / "outputs.parquet", columns=columns).to_pylist()
    first = {row["prompt_key"]: row for row in reversed(rows)}
    found = [first[name] for name in sorted(first, key=str) if len(first[name]["output_token_ids"]) > 1]
    if not found:
        raise InputError(f"benchmark {baseline.key}: no output of two tokens or more to replay")
    return found


def _rows(walks: Sequence[Walk], requests: Sequence[dict[str, Any]], k: int) -> Iterable[dict[str, Any]]:
    categories = sorted({request["category"] for request in requests if request["category"] is not None})
    for category in [None, *categories]:
        chosen = [w for w, request in zip(walks, requests, strict=True) if category in (None, request["category"])]
        counts = [count for w in chosen for count in w.accepted]
        total = {"category": category, "position": None, "drafts": len(counts), "accepted": sum(counts)}
        yield total | {
            "accept_rate": sum(counts) / (k * len(counts)), "accept_length": 1 + sum(counts) / len(counts),
        }
        for position in range(k):
            accepted = sum(count > position for count in counts)
            rate = accepted / len(counts)
            yield total | {"position": position, "accepted": accepted, "accept_rate": rate, "accept_length": None}
