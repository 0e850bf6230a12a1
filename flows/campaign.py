"""The campaign: serve, measure, extract, align, train, replay, and measure speculation.

    clean → doctor
    clean → serve (base arm) → benchmark ─┬→ next arm
                                          └ regenerate (on the running base arm)
    clean → serve (extraction arm) → extract → align → train
    replay → clean → serve (speculative arm) → benchmark → report
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from flows.artifacts import publish_results
from flows.form import chosen_campaign, run_name
from flows.lock import only_campaign_on_host
from flows.runs import Run, recorded
from tasks.agree import agree
from tasks.align import align
from tasks.benchmark import alternate, benchmark
from tasks.clean import clean
from tasks.config import Arm, Campaign, EngineName, Role, Workload, WorkloadKind
from tasks.doctor import doctor, require_fit
from tasks.extract import extract
from tasks.preflight import require_ready
from tasks.probe import probe, probe_folder
from tasks.reference import release_gpu
from tasks.regenerate import regenerate
from tasks.replay import replay
from tasks.report import write_report
from tasks.serve import Server, serving
from tasks.store.refs import BenchmarkRef, DrafterRef, ReplayRef, ResponsesRef
from tasks.store.tables import Store
from tasks.train import train


def run_id_of(config: Campaign) -> str:
    """The same for every retry of one Prefect flow run, so that a retry continues its own run."""
    return f"{config.name}-{str(flow_run.id).replace('-', '')[-12:]}"


def name_of_run() -> str:
    """Target, arms and date, as Prefect's lists show a run."""
    return run_name(flow_run.parameters, f"{flow_run.scheduled_start_time:%Y-%m-%d %H:%M}")


@flow(name="campaign", flow_run_name=name_of_run, persist_result=True, validate_parameters=False)
def campaign(config: Campaign | str, store: str = "store", overrides: Sequence[str] = ()) -> str:
    """Run one campaign and return its run id; its numbers are in the store's tables.

    A retry continues at the unfinished stage, sample, measurement or training step.
    """
    config = chosen_campaign(config, overrides)
    require_ready(config)
    run_id = run_id_of(config)
    with only_campaign_on_host(config, run_id), recorded(config, Store(Path(store), run_id)) as run:
        # First, so that the doctor does not meet our own leftovers, and a retry that needs no server frees them too.
        run.step("clean", "", partial(clean, config, None, run.store))
        run.step("doctor", "", partial(examine_host, config, run.store))
        baselines, responses = measure_base_arms(run)
        drafters = train_drafters(run, responses)
        measure_speculation(run, baselines, drafters)
        run.step("report", "", partial(write_report, store=run.store))
        publish_results(run.store)
    return run.store.run_id


def examine_host(config: Campaign, store: Store) -> None:
    """Stop before anything is loaded if this host or these settings are known to fail."""
    require_fit(doctor(config, store.root))


Baselines = dict[tuple[EngineName, str], BenchmarkRef]


def measure_base_arms(run: Run) -> tuple[Baselines, ResponsesRef | None]:
    """Benchmark every base arm, each compared with the first one, which also generates the training responses."""
    baselines: Baselines = {}
    first: dict[str, BenchmarkRef] = {}
    responses = None
    for arms in run.config.arms_together(Role.base):
        with servers_of(run, arms) as servers:
            for workload in run.config.workloads:
                take_turns(run, servers, workload, baselines=[first.get(workload.name) for _ in arms])
                for server in servers:
                    measure = partial(benchmark, server, workload, run.config, run.store, drafter=None)
                    subject, other = f"{server.arm.name} {workload.name}", first.get(workload.name)
                    measured = run.step("benchmark", subject, measure, baseline=other)
                    first.setdefault(workload.name, measured)
                    baselines.setdefault((server.arm.engine, workload.name), measured)
            if responses is None and run.config.arms_of(Role.extraction):
                generate = partial(regenerate, servers[0], run.config, run.store)
                responses = run.step("regenerate", arms[0].name, generate)
    return baselines, responses


def train_drafters(run: Run, responses: ResponsesRef | None) -> dict[EngineName, DrafterRef]:
    """One drafter per engine that extracts; a misaligned capture stops the campaign before training."""
    drafters = {}
    for arm in run.config.arms_of(Role.extraction):
        assert responses is not None, "the config refuses extraction without a base arm"
        capturing = partial(server_of, run, arm)
        take = partial(extract, capturing, arm=arm, campaign=run.config, store=run.store)
        states = run.step("extract", arm.name, take, responses=responses)
        check = partial(align, campaign=run.config, store=run.store)
        alignment = run.step("align", arm.engine, check, states=states)
        learn = partial(train, campaign=run.config, store=run.store)
        drafters[arm.engine] = run.step(
            "train", arm.engine, learn, states=states, responses=responses, alignment=alignment
        )
    return drafters


