"""Hooks that are known to have taken.

SGLang logs and swallows a hook that it cannot apply, and goes on without it: a server that captures
nothing, or samples with a kernel that is not there, looks healthy. So a target is resolved when its
hook is registered, and looked up again once the model is loaded.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


@dataclass(frozen=True)
class Hook:
    """One change to SGLang: a dotted path of a function or method, and what wraps or replaces it."""

    target: str
    function: Callable[..., Any]
    kind: HookType


def register(hooks: list[Hook]) -> None:
    """Register `hooks`; ends the process, with the reason, if this SGLang lacks a target.

    SystemExit passes through the engine's `except Exception` around plugins.
    """
    for hook in hooks:
        try:
            pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError) as error:
            raise SystemExit(
                f"drafthouse: this SGLang has no {hook.target} ({error}); use a supported version: 0.5.16 or 0.5.23"
            ) from error
        HookRegistry.register(hook.target, hook.function, hook.kind)


def taken(hooks: list[Hook]) -> dict[str, bool]:
    """Target -> whether our hook is in force there now."""
    return {hook.target: hook.target in HookRegistry._patched and _is_wrapped(hook.target) for hook in hooks}


def require(hooks: list[Hook]) -> dict[str, bool]:
    """`taken`, or RuntimeError that names the hooks that did not take."""
    state = taken(hooks)
    missing = sorted(target for target, took in state.items() if not took)
    if missing:
        raise RuntimeError(f"drafthouse: hooks did not take: {', '.join(missing)}; see the plugin errors above")
    return state


def _is_wrapped(target: str) -> bool:
    owner_path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    raw = vars(owner).get(name)
    function = raw.__func__ if isinstance(raw, classmethod | staticmethod) else raw
    return hasattr(function, "__wrapped__")
