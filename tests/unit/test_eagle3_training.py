"""Data, draft vocabulary, training loop, checkpoints, export."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from eagle3_kit import CPU, LAYERS, VOCAB, responses, small_trainer, vocabulary, write_states
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tasks.eagle3.data import Dataset, join_rows, response_mask
from tasks.eagle3.export import export_drafter, load_drafter, verify_drafter
from tasks.eagle3.trainer import learning_rate
from tasks.errors import CaptureLost, DrafterBroken, ExportMismatch, InputError, SeamMismatch

# data ------------------------------------------------------------------------------------------

PLAIN = (
    "{% for m in messages %} <{{ m['role'] }}> {{ m['content'] }}{% if m['role'] == 'assistant' %} <end> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %} <assistant>{% endif %}"
)
TAGGED = PLAIN.replace(" <end> {% endif %}", "{% generation %} <end> {% endgeneration %}{% endif %}")


@pytest.mark.parametrize("template", [PLAIN, TAGGED], ids=["without tags", "with tags"])
def test_mask_is_the_answer_and_its_end_token_whatever_the_template(template: str) -> None:
    words = ["<user>", "<assistant>", "<end>", "how", "are", "you", "fine", "and", "thanks"]
    word_level = models.WordLevel({word: number for number, word in enumerate(words)})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(word_level))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.chat_template = template
    turns = [("user", "how are you"), ("assistant", " fine thanks"), ("user", "and you")]
    talk = [{"role": role, "content": content} for role, content in turns]
    prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    answer = tokenizer.encode("fine and thanks <end>", add_special_tokens=False)
    mask = response_mask([*prompt, *answer], len(prompt))
    supervised = [token for token, own in zip([*prompt, *answer], mask, strict=True) if own]
    assert tokenizer.decode(supervised) == "fine and thanks <end>"


def test_samples_without_a_response_are_left_out_and_named(tmp_path: Path) -> None:
    rows = responses(10)
    for row in rows[:3]:
        row["prompt_tokens"] = len(row["token_ids"])
    data = Dataset(tmp_path, join_rows(write_states(tmp_path, rows), rows), [1, 2, 3], LAYERS)
    assert len(data) == 7 and data.skipped == [row["sample_key"] for row in rows[:3]]


def test_nothing_but_empty_masks_stops_before_the_first_step(tmp_path: Path) -> None:
    rows = responses(4)
    for row in rows:
        row["prompt_tokens"] = len(row["token_ids"])
    with pytest.raises(InputError, match="first sample sample-0-0"):
        Dataset(tmp_path, join_rows(write_states(tmp_path, rows), rows), [1, 2, 3], LAYERS)


def test_responses_without_states_are_named(tmp_path: Path) -> None:
    rows = responses(4)
    with pytest.raises(CaptureLost, match="2 responses have no states, first sample-0-2"):
        join_rows(write_states(tmp_path, rows[:2]), rows)


def test_states_of_other_token_ids_are_refused(tmp_path: Path) -> None:
    rows = responses(2)
    index = write_states(tmp_path, rows)
    rows[1] = rows[1] | {"token_ids": [*rows[1]["token_ids"][:-1], 3]}
    with pytest.raises(SeamMismatch, match="sample-0-1 belong to other token ids"):
        Dataset(tmp_path, join_rows(index, rows), [1, 2, 3], LAYERS).batch([0, 1], CPU)


def test_states_that_lack_a_point_are_refused(tmp_path: Path) -> None:
    rows = responses(1)
    with pytest.raises(SeamMismatch, match=r"lack points \[7\]"):
        Dataset(tmp_path, join_rows(write_states(tmp_path, rows), rows), [1, 2, 7], LAYERS).batch([0], CPU)


def test_changed_bytes_of_states_are_noticed(tmp_path: Path) -> None:
    rows = responses(1)
    index = write_states(tmp_path, rows)
    shard = tmp_path / index[0]["shard"]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CaptureLost, match="sample-0-0"):
        Dataset(tmp_path, join_rows(index, rows), [1, 2, 3], LAYERS).batch([0], CPU)


def joined(rows: list[dict[str, object]]) -> list[object]:
    return join_rows([{"sample_key": r["sample_key"], "shard": "s", "row_group": 0} for r in rows], rows)


def test_each_data_tokenizer_and_size_has_a_vocabulary_of_its_own() -> None:
    a, b = joined(responses(5, seed=1)), joined(responses(5, seed=2))
    made = [vocabulary(a), vocabulary(b), vocabulary(a, 40), vocabulary(a, tokenizer_key="another")]
    assert len({v.key for v in made}) == 4
    assert vocabulary(a).key == made[0].key and torch.equal(vocabulary(a).target_ids, made[0].target_ids)
    assert made[0].target_ids.tolist() != made[1].target_ids.tolist()


def test_vocabulary_holds_the_most_frequent_response_tokens_and_no_prompt_tokens() -> None:
    rows = [{"sample_key": "s", "prompt_tokens": 3, "token_ids": [7, 7, 7, 5, 5, 9, 9, 9, 30, 1]}]
    words = vocabulary(joined(rows), size=2)
    assert words.target_ids.tolist() == [5, 9] and words.coverage == pytest.approx(5 / 7)


# training --------------------------------------------------------------------------------------


def test_loss_falls_and_every_step_is_recorded(tmp_path: Path) -> None:
    history = small_trainer(tmp_path, responses(8, words=40), epochs=15, learning_rate=5e-3).fit()
    assert [entry.step for entry in history] == list(range(1, 61))
    assert history[-1].loss < 0.7 * history[0].loss
    assert len(history[-1].accuracy) == 3 and history[-1].tokens == 15 * sum(len(r["token_ids"]) for r in responses(8))


def test_schedule_warms_up_and_decays(tmp_path: Path) -> None:
    config = small_trainer(tmp_path).config
    rates = [learning_rate(step, 20, config) for step in range(1, 21)]
    assert rates[2] == max(rates) == config.learning_rate
    assert rates[0] < rates[1] < rates[2] and rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(0.05 * config.learning_rate)
    assert learning_rate(1, 1, config) > 0


class Stop(Exception):
    """Stands for whatever ends the process."""


def stop_after(steps: int):  # type: ignore[no-untyped-def]
    def on_step(done: int, total: int) -> None:
        if done == steps:
            raise Stop

    return on_step


@pytest.mark.parametrize("stop", [5, 7, 13], ids=["inside an epoch", "after a checkpoint", "in the fourth epoch"])
def test_a_resumed_training_is_the_uninterrupted_one(tmp_path: Path, stop: int) -> None:
    whole = small_trainer(tmp_path, checkpoints="whole")
    expected = whole.fit()
    with pytest.raises(Stop):
        small_trainer(tmp_path, checkpoints="parts").fit(stop_after(stop))
    resumed = small_trainer(tmp_path, checkpoints="parts")
    found = resumed.fit()
    assert resumed.resumed_at == stop // 5 * 5 and len(found) == 20
    for ours, theirs in zip(found, expected, strict=True):
        assert dataclasses.replace(ours, tok_s=0) == dataclasses.replace(theirs, tok_s=0)
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(tensor, resumed.drafter.state_dict()[name]), name


def test_a_torn_checkpoint_is_passed_over(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        small_trainer(tmp_path).fit(stop_after(11))
    newest = tmp_path / "checkpoints" / "step-00000010.pt"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    (tmp_path / "checkpoints" / ".step-00000011.tmp").write_bytes(b"half")
    resumed = small_trainer(tmp_path)
    assert len(resumed.fit()) == 20 and resumed.resumed_at == 5


def test_a_finished_training_is_not_trained_again(tmp_path: Path) -> None:
    small_trainer(tmp_path).fit()
    again = small_trainer(tmp_path)
    again.fit(stop_after(1))
    assert again.resumed_at == 20


def test_nan_loss_names_the_first_bad_sample(tmp_path: Path) -> None:
    rows = responses(8, words=VOCAB - 1)
    rows[5]["token_ids"][6] = VOCAB - 1
    trainer = small_trainer(tmp_path, rows)
    trainer.target.embeddings_VD[VOCAB - 1] = float("nan")
    with pytest.raises(DrafterBroken, match=r"nan at step \d, first bad sample sample-0-5"):
        trainer.fit()


def test_infinite_states_are_refused_before_they_spoil_the_loss(tmp_path: Path) -> None:
    with pytest.raises(SeamMismatch, match="sample-0-2 hold NaN or infinite"):
        small_trainer(tmp_path, responses(8), spoil={"sample-0-2": float("nan")}).fit()


def test_a_loss_of_zero_is_an_error(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path)
    trainer.vocabulary.t2d.zero_()  # nothing can be said, so nothing is supervised
    with pytest.raises(DrafterBroken, match=r"loss is 0\.0 at step 1, first bad sample"):
        trainer.fit()


def test_a_loss_that_never_changes_is_an_error(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, responses(1), batch_size=1, epochs=20)
    trainer.optimizer.step = lambda: None  # type: ignore[assignment, method-assign]
    with pytest.raises(DrafterBroken, match="did not change in 5 steps"):
        trainer.fit()


# export ----------------------------------------------------------------------------------------


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    trainer = small_trainer(tmp_path, epochs=1)
    trainer.fit()
    folder = tmp_path / "drafter"
    folder.mkdir()
    layer_ids = {"vllm": [1, 2, 3], "sglang": [0, 1, 2]}
    export_drafter(trainer.drafter, trainer.vocabulary, folder, layer_ids, [1, 2, 3], tmp_path / "target")
    return folder


def test_mapping_is_in_the_weights_file(exported: Path) -> None:
    tensors = load_file(exported / "model.safetensors")
    said = torch.arange(50) + tensors["d2t"]
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert tensors["t2d"].shape == (VOCAB,) and int(tensors["t2d"].sum()) == 50
    assert said.tolist() == tensors["t2d"].nonzero()[:, 0].tolist() and int(said.max()) < VOCAB


def test_full_vocabulary_has_no_mapping(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, draft=VOCAB)
    export_drafter(trainer.drafter, trainer.vocabulary, tmp_path, {"vllm": [1, 2, 3]}, [1, 2, 3], tmp_path / "target")
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))
    assert load_drafter(tmp_path / "serve" / "vllm", tmp_path / "target")[1].tolist() == list(range(VOCAB))


def test_each_engine_gets_its_own_layer_ids_and_the_same_weights(exported: Path) -> None:
    configs = {e: json.loads((exported / "serve" / e / "config.json").read_text()) for e in ("vllm", "sglang")}
    assert configs["vllm"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert configs["sglang"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    inodes = {(exported / place / "model.safetensors").stat().st_ino for place in (".", "serve/vllm", "serve/sglang")}
    assert len(inodes) == 1


def test_a_reloaded_drafter_computes_the_same(exported: Path, tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, epochs=1)
    trainer.fit()
    drafter, target_ids, embeddings = load_drafter(exported / "serve" / "vllm", tmp_path / "target")
    auxiliary, embedded = torch.randn(1, 6, 96), torch.randn(1, 6, 32)
    for ours, theirs in zip(
        drafter.unroll(auxiliary, 3, lambda *_: embedded), trainer.drafter.unroll(auxiliary, 3, lambda *_: embedded),
        strict=True,
    ):
        assert torch.equal(ours, theirs)
    assert torch.equal(target_ids, trainer.vocabulary.target_ids) and embeddings is None


BROKEN = {
    "lm_head.weight": r"no tensor lm_head\.weight, expected lm_head\.weight \[50, 32\]",
    "fc.weight": r"no tensor fc\.weight, expected fc\.weight \[32, 96\]",
    "midlayer.hidden_norm.weight": r"no tensor midlayer\.hidden_norm\.weight, expected .* \[32\]",
    "d2t": r"no tensor d2t, expected d2t \[50\]",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_missing_tensor_is_named_with_its_shape(exported: Path, tmp_path: Path, name: str) -> None:
    folder = exported / "serve" / "vllm"
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ExportMismatch, match=BROKEN[name]):
        verify_drafter(folder, tmp_path / "target")


def test_extra_misshapen_and_mismapped_tensors_are_named(exported: Path, tmp_path: Path) -> None:
    folder, target = exported / "serve" / "vllm", tmp_path / "target"
    good = load_file(folder / "model.safetensors")

    def check(match: str, **changes: torch.Tensor) -> None:
        save_file(good | changes, folder / "model.safetensors")
        with pytest.raises(ExportMismatch, match=match):
            verify_drafter(folder, target)

    check(r"unexpected tensor surplus \[3\]", surplus=torch.zeros(3))
    check(r"norm\.weight is \[31\], expected \[32\]", **{"norm.weight": torch.zeros(31)})
    check("d2t is torch.float32", d2t=good["d2t"].float())
    check("distinct target ids", d2t=good["d2t"] + VOCAB)
    check("t2d marks other tokens", t2d=good["t2d"].roll(1))


def test_a_drafter_for_another_target_is_refused(exported: Path, tmp_path: Path) -> None:
    config = tmp_path / "target" / "config.json"
    config.write_text(config.read_text().replace(f'"vocab_size": {VOCAB}', '"vocab_size": 300'))
    with pytest.raises(ExportMismatch, match="vocab_size is 200, the target has 300"):
        verify_drafter(exported / "serve" / "vllm", tmp_path / "target")


def test_other_spellings_and_own_embeddings_of_published_drafters_are_read(exported: Path, tmp_path: Path) -> None:
    folder = exported / "serve" / "vllm"
    tensors = {n.replace("midlayer.", "layers.0."): t for n, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"embed_tokens.weight": torch.ones(VOCAB, 32)}, folder / "model.safetensors")
    assert load_drafter(folder, tmp_path / "target")[2] is not None


def test_pickled_weights_are_not_read(exported: Path, tmp_path: Path) -> None:
    (exported / "serve" / "vllm" / "model.safetensors").rename(exported / "serve" / "vllm" / "pytorch_model.bin")
    with pytest.raises(InputError, match="never from pickles"):
        verify_drafter(exported / "serve" / "vllm", tmp_path / "target")
