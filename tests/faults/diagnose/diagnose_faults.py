"""Faults of the study, each at its own stage. Written with the diagnosis at hand; a second set is written without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from diagnose_world import Fault, World
from torch import Tensor

from tasks import reference
from tasks.diagnosis.repairs import Setup
from tasks.eagle3.target import TargetHead

RESPONSES, STATES, TRAIN, EXPORT, SERVE = "responses", "states", "train", "export", "serve"


def _all_states(world: World) -> dict[str, Tensor]:
    """What the reference has for every sample: hidden_states 0 to N, and N behind the final norm."""
    last = reference.num_layers(world.model)
    keys = list(world.states)
    ids = {row["sample_key"]: row["token_ids"] for row in world.responses}
    found = reference.layer_states(world.model, [ids[k] for k in keys], range(last + 1))
    return {k: torch.cat([s, reference.after_norm(world.model, s[:, last])[:, None]], 1) for k, s in
            zip(keys, found, strict=True)}


# states ---------------------------------------------------------------------------------------------


def shift_layers(by: int) -> Any:
    def inject(world: World) -> None:
        last = world.points[-1]
        for key, states in _all_states(world).items():
            world.states[key] = states[:, [min(max(p + by, 0), last) if p != last else p for p in world.points]]
    return inject


def shift_one_layer(world: World) -> None:
    for key, states in _all_states(world).items():
        world.states[key] = states[:, [world.points[0] - 1, *world.points[1:]]]


def reorder_points(world: World) -> None:
    a, b, c = world.random.choice([(2, 0, 1), (1, 2, 0), (2, 1, 0), (1, 0, 2)])
    for key, states in world.states.items():
        world.states[key] = states[:, [a, b, c, 3]]


def after_final_norm(world: World) -> None:
    for key, states in _all_states(world).items():
        world.states[key] = states[:, [*world.points[:-1], world.points[-1] + 1]]


def norm_on_all(world: World) -> None:
    for key, states in world.states.items():
        world.states[key] = torch.stack([reference.after_norm(world.model, states[:, p]) for p in range(4)], 1)


def shift_tokens(world: World) -> None:
    by = world.random.choice((1, -1))
    for key, states in world.states.items():
        world.states[key] = states.roll(by, 0)


def swap_requests(world: World) -> None:
    keys = list(world.states)
    for a, b in zip(keys[: len(keys) // 2], keys[len(keys) // 2 :], strict=True):
        one, two = world.states[a].clone(), world.states[b].clone()
        length = min(len(one), len(two))
        world.states[a][:length], world.states[b][:length] = two[:length], one[:length]


def lose_prefix(world: World) -> None:
    for key, states in world.states.items():
        cut = min(len(states) - 4, 16)
        world.states[key] = torch.cat([states[:cut] * 0 + states[cut : cut + 1], states[cut:]])


def drop_prefix(world: World) -> None:
    for key, states in world.states.items():
        cut = min(len(states) // 2, 16)
        world.states[key] = torch.cat([states[cut:], states[-1:].expand(cut, -1, -1)])


def overflow(world: World) -> None:
    top = max(float(s.abs().max()) for s in world.states.values()) / 8
    for key, states in world.states.items():
        world.states[key] = states.clamp(-top, top)


def other_weights(world: World) -> None:
    """The target's matrices in 4 bits while extracting."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(world.model).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and ".layers." in name:
                step = weight.abs().amax(1, keepdim=True) / 7
                weight.copy_((weight / step).round() * step)
    ids = {row["sample_key"]: row["token_ids"] for row in world.responses}
    kept: list[Tensor] = []
    model.model.norm.register_forward_hook(lambda m, i, o: kept.append(i[0][0].detach()))
    for key in world.states:
        with torch.no_grad():
            out = model(torch.tensor([list(ids[key])]), output_hidden_states=True).hidden_states
        world.states[key] = torch.stack([*(out[p][0] for p in world.points[:-1]), kept[-1]], 1)


# responses and training -------------------------------------------------------------------------------


def garbage(world: World) -> None:
    _respond(world, lambda row: [world.random.randrange(6, 2000) for _ in row["token_ids"][row["prompt_tokens"] :]])


def other_template(world: World) -> None:
    for row in world.responses:
        row["token_ids"] = [*row["token_ids"][1:2], *row["token_ids"][2:]]  # without the first special token
        row["prompt_tokens"] -= 1
    _recompute(world)


