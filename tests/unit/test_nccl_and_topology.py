"""Topology, NCCL profiles and attention backends: what the GPUs demand is explicit, what is unknown says so."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path

import pytest

from tasks.config import EngineName, Interconnect
from tasks.errors import NotSupported
from tasks.machine import backends, nccl, topology
from tasks.machine.nccl import PROFILES, read_log, resolve
from tasks.machine.topology import Acs, parse_acs, parse_matrix

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
OFF, ON, UNKNOWN = Acs("off"), Acs("on", ("40:01.1",)), Acs("unknown")
SIX = {
    "NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "SYS", "NCCL_MAX_NCHANNELS": "16",
    "NCCL_BUFFSIZE": "16777216", "NCCL_NTHREADS": "512",
}


def machine_text(name: str) -> str:
    return (FIXTURES / "machine" / name).read_text()


def test_eight_gpus_on_pcie_and_two_on_nvlink_are_told_apart() -> None:
    pcie = parse_matrix(machine_text("topo-pcie-8.txt"))
    assert pcie.gpus == 8
    assert set(pcie.links) == set(combinations(range(8), 2))
    assert pcie.links[0, 1] == "PIX"
    assert pcie.links[0, 7] == "SYS"
    assert pcie.numa[7] == "1"
    assert pcie.interconnect() is Interconnect.pcie
    assert pcie.interconnect([3]) is Interconnect.single
    nvlink = parse_matrix(machine_text("topo-nvlink-2.txt"))
    assert nvlink.links == {(0, 1): "NV18"}
    assert nvlink.interconnect([0, 1]) is Interconnect.nvlink


def test_a_table_that_cannot_be_read_is_unknown_not_pcie() -> None:
    with pytest.raises(ValueError, match="no GPU column"):
        parse_matrix("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    assert topology.Topology(2).interconnect() is None


def test_a_tool_that_hangs_or_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(topology, "COMMAND_TIMEOUT_S", 0.2)
    assert "gave no answer within 0.2 s" in topology.read_topology().problem
    tool.write_text("#!/bin/sh\necho 'No devices were found' >&2\nexit 6\n")
    monkeypatch.setattr(topology, "COMMAND_TIMEOUT_S", 10)
    assert "failed with code 6: No devices were found" in topology.read_topology().problem
    tool.unlink()
    assert topology.run_command(["no-such-tool"]) == "no-such-tool is not installed"


def test_acs_redirect_names_its_bridges_and_unreadable_is_unknown() -> None:
    assert parse_acs(machine_text("lspci-acs-on.txt")) == Acs("on", ("40:01.1", "0000:c0:01.1"))
    assert parse_acs(machine_text("lspci-acs-off.txt")) == Acs("off")
    denied = parse_acs(machine_text("lspci-denied.txt"))
    assert denied.state == "unknown"
    assert "2 of 2 bridges" in denied.reason
    assert parse_acs("").state == "unknown"


@pytest.mark.parametrize(
    ("interconnect", "acs", "profile"),
    [
        (Interconnect.single, UNKNOWN, "single-gpu"), (Interconnect.nvlink, ON, "nvlink"),
        (Interconnect.pcie, OFF, "pcie-no-nvlink"), (Interconnect.pcie, UNKNOWN, "pcie-no-nvlink"),
        (Interconnect.pcie, ON, "p2p-off"), (None, UNKNOWN, "none"),
    ],
)
def test_auto_follows_the_topology(interconnect: Interconnect | None, acs: Acs, profile: str) -> None:
    assert nccl.choose(interconnect, acs).name == profile


def test_the_pcie_profile_holds_exactly_the_six_variables() -> None:
    assert dict(PROFILES["pcie-no-nvlink"].variables) == SIX
    assert not any(PROFILES[name].variables for name in ("none", "nvlink", "single-gpu"))


def resolved(name: str, tp: int, interconnect: Interconnect | None, **own: str | bool | None) -> nccl.Resolved:
    flag = own.pop("custom_all_reduce", None)
    assert flag is None or isinstance(flag, bool)
    variables = {k: str(v) for k, v in own.items()}
    return resolve(
        name=name, tensor_parallel=tp, interconnect=interconnect, acs=OFF, custom_all_reduce=flag,
        own_variables=variables,
    )


@pytest.mark.parametrize("profile", ["none", "auto", "pcie-no-nvlink", "p2p-off"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_without_nvlink_the_all_reduce_kernel_is_off_explicitly_for_every_pair_or_more(profile: str, tp: int) -> None:
    found = resolved(profile, tp, Interconnect.pcie)
    assert found.custom_all_reduce is (None if tp == 1 else False)
    assert bool(found.variables) is (tp > 1)


def test_nvlink_keeps_the_all_reduce_kernel() -> None:
    assert resolved("nvlink", 8, Interconnect.nvlink).custom_all_reduce is None
    assert resolved("auto", 8, Interconnect.nvlink, custom_all_reduce=True).custom_all_reduce is True


def test_peers_turned_off_by_a_variable_turn_the_kernel_off_too() -> None:
    assert resolved("none", 2, Interconnect.nvlink, NCCL_P2P_DISABLE="1").custom_all_reduce is False
    assert resolved("none", 2, Interconnect.nvlink, NCCL_P2P_DISABLE="0").custom_all_reduce is None


@pytest.mark.parametrize(
    ("profile", "interconnect", "own", "told"),
    [
        ("none", Interconnect.pcie, {"custom_all_reduce": True}, "custom_all_reduce: true, but no NVLink"),
        ("none", Interconnect.nvlink, {"custom_all_reduce": True, "NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE is set"),
        ("pcie-no-nvlink", Interconnect.pcie, {"NCCL_P2P_DISABLE": "1"}, "overrides NCCL_P2P_LEVEL"),
        ("fastest", Interconnect.pcie, {}, "no profile fastest"),
    ],
)
def test_flags_and_variables_that_disagree_are_refused(
    profile: str, interconnect: Interconnect, own: dict[str, str | bool], told: str
) -> None:
    with pytest.raises(NotSupported, match=told):
        resolved(profile, 2, interconnect, **own)


def test_unknown_topology_changes_nothing_and_says_so() -> None:
    found = resolved("none", 2, None)
    assert found.custom_all_reduce is None
    assert found.reason == "topology unknown"


def log_of(name: str) -> nccl.NcclLog:
    return read_log((FIXTURES / "nccl" / f"{name}.log").read_text().splitlines())


def test_nccl_says_which_values_took_effect() -> None:
    six = log_of("six")
    assert {k: six.values.get(k) for k in SIX} == {k: {v} for k, v in SIX.items()}
    assert six.version == "2.28.9+cuda13.0"
    assert six.channels == 16
    assert {c.protocol for c in six.choices} == {"LL"}
    default = log_of("default")
    assert not set(SIX) & set(default.values)
    assert [c.protocol for c in default.choices if c.bytes in (8192, 33554432)] == ["LL", "SIMPLE"]
    assert default.paths == {"P2P"}


def test_p2p_off_goes_through_host_memory_and_hides_the_level() -> None:
    assert log_of("p2poff").paths == {"SHM"}
    both = log_of("p2poff-six")
    assert both.values["NCCL_P2P_DISABLE"] == {"1"}
    assert "NCCL_P2P_LEVEL" not in both.values  # requested there, but NCCL never says so: not reported


def test_ranks_that_differ_show_all_their_values_and_prefixes_do_not_matter() -> None:
    lines = [
        "(EngineCore pid=7) box:7:7 [0] NCCL INFO NCCL_PROTO set by environment to LL",
        "[2026-11-29 TP1] box:8:9 [1] NCCL INFO NCCL_PROTO set by environment to Simple.",
        "NCCL_ALGO set by environment to Ring",
    ]
    found = read_log(lines)
    assert found.values == {"NCCL_PROTO": {"LL", "Simple"}}
    assert found.first_line == {"NCCL_PROTO": 1}
    assert not read_log(["nothing of interest"]).spoke


CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("mla", [False, True])
def test_attention_backends_by_capability(capability: tuple[int, int], mla: bool) -> None:
    fits = {
        "trtllm_mla": mla and capability[0] == 10,
        "fa3": capability[0] == 9 or (capability[0] == 8 and not mla),
    }
    for asked, fit in fits.items():
        if fit:
            assert backends.resolve(EngineName.sglang, capability, mla, asked).name == asked
        else:
            with pytest.raises(NotSupported, match=r"there are .*triton"):
                backends.resolve(EngineName.sglang, capability, mla, asked)
    automatic = backends.resolve(EngineName.sglang, capability, mla, None)
    assert automatic.name not in ("trtllm_mla", "fa3")
    if capability[0] == 12 and mla:
        assert automatic.name == "triton"
        assert backends.resolve(EngineName.sglang, capability, mla, "flashinfer").name == "flashinfer"


@pytest.mark.parametrize(("engine", "portable"), [(EngineName.sglang, "triton"), (EngineName.vllm, "triton_mla")])
def test_an_unknown_capability_gets_the_portable_backend_and_it_is_recorded(engine: EngineName, portable: str) -> None:
    found = backends.resolve(engine, (13, 0), True, None)
    assert found.name == portable
    assert "SM130 is not a known capability" in found.note
    nothing = backends.resolve(engine, None, True, None)
    assert nothing.name is None
    assert "unknown" in nothing.note


def test_a_backend_that_the_table_does_not_know_is_left_to_the_engine_only_on_unknown_gpus() -> None:
    assert backends.resolve(EngineName.sglang, (13, 0), True, "brand_new").name == "brand_new"
    with pytest.raises(NotSupported):
        backends.resolve(EngineName.sglang, (13, 0), True, "trtllm_mla")
