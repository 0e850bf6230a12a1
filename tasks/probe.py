"""Probe: what does the drafter receive while it serves, and does it say what the trained one says?

A few training prompts are sent one at a time to the speculative server, whose plugin writes every call of the
drafter. Its auxiliary states, token ids and positions are compared with the stored states of the same tokens, and
its first logits with the exported drafter in plain torch on the same inputs: extraction = serving = training.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
import requests
import torch

from tasks import reference
from tasks.config import Campaign
from tasks.diagnosis.repairs import setup_of
from tasks.diagnosis.serving import compare
from tasks.eagle3.export import load_drafter
from tasks.eagle3.target import read_target_head
from tasks.engines.base import RunningServer
from tasks.engines.registry import engine as adapter_of
from tasks.errors import DrafthouseError, SeamMismatch
from tasks.store.captured import states_index
from tasks.store.refs import DrafterRef, StatesRef
from tasks.store.served import Call, read_calls
from tasks.store.tables import Store

log = logging.getLogger(__name__)
Row = dict[str, Any]
TOKENS: Final = 32
TIMEOUT_S: Final = 60.0
SWITCH: Final = "on"


def probe_folder(store: Store, arm: str) -> Path:
    """Where the engine's plugin writes the calls of this arm's drafter."""
    folder = (store.run_dir / "probe" / arm).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def probe(server: RunningServer, drafter: DrafterRef, campaign: Campaign, store: Store) -> None:
    """Send `speculative.serving_probe` prompts and compare; writes rows of table `alignment` first.

    Raises SeamMismatch in a strict campaign when the drafter receives or says something else.
    """
    arm = server.arm
    assert arm.speculative is not None
    manifest = store.require("drafter", drafter.key)
    samples = _samples(drafter, manifest, campaign, store)[: arm.speculative.serving_probe]
    folder, calls = probe_folder(store, arm.name), list[tuple[Call, list[int], Row]]()
    failed = ""
    server.url()  # a server that does not come up is no probe without an answer
    for sample in samples:
        try:
            answer = _serve(server, sample, campaign, folder)
        except (requests.RequestException, DrafthouseError, KeyError, ValueError) as error:
            failed = f"; a probe got no answer ({type(error).__name__}), what came is kept"
            continue
        calls += [(call, answer, sample) for call in _take(folder)]
    store.count("probe", requests=len(samples), executed=len(calls))
    model = Path(campaign.target.model)
    net, target_ids, own = load_drafter(store.artifact("drafter", drafter.key) / "serve" / arm.engine, model)
    head = read_target_head(model, torch.float32, torch.device("cpu"))
    setup = setup_of(
        net, target_ids, head.embeddings_VD if own is None else own, drafter.points, reference.num_layers(model)
    )
    rows = compare(calls, setup, drafter.points, campaign, arm.name, failed)
    store.write("alignment", rows, f"probe-{arm.name}")
    if campaign.strict and not calls and not failed:
        raise SeamMismatch(
            f"{arm.name}: the serving probe recorded nothing of {len(samples)} prompts, so what the drafter "
            "receives is not known; speculative.serving_probe: 0 goes on without it"
        )
    wrong = [row for row in rows if row["passed"] is False]
    for row in rows:
        if row["passed"] is None:
            log.warning("%s: %s: %s", row["subject"], row["check"], row["detail"])
    if wrong and campaign.strict:
        told = "; ".join(f"{row['check']} {row['value']:.2g} > {row['threshold']:g}: {row['detail']}" for row in wrong)
        raise SeamMismatch(f"{arm.name}: while serving the drafter gets something else than it was trained on: {told}")


def _samples(drafter: DrafterRef, manifest: Row, campaign: Campaign, store: Store) -> list[Row]:
    """Responses with their stored states at the drafter's points [tokens, fused width], longest answers first."""
    ref = StatesRef(
        key=manifest["states"], samples=0, tokens=0, engine=drafter.extracted_on, points=drafter.points,
        dtype=campaign.target.dtype.value,
    )
    pool, index = states_index(store, ref)
    place = {row["sample_key"]: row for row in index}
    file = store.artifact("responses", manifest["responses"]) / "responses.parquet"
    rows = sorted(pq.read_table(file).to_pylist(), key=lambda r: r["prompt_tokens"] - len(r["token_ids"]))
    return [{**row, "pool": pool, "place": place[row["sample_key"]]} for row in rows if row["sample_key"] in place]


def _serve(server: RunningServer, sample: Row, campaign: Campaign, folder: Path) -> list[int]:
    """Prompt and greedy answer, while the plugin writes."""
    adapter, prompt = adapter_of(server.arm.engine), list(sample["token_ids"][: sample["prompt_tokens"]])
    url = server.url() + adapter.endpoint
    room = min(TOKENS, campaign.target.max_model_len - len(prompt) - 1)
    body = adapter.completion_body(campaign.target.name, prompt, room, stream=False)
    switch = folder / SWITCH
    switch.touch()
    try:
        with requests.Session() as session:
            session.trust_env = False
            answer = session.post(url, json=body, timeout=TIMEOUT_S)
        answer.raise_for_status()
        return prompt + adapter.parse_completion(answer.json()).token_ids
    finally:
        switch.unlink()


def _take(folder: Path) -> list[Call]:
    found = list(read_calls(folder))
    for file in folder.glob("call-*.parquet"):
        file.unlink()
    return found
