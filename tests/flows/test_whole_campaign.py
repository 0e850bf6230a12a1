"""The whole campaign by the command line: on the stub engine, and small on each real engine with negative controls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from flows.runs import references_of
from tasks.benchmark import benchmark
from tasks.campaign_file import load_campaign
from tasks.config import Campaign, EngineName, Role
from tasks.errors import DrafterBroken, ExportMismatch, SeamMismatch
from tasks.probe import probe, probe_folder
from tasks.replay import replay
from tasks.serve import serving
from tasks.store.refs import BenchmarkRef, DrafterRef
from tasks.store.schemas import TABLES
from tasks.store.tables import Store
from tests.conftest import environment_python

ROOT = Path(__file__).resolve().parents[2]
CAMPAIGNS = ROOT / "deployments" / "campaigns"


@dataclass
class Finished:
    """One finished `drafthouse run`."""

    facts: dict[str, Any]
    store: Store

    def table(self, name: str) -> pd.DataFrame:
        return self.store.read(name, self.store.run_id).to_pandas()


def drafthouse(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "DRAFTHOUSE_"))}
    env = kept | {"PREFECT_HOME": str(folder / "prefect"), "XDG_STATE_HOME": str(folder / "state")}
    command = [str(ROOT / ".venv" / "bin" / "drafthouse"), *arguments, "--store", str(folder / "store")]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=500)


def run(folder: Path, campaign: str, *overrides: str) -> Finished:
    sets = [part for override in overrides for part in ("--set", override)]
    done = drafthouse(folder, "run", str(CAMPAIGNS / campaign), "--json", *sets)
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout)
    return Finished(facts, Store(folder / "store", facts["run_id"]))


@pytest.fixture(scope="module")
def on_stub(tmp_path_factory: pytest.TempPathFactory) -> list[Finished]:
    folder = tmp_path_factory.mktemp("stub-campaign")
    return [run(folder, "stub.yaml"), run(folder, "stub.yaml")]


def test_every_stage_of_the_stub_campaign_runs_and_every_number_reads_back(on_stub: list[Finished]) -> None:
    first = on_stub[0]
    stages = set(first.table("stages")["stage"])
    assert stages >= {"doctor", "clean", "serve", "benchmark", "regenerate", "extract", "align", "train", "replay"}
    assert first.facts["state"] == "completed"
    assert first.table("stages").query("stage == 'serve'")["loads"].tolist() == [1, 1, 1]
    for table in TABLES:
        rows = first.store.read(table).num_rows
        pattern = f"{first.store.root}/tables/{table}/*/*.parquet"
        if rows:
            by_duckdb = duckdb.sql(f"select count(*) from read_parquet('{pattern}')").fetchall()
            assert by_duckdb == [(rows,)] == [(len(pd.read_parquet(first.store.root / "tables" / table)),)]


def test_the_host_is_cleaned_first_also_where_no_server_will_start(on_stub: list[Finished]) -> None:
    """Two of 200 faults struck when all was measured: the retry needed no server, so the dead one left a lease."""
    for finished in on_stub:
        order = finished.table("stages").sort_values("started_at")
        assert order["stage"].tolist()[:2] == ["clean", "doctor"]
        assert order["arm"].isna().tolist()[:2] == [True, True]


def test_a_second_run_generates_extracts_and_trains_nothing_and_writes_all_tables(on_stub: list[Finished]) -> None:
    first, second = on_stub
    stages = second.table("stages").set_index("stage")
    for stage in ("regenerate", "extract", "train"):
        assert stages.loc[stage, "executed"] == 0
        assert stages.loc[stage, "reused"] > 0
    assert stages.loc[["regenerate", "extract"], "requests"].sum() == 0
    for table in ("responses", "states_index", "training", "replay"):
        assert set(second.table(table)["reused_from"]) == {first.store.run_id}
    aligned = second.table("alignment").query("check != 'replay_gap'")  # that one is measured anew
    assert set(aligned["reused_from"]) == {first.store.run_id}


def test_the_report_is_one_file_whose_numbers_stand_in_the_tables(on_stub: list[Finished]) -> None:
    first = on_stub[0]
    html = (first.store.run_dir / "report.html").read_text()
    assert "<script src" not in html
    assert "<link" not in html
    for value in first.table("benchmarks")["output_tok_s"]:
        assert f"{value:.4g}" in html


def test_speculative_arms_side_by_side_take_turns_each_against_its_own_replay(tmp_path: Path) -> None:
    data = load_campaign(CAMPAIGNS / "stub.yaml").model_dump(mode="json")
    data["workloads"] = [data["workloads"][0] | {"concurrencies": [2], "repeats": 2, "by_category": False}]
    spec = data["arms"][-1] | {"side_by_side": "specs"}
    shorter = {"name": "stub-spec-2", "speculative": spec["speculative"] | {"num_speculative_tokens": 2}}
    data["arms"] = [*data["arms"][:-1], spec, spec | shorter]
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(data))
    finished = run(tmp_path, str(tmp_path / "two.yaml"))
    stages = finished.table("stages")
    assert stages.query("stage == 'serve'")["arm"].value_counts().to_dict() == dict.fromkeys(
        ("stub-base", "stub-extract", "stub-spec", "stub-spec-2"), 1
    )
    speculated = finished.table("requests").query("arm.str.startswith('stub-spec')")
    turns = speculated.groupby(["arm", "repeat"])["sent_at"].min().sort_values().index.tolist()
    assert turns == [("stub-spec", 0), ("stub-spec-2", 0), ("stub-spec-2", 1), ("stub-spec", 1)]
    gaps = finished.table("alignment").query("check == 'replay_gap'")["subject"]
    positions = [gaps.str.startswith(f"{arm} chat position").sum() for arm in ("stub-spec", "stub-spec-2")]
    assert positions == [3, 2]


SMALL = (
    "prompts.train_samples=96", "prompts.heldout_samples=12", "workloads.chat.requests=12",
    "workloads.random.requests=8", "workloads.chat.by_category=false", "workloads.chat.concurrencies=[8]",
    "drafter.epochs=6", "thresholds.align_samples=4",
)


@pytest.fixture(scope="module", params=[EngineName.vllm, EngineName.sglang])
def on_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The demo campaign with the arms of one engine, small; on vLLM a base arm of SGLang takes turns with its own."""
    environment_python(f"{request.param}-cpu")
    folder = tmp_path_factory.mktemp(f"{request.param}-campaign")
    whole = load_campaign(CAMPAIGNS / "demo-cpu.yaml").model_dump(mode="json")
    engine, both = request.param, ("vllm-base", "sglang-base")
    together = engine is EngineName.vllm
    if together:
        environment_python("sglang-cpu")
    whole["arms"] = [
        arm | {"side_by_side": "bases" if together and arm["name"] in both else None} for arm in whole["arms"]
        if (together and arm["name"] in both)
        or (arm["engine"] == engine and (arm["speculative"] or {}).get("extracted_on", engine) == engine)
    ]
    (folder / "small.yaml").write_text(yaml.safe_dump(whole))
    return run(folder, str(folder / "small.yaml"), *SMALL, *(["workloads.chat.repeats=2"] if together else []))


