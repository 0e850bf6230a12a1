"""The doctor on recorded hosts and the dry run of the eight-GPU campaign: right advice, nothing rendered in silence."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks import dry_run
from tasks.campaign_file import load_campaign, parse_campaign
from tasks.config import Campaign, EngineEnvironment, EngineName, Variable
from tasks.engines.registry import engine
from tasks.errors import ConfigError, InputError, MachineError, NotSupported
from tasks.launch import nccl_observed, plan_of, requested, shape_of, shown_variables
from tasks.machine import doctor
from tasks.machine.facts import facts_of, judge
from tasks.machine.gpu import GpuHolder, GpuState
from tasks.machine.known_bad import judge_campaign
from tasks.machine.topology import Acs, Topology, parse_acs, parse_matrix

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
STORY = ROOT / "deployments" / "campaigns" / "kimi-k2.5-int4-8x-rtx-pro-6000.yaml"
SIX = {
    "NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "SYS", "NCCL_MAX_NCHANNELS": "16",
    "NCCL_BUFFSIZE": "16777216", "NCCL_NTHREADS": "512",
}

GRAPHS = "graphs-below-concurrency"
TOGETHER = {"arms.vllm-base.side_by_side": "x", "arms.sglang-base.side_by_side": "x"}


def split(first: str, second: str) -> dict[str, str]:
    shares = {"arms.vllm-base.tuning.memory_fraction": first, "arms.sglang-base.tuning.memory_fraction": second}
    return {**TOGETHER, **shares}


EXTRACT_ON_VLLM = {
    "arms.sglang-extract.engine": "vllm", "arms.sglang-extract.tuning.attention_backend": "null",
    "arms.sglang-own.speculative.extracted_on": "vllm", "arms.sglang-own.speculative.declared_experiment": "true",
}


def text(name: str) -> str:
    return (FIXTURES / "machine" / name).read_text()


def box(acs: str = "lspci-acs-off.txt", wedged: int | None = None, foreign: int | None = None) -> doctor.Machine:
    """The first users' machine: eight RTX PRO 6000 over PCIe."""
    gpus = [
        GpuState(
            i, f"GPU-{i}", "NVIDIA RTX PRO 6000 Blackwell", 97887, 624 if i == wedged else 4, 100 if i == wedged else 0,
            (GpuHolder(2**22 + 7, 31000),) if i == foreign else (), (12, 0),
        )
        for i in range(8)
    ]
    return doctor.Machine(
        gpus, "580.95", parse_matrix(text("topo-pcie-8.txt")), parse_acs(text(acs)), cores=96, memory_gib=1000.0,
        shm_gib=500.0, shm_free_gib=499.0, shm_largest=[], disk_free_gib=4000.0,
    )


def nvlink_box() -> doctor.Machine:
    gpus = [GpuState(i, f"GPU-{i}", "NVIDIA H200", 143771, 4, 0, (), (9, 0)) for i in range(2)]
    topology = parse_matrix(text("topo-nvlink-2.txt"))
    return replace(box(), gpus=gpus, topology=topology, acs=Acs("unknown", reason="lspci is not installed"))


def story(**overrides: Any) -> Campaign:
    return load_campaign(STORY, [f"{key}={value}" for key, value in overrides.items()])


def findings(campaign: Campaign, machine: doctor.Machine) -> dict[str, str]:
    report = doctor.examine(campaign, campaign.target.shape, machine=machine)
    return {f.id: f.level for f in report.findings}


def test_the_first_users_box_is_fit_when_acs_is_off() -> None:
    report = doctor.examine(story(), story().target.shape, machine=box())
    assert report.healthy
    assert {f.id for f in report.findings if f.level != "info"} == set()
    assert json.loads(json.dumps(report.to_json()))["healthy"] is True


def test_acs_redirect_is_named_with_its_bridges_and_the_profile_that_helps() -> None:
    report = doctor.examine(story(), story().target.shape, machine=box("lspci-acs-on.txt"))
    found = next(f for f in report.findings if f.id == "acs-redirect")
    assert found.level == "warning"
    assert "40:01.1, 0000:c0:01.1" in found.what
    assert "p2p-off" in found.remedy
    assert found.source.endswith("nccl/issues/2079")
    off = story(**{f"arms.{arm.name}.tuning.nccl_profile": "p2p-off" for arm in story().arms})
    assert "acs-redirect" not in findings(off, box("lspci-acs-on.txt"))
    assert findings(story(), box("lspci-denied.txt"))["acs-redirect"] == "unknown"


