"""The reference forward against stock transformers: whole, streamed, wrapped, quantised."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from tasks import reference
from tasks.errors import InputError, NotSupported

TEXTS = [[(7 * i + n) % 97 + 3 for i in range(n)] for n in (3, 17, 64, 65, 200)]


def _save(model: torch.nn.Module, folder: Path, **options: object) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **options)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2,
    )
    return _save(LlamaForCausalLM(config), tmp_path_factory.mktemp("llama"), max_shard_size="40KB")


@pytest.fixture(scope="module")
def mla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=101, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, kv_lora_rank=16,
        q_lora_rank=24, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=16, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, max_position_embeddings=512, initializer_range=0.2,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )
    model = DeepseekV3ForCausalLM(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    return _save(model, tmp_path_factory.mktemp("mla"))


def _stock(folder: Path, ids: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    return [states[0] for states in out.hidden_states], out.logits[0]


@pytest.mark.parametrize("which", ["llama", "mla"])
def test_states_equal_stock_transformers_at_every_index(which: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(which)
    n = reference.num_layers(folder)
    ids = TEXTS[3]
    expected, expected_logits = _stock(folder, ids)
    states = reference.layer_states(folder, [ids], range(n + 1))[0]
    assert states.shape == (65, n + 1, 32)
    for point in range(n):
        torch.testing.assert_close(states[:, point], expected[point], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(reference.after_norm(folder, states[:, n]), expected[n], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(reference.logits(folder, states[:, n]), expected_logits, rtol=1e-4, atol=1e-4)
    assert (states[:, n] - expected[n]).norm() > 0.1 * expected[n].norm(), "point N is before the final norm"


@pytest.mark.parametrize("which", ["llama", "mla"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streamed_is_bit_equal_to_whole(which: str, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(which)
    whole = reference.layer_states(folder, TEXTS[:3], [1, 2, 4], dtype, streamed=False)
    streamed = reference.layer_states(folder, TEXTS[:3], [1, 2, 4], dtype, streamed=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, streamed, strict=True))
    assert whole[0].dtype == dtype


def test_streaming_keeps_no_decoder_layer_in_memory(llama: Path) -> None:
    target = reference._target(llama, torch.float32, True)
    seen: list[int] = []
    load = target._load
    target._load = lambda module, prefix: (load(module, prefix), seen.append(_resident(target)))[0]  # type: ignore
    try:
        target.states(TEXTS[:2], [8])
    finally:
        target._load = load  # type: ignore[method-assign]
    assert seen == [1] * 8
    assert _resident(target) == 0


def _resident(target: reference._Target) -> int:
    return sum(not next(layer.parameters()).is_meta for layer in target.layers)


def test_a_batch_in_any_order_and_again_equals_one_by_one(llama: Path) -> None:
    points = [2, 4, 5, 8]
    alone = [reference.layer_states(llama, [ids], points)[0] for ids in TEXTS]
    for _ in range(2):
        together = reference.layer_states(llama, TEXTS, points)
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    backwards = reference.layer_states(llama, TEXTS[::-1], points)
    assert all(torch.equal(a, b) for a, b in zip(alone, backwards[::-1], strict=True))


def test_points_keep_the_order_in_which_they_were_asked_for(llama: Path) -> None:
    forward = reference.layer_states(llama, [TEXTS[1]], [0, 3, 8])[0]
    assert torch.equal(reference.layer_states(llama, [TEXTS[1]], [8, 3, 0])[0], forward.flip(1))


def test_the_language_model_inside_a_wrapper_is_found(mla: Path, tmp_path: Path) -> None:
    raw = json.loads((mla / "config.json").read_text())
    wrapper = {"model_type": "kimi_k25", "text_config": {**raw, "model_type": "kimi_k2"}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    tensors = {f"language_model.{name}": value for name, value in load_file(mla / "model.safetensors").items()}
    save_file({**tensors, "vision_tower.patch.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    plain = reference.layer_states(mla, [TEXTS[1]], [1, 4])[0]
    assert torch.equal(reference.layer_states(tmp_path, [TEXTS[1]], [1, 4], streamed=True)[0], plain)
    assert reference.nll_per_token(tmp_path, TEXTS[1], 4) == reference.nll_per_token(mla, TEXTS[1], 4)


def _rewritten(source: Path, folder: Path, change: object) -> Path:
    tensors = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    folder.mkdir(exist_ok=True)
    save_file(change(tensors), folder / "model.safetensors")  # type: ignore[operator]
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def test_packed_int4_and_fp8_blocks_are_dequantised(llama: Path, tmp_path: Path) -> None:
    name4, name8 = "model.layers.2.mlp.up_proj.weight", "model.layers.5.self_attn.q_proj.weight"
    small = torch.randint(-8, 8, (48, 32), dtype=torch.int32)
    scale4 = torch.rand(48, 4)
    packed = torch.zeros(48, 4, dtype=torch.int32)
    for i in range(8):  # value i of each group of eight sits in bits 4 i to 4 i + 3
        packed |= (small[:, i::8] + 8) << (4 * i)
    fp8 = torch.randn(32, 32).to(torch.float8_e4m3fn)

    def quantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        del tensors[name4]
        shape = torch.tensor([48, 32])
        tensors |= {f"{name4}_packed": packed, f"{name4}_scale": scale4, f"{name4}_shape": shape}
        return tensors | {name8: fp8, f"{name8}_scale_inv": torch.full((1, 1), 0.25)}

    def plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        by_group = small.view(48, 4, 8).float() * scale4[:, :, None]
        return tensors | {name4: by_group.view(48, 32), name8: fp8.float() * 0.25}

    folders = [_rewritten(llama, tmp_path / "q", quantised), _rewritten(llama, tmp_path / "p", plain)]
    got, expected = (reference.layer_states(folder, [TEXTS[1]], [3, 8])[0] for folder in folders)
    torch.testing.assert_close(got, expected)


def test_a_tensor_that_the_model_class_does_not_use_is_refused(llama: Path, tmp_path: Path) -> None:
    extra = {"model.layers.3.self_attn.q_proj.bias": torch.ones(32)}
    folder = _rewritten(llama, tmp_path / "m", lambda tensors: tensors | extra)
    with pytest.raises(NotSupported, match=r"layers\.3\.self_attn\.q_proj\.bias"):
        reference.layer_states(folder, [TEXTS[0]], [8])


def test_a_missing_tensor_and_a_wrong_point_are_named(llama: Path, tmp_path: Path) -> None:
    gone = "model.layers.6.mlp.up_proj.weight"
    folder = _rewritten(llama, tmp_path / "m", lambda tensors: {n: t for n, t in tensors.items() if n != gone})
    with pytest.raises(InputError, match=gone):
        reference.layer_states(folder, [TEXTS[0]], [8])
    with pytest.raises(InputError, match=r"no hidden_states index \[9\] in a model of 8 layers"):
        reference.layer_states(llama, [TEXTS[0]], [1, 9])
    with pytest.raises(InputError, match="not a model folder"):
        reference.num_layers(tmp_path / "nothing")


def test_changed_weights_are_not_answered_from_the_cache(llama: Path, tmp_path: Path) -> None:
    folder = _rewritten(llama, tmp_path / "m", lambda tensors: tensors)
    before = reference.layer_states(folder, [TEXTS[0]], [8])[0]
    _rewritten(llama, folder, lambda tensors: {n: t * 1.5 for n, t in tensors.items()})
    assert not torch.allclose(reference.layer_states(folder, [TEXTS[0]], [8])[0], before)


def test_nll_and_top2_margin_are_those_of_the_logits(llama: Path) -> None:
    ids, prompt = TEXTS[1], 5
    _, scores = _stock(llama, ids)
    log_probs = scores.log_softmax(-1)
    expected = -torch.stack([log_probs[i - 1, ids[i]] for i in range(prompt, len(ids))]).mean()
    assert reference.nll_per_token(llama, ids, prompt) == pytest.approx(float(expected), rel=1e-4)
    best = log_probs[-1].topk(2).values
    assert reference.top2_margin(llama, ids) == pytest.approx(float(best[0] - best[1]), rel=1e-3)


def test_the_thread_count_is_respected_and_restored(llama: Path) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    target = reference._target(llama, torch.float32, None)
    hook = target.layers[0].register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    try:
        reference.layer_states(llama, [TEXTS[0]], [1], threads=before + 1)
    finally:
        hook.remove()
    assert seen == [before + 1]
    assert torch.get_num_threads() == before