@pytest.mark.engine
def test_both_engines_side_by_side_take_turns_and_write_the_same(on_engine: Finished) -> None:
    arms = [arm.name for arm in campaign_of(on_engine).arms_of(Role.base)]
    if len(arms) == 1:
        pytest.skip("the other campaign has both engines up together")
    chat = on_engine.table("requests").query("workload == 'chat' and arm in @arms")
    sent = chat.groupby(["arm", "repeat"])["sent_at"].agg(["min", "max"])
    spans = sorted((first, last, *turn) for turn, (first, last) in sent.iterrows())
    assert [tuple(turn) for _, _, *turn in spans] == [(arms[0], 0), (arms[1], 0), (arms[1], 1), (arms[0], 1)]
    assert all(before[1] < after[0] for before, after in pairwise(spans)), "one at a time"
    same = on_engine.table("losslessness").query("arm == 'sglang-base'")
    assert len(same) >= 12
    assert set(same["verdict"]) <= {"identical", "near_tie"}


@pytest.mark.engine
def test_a_real_engine_serves_extracts_and_speculates_without_a_mismatch(on_engine: Finished) -> None:
    aligned = on_engine.table("alignment")
    errors = aligned[aligned["check"] == "state_rel_error"]["value"]
    next_best = aligned[aligned["check"] == "next_best_rel_error"]["value"]
    assert len(errors) == 4
    assert errors.max() <= 1e-5
    assert next_best.min() >= 0.2
    assert set(on_engine.table("losslessness")["verdict"]) <= {"identical", "near_tie"}
    assert (on_engine.table("stages")["stage"] == "serve").sum() == len(campaign_of(on_engine).arms)
    assert on_engine.table("servers")["status"].ne("mismatch").all()


@pytest.mark.engine
def test_replay_predicts_what_is_served(on_engine: Finished) -> None:
    served = on_engine.table("acceptance").query("workload == 'chat' and category.isna() and position.isna()")
    told = on_engine.table("replay").query("workload == 'chat' and category.isna() and position.isna()")
    predicted = told.set_index("auxiliary")["accept_length"]
    assert served["accept_length"].iloc[0] == pytest.approx(predicted["true"], rel=0.02)
    assert predicted["zeroed"] < predicted["true"] - 0.3