def test_auto_sets_p2p_off_where_acs_is_on() -> None:
    campaign = story(**{"arms.vllm-tuned.tuning.nccl_profile": "auto"})
    machine = box("lspci-acs-on.txt")
    facts = judge(campaign.machine, machine.gpus, machine.topology, machine.acs)
    plan = plan_of(campaign, campaign.arms[1], None, None, facts)
    assert plan.env["NCCL_P2P_DISABLE"] == "1"
    assert plan.arm.tuning.custom_all_reduce is False
    assert plan.notes["nccl.profile"].startswith("p2p-off")


def test_a_wedged_gpu_and_a_foreign_holder_stop_the_campaign() -> None:
    assert findings(story(), box(wedged=3))["wedged-gpu"] == "error"
    assert findings(story(), box(foreign=5))["foreign-holder"] == "error"
    fewer = story(**{"machine.gpus": "[0, 1]"})
    assert findings(fewer, box(wedged=3))["wedged-gpu"] == "warning"
    assert findings(fewer, box(wedged=3))["too-few-gpus"] == "error"


def test_nvlink_gets_no_pcie_advice_and_a_wrong_declaration_is_refused() -> None:
    changes = {"machine.gpus": "[0, 1]", "machine.interconnect": "auto", "machine.compute_capability": "null"}
    changes |= {f"arms.{arm.name}.tuning.tensor_parallel": "2" for arm in story().arms}
    changes |= {f"arms.{arm.name}.tuning.nccl_profile": "auto" for arm in story().arms}
    campaign, machine = story(**changes), nvlink_box()
    found = findings(campaign, machine)
    assert "acs-redirect" not in found
    assert found["does-not-fit"] == "error"  # 509 GiB on two cards
    facts = judge(campaign.machine, machine.gpus, machine.topology, machine.acs)
    plan = plan_of(campaign, campaign.arms[0], None, None, facts)
    assert plan.arm.tuning.custom_all_reduce is None
    assert not set(SIX) & set(plan.env)
    with pytest.raises(MachineError, match="declared pcie, this host has nvlink"):
        judge(story(**{"machine.gpus": "[0, 1]"}).machine, machine.gpus, machine.topology, machine.acs)
    with pytest.raises(MachineError, match=r"declared 12\.0, this host has 9\.0"):
        one = story(**{"machine.gpus": "[0]", "machine.interconnect": "auto"}).machine
        judge(one, machine.gpus, Topology(0), machine.acs)


@pytest.mark.parametrize(
    ("changes", "finding", "level"),
    [
        ({"arms.sglang-own.tuning.max_running_requests": "48"}, "cap-below-concurrency", "warning"),
        ({"arms.sglang-own.tuning.max_running_requests": "48"}, "unequal-caps", "warning"),
        ({"arms.sglang-tuned.tuning.attention_backend": "trtllm_mla"}, "attention-backend", "error"),
        ({"arms.sglang-tuned.tuning.attention_backend": "fa3"}, "attention-backend", "error"),
        ({"arms.vllm-base.tuning.custom_all_reduce": "true"}, "all-reduce", "error"),
        ({"arms.vllm-base.tuning.extra_args": '["--max-cudagraph-capture-size", "64"]'}, GRAPHS, "warning"),
        ({"arms.sglang-base.tuning.extra_args": '["--cuda-graph-max-bs=64"]'}, GRAPHS, "warning"),
        (split("null", "0.4"), "memory-split", "error"),
        (split("0.6", "0.5"), "memory-split", "error"),
        (split("0.5", "0.45"), "memory-split", "warning"),
        (EXTRACT_ON_VLLM, "extraction-mla", "error"),
    ],
)
def test_known_bad_combinations(changes: dict[str, str], finding: str, level: str) -> None:
    assert findings(story(**changes), box())[finding] == level
    assert finding not in findings(story(), box()) or findings(story(), box())[finding] == "info"


