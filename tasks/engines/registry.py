"""Which adapter speaks for which engine; adapters are imported only when asked for."""

from __future__ import annotations

from tasks.config import EngineName
from tasks.engines.base import Engine


def engine(name: EngineName) -> Engine:
    """The adapter of an engine."""
    match name:
        case EngineName.vllm:
            from tasks.engines.vllm import VllmEngine

            return VllmEngine()
        case EngineName.sglang:
            from tasks.engines.sglang import SglangEngine

            return SglangEngine()
        case EngineName.stub:
            from tasks.engines.stub import StubEngine

            return StubEngine()