@pytest.mark.engine
def test_a_served_drafter_receives_the_stored_states_and_says_what_plain_torch_says(on_engine: Finished) -> None:
    probed = on_engine.table("alignment").query("check.str.startswith('serving_')").set_index("check")
    assert set(probed.index) == {"serving_state_rel_error", "serving_token_mismatch", "serving_logit_rel_error"}
    assert probed["passed"].eq(True).all(), probed[["value", "detail"]]
    assert probed.loc["serving_state_rel_error", "value"] <= 1e-5
    assert probed.loc["serving_token_mismatch", "value"] == 0


@pytest.mark.engine
def test_a_drafter_that_is_served_other_layers_is_seen_though_it_drafts_well(on_engine: Finished) -> None:
    store, campaign, drafter = Store(on_engine.store.root, "shifted"), campaign_of(on_engine), drafter_of(on_engine)
    arm = campaign.arms_of(Role.speculative)[0]
    served = store.artifact("drafter", drafter.key) / "serve" / arm.engine
    if arm.engine is EngineName.vllm:
        shifted = store.run_dir / "shifted"
        shutil.copytree(served, shifted)
        config = json.loads((shifted / "config.json").read_text())
        ids = [number + 1 for number in config["eagle_aux_hidden_state_layer_ids"]]
        config |= {"eagle_aux_hidden_state_layer_ids": ids, "hidden_states_points": [2, 3, 4]}
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
        (shifted / "config.json").write_text(json.dumps(config))
        served = shifted
    else:  # of four layers SGLang can tap no other three: so the drafter says that it was trained on others
        drafter = drafter.model_copy(update={"points": (2, 3, 4)})
    place = probe_folder(store, arm.name)
    with (
        serving(campaign, arm, store, before_start=lambda: None, drafter_dir=served, probe_dir=place) as server,
        pytest.raises(SeamMismatch, match="serving_state_rel_error"),
    ):
        probe(server, drafter, campaign, store)


def campaign_of(finished: Finished) -> Campaign:
    return Campaign.model_validate_json(finished.table("runs")["config_json"][0])


def drafter_of(finished: Finished) -> DrafterRef:
    return next(r for r in references_of(finished.store) if isinstance(r, DrafterRef))


@pytest.mark.engine
def test_a_permuted_d2t_is_seen_by_replay_before_serving_and_accepts_nothing_when_served(on_engine: Finished) -> None:
    store = Store(on_engine.store.root, "permuted")
    campaign, whole = campaign_of(on_engine), drafter_of(on_engine)
    arm, base = campaign.arms_of(Role.speculative)[0], campaign.arms_of(Role.base)[0]
    measured_before = [r for r in references_of(on_engine.store) if isinstance(r, BenchmarkRef)]
    chat = next(r for r in measured_before if (r.arm, r.workload) == (base.name, "chat"))
    broken = whole.model_copy(update={"key": "permuted"})
    with store.new_artifact("drafter", broken.key, {"permuted": True}) as folder:
        shutil.copytree(store.artifact("drafter", whole.key), folder, dirs_exist_ok=True)
        (folder / "manifest.json").unlink()
        permute_d2t(folder)
    with pytest.raises((DrafterBroken, ExportMismatch)):
        replay(broken, chat, arm, campaign, store)
    drafter_dir = store.artifact("drafter", broken.key) / "serve" / arm.engine
    workload = next(w for w in campaign.workloads if w.name == "chat")
    with serving(campaign, arm, store, before_start=lambda: None, drafter_dir=drafter_dir) as server:
        try:
            measured = benchmark(server, workload, campaign, store, baseline=None, drafter=broken)
        except DrafterBroken:
            return  # not one draft token accepted
    assert measured.accept_length is not None
    assert measured.accept_length <= 1.05


def permute_d2t(folder: Path) -> None:
    """Give every draft id another draft id's token, in each copy of the weights."""
    for weights in {path.resolve() for path in folder.rglob("*.safetensors")}:
        tensors = load_file(weights)
        ids = torch.arange(len(tensors["d2t"]))
        tokens = ids + tensors["d2t"]
        tensors["d2t"] = tokens.roll(len(tokens) // 2) - ids
        weights.unlink()
        save_file(tensors, weights)


def test_the_demo_campaigns_load() -> None:
    for name in ("demo-cpu.yaml", "demo-vllm.yaml", "stub.yaml"):
        load_campaign(CAMPAIGNS / name)