def mask_moved(world: World) -> None:
    for row in world.responses:
        row["prompt_tokens"] = max(1, row["prompt_tokens"] // 2)


def mask_on_prompts(world: World) -> None:
    def inverted(token_ids: Any, prompt_tokens: int) -> list[bool]:
        return [position < prompt_tokens for position in range(len(token_ids))]
    world.patches.append(patch("tasks.eagle3.data.response_mask", inverted))


def embedding_of_same_token(world: World) -> None:
    original = TargetHead.embed
    world.patches.append(patch.object(TargetHead, "embed", lambda self, ids: original(self, ids.roll(1, 1))))


def too_little_training(world: World) -> None:
    world.drafter_config(epochs=1, batch_size=16, warmup_steps=1)


def _respond(world: World, answer: Any) -> None:
    for row in world.responses:
        row["token_ids"] = [*row["token_ids"][: row["prompt_tokens"]], *answer(row)]
    _recompute(world)


def _recompute(world: World) -> None:
    """States of the changed texts, as the engine would have captured them."""
    keys = [row["sample_key"] for row in world.responses]
    for row in world.responses:
        row["nll_per_token"] = None
    found = reference.layer_states(world.model, [row["token_ids"] for row in world.responses], world.points)
    world.states = dict(zip(keys, found, strict=True))


# export -------------------------------------------------------------------------------------------------


def permute_d2t(world: World) -> None:
    tensors = world.tensors()
    said = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    said = said[torch.randperm(len(said), generator=world.generator)]
    world.write_tensors(tensors | {"d2t": said - torch.arange(len(said))})


def d2t_absolute(world: World) -> None:
    tensors = world.tensors()
    world.write_tensors(tensors | {"d2t": tensors["d2t"] + torch.arange(len(tensors["d2t"]))})


def t2d_off(world: World) -> None:
    tensors = world.tensors()
    world.write_tensors(tensors | {"t2d": tensors["t2d"].roll(1)})


def random_head(world: World) -> None:
    tensors = world.tensors()
    world.write_tensors(tensors | {"lm_head.weight": torch.randn(tensors["lm_head.weight"].shape,
                                                                  generator=world.generator) * 0.02})


def no_head(world: World) -> None:
    tensors = world.tensors()
    tensors.pop("lm_head.weight")
    world.write_tensors(tensors)


def foreign_embeddings(world: World) -> None:
    tensors = world.tensors()
    shape = (world.config()["vocab_size"], world.config()["hidden_size"])
    world.write_tensors(tensors | {"embed_tokens.weight": torch.randn(shape, generator=world.generator) * 0.02})


def rope_lost(world: World) -> None:
    config = world.config()
    theta = world.random.choice((100.0, 500000.0, 1000000.0))
    config["rope_theta"] = theta
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    world.write_config(config)


def few_positions(world: World) -> None:
    world.write_config(world.config() | {"max_position_embeddings": 64})


def ids_off_by_one(world: World) -> None:
    config = world.config()
    ids = [i + 1 for i in config["eagle_aux_hidden_state_layer_ids"]]
    config |= {"eagle_aux_hidden_state_layer_ids": ids, "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    world.write_config(config)
    world.served = lambda setup: replace(setup, places=tuple(p + 1 for p in setup.places))


# serving --------------------------------------------------------------------------------------------------


def serves(change: Any) -> Any:
    def inject(world: World) -> None:
        world.served = change
    return inject


def _one_up(setup: Setup) -> Setup:
    return replace(setup, places=tuple(p + 1 for p in setup.places))


FAULTS = [
    Fault("states one layer up", "layer_shift", STATES, shift_layers(1)),
    Fault("states one layer down", "layer_shift", STATES, shift_layers(-1)),
    Fault("one point one layer down", "layer_shift", STATES, shift_one_layer),
    Fault("points in another order", "point_order", STATES, reorder_points),
    Fault("last state after the final norm", "norm_mixup", STATES, after_final_norm),
    Fault("final norm on every point", "norm_mixup", STATES, norm_on_all),
    Fault("states shifted by a token", "token_shift", STATES, shift_tokens),
    Fault("states of other requests", "other_request", STATES, swap_requests),
    Fault("prefix never computed", "prefix_truncated", STATES, lose_prefix),
    Fault("prefix left out", "prefix_truncated", STATES, drop_prefix),
    Fault("states clipped", "dtype_overflow", STATES, overflow),
    Fault("extracted in 4 bits", "quantisation_mismatch", STATES, other_weights),
    Fault("trained one layer down", "layer_shift", STATES, shift_layers(-1), past_checks=True),
    Fault("trained on a shifted token", "token_shift", STATES, shift_tokens, past_checks=True),
    Fault("trained on another order", "point_order", STATES, reorder_points, past_checks=True),
    Fault("random responses", "garbage_responses", RESPONSES, garbage),
    Fault("another chat template", "chat_template", RESPONSES, other_template),
    Fault("responses begin elsewhere", "loss_mask", RESPONSES, mask_moved),
    Fault("loss on the user's turns", "loss_mask", TRAIN, mask_on_prompts),
    Fault("embedding of the same token", "embedding_not_shifted", TRAIN, embedding_of_same_token),
    Fault("too little training", "undertrained", TRAIN, too_little_training),
    Fault("d2t permuted", "d2t_mismatch", EXPORT, permute_d2t),
    Fault("d2t holds ids, not offsets", "d2t_mismatch", EXPORT, d2t_absolute),
    Fault("t2d off by one", "t2d_mismatch", EXPORT, t2d_off),
    Fault("random head", "head_random_or_missing", EXPORT, random_head),
    Fault("no head", "head_random_or_missing", EXPORT, no_head),
    Fault("embeddings of another model", "embedding_not_target", EXPORT, foreign_embeddings),
    Fault("rope theta lost", "rope_mismatch", EXPORT, rope_lost),
    Fault("64 positions", "max_positions", EXPORT, few_positions),
    Fault("layer ids off by one", "layer_shift", EXPORT, ids_off_by_one),
    Fault("served one layer up", "layer_shift", SERVE, serves(_one_up)),
    Fault("served with another order", "point_order", SERVE, serves(lambda s: replace(s, places=s.places[::-1]))),
    Fault("served a token late", "token_shift", SERVE, serves(lambda s: replace(s, rows=-1))),
]