def test_the_second_of_two_arms_side_by_side_knows_what_the_first_took() -> None:
    campaign = story(**split("0.5", "0.4"))
    taken = {a.name: plan_of(campaign, a, None, None).memory_taken for a in campaign.arms}
    assert (taken["vllm-base"], taken["sglang-base"]) == (0.0, 0.5)
    assert taken["sglang-tuned"] == 0.0


def test_on_a_cpu_a_vllm_arm_side_by_side_says_how_large_its_cache_is() -> None:
    demo = STORY.with_name("demo-cpu.yaml")
    together = ["arms.vllm-base.side_by_side=x", "arms.sglang-base.side_by_side=x"]
    facts = facts_of(load_campaign(demo).machine)
    told = judge_campaign(load_campaign(demo, [*together, "arms.vllm-base.tuning.kv_cache_gib=null"]), facts, None)
    assert [f.level for f in told if f.id == "memory-split"] == ["error"]
    assert not [f for f in judge_campaign(load_campaign(demo, together), facts, None) if f.id == "memory-split"]


def test_too_little_disk_and_shared_memory_are_named_with_their_need(tmp_path: Path) -> None:
    machine = replace(box(), disk_free_gib=100.0, shm_gib=0.0625, shm_free_gib=0.0625)
    report = doctor.examine(story(), story().target.shape, machine=machine, store_root=tmp_path)
    told = {f.id: f for f in report.findings}
    assert told["disk"].level == "error"
    assert "100.0 GiB free" in told["disk"].what
    assert "--shm-size" in told["shm"].remedy
    assert not report.healthy


def test_unreadable_is_unknown_and_not_ok() -> None:
    machine = replace(box(), gpus=None, shm_gib=None, disk_free_gib=None, topology=Topology(0, problem="x"))
    report = doctor.examine(None, machine=machine)
    assert {f.id: f.level for f in report.findings} == {"nvml": "unknown", "shm": "unknown"}
    holders = [replace(g, holders=None) for g in box().gpus or []]
    assert doctor.examine(None, machine=replace(box(), gpus=holders)).findings[0].level == "unknown"


def test_the_machine_at_hand_can_be_examined_and_shown(tmp_path: Path) -> None:
    broken = doctor.EnvironmentFact("vllm-cpu", "/no/python", {}, "no interpreter there")
    report = doctor.examine(store_root=tmp_path / "store", environments=[broken])
    assert report.machine.cores >= 1
    assert report.machine.disk_free_gib is not None
    shown = "\n".join(doctor.lines(report))
    assert "engine      vllm-cpu: no interpreter there" in shown
    assert "error    environment: vllm-cpu: no interpreter there -> make engines" in shown
    assert shown.endswith("not fit for this campaign: see the errors above")
    assert all(len(line) < 400 for line in doctor.lines(doctor.examine(story(), story().target.shape, machine=box())))


# The dry run ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rendered() -> dict[str, dry_run.Launch]:
    run = dry_run.render(story())
    assert not run.refused
    return {launch.arm: launch for launch in run.launches}


def test_tuned_arms_of_both_engines_carry_exactly_the_six_variables(rendered: dict[str, dry_run.Launch]) -> None:
    for arm in ("vllm-tuned", "sglang-tuned"):
        variables = {k: v for k, v in rendered[arm].env.items() if k.startswith("NCCL_") and "DEBUG" not in k}
        assert variables == SIX
    words = rendered["sglang-tuned"].argv
    assert words[words.index("--attention-backend") + 1] == "flashinfer"
    assert words[words.index("--num-continuous-decode-steps") + 1] == "4"
    assert "--disable-custom-all-reduce" in words


def test_baselines_carry_none_of_them_and_the_safety_flag_is_in_all(rendered: dict[str, dry_run.Launch]) -> None:
    for arm in ("vllm-base", "sglang-base"):
        assert not set(SIX) & set(rendered[arm].env)
        assert "--num-continuous-decode-steps" not in rendered[arm].argv
    assert all("--disable-custom-all-reduce" in launch.argv for launch in rendered.values())


