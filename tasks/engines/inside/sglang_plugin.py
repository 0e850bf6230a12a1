"""Entry points of drafthouse inside SGLang: a CPU platform, and the capture of hidden states.

Both are off unless the launch asks for them by the variables below, so that an SGLang that happens to
share the environment is left alone. Nothing of the engine is imported before it is needed.
"""

from __future__ import annotations

import os

PLATFORM = "drafthouse-cpu"  # name of the entry point, for SGLANG_PLATFORM
CAPTURE_DIR = "DRAFTHOUSE_CAPTURE_DIR"  # folder of the shards; set = capture
CAPTURE_POINTS = "DRAFTHOUSE_CAPTURE_POINTS"  # Hugging Face hidden_states indices, comma separated
PROBE_DIR = "DRAFTHOUSE_PROBE_DIR"  # folder of the serving probe's records; set = probe on request
SAMPLE_KEY = "drafthouse_sample_key"  # in a request's custom_params: the key to acknowledge its states under
CAPTURE_VERSION = "sglang-1"  # part of the key of captured states: raise it when their values change


def activate() -> str | None:
    """Class of the platform; None, so that SGLang takes its own, unless the launch names this one."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM:
        return None
    return "tasks.engines.inside.sglang_cpu.CpuPlatform"


def register() -> None:
    """Register the hooks that this launch needs; called in every process of the server."""
    if os.environ.get("SGLANG_PLATFORM") == PLATFORM:
        from tasks.engines.inside import sglang_cpu

        sglang_cpu.register()
    if os.environ.get(CAPTURE_DIR):
        from tasks.engines.inside import sglang_capture

        sglang_capture.register(os.environ[CAPTURE_DIR], os.environ.get(CAPTURE_POINTS, ""))
    if os.environ.get(PROBE_DIR):
        from tasks.engines.inside import sglang_probe

        sglang_probe.register(os.environ[PROBE_DIR])
