"""Which attention backends exist for which compute capability: refused before a ten-minute load.

SM120 (RTX PRO 6000) is not a bigger SM100: kernels of the data-centre Blackwell do not run on it, and a
test for ">= (10, 0)" takes it for one. Read from the engines' own checks (vLLM 0.32, SGLang 0.5.23).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tasks.config import EngineName
from tasks.errors import NotSupported

Capability = tuple[int, int]
KNOWN: Final[frozenset[Capability]] = frozenset(
    {(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)}
)
ALL: Final = frozenset({8, 9, 10, 12})

# engine -> attention kind -> backend -> major capabilities that it runs on, best choice first
_MHA: Final = "mha"
_MLA: Final = "mla"
TABLE: Final[dict[EngineName, dict[str, dict[str, frozenset[int]]]]] = {
    EngineName.sglang: {
        _MHA: {
            "fa3": frozenset({8, 9}), "trtllm_mha": frozenset({10}), "flashinfer": ALL, "triton": ALL,
        },
        _MLA: {
            "fa3": frozenset({9}), "trtllm_mla": frozenset({10}), "cutlass_mla": frozenset({10}),
            "flashmla": frozenset({9}), "flashinfer": ALL, "triton": ALL,
        },
    },
    EngineName.vllm: {
        _MHA: {"flash_attn": ALL, "flashinfer": ALL, "triton_attn": ALL, "flex_attention": ALL},
        _MLA: {
            "flashinfer_mla": frozenset({10}), "cutlass_mla": frozenset({10}), "flash_attn_mla": frozenset({9}),
            "flashmla": frozenset({9, 10}), "triton_mla": ALL,
        },
    },
}
PORTABLE: Final[dict[EngineName, dict[str, str]]] = {
    EngineName.sglang: {_MHA: "triton", _MLA: "triton"},
    EngineName.vllm: {_MHA: "triton_attn", _MLA: "triton_mla"},
}


@dataclass(frozen=True)
class Backend:
    """What to ask the engine for; `name` None = its own choice is safe here. `note` goes into the servers table."""

    name: str | None
    note: str


def allowed(engine: EngineName, capability: Capability, mla: bool) -> list[str]:
    """Backends that run there, best first; only the portable one for a capability that nobody has tried."""
    kind = _MLA if mla else _MHA
    if capability not in KNOWN:
        return [PORTABLE[engine][kind]]
    return [name for name, majors in TABLE[engine][kind].items() if capability[0] in majors]


def resolve(engine: EngineName, capability: Capability | None, mla: bool, asked: str | None) -> Backend:
    """The backend to ask for; raises NotSupported for one that cannot run there, with the allowed list."""
    if engine not in TABLE:
        return Backend(asked, "")
    kind = _MLA if mla else _MHA
    if capability is None:
        return Backend(asked, "compute capability unknown: the engine's own choice" if asked is None else "")
    shown = f"SM{capability[0]}{capability[1]}"
    if asked is not None:
        name = asked.lower()
        fit = allowed(engine, capability, mla)
        known = {n for table in TABLE[engine].values() for n in table}
        if (name in known or capability in KNOWN) and name not in fit:
            raise NotSupported(
                f"tuning.attention_backend: {asked} does not run on {shown} with {kind.upper()} attention in {engine}; "
                f"there are {', '.join(fit)}"
            )
        return Backend(asked, "")
    if capability not in KNOWN:
        return Backend(PORTABLE[engine][kind], f"{shown} is not a known capability: the portable backend")
    if capability[0] == 12 and mla and engine is EngineName.sglang:
        # Its automatic choice has taken kernels for SM100 here; vLLM tests for the exact generation.
        return Backend(PORTABLE[engine][kind], f"{shown} with MLA: the engine's own choice may be one for SM100")
    return Backend(None, "")
