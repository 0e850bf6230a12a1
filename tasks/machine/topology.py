"""How the GPUs of a host reach each other, and whether a PCIe bridge stands in their way (ACS redirect).

What cannot be read is `unknown`, which is not the same as `ok`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

from tasks.config import Interconnect
from tasks.machine.gpu import _ask, nvml

COMMAND_TIMEOUT_S: Final = 10.0  # nvidia-smi hangs on a wedged driver
_NVML_LEVELS: Final = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_BRIDGE: Final = re.compile(r"^((?:[0-9a-fA-F]{4}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]) .*(?:PCI bridge|Root Port)")
_DEVICE: Final = re.compile(r"^(?:[0-9a-fA-F]{4}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7] ")


@dataclass(frozen=True)
class Topology:
    """Links between pairs of GPUs by nvidia-smi's words (NV18, PIX, PXB, PHB, NODE, SYS); NUMA node per GPU."""

    gpus: int
    links: dict[tuple[int, int], str] = field(default_factory=dict)
    numa: dict[int, str] = field(default_factory=dict)
    problem: str = ""  # why it is not known

    def interconnect(self, gpus: Sequence[int] = ()) -> Interconnect | None:
        """Of the named GPUs (default all): nvlink only if every pair has it; None = unknown."""
        chosen = list(gpus) or list(range(self.gpus))
        if len(chosen) == 1:
            return Interconnect.single
        links = [self.links.get((a, b)) for a, b in combinations(sorted(chosen), 2)]
        if not links or None in links:
            return None
        return Interconnect.nvlink if all(str(link).startswith("NV") for link in links) else Interconnect.pcie


@dataclass(frozen=True)
class Acs:
    """State of ACS redirect: on (bridges named) | off | unknown (with the reason)."""

    state: str
    bridges: tuple[str, ...] = ()
    reason: str = ""


def parse_matrix(text: str) -> Topology:
    """The table of `nvidia-smi topo -m`; raises ValueError for anything else."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.split("\t") for line in plain.splitlines()]
    header = next((line for line in lines if any(cell.strip() == "GPU0" for cell in line)), None)
    if header is None:
        raise ValueError("no GPU column in the topology table")
    names = [cell.strip() for cell in header]
    columns = {int(name[3:]): i for i, name in enumerate(names) if re.fullmatch(r"GPU\d+", name)}
    numa_column = names.index("NUMA Affinity") if "NUMA Affinity" in names else None
    links: dict[tuple[int, int], str] = {}
    numa: dict[int, str] = {}
    for line in lines:
        row = line[0].strip()
        if not re.fullmatch(r"GPU\d+", row):
            continue
        here = int(row[3:])
        for other, column in columns.items():
            if here < other and column < len(line):
                links[here, other] = line[column].strip()
        if numa_column is not None and numa_column < len(line):
            numa[here] = line[numa_column].strip()
    return Topology(len(columns), links, numa)


def read_topology() -> Topology:
    """Of this host: nvidia-smi's table, else NVML's pairs, else unknown with the reason."""
    done = run_command(["nvidia-smi", "topo", "-m"])
    problem = done if isinstance(done, str) else ""
    if not isinstance(done, str):
        try:
            return parse_matrix(done.stdout)
        except ValueError as error:
            problem = f"nvidia-smi topo -m: {error}"
    return _from_nvml() or Topology(0, problem=problem)


def _from_nvml() -> Topology | None:
    with nvml() as n:
        if n is None or not (count := _ask(n.nvmlDeviceGetCount)):
            return None
        handles = [n.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        links = {}
        for a, b in combinations(range(count), 2):
            if _ask(n.nvmlDeviceGetP2PStatus, handles[a], handles[b], n.NVML_P2P_CAPS_INDEX_NVLINK) == 0:
                links[a, b] = "NV"
            elif (level := _ask(n.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b])) is not None:
                links[a, b] = _NVML_LEVELS.get(int(level), "SYS")
        return Topology(count, links)


def run_command(argv: list[str]) -> subprocess.CompletedProcess[str] | str:
    """Output of a tool of the host, or why there is none (absent, hangs, fails)."""
    tool = shutil.which(argv[0])
    if tool is None:
        return f"{argv[0]} is not installed"
    try:
        done = subprocess.run(
            [tool, *argv[1:]], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"{' '.join(argv)} gave no answer within {COMMAND_TIMEOUT_S:g} s: the driver may hang"
    except OSError as error:
        return f"{argv[0]} cannot be run ({error.strerror})"
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()
        return f"{' '.join(argv)} failed with code {done.returncode}: {last[-1] if last else 'no output'}"
    return done


def parse_acs(text: str) -> Acs:
    """ACS redirect of the PCI bridges in `lspci -vvv`: peer traffic takes the way through the IOMMU where it is on.

    Bridges whose capabilities may not be read make the answer unknown, unless another one is on already.
    """
    bridge, on, hidden, seen = "", [], 0, 0
    for line in text.splitlines():
        if _DEVICE.match(line):
            match = _BRIDGE.match(line)
            bridge = match[1] if match else ""
            seen += bool(bridge)
        elif bridge and "ACSCtl:" in line and "ReqRedir+" in line:
            on.append(bridge)
        elif bridge and "<access denied>" in line:
            hidden += 1
    if on:
        return Acs("on", tuple(on))
    if hidden:
        return Acs("unknown", reason=f"lspci may not read {hidden} of {seen} bridges; run the doctor as root once")
    if not seen:
        return Acs("unknown", reason="lspci shows no PCI bridge")
    return Acs("off")


def read_acs() -> Acs:
    """Of this host."""
    done = run_command(["lspci", "-vvv"])
    return Acs("unknown", reason=done) if isinstance(done, str) else parse_acs(done.stdout)
