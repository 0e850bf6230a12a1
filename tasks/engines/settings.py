"""Requested and effective settings of a server, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tasks.engines.base import Observed, Source

# A server may repeat what it was asked for after it fell back to something else: behaviour and log decide.
_STRENGTH: Final[dict[Source, int]] = {"server_info": 0, "metrics": 1, "log": 2, "probe": 3}


def same(requested: str, effective: str) -> bool:
    """Equal as numbers, truth values or words."""
    a, b = requested.strip().lower(), effective.strip().lower()
    try:
        return float(a) == float(b)
    except ValueError:
        return a == b


def strongest(observed: Sequence[Observed]) -> dict[str, str]:
    """Setting -> value of the strongest source that reports one."""
    known = sorted((o for o in observed if o.value is not None), key=lambda o: _STRENGTH[o.source])
    return {o.setting: o.value for o in known if o.value is not None}


def setting_rows(
    requested: Mapping[str, str], observed: Sequence[Observed], notes: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Rows of the `servers` table: setting, engine_setting, requested, effective, source, status, detail.

    status: match | mismatch by the strongest source that reports a value; not_reported if none does;
    observed for settings that nobody asked for and for weaker sources of a setting. `notes` tell why a
    setting was asked for and go into `detail`.
    """
    strongest: dict[str, int] = {}
    for o in observed:
        if o.value is not None:
            strongest[o.setting] = max(strongest.get(o.setting, 0), _STRENGTH[o.source])
    rows = []
    for o in observed:
        wanted = requested.get(o.setting)
        if wanted is None:
            status = "observed"
        elif o.value is None:
            status = "observed" if o.setting in strongest else "not_reported"
        elif _STRENGTH[o.source] < strongest[o.setting]:
            status = "observed"
        else:
            status = "match" if same(wanted, o.value) else "mismatch"
        rows.append(
            {"setting": o.setting, "engine_setting": o.engine_setting, "requested": wanted, "effective": o.value,
             "source": o.source, "status": status, "detail": o.detail}
        )
    seen = {o.setting for o in observed}
    rows += [
        {"setting": name, "engine_setting": name, "requested": wanted, "status": "not_reported",
         "detail": "the engine does not say"}
        for name, wanted in requested.items() if name not in seen
    ]
    for row in rows:
        note = (notes or {}).get(str(row["setting"]))
        row["detail"] = "; ".join(part for part in (row["detail"], note) if part) or None
    return rows


def mismatches(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One phrase per mismatch, for an error message."""
    found = []
    for row in rows:
        if row["status"] == "mismatch":
            where = ": ".join(part for part in (row["source"], row["detail"]) if part)
            found.append(f"{row['setting']}: asked {row['requested']}, got {row['effective']} ({where})")
    return found
