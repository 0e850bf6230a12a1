"""What may change the numbers of an engine, as one key: a new key asks for a new look at its states."""

from __future__ import annotations

import json
import os
import subprocess
from functools import lru_cache
from pathlib import Path

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
    variables = tuple((v.name, v.value) for v in environment.variables)
    return content_key(
        "environment", arm.engine, adapter.versions(environment.python), _packages(environment.python, variables),
        code, arm.tuning.model_dump(mode="json"), arm.fault, campaign.machine.device, variables,
    )


@lru_cache(maxsize=16)
def _packages(python: str, variables: tuple[tuple[str, str], ...]) -> str:
    try:
        done = subprocess.run(
            [python, "-P", "-c", _PACKAGES], capture_output=True, text=True, timeout=60, check=True,
            env=os.environ | dict(variables),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NotSupported(f"{python}: this engine environment does not work ({error}); run make engines") from error
    return content_key(json.loads(done.stdout))
