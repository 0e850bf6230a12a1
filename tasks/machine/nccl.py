"""NCCL profiles (data) and what NCCL itself says in its log of the values that took effect.

A process environment proves nothing: engines set NCCL_* inside the process. Only NCCL's own lines do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tasks.config import Interconnect
from tasks.errors import NotSupported
from tasks.machine.topology import Acs


@dataclass(frozen=True)
class Profile:
    """A named set of variables and what it says of the engine's own all-reduce kernel (None = by topology)."""

    name: str
    variables: Mapping[str, str]
    custom_all_reduce: bool | None
    why: str


PROFILES: Final[dict[str, Profile]] = {
    p.name: p
    for p in (
        Profile("none", {}, None, "NCCL's own choices"),
        Profile("single-gpu", {}, None, "one GPU has no collective"),
        Profile("nvlink", {}, None, "NCCL's own choices are right on NVLink; the engine's all-reduce kernel stays on"),
        Profile(
            "pcie-no-nvlink",
            {
                "NCCL_P2P_LEVEL": "SYS", "NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_MAX_NCHANNELS": "16",
                "NCCL_BUFFSIZE": "16777216", "NCCL_NTHREADS": "512",
            },
            False,
            "low-latency ring for the small messages of decoding over PCIe; forces LL for large ones too (prefill)",
        ),
        Profile(
            "p2p-off", {"NCCL_P2P_DISABLE": "1"}, False,
            "through host memory: for hosts where peer traffic hangs (ACS redirect, IOMMU)",
        ),
    )
}
# Enough for the values to be seen; TUNING would print a line for every call and disturb the measurement.
LOGGING: Final = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV"}


@dataclass(frozen=True)
class Resolved:
    """A profile as one arm gets it: flags and variables agree."""

    profile: Profile
    variables: dict[str, str]
    custom_all_reduce: bool | None  # None = no flag: one GPU, or NVLink
    reason: str


def choose(interconnect: Interconnect | None, acs: Acs) -> Profile:
    """The profile `auto` stands for on this host."""
    if interconnect is Interconnect.single:
        return PROFILES["single-gpu"]
    if interconnect is Interconnect.nvlink:
        return PROFILES["nvlink"]
    if interconnect is Interconnect.pcie:
        return PROFILES["p2p-off" if acs.state == "on" else "pcie-no-nvlink"]
    return PROFILES["none"]


def resolve(
    *, name: str, tensor_parallel: int, interconnect: Interconnect | None, acs: Acs, custom_all_reduce: bool | None,
    own_variables: Mapping[str, str],
) -> Resolved:
    """Variables and the all-reduce flag of an arm; raises NotSupported when they cannot agree.

    Without NVLink the engine's own all-reduce kernel is turned off explicitly for every tensor_parallel
    above 1: engines turn it off by themselves above two GPUs only, and a pair hangs.
    """
    if tensor_parallel == 1:
        interconnect = Interconnect.single
    if name == "auto":
        profile = choose(interconnect, acs)
    elif name in PROFILES:
        profile = PROFILES[name]
    else:
        raise NotSupported(f"tuning.nccl_profile: no profile {name}; there are auto, {', '.join(PROFILES)}")
    variables = dict(profile.variables) if tensor_parallel > 1 else {}
    merged = variables | dict(own_variables)
    p2p_off = merged.get("NCCL_P2P_DISABLE", "0") != "0"
    if p2p_off and "NCCL_P2P_LEVEL" in merged:
        told = "NCCL_P2P_DISABLE overrides NCCL_P2P_LEVEL: set one of them (profile p2p-off, or no P2P_DISABLE)"
        raise NotSupported(told)
    if tensor_parallel == 1:
        return Resolved(profile, variables, None, "one GPU")
    if p2p_off:
        wanted, reason = False, "NCCL_P2P_DISABLE is set: peers cannot reach each other's memory"
    elif interconnect is Interconnect.pcie:
        wanted, reason = False, "no NVLink between the GPUs"
    elif profile.custom_all_reduce is False:
        wanted, reason = False, f"profile {profile.name}"
    else:
        reason = "NVLink" if interconnect else "topology unknown"
        return Resolved(profile, variables | LOGGING, custom_all_reduce, reason)
    if custom_all_reduce:
        raise NotSupported(f"tuning.custom_all_reduce: true, but {reason}; set it to false or leave it empty")
    return Resolved(profile, variables | LOGGING, wanted, reason)


# What NCCL says ---------------------------------------------------------------------------------

_LINE: Final = re.compile(r"(\S+):(\d+):\d+ \[(\d+)\] NCCL INFO (.*)$")
_ENV: Final = re.compile(r"(NCCL_\w+) set by environment to (.*?)\.?$")
_VERSION: Final = re.compile(r"NCCL version (\S+)")
_VIA: Final = re.compile(r"Channel \d+\S* : \d+\[\d+\] -> \d+\[\d+\] via (\w+)")
_TUNING: Final = re.compile(r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")
_CHANNELS: Final = re.compile(r"(\d+) coll channels")


@dataclass(frozen=True)
class Choice:
    """What NCCL took for one message size."""

    operation: str
    bytes: int
    algorithm: str
    protocol: str
    channels: int


@dataclass
class NcclLog:
    """NCCL's own words; `values[name]` holds every value seen, since ranks may differ."""

    version: str | None = None
    values: dict[str, set[str]] = field(default_factory=dict)
    first_line: dict[str, int] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)  # P2P, SHM, NET: how ranks reach each other
    choices: list[Choice] = field(default_factory=list)
    channels: int | None = None
    processes: set[str] = field(default_factory=set)

    @property
    def spoke(self) -> bool:
        return self.version is not None or bool(self.values)


def read_log(lines: Iterable[str]) -> NcclLog:
    """Everything that NCCL_DEBUG=INFO prints and that is of use; other lines are passed over."""
    found = NcclLog()
    for number, line in enumerate(lines, 1):
        match = _LINE.search(line)
        if not match:
            continue
        found.processes.add(match[2])
        text = match[4].strip()
        if env := _ENV.match(text):
            found.values.setdefault(env[1], set()).add(env[2].strip())
            found.first_line.setdefault(env[1], number)
        elif version := _VERSION.match(text):
            found.version = version[1]
        elif via := _VIA.match(text):
            found.paths.add(via[1])
        elif tuning := _TUNING.match(text):
            channels = int(tuning[6]) - int(tuning[5]) + 1
            choice = Choice(tuning[1], int(tuning[2]), tuning[3], tuning[4], channels)
            if choice not in found.choices:
                found.choices.append(choice)
        elif coll := _CHANNELS.match(text):
            found.channels = int(coll[1])
    return found
