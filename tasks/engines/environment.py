"""What may change the numbers of an engine, as one key: a new key asks for a new look at its states."""

from __future__ import annotations

import json
import os
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks.config import Arm, Campaign
from tasks.engines.base import Engine
from tasks.errors import NotSupported
from tasks.store.keys import content_key, folder_fingerprint

_PACKAGES = """
import importlib.metadata as metadata, json, sys
found = {d.metadata["Name"] or "": d.version for d in metadata.distributions()}
print(json.dumps([sys.version, sorted(found.items())]))
"""
_TASKS = Path(__file__).resolve().parents[1]


def environment_key(campaign: Campaign, arm: Arm, adapter: Engine) -> str:
    """Key of the installed packages, our own engine code, the arm's tuning and its variables.

    Starts no server. Raises NotSupported if the environment's interpreter does not run.
    """
    environment = campaign.machine.environment_of(arm)
    # Of our own code what decides which numbers are stored; the rest may change without a new look.
    own = [f"engines/{arm.engine}.py", f"engines/inside/{arm.engine}_*.py", "store/states.py"]
    code = folder_fingerprint(_TASKS, own)
    return content_key(
        "environment", arm.engine, adapter.versions(environment), _packages(environment.python, environment.pairs),
        code, arm.tuning.model_dump(mode="json"), arm.fault, campaign.machine.device, environment.pairs,
    )


@lru_cache(maxsize=16)
def _packages(python: str, variables: tuple[tuple[str, str], ...]) -> str:
    return content_key(ask_environment(python, _PACKAGES, variables))


def ask_environment(python: str, program: str, variables: tuple[tuple[str, str], ...] = ()) -> Any:
    """What a small program prints as JSON when the environment's own interpreter runs it.

    `variables` are those that the environment needs, such as PYTHONPATH. Raises NotSupported if that
    interpreter does not run.
    """
    if not Path(python).exists():
        raise NotSupported(f"no engine environment at {python}; make it with: make engines")
    try:
        done = subprocess.run(
            [python, "-P", "-c", program], capture_output=True, text=True, timeout=60, check=True,
            env=os.environ | dict(variables),
        )
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        what = f"{python}: this engine environment does not work ({type(error).__name__})"
        raise NotSupported(f"{what}; run make engines") from error
