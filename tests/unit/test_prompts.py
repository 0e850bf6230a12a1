"""Prompt files: what is kept, what is dropped and counted, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.config import Workload
from tasks.errors import ConfigError, InputError
from tasks.load.prompts import check_disjoint, read_prompts, render
from tasks.load.workloads import Point, blocks, heldout_prompts, points, warmup
from tests.conftest import SHARED
from tests.unit.stub_kit import TINY, campaign


def file_of(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in rows) + "\n")
    return path


def said(*turns: tuple[Any, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_four_shapes_of_the_same_question_are_one_prompt(tmp_path: Path) -> None:
    path = file_of(
        tmp_path, {"prompt": "Why?"}, {"question": "Why?", "answer": "x"}, {"turns": ["Why?", "And now?"]},
        said(("user", "Why?")), {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So"}]},
        {"prompt": "When?", "category": 3},
    )
    prompts = read_prompts(path)
    assert [p.messages[0]["content"] for p in prompts] == ["Why?", "When?"]
    assert prompts[1].category == "3"
    assert prompts.dropped == {"repeated prompt": 4}


def test_roles_follow_one_rule_and_no_turn_is_lost_from_the_middle(tmp_path: Path) -> None:
    def talk(role: Any, text: str) -> dict[str, Any]:
        return said(("human", text), (role, "A"), ("user", "More?"))

    missing = talk("gpt", "m")
    del missing["messages"][1]["role"]
    path = file_of(
        tmp_path, talk("gpt", "a"), talk("assistant", "b"), talk("chatgpt", "c"), talk("bing", "d"),
        talk("laguna_s", "e"), talk("laguna_s", "f"), missing, talk(None, "g"), talk("system", "h"),
        said(("system", "S"), ("user", "i")),
    )
    prompts = read_prompts(path)
    kept = [[m["role"] for m in p.messages] for p in prompts]
    assert kept == [["user", "assistant", "user"]] * 4 + [["system", "user"]]
    assert prompts.dropped == {
        "unknown role 'laguna_s'": 2, "turn without a role": 2, "system turn in the middle": 1,
    }


def test_answers_to_be_generated_are_left_out_and_useless_rows_counted(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    tools = {"messages": [{"role": "user", "content": "q"}, call, {"role": "tool", "content": "7"}]}
    path = file_of(
        tmp_path, said(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")), tools,
        said(("assistant", "hello"), ("user", "x")), {"messages": []}, said(("user", " ")),
    )
    prompts = read_prompts(path)
    assert [m["content"] for m in prompts[0].messages] == ["a", "b", "c"]
    assert prompts[1].messages[1]["tool_calls"] == call["tool_calls"]
    assert prompts.dropped == {"starts with assistant": 1, "no user turn": 1, "empty user turn": 1}


def test_broken_rows_are_named_by_number(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"prompt": "a\u2028b"}, "{half", "", "[1]", {"text": "no"}, {"messages": "no"})
    with pytest.raises(InputError) as failed:
        read_prompts(path)
    text = str(failed.value)
    assert "2 (not JSON), 4 (not a JSON object), 5 (none of messages, turns, prompt, question), 6 (messages" in text
    assert "\n" not in text


@pytest.mark.parametrize("content", ["", "\n\n", '{"messages": []}\n'])
def test_file_without_a_usable_prompt_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="no usable prompts"):
        read_prompts(path)


def test_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.jsonl: cannot read"):
        read_prompts(tmp_path / "absent.jsonl")


def test_limit_takes_usable_prompts_from_the_start(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"messages": []}, {"prompt": "a"}, {"prompt": "a"}, {"prompt": "b"}, "{broken")
    assert [p.messages[0]["content"] for p in read_prompts(path, limit=2)] == ["a", "b"]


def test_shared_text_is_found_though_case_spaces_and_key_differ(tmp_path: Path) -> None:
    train = read_prompts(file_of(tmp_path, {"prompt": "Tell  me\nWHY"}, {"prompt": "x"}))
    heldout = read_prompts(file_of(tmp_path, said(("system", "S"), ("user", "tell me why ")), {"prompt": "y"}))
    with pytest.raises(InputError, match="1 held-out user turns"):
        check_disjoint(train, heldout)
    check_disjoint(train, heldout[1:])


def test_the_known_overlap_of_two_public_sets_is_found() -> None:
    if not SHARED.exists():
        pytest.skip("no ../shared with the public prompt sets")
    heldout = read_prompts(SHARED / "data" / "spec_bench.jsonl")
    assert len(heldout) == 480
    with pytest.raises(InputError, match="80 held-out user turns"):
        check_disjoint(read_prompts(SHARED / "data" / "gsm8k_test.jsonl"), heldout)


def test_rendering_ends_where_the_answer_begins_and_counts_what_is_too_long(tmp_path: Path, tiny_model: Path) -> None:
    prompts = read_prompts(file_of(tmp_path, {"prompt": "How many?"}, {"prompt": "word " * 200}))
    rendered = render(prompts, tiny_model, 64)
    assert [r.prompt.messages[0]["content"] for r in rendered] == ["How many?"]
    assert rendered.dropped == {"longer than 64 tokens": 1}
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(tiny_model).decode(rendered[0].token_ids)
    assert text.endswith("<|assistant|>") and "How many?" in text
    with pytest.raises(InputError, match=r"no usable rendered prompts \(1 × longer than 64 tokens\)"):
        render(prompts[1:], tiny_model, 64)


def test_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no usable tokenizer"):
        render(read_prompts(file_of(tmp_path, {"prompt": "a"})), tmp_path, 64)


def test_random_ids_differ_by_point_and_run_but_not_by_arm() -> None:
    load = Workload(name="r", kind="random", requests=4, input_tokens=16, concurrencies=(1, 2), repeats=2)
    seen = {
        (seed, p): [request.token_ids for request in blocks(load, p, [], 100, seed)[0]]
        for p in points(load) for seed in ("run-a", "run-b")
    }
    ids = [i for requests in seen.values() for i in requests]
    assert len(ids) == len(set(ids)) == 4 * 4 * 2
    again = [r.token_ids for r in blocks(load, points(load)[0], [], 100, "run-a")[0]]
    assert again == seen["run-a", points(load)[0]]
    assert all(len(i) == 16 and max(i) < 100 for i in ids)
    assert warmup(load, points(load)[0], [], 100, "run-a")[0].token_ids not in ids


def test_categories_run_as_blocks_and_prompts_start_again_when_they_run_out() -> None:
    config = campaign()
    load = Workload(name="chat", requests=8, by_category=True)
    prompts = heldout_prompts(load, config)
    found = blocks(load, Point(1, 0), prompts, 100, "run-a")
    assert sum(map(len, found)) == 8
    assert all(len({r.category for r in block}) == 1 for block in found)
    assert len({block[0].category for block in found}) == len(found)
    flat = blocks(load.model_copy(update={"by_category": False}), Point(1, 0), prompts, 100, "run-a")[0]
    assert [r.prompt_key for r in flat[6:]] == [r.prompt_key for r in flat[:2]]


def test_trained_prompts_and_too_long_answers_are_refused_before_anything_is_sent() -> None:
    both = {"train_file": str(TINY / "prompts-heldout.jsonl"), "heldout_file": str(TINY / "prompts-heldout.jsonl")}
    with pytest.raises(InputError, match="also stand in the training prompts"):
        heldout_prompts(Workload(name="chat"), campaign(prompts=both))
    with pytest.raises(ConfigError, match=r"workloads\.chat\.output_tokens"):
        heldout_prompts(Workload(name="chat", output_tokens=250), campaign())
