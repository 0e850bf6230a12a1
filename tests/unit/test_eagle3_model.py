"""The drafter's network, its points and its loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from eagle3_kit import CPU, VOCAB, WIDTH, responses, small_target, small_trainer

from tasks.eagle3.drafting import drafts_at_every_start, walk
from tasks.eagle3.model import Drafter, check_points, default_points, drafter_config
from tasks.eagle3.target import read_target_head, target_config
from tasks.errors import ConfigError, InputError, NotSupported


@pytest.mark.parametrize("layers", [2, 3, 4, 5, 6, 7, 28, 61])
def test_default_points_are_three_distinct_indices_of_the_target(layers: int) -> None:
    points = default_points(layers)
    assert len(set(points)) == 3 and list(points) == sorted(points)
    assert points[0] >= 0 and points[2] <= layers
    check_points(points, layers)


def test_default_points_of_the_story_are_the_published_ones() -> None:
    assert default_points(61) == (2, 30, 58)


def test_one_layer_has_no_three_points_and_the_error_names_the_option() -> None:
    with pytest.raises(ConfigError, match=r"drafter\.points"):
        default_points(1)


@pytest.mark.parametrize("points", [(1, 2, 5), (1, 1, 2), (-1, 1, 2), (1, 2)])
def test_points_outside_the_target_are_refused_with_ones_that_fit(points: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"drafter\.points.*\[1, 2, 3\] fits"):
        check_points(points, 4)


def drafter_of(folder: Path) -> Drafter:
    torch.manual_seed(3)
    return Drafter(drafter_config(target_config(small_target(folder / "target")), 50)).eval()


def test_a_draft_depends_on_the_prefix_only(tmp_path: Path) -> None:
    """The drafts of all starts come from one unroll; each must equal the draft made from its prefix alone."""
    drafter = drafter_of(tmp_path)
    embeddings, target_ids = torch.randn(VOCAB, WIDTH), torch.arange(0, VOCAB, 4)
    text, auxiliary = responses(1)[0]["token_ids"], torch.randn(20, 3 * WIDTH)
    together = drafts_at_every_start(drafter, target_ids, embeddings, text, auxiliary, 4)
    for known in range(1, len(text)):
        alone = drafts_at_every_start(drafter, target_ids, embeddings, text[: known + 1], auxiliary[: known + 1], 4)
        assert alone[known].tolist() == together[known].tolist()
    assert len({tuple(row) for row in together.tolist()}) > 5


def test_speculative_steps_are_what_a_growing_cache_computes(tmp_path: Path) -> None:
    """Step by step with plain causal attention over [true prefix, own drafts]: the same logits."""
    drafter = drafter_of(tmp_path)
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    auxiliary, embedded = torch.randn(1, 7, 3 * WIDTH), torch.randn(4, 1, 7, WIDTH)
    with torch.no_grad():
        unrolled = [logits[0, -1] for logits in drafter.unroll(auxiliary, 4, lambda step, _: embedded[step])]
        hidden, inputs, expected = drafter.fc(auxiliary), embedded[0], []
        states, words = hidden, inputs
        for step in range(4):
            x = torch.cat([layer.input_layernorm(words), layer.hidden_norm(states)], -1)
            cos, sin = drafter.rotary(x, torch.arange(x.shape[1])[None])
            q, k, v = attention.queries_keys_values(x, cos[:, None], sin[:, None])
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            out = states + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            out = out + layer.mlp(layer.post_attention_layernorm(out))
            expected.append(drafter.lm_head(drafter.norm(out))[0, -1])
            states = torch.cat([states, out[:, -1:]], 1)
            if step < 3:
                words = torch.cat([words, embedded[step + 1][:, -1:]], 1)
    for ours, theirs in zip(unrolled, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_grouped_heads_and_rope_come_from_the_target(tmp_path: Path) -> None:
    config = drafter_config(target_config(small_target(tmp_path)), 50)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert config.rope_parameters["rope_theta"] == 5000.0


def test_latent_attention_and_engine_specific_rope_do_not_leak_into_the_drafter() -> None:
    target = {
        "hidden_size": 7168, "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64,
        "kv_lora_rank": 512, "rope_theta": 50000.0, "rope_scaling": {"type": "yarn", "factor": 64.0},
        "intermediate_size": 18432, "max_position_embeddings": 262144,
    }
    config = drafter_config(target, 32000)
    assert (config.head_dim, config.num_attention_heads) == (128, 56)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 50000.0}


def test_a_draft_vocabulary_larger_than_the_targets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"drafter\.draft_vocab_size: 201"):
        drafter_config(target_config(small_target(tmp_path)), VOCAB + 1)


@pytest.mark.parametrize("variant", [{}, {"nested": True}, {"tied": True}, {"sharded": True}])
def test_head_is_read_from_every_layout_of_files(tmp_path: Path, variant: dict[str, bool]) -> None:
    head = read_target_head(small_target(tmp_path, **variant), torch.float32, CPU)
    assert head.embeddings_VD.shape == head.head_VD.shape == (VOCAB, WIDTH)
    assert torch.equal(head.embeddings_VD, head.head_VD) == variant.get("tied", False)


def test_head_gives_the_logits_of_the_whole_target(tiny_model: Path) -> None:
    from tasks.reference import layer_states, logits

    states = layer_states(tiny_model, [[0, 4, 300, 301, 302, 5]], [4])[0][:, 0]
    ours = read_target_head(tiny_model, torch.float32, CPU).logits(states)
    torch.testing.assert_close(ours, logits(tiny_model, states), rtol=1e-5, atol=1e-5)


def test_missing_head_names_the_tensor(tmp_path: Path) -> None:
    target = small_target(tmp_path, tied=True)
    config = (target / "config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (target / "config.json").write_text(config)
    with pytest.raises(InputError, match=r"lm_head\.weight"):
        read_target_head(target, torch.float32, CPU)


def test_a_head_that_is_computed_differently_is_refused(tmp_path: Path) -> None:
    target = small_target(tmp_path)
    config = (target / "config.json").read_text().replace('"tie_word', '"final_logit_softcapping": 30.0, "tie_word')
    (target / "config.json").write_text(config)
    with pytest.raises(NotSupported, match="final_logit_softcapping"):
        read_target_head(target, torch.float32, CPU)


def test_loss_sees_response_tokens_only(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path)
    batch = trainer.data.batch([0, 1], CPU)
    assert batch.mask.sum() == sum(len(row.token_ids) - row.prompt_tokens for row in trainer.data.rows[:2])
    before = trainer._loss([0, 1])
    batch.last[~batch.mask.roll(-1, 1)] = 1e3  # states that decide about prompt tokens and padding
    trainer.data.batch = lambda *_: batch  # type: ignore[method-assign]
    assert trainer._loss([0, 1]).loss.item() == before.loss.item()
    assert before.tokens[0] > before.tokens[1] - 1 and before.hits[0] <= before.tokens[0]


def drafts(*rows: list[int], length: int) -> torch.Tensor:
    table = torch.full((length, 3), -1)
    for row in rows:
        table[row[0]] = torch.tensor(row[1:])
    return table


def test_walk_advances_by_the_accepted_tokens_plus_one() -> None:
    text = [9, 9, 1, 2, 3, 4, 5, 6, 7]  # two prompt tokens; token 2 comes from the prefill
    table = drafts([2, 2, 3, 0], [5, 0, 0, 0], [6, 6, 0, 0], [8, 1, 1, 1], length=len(text))
    walked = walk(table, text, 2)
    assert walked.accepted == [2, 0, 1] and walked.open_end == []


def test_walk_leaves_a_draft_that_reaches_the_end_to_the_target() -> None:
    text = [9, 9, 1, 2]
    walked = walk(drafts([2, 2, 7, 8], length=4), text, 2)
    assert walked.accepted == [1] and walked.open_end == [7, 8]


def test_an_output_of_one_token_counts_no_draft() -> None:
    assert walk(drafts(length=3), [9, 9, 1], 2).accepted == []
