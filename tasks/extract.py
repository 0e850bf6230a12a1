"""Extract: responses -> hidden states at the drafter's points and before the final norm, by the serving engine.

Each prompt and response is sent as a prompt; the plugin inside the engine writes its states to a pool and
acknowledges them, and they are read back and checked. What the pool holds is not asked for again. The key of a
state holds the fingerprint of what this engine gives for a fixed text (store/probes.py), remembered per
engine environment, so that a look-up needs no server.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tasks import reference
from tasks.config import Arm, Campaign
from tasks.engines.base import Engine, RunningServer
from tasks.engines.capture import Capture
from tasks.engines.environment import environment_key
from tasks.engines.registry import engine
from tasks.errors import ConfigError, InputError
from tasks.load.prompts import Prompt, render
from tasks.store.keys import content_key, state_key, weights_fingerprint
from tasks.store.probes import remember, remembered
from tasks.store.refs import ResponsesRef, StatesRef
from tasks.store.tables import Store, rows_to_table, write_parquet

Row = dict[str, Any]
_BATCH = 256  # samples between two looks at the disk: what a kill can cost
_PROBE = "List the months of the year, and say in one sentence each what a gardener in a cold country does then."


def extract(
    server_for: Callable[[Path], AbstractContextManager[RunningServer]], responses: ResponsesRef, arm: Arm,
    campaign: Campaign, store: Store, *, progress: Callable[[int, int], None] | None = None,
    ack_timeout_s: float = 20.0,
) -> StatesRef:
    """States of every response; `server_for(folder)` gives the lazy server that captures into `folder`.

    `ack_timeout_s` = longest time without a new acknowledgement. Raises CaptureLost that names the samples
    without usable states, ConfigError for points outside the target, InputError for too long responses.
    """
    adapter, points, rows = engine(arm.engine), capture_points(campaign), _responses(responses, campaign, store)
    family = _family(adapter, arm, points, campaign)
    pool = store.pool("states", family)
    folder = pool / environment_key(campaign, arm, adapter)
    folder.mkdir(exist_ok=True)
    capture = Capture(
        adapter, folder, points, campaign.target.dtype, model=campaign.target.name, run_id=store.run_id,
        concurrency=campaign.sampling.concurrency, ack_timeout_s=ack_timeout_s,
    )
    fingerprint = remembered(folder)
    found = capture.look_up(_wanted(rows, family, fingerprint)) if fingerprint else {}
    executed = 0
    if fingerprint is None or not all(row["state_key"] in found for row in rows):
        with server_for(folder) as server:
            url = server.url() + adapter.endpoint
            # Also where one is remembered: what the engine gives now decides, not what it gave.
            probe = capture.probe(url, _probe_ids(campaign))
            fingerprint = remember(folder, probe, campaign.thresholds.state_rel_error)
            wanted = _wanted(rows, family, fingerprint)
            found = capture.look_up(wanted)
            missing = [key for key in wanted if key not in found]
            for start in range(0, len(missing), _BATCH):
                capture.take(url, {key: wanted[key] for key in missing[start : start + _BATCH]})
                executed = min(start + _BATCH, len(missing))
                if progress:
                    progress(len(found) + executed, len(wanted))
            found = capture.look_up(wanted)
    store.count("extract", requests=capture.sent, executed=executed, reused=len(found) - executed)
    index = [_index_row(row, found[row["state_key"]], points, campaign) for row in rows]
    key = content_key("states", family, fingerprint, [[row["sample_key"], row["state_key"]] for row in rows])
    _keep(key, index, {"pool": family, "fingerprint": fingerprint, "responses": responses.key}, store)
    tokens = sum(row["tokens"] for row in index)
    return StatesRef(
        key=key, samples=len(rows), tokens=tokens, engine=arm.engine, points=points, dtype=campaign.target.dtype
    )


def capture_points(campaign: Campaign) -> tuple[int, ...]:
    """The drafter's three points and N, sorted; raises ConfigError for a point that the target does not have."""
    last = reference.num_layers(campaign.target.model)
    if (worst := max(campaign.drafter.points)) > last:
        raise ConfigError(f"drafter.points: {worst} is beyond the target's {last} layers; choose three of 0 to {last}")
    return tuple(sorted({*campaign.drafter.points, last}))


def _responses(responses: ResponsesRef, campaign: Campaign, store: Store) -> list[Row]:
    store.require("responses", responses.key)
    rows: list[Row] = pq.read_table(store.artifact("responses", responses.key) / "responses.parquet").to_pylist()
    limit = campaign.target.max_model_len - 1  # the engine adds one token
    long = [row["sample_key"] for row in rows if len(row["token_ids"]) > limit]
    if long:
        raise InputError(
            f"responses: {len(long)} are longer than {limit} tokens and would be cut by the engine, first {long[0]}; "
            "raise target.max_model_len"
        )
    return rows


def _family(adapter: Engine, arm: Arm, points: tuple[int, ...], campaign: Campaign) -> str:
    """All that must be equal for states to be interchangeable, but for the fingerprint of the probe."""
    versions = adapter.versions(campaign.machine.environment_of(arm))
    plugin = versions.get("plugin") or versions.get("drafthouse")
    target = weights_fingerprint(Path(campaign.target.model))
    return content_key("states-pool", target, arm.engine, plugin, list(points), campaign.target.dtype)


def _wanted(rows: list[Row], family: str, fingerprint: str) -> dict[str, list[int]]:
    """State key -> token ids; the key is also noted in each row. Equal texts have one key."""
    for row in rows:
        row["state_key"] = state_key(row["token_ids"], content_key(family, fingerprint))
    return {row["state_key"]: row["token_ids"] for row in rows}


def _probe_ids(campaign: Campaign) -> list[int]:
    prompt = Prompt("probe", None, ({"role": "user", "content": _PROBE},))
    trusted = campaign.target.trust_remote_code
    ids: list[int] = render([prompt], campaign.target.model, 1 << 20, trust_remote_code=trusted)[0].token_ids
    return ids[: campaign.target.max_model_len - 1]


def _index_row(row: Row, place: Row, points: tuple[int, ...], campaign: Campaign) -> Row:
    same = {name: place[name] for name in ("shard", "row_group", "tokens", "bytes", "checksum")}
    return {
        "sample_key": row["sample_key"], "state_key": row["state_key"], "points": list(points),
        "dtype": campaign.target.dtype.value, "reused_from": place["made_by"], **same,
    }


def _keep(key: str, index: list[Row], manifest: Row, store: Store) -> None:
    """The artifact, made again if shards have moved since; and this run's rows."""
    table = rows_to_table("states_index", index)
    file = store.artifact("states", key) / "index.parquet"
    if store.manifest("states", key) is None or not pq.read_table(file).equals(table):
        with store.new_artifact("states", key, manifest) as folder:
            write_parquet(table, folder / "index.parquet")
    new = {"reused_from": None}
    rows = [row | new if row["reused_from"] == store.run_id else row for row in index]
    store.write("states_index", rows, f"states-{key}")
