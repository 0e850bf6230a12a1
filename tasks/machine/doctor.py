"""The doctor: what this host is, and what a campaign would meet on it. Looks only, changes nothing.

"unknown" is not "ok": a check that could not be made says so and why.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.config import Campaign, Device, TargetShape
from tasks.errors import DrafthouseError
from tasks.machine import shm
from tasks.machine.estimate import disk_needed_gib
from tasks.machine.facts import Facts, judge
from tasks.machine.gpu import GpuState, driver_version, read_gpus
from tasks.machine.handle import choose_port
from tasks.machine.host import ThisHost
from tasks.machine.known_bad import Finding, Level, judge_campaign
from tasks.machine.ownership import judge_gpus, look
from tasks.machine.processes import user_name
from tasks.machine.topology import Acs, Topology, read_acs, read_topology

GIB = 2**30
SHM_NEEDED_GIB = 1.0
SHM_SOURCE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"


@dataclass(frozen=True)
class EnvironmentFact:
    """What an engine environment holds, or why it does not work."""

    name: str
    python: str
    versions: dict[str, str]
    problem: str = ""


@dataclass(frozen=True)
class Machine:
    """One look at the host; everything that the checks read, so that they can be tried on recorded hosts."""

    gpus: list[GpuState] | None
    driver: str | None
    topology: Topology
    acs: Acs
    cores: int
    memory_gib: float | None
    shm_gib: float | None
    shm_free_gib: float | None
    shm_largest: list[tuple[str, int, str]]  # path, bytes, owner
    disk_free_gib: float | None


@dataclass
class Report:
    """The doctor's answer; `healthy` is False only for what stops a campaign, never for what is unknown."""

    machine: Machine
    environments: list[EnvironmentFact] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        return not any(f.level == "error" for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        body = asdict(self)
        body["machine"]["topology"]["links"] = {f"{a}-{b}": v for (a, b), v in self.machine.topology.links.items()}
        return {**body, "healthy": self.healthy}


def look_at_host(store_root: Path) -> Machine:
    """Read this host once."""
    gpus = read_gpus()
    if gpus:
        topology, acs = read_topology(), read_acs()
    else:
        topology, acs = Topology(0, problem="NVML lists no GPU"), Acs("unknown", reason="no GPU to ask for")
    largest = sorted(shm.segments(), key=lambda s: -s.size)[:5]
    size, free = _space(shm.SHM)
    return Machine(
        gpus, driver_version(), topology, acs, len(os.sched_getaffinity(0)), _memory_gib(), size, free,
        [(s.path, s.size, user_name(s.uid)) for s in largest], _space(_existing(store_root))[1],
    )


def examine(
    campaign: Campaign | None = None, shape: TargetShape | None = None, *, store_root: Path = Path("store"),
    environments: Iterable[EnvironmentFact] = (), machine: Machine | None = None,
) -> Report:
    """Examine this host (or a recorded `machine`), for a campaign if one is given."""
    seen = machine or look_at_host(store_root)
    report = Report(seen, list(environments))
    report.findings += _host(seen)
    broken = [e for e in report.environments if e.problem]
    report.findings += [Finding("environment", "error", f"{e.name}: {e.problem}", "make engines") for e in broken]
    if campaign is not None:
        reuse = (store_root / "objects").exists()
        report.findings += _for_campaign(campaign, shape, seen, live=machine is None, reuse=reuse)
    return report


def _host(seen: Machine) -> list[Finding]:
    found = []
    if seen.gpus is None:
        found.append(Finding("nvml", "unknown", "NVML does not answer: no GPU, or no driver", "nothing to do on a CPU"))
    for gpu in seen.gpus or []:
        if gpu.wedged:
            what = f"{gpu}: {gpu.used_mib} MiB and {gpu.load_pct} % load without a process: wedged"
            found.append(Finding("wedged-gpu", "warning", what, "an operator has to reset it or reboot"))
        elif gpu.holders is None:
            found.append(Finding("gpu-holders", "unknown", f"{gpu}: NVML does not tell who holds it"))
    if seen.gpus and len(seen.gpus) > 1 and seen.topology.problem:
        found.append(Finding("topology", "unknown", seen.topology.problem, "set machine.interconnect"))
    if seen.shm_gib is None:
        found.append(Finding("shm", "unknown", f"{shm.SHM} cannot be read"))
    elif seen.shm_free_gib is not None and seen.shm_free_gib < SHM_NEEDED_GIB:
        what = f"{shm.SHM} has {seen.shm_free_gib:.2f} GiB free of {seen.shm_gib:.2f}"
        remedy = "drafthouse clean; in a container raise --shm-size (its default is 64 MiB)"
        found.append(Finding("shm", "warning", what, remedy, SHM_SOURCE))
    return found


def _for_campaign(
    campaign: Campaign, shape: TargetShape | None, seen: Machine, *, live: bool, reuse: bool
) -> list[Finding]:
    found: list[Finding] = []
    try:
        facts = judge(campaign.machine, seen.gpus, seen.topology, seen.acs)
    except DrafthouseError as error:
        found.append(Finding("declared-machine", "error", str(error)))
        facts = Facts(None, seen.acs, None, None, True)
    found += judge_campaign(campaign, facts, shape)
    found += _gpus_free(campaign, seen)
    if shape is not None:
        found += _disk(campaign, shape, seen, reuse)
    if live and campaign.machine.port is not None:
        try:
            choose_port(campaign.machine.port)
        except DrafthouseError as error:
            found.append(Finding("port", "error", str(error)))
    return found


def _gpus_free(campaign: Campaign, seen: Machine) -> list[Finding]:
    needed = set(campaign.machine.gpus)
    if campaign.machine.device is Device.cpu or not needed:
        return []
    if seen.gpus is None:
        what = f"GPUs {sorted(needed)} are needed, NVML does not answer"
        return [Finding("needed-gpus", "error", what, "run it on the GPU host; --dry-run needs none")]
    picture = look(ThisHost())
    judged = judge_gpus(seen.gpus, needed, picture, {i.pid for i in picture.ours})
    missing = sorted(needed - {g.index for g in seen.gpus})
    remedy = "wait, choose others, or ask its owner"
    found = [Finding("foreign-holder", "error", text, remedy) for text in judged.foreign]
    found += [Finding("wedged-gpu", "error", text) for text in judged.wedged]
    if missing:
        found.append(Finding("needed-gpus", "error", f"no GPU {missing} on this host", "correct machine.gpus"))
    return found


def _disk(campaign: Campaign, shape: TargetShape, seen: Machine, reuse: bool) -> list[Finding]:
    need, free = disk_needed_gib(campaign, shape), seen.disk_free_gib
    if free is None:
        return [Finding("disk", "unknown", f"free disk cannot be read; the campaign needs {need:.1f} GiB")]
    if free < need:
        what = f"{free:.1f} GiB free for the store, a campaign from nothing needs {need:.1f} GiB"
        level: Level = "warning" if reuse else "error"  # a store with earlier work needs less
        return [Finding("disk", level, what, "free some, or use --store on a larger disk")]
    return []


def lines(report: Report) -> list[str]:
    """One screen of text."""
    seen = report.machine
    count = "unknown: NVML does not answer" if seen.gpus is None else f"{len(seen.gpus)}, driver {seen.driver}"
    shown = [f"GPUs        {count}"]
    for gpu in seen.gpus or []:
        holders = "?" if gpu.holders is None else ", ".join(f"pid {h.pid} {h.mib} MiB" for h in gpu.holders) or "free"
        capability = "?" if gpu.capability is None else f"{gpu.capability[0]}.{gpu.capability[1]}"
        used = f"{gpu.used_mib}/{gpu.total_mib} MiB  {gpu.load_pct} %"
        shown.append(f"  {gpu.index}  {gpu.name}  sm {capability}  {used}  {holders}")
    kinds = sorted({str(v) for v in seen.topology.links.values()})
    acs = ", ".join(seen.acs.bridges) or seen.acs.reason
    nodes = ", ".join(sorted(set(seen.topology.numa.values()))) or "?"
    shown += [
        f"topology    {', '.join(kinds) or seen.topology.problem or 'one GPU'}; NUMA nodes {nodes}",
        f"ACS         {seen.acs.state}{' (' + acs + ')' if acs else ''}",
        f"host        {seen.cores} cores, {_number(seen.memory_gib)} GiB memory available",
        f"{shm.SHM}    {_number(seen.shm_free_gib)} of {_number(seen.shm_gib)} GiB free",
    ]
    shown += [f"            {size / GIB:.3f} GiB  {path}  ({owner})" for path, size, owner in seen.shm_largest]
    shown.append(f"disk        {_number(seen.disk_free_gib)} GiB free for the store")
    for environment in report.environments:
        told = environment.problem or ", ".join(f"{k} {v}" for k, v in environment.versions.items())
        shown.append(f"engine      {environment.name}: {told}")
    shown += [str(finding) for finding in report.findings]
    shown.append("healthy" if report.healthy else "not fit for this campaign: see the errors above")
    return shown


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.1f}"


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _space(path: Path) -> tuple[float | None, float | None]:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None, None
    return usage.total / GIB, usage.free / GIB


def _memory_gib() -> float | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / 2**20
    except (OSError, ValueError):
        pass
    return None