def measure_speculation(run: Run, baselines: Baselines, drafters: dict[EngineName, DrafterRef]) -> None:
    """Replay each drafter offline, then serve it and measure it against the base arm's outputs."""
    for arms in run.config.arms_together(Role.speculative):
        own = {arm.name: own_drafter(arm, drafters) for arm in arms}
        replayed = {arm.name: predict_acceptance(run, arm, baselines, own[arm.name]) for arm in arms}
        with servers_of(run, arms, own) as servers:
            for server in servers:
                look_inside(run, server, own[server.arm.name])
            for workload in run.config.workloads:
                against = [baselines[arm.engine, workload.name] for arm in arms]
                take_turns(run, servers, workload, baselines=against, drafters=list(own.values()))
                for server, baseline in zip(servers, against, strict=True):
                    name = server.arm.name
                    measure = partial(benchmark, server, workload, run.config, run.store)
                    subject = f"{name} {workload.name}"
                    served = run.step("benchmark", subject, measure, baseline=baseline, drafter=own[name])
                    if workload.name in replayed[name]:
                        check = partial(agree, campaign=run.config, store=run.store)
                        run.step("agree", subject, check, replayed=replayed[name][workload.name], served=served)


def own_drafter(arm: Arm, drafters: dict[EngineName, DrafterRef]) -> DrafterRef | None:
    """The drafter of this campaign that the arm serves; None for a published one."""
    assert arm.speculative is not None, "the config refuses speculative arms without it"
    return drafters[arm.speculative.extracted_on] if arm.speculative.drafter == "own" else None


def predict_acceptance(
    run: Run, arm: Arm, baselines: Baselines, drafter: DrafterRef | None
) -> dict[str, ReplayRef]:
    """Replay the drafter along the base arm's answers, workload by workload, before its server starts."""
    replayed = {}
    for workload in run.config.workloads:
        if drafter is not None and workload.replay and workload.kind is WorkloadKind.prompts:
            predict = partial(replay, arm=arm, campaign=run.config, store=run.store)
            subject, baseline = f"{arm.name} {workload.name}", baselines[arm.engine, workload.name]
            replayed[workload.name] = run.step("replay", subject, predict, drafter=drafter, baseline=baseline)
    return replayed


def look_inside(run: Run, server: Server, drafter: DrafterRef | None) -> None:
    """Compare what the drafter receives while it serves with what it was trained on, where the arm asks for it."""
    if drafter is not None and server.arm.speculative and server.arm.speculative.serving_probe:
        look = partial(probe, server, campaign=run.config, store=run.store)
        run.step("probe", server.arm.name, look, drafter=drafter)


def take_turns(
    run: Run, servers: Sequence[Server], workload: Workload, baselines: Sequence[BenchmarkRef | None],
    drafters: Sequence[DrafterRef | None] | None = None,
) -> None:
    """Measure arms that are up together in turns; `benchmark` then finds every measurement finished."""
    if len(servers) > 1:
        subject = f"{servers[0].arm.side_by_side} {workload.name}"
        measure = partial(alternate, servers, workload, run.config, run.store)
        run.step("alternate", subject, measure, baselines=baselines, drafters=drafters or [None for _ in servers])


@contextmanager
def servers_of(
    run: Run, arms: Sequence[Arm], drafters: Mapping[str, DrafterRef | None] | None = None
) -> Iterator[list[Server]]:
    """Servers of arms that are up together; each starts when something first asks for its address."""
    with ExitStack() as up:
        yield [up.enter_context(server_of(run, arm, drafter=(drafters or {}).get(arm.name))) for arm in arms]


@contextmanager
def server_of(
    run: Run, arm: Arm, capture_dir: Path | None = None, drafter: DrafterRef | None = None
) -> Iterator[Server]:
    """A lazy server: it is cleaned for and started when an unfinished stage first asks for its address."""
    drafter_dir = run.store.artifact("drafter", drafter.key) / "serve" / arm.engine if drafter else None

    def tidy() -> None:
        release_gpu()
        run.step("clean", arm.name, partial(clean, run.config, arm.name, run.store))

    with serving(
        run.config, arm, run.store, before_start=tidy, capture_dir=capture_dir, drafter_dir=drafter_dir,
        probe_dir=probe_folder(run.store, arm.name) if arm.speculative and arm.speculative.serving_probe else None,
        progress=run.progress.loading(arm.name), start_as=partial(run.step, "serve", arm.name),
    ) as server, run.logs_of(server):
        yield server
        if server.loads:
            run.step("stop", arm.name, server.stop)
