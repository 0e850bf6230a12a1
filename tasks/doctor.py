"""Doctor: what a campaign would meet on this host, before anything is loaded; looks only, changes nothing."""

from __future__ import annotations

from pathlib import Path

from tasks.config import Campaign, Device, EngineEnvironment, EngineName
from tasks.engines.registry import engine
from tasks.errors import DrafthouseError, MachineError
from tasks.launch import shape_of
from tasks.machine.doctor import EnvironmentFact, Report, examine
from tasks.preflight import preflight

PROJECT = Path(__file__).resolve().parents[1]


def doctor(campaign: Campaign | None = None, store_root: Path = Path("store")) -> Report:
    """Host, engine environments and, for a campaign, all that is known to fail with it."""
    shape = None if campaign is None else shape_of(campaign.target)
    report = examine(campaign, shape, store_root=store_root, environments=environments(campaign))
    if campaign is not None and shape is not None:
        report.findings += preflight(campaign, shape)
    return report


def require_fit(report: Report) -> None:
    """Raises MachineError that names everything that stops the campaign; unknown and warnings do not."""
    errors = [f"{f.what} -> {f.remedy}" if f.remedy else f.what for f in report.findings if f.level == "error"]
    if errors:
        raise MachineError("; ".join(errors))


def environments(campaign: Campaign | None) -> list[EnvironmentFact]:
    """Engine environments of a campaign's arms, or those of the project without one."""
    if campaign is not None:
        used = {(arm.engine, campaign.machine.environment_of(arm)) for arm in campaign.arms}
        return [_fact(name, environment) for name, environment in sorted(used, key=lambda pair: pair[1].name)]
    found = []
    for name in (EngineName.vllm, EngineName.sglang):
        for device in Device:
            python = PROJECT / ".venvs" / f"{name}-{device}" / "bin" / "python"
            if python.exists():
                found.append(_fact(name, EngineEnvironment(name=f"{name}-{device}", python=str(python))))
    return found


def _fact(name: EngineName, environment: EngineEnvironment) -> EnvironmentFact:
    if not Path(environment.python).exists():
        return EnvironmentFact(environment.name, environment.python, {}, f"no interpreter at {environment.python}")
    try:
        return EnvironmentFact(environment.name, environment.python, engine(name).versions(environment))
    except DrafthouseError as error:
        return EnvironmentFact(environment.name, environment.python, {}, str(error))