def test_loads_points_and_costs_are_shown_with_their_assumptions() -> None:
    run = dry_run.render(story())
    assert run.loads == 7
    extract = next(launch for launch in run.launches if launch.role == "extraction")
    assert "2,30,58" in " ".join([*extract.argv, *extract.env.values()]).replace(" ", "")
    assert run.layer_ids["vllm"] == "[2, 30, 58]"
    assert run.layer_ids["sglang"].startswith("[")
    assert all(row.assumption for row in run.estimates)
    states = next(row for row in run.estimates if row.stage == "extract sglang")
    assert states.disk_gib == pytest.approx(15_000 * 1024 * 4 * 7168 * 2 / 2**30)
    assert run.disk_gib > states.disk_gib
    shown = "\n".join(dry_run.lines(run))
    assert "/models/Kimi-K2.5-INT4" in shown
    assert "drafthouse-shape" not in shown
    assert json.loads(json.dumps(run.to_json()))["refused"] is False


def test_trtllm_mla_on_sm120_is_refused_with_the_reason() -> None:
    run = dry_run.render(story(**{"arms.sglang-tuned.tuning.attention_backend": "trtllm_mla"}))
    assert run.refused
    problem = next(launch.problem for launch in run.launches if launch.problem)
    assert problem == (
        "tuning.attention_backend: trtllm_mla does not run on SM120 with MLA attention in sglang; "
        "there are flashinfer, triton"
    )


def test_effective_values_come_from_nccls_own_lines(tmp_path: Path) -> None:
    campaign = story()
    plan = plan_of(campaign, campaign.arms[1], None, None)
    from tasks.engines.registry import engine

    adapter = engine(campaign.arms[1].engine)
    command = adapter.command(plan)
    asked = {k: v for k, v in requested(adapter, plan, command).items() if k.startswith("nccl.")}
    assert asked == {f"nccl.{k}": v for k, v in SIX.items()}
    assert shown_variables(plan, command)["NCCL_PROTO"] == "LL"
    from tasks.engines.settings import setting_rows

    def statuses(log: str) -> dict[str, str]:
        rows = setting_rows(asked, nccl_observed(FIXTURES / "nccl" / f"{log}.log"))
        return {r["setting"]: r["status"] for r in rows if r["setting"] in asked}

    assert set(statuses("six").values()) == {"match"}
    assert set(statuses("default").values()) == {"not_reported"}
    assert statuses("p2poff-six")["nccl.NCCL_P2P_LEVEL"] == "not_reported"
    (tmp_path / "log").write_text("box:1:1 [0] NCCL INFO NCCL_PROTO set by environment to Simple\n")
    rows = setting_rows(asked, nccl_observed(tmp_path / "log"))
    assert {r["status"] for r in rows if r["setting"] == "nccl.NCCL_PROTO"} == {"mismatch"}


def test_a_model_folder_that_is_absent_needs_a_declared_shape_and_a_present_one_is_checked(tmp_path: Path) -> None:
    body = story().model_dump(mode="json")
    body["target"]["shape"] = None
    with pytest.raises(InputError, match=r"check target\.model"):
        dry_run.render(parse_campaign(body))
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 16, "kv_lora_rank": 2}})
    )
    body["target"]["model"] = str(tmp_path)
    found = shape_of(parse_campaign(body).target)
    assert (found.num_layers, found.width, found.mla) == (4, 8, True)
    body["target"]["shape"] = {**found.model_dump(), "num_layers": 5}
    with pytest.raises(ConfigError, match=r"target\.shape\.num_layers: 5, but .* says 4"):
        shape_of(parse_campaign(body).target)


@pytest.mark.parametrize("name", [EngineName.vllm, EngineName.sglang])
def test_an_environment_that_is_only_a_pythonpath_is_looked_into(tmp_path: Path, name: EngineName) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    installed = tmp_path / f"{name}-9.9.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    without = EngineEnvironment(name="bare", python=sys.executable)
    with pytest.raises(NotSupported, match="is not installed in this engine environment"):
        engine(name).versions(without)
    path = Variable(name="PYTHONPATH", value=str(tmp_path))
    assert engine(name).versions(without.model_copy(update={"variables": (path,)}))[name] == "9.9"
