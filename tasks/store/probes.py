"""Fingerprints of what an engine environment computes: which states are interchangeable with which.

Bits differ between kernels that are equally right, so two environments share a fingerprint when their
states of one fixed text agree within a tolerance; the first one of a kind gives its checksum as the name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tasks.store.states import Sample, read_sample

_FILE = "probe.json"


def remembered(folder: Path) -> str | None:
    """Fingerprint of an environment's folder of a pool, if it was ever taken."""
    probe = _read(folder)
    return None if probe is None else str(probe["fingerprint"])


def remember(folder: Path, ack: dict[str, Any], tolerance: float) -> str:
    """Fingerprint of the probe that was just captured into `folder` and acknowledged by `ack`.

    It is that of the first environment of the pool whose states agree within `tolerance` (median over
    tokens of the relative error, at every point), else a new one.
    """
    sample = read_sample(folder, ack["shard"], ack["row_group"])
    fingerprint = str(ack["checksum"])
    for other in sorted(folder.parent.glob(f"*/{_FILE}")):
        probe = _read(other.parent)
        # Only with the first of its kind: else many small drifts would pass as one.
        if probe and probe["fingerprint"] == probe["checksum"] and _agree(sample, other.parent, probe, tolerance):
            fingerprint = str(probe["fingerprint"])
            break
    kept = {name: ack[name] for name in ("shard", "row_group", "checksum")}
    temporary = folder / f".{_FILE}.tmp"
    temporary.write_text(json.dumps({"fingerprint": fingerprint, **kept}))
    temporary.replace(folder / _FILE)
    return fingerprint


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        probe: dict[str, Any] = json.loads((folder / _FILE).read_text())
    except (OSError, ValueError):
        return None
    return probe


def _agree(sample: Sample, folder: Path, probe: dict[str, Any], tolerance: float) -> bool:
    try:
        other = read_sample(folder, probe["shard"], probe["row_group"])
    except Exception:  # arrow raises a dozen kinds for a broken file; without it nothing can be compared
        return False
    if other.token_ids != sample.token_ids or other.states.shape != sample.states.shape:
        return False
    ours, theirs = sample.states.float(), other.states.float()
    errors_TP = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return bool((errors_TP.median(dim=0).values <= tolerance).all())
