"""What would stop a campaign after servers were loaded is told before: by the flow, the dry run and the doctor."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks import dry_run
from tasks.campaign_file import load_campaign
from tasks.config import Campaign
from tasks.doctor import doctor
from tasks.errors import ConfigError
from tasks.launch import shape_of
from tasks.preflight import preflight, require_ready

CAMPAIGNS = Path(__file__).resolve().parents[2] / "deployments" / "campaigns"
STORY = CAMPAIGNS / "kimi-k2.5-int4-8x-rtx-pro-6000.yaml"


def stub(**overrides: Any) -> Campaign:
    changes = [f"{path.replace('__', '.')}={value}" for path, value in overrides.items()]
    return load_campaign(CAMPAIGNS / "stub.yaml", changes)


def rows(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def errors(campaign: Campaign) -> list[str]:
    return [f.what for f in preflight(campaign, shape_of(campaign.target)) if f.level == "error"]


@pytest.mark.parametrize("file", sorted(CAMPAIGNS.glob("*.yaml")), ids=lambda path: path.stem)
def test_campaigns_that_ship_have_no_fault_of_their_own(file: Path, tmp_path: Path) -> None:
    prompts = [rows(tmp_path / name, *(f"{name} {i}" for i in range(3000))) for name in ("train", "heldout")]
    named = [f"prompts.{p.name}_file={p}" for p in prompts] if file.stem.startswith("smollm2") else []
    campaign = load_campaign(file, named)
    if campaign.target.shape is None and not Path(campaign.target.model, "config.json").exists():
        pytest.skip("its model is built or fetched first")
    found = preflight(campaign, shape_of(campaign.target), elsewhere=True)
    assert [f for f in found if f.level == "error"] == []


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"drafter__points": "[1,2,99]"}, "drafter.points: [1, 2, 99] go beyond the target's 4 layers"),
        ({"drafter__draft_vocab_size": 10**6}, "drafter.draft_vocab_size: 1000000 is more than the target's"),
        ({"sampling__draws": 2}, "sampling.draws: 2 greedy draws are all the same text"),
        ({"workloads__0__output_tokens": 100000}, "workloads.chat.output_tokens: 100000 leave no room for a prompt"),
        ({"workloads__1__input_tokens": 250}, "workloads.random.output_tokens: 250 prompt tokens and 16 more exceed"),
        ({"prompts__train_file": "/nowhere"}, "prompts.train_file: /nowhere is not a file on this machine"),
        ({"prompts__heldout_file": "/nowhere"}, "prompts.heldout_file: /nowhere is not a file on this machine"),
        ({"prompts__train_samples": 513}, "prompts.train_samples: 513 are asked for"),
        ({"prompts__heldout_samples": 65}, "prompts.heldout_samples: 65 are asked for"),
        ({"arms__2__speculative__drafter": "/nowhere"}, "arms.stub-spec.speculative.drafter: no config.json in"),
    ],
)
def test_a_fault_is_told_by_flow_dry_run_and_doctor(overrides: dict[str, Any], says: str, tmp_path: Path) -> None:
    campaign = stub(**overrides)
    (found,) = errors(campaign)
    assert found.startswith(says)
    with pytest.raises(ConfigError) as refused:
        require_ready(campaign)
    assert str(refused.value).startswith(says) and "\n" not in str(refused.value)
    planned = dry_run.render(campaign, tmp_path)
    assert planned.refused and any(says in line for line in dry_run.lines(planned))
    report = doctor(campaign, tmp_path)
    assert not report.healthy and any(f.what.startswith(says) for f in report.findings)


def test_the_flow_stops_before_it_takes_the_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flows import campaign as flow

    monkeypatch.setattr(flow, "only_campaign_on_host", lambda *_: pytest.fail("the lock was taken"))
    monkeypatch.setattr(flow, "run_id_of", lambda _: "run")
    with pytest.raises(ConfigError, match=r"drafter\.points: \[1, 2, 99\] go beyond"):
        flow.campaign.fn(stub(drafter__points="[1,2,99]"), str(tmp_path / "store"))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [("", "no usable prompts (the file has no rows)"), ('{"prompt": "a"}\n{half\n', "broken rows 2 (not JSON)"),
     ('{"prompt": " "}\n', "no usable prompts (1 × empty user turn)")],
)
@pytest.mark.parametrize("kind", ["train", "heldout"])
def test_unusable_prompt_files_are_faults(tmp_path: Path, kind: str, text: str, says: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    (found,) = errors(stub(**{f"prompts__{kind}_file": file}))
    assert found.startswith(f"prompts.{kind}_file: {file}: ") and says in found


def test_too_few_usable_prompts_name_what_was_dropped(tmp_path: Path) -> None:
    file = rows(tmp_path / "p.jsonl", *(f"a{i}" for i in range(15)), "a0", " ")
    (found,) = errors(stub(prompts__train_file=file))
    assert found.endswith("p.jsonl has 15 usable prompts, 1 × repeated prompt, 1 × empty user turn")


def test_held_out_prompts_that_are_trained_on_are_a_fault(tmp_path: Path) -> None:
    file = rows(tmp_path / "p.jsonl", *(f"a{i}" for i in range(16)))
    (found,) = errors(stub(prompts__train_file=file, prompts__heldout_file=file))
    assert found.startswith("prompts: 6 held-out user turns also stand in the training prompts")


def test_prompts_are_counted_by_the_tokenizer_only_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = errors(stub(workloads__0__output_tokens=240))
    assert found.startswith("workloads.chat.output_tokens: ") and "prompt tokens and 240 more exceed" in found
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it fails from here on
    assert errors(stub()) == []


def test_a_campaign_that_does_not_train_need_not_set_what_it_never_uses(tmp_path: Path) -> None:
    few = rows(tmp_path / "p.jsonl", "a")
    base = "[{name: base, engine: stub, role: base}]"
    unused = {"drafter__points": "[1,2,99]", "sampling__draws": 2, "drafter__draft_vocab_size": 10**6}
    assert errors(stub(arms=base, prompts__train_file=few, **unused)) == []
    random = "[{name: r, kind: random, input_tokens: 16, output_tokens: 16}]"
    assert errors(stub(arms=base, workloads=random, prompts__heldout_samples=10**6)) == []


def test_points_that_the_serving_engine_cannot_tap_are_a_fault() -> None:
    swap = {"arms.sglang-extract.engine": "vllm", "arms.sglang-own.speculative.extracted_on": "vllm",
            "arms.sglang-own.speculative.declared_experiment": "true", "drafter.points": "[0, 30, 58]"}
    campaign = load_campaign(STORY, [f"{path}={value}" for path, value in swap.items()])
    found = [f.what for f in preflight(campaign, shape_of(campaign.target), elsewhere=True) if f.level == "error"]
    assert len(found) == 1 and found[0].startswith("drafter.points [0, 30, 58]: SGLang hands a drafter")


def test_what_is_absent_with_its_model_is_a_warning_only_in_a_dry_run() -> None:
    campaign = load_campaign(STORY)
    planned = preflight(campaign, shape_of(campaign.target), elsewhere=True)
    assert {(f.id, f.level) for f in planned} == {("prompts", "warning"), ("drafter", "warning")}
    here = preflight(campaign, shape_of(campaign.target))
    assert {(f.id, f.level) for f in here} == {("model", "error"), ("prompts", "error"), ("drafter", "error")}
    too_deep = load_campaign(STORY, ["drafter.points=[2, 30, 99]"])
    assert dry_run.render(too_deep).refused
