"""Diagnose: given a run, why does its drafter not draft as it should?

Each hypothesis is tested by a computation on what the run left behind: undo the supposed damage and see
whether the numbers become right. The causes come ranked, by fixed ids (docs/diagnose.md); a healthy run has none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tasks.diagnosis.case import Case, load_case
from tasks.diagnosis.causes import Findings
from tasks.diagnosis.data import check_responses
from tasks.diagnosis.drafting import check_drafter
from tasks.diagnosis.folder import check_folder, read_folder
from tasks.diagnosis.stored import check_states
from tasks.eagle3.target import read_target_head
from tasks.errors import DrafthouseError
from tasks.store.tables import Store

ACCUSED = 0.5  # score from which a cause is named


def diagnose(store: Store, drafter_dir: Path | None = None) -> dict[str, Any]:
    """`{"causes": [{"id", "score", "evidence", "sentence", "remedy"}], "healthy", "notes"}` of the run `store.run_id`.

    `drafter_dir` = another drafter folder to judge in place of the run's own. Parts that are missing are named
    in `notes` and what is there is judged. Raises InputError for a run or folder that cannot be read at all.
    """
    case, findings = load_case(store, drafter_dir), Findings()
    findings.notes += case.notes
    _attempt("responses", lambda: check_responses(case, findings), findings)
    _attempt("states", lambda: check_states(case, findings), findings)
    _attempt("servers", lambda: _check_formats(case, findings), findings)
    if case.drafter_dir is None:
        findings.notes.append("no drafter in this run: its hypotheses are not tested")
    else:
        _check_drafter(case, findings)
    named = [finding for finding in findings.ranked() if finding.score >= ACCUSED]
    judged = bool(case.states_index) or case.drafter_dir is not None
    if not judged:
        findings.notes.append("neither states nor a drafter to judge: this run is not called healthy")
    causes = [finding.as_json() for finding in named]
    return {"causes": causes, "healthy": judged and not named, "notes": findings.notes}


def _check_drafter(case: Case, findings: Findings) -> None:
    folder = read_folder(case, findings)
    head = read_target_head(case.model, torch.float32, torch.device("cpu"))
    _attempt("drafter folder", lambda: check_folder(folder, head, case, findings), findings)
    _attempt("drafter", lambda: check_drafter(folder, head, case, findings), findings)


def _check_formats(case: Case, findings: Findings) -> None:
    """Weights served in one format and extracted in another, as the servers themselves said."""
    seen: dict[str, dict[str, set[str]]] = {}
    for row in case.tables["servers"]:
        if row["setting"] in ("dtype", "quantization") and row["effective"] is not None:
            seen.setdefault(row["setting"], {}).setdefault(row["effective"], set()).add(row["arm"])
    for setting, values in seen.items():
        if len(values) > 1:
            text = "; ".join(f"{value} on {', '.join(sorted(arms))}" for value, arms in sorted(values.items()))
            findings.add("quantisation_mismatch", 0.9, f"{setting} differs between servers: {text}")


def _attempt(what: str, check: Callable[[], object], findings: Findings) -> None:
    """Run one group of checks; an error of ours becomes a note, and the other groups still speak."""
    try:
        check()
    except DrafthouseError as error:
        findings.notes.append(f"{what}: not judged ({' '.join(str(error).split())})")
