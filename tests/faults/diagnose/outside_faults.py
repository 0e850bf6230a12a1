"""Faults thought up by somebody who had read neither the diagnosis nor the faults that it was written against.

They test whether the diagnosis holds beyond its own cases. Most are partial: some rows of some samples, some draft
positions, weights half right. `inject` says how each comes about in practice.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from statistics import median_low
from unittest import mock

import torch
import torch.nn.functional as F
from diagnose_world import Fault, World
from torch import Tensor, nn

from tasks.config import DrafterConfig
from tasks.diagnosis.repairs import Setup
from tasks.eagle3.data import DraftVocabulary
from tasks.eagle3.model import drafter_config
from tasks.eagle3.target import TargetHead, read_target_head, target_config
from tasks.eagle3.trainer import learning_rate, start_drafter

PADDED_BATCH = 8  # prompts that a sampler pads to one length
BLOCK = 16  # tokens per block of an engine's cache, to which chunks are aligned
AVERAGE_KEEPS = 0.999  # of the moving average, per step


def prompt_length_of_the_padded_batch(world: World) -> None:
    """Responses from a script around `generate`, which takes `input_ids.shape[1]` for the length of every prompt.

    That is the longest prompt of a left-padded batch. The padding itself was stripped from the token ids, so they are
    right, and the start of most answers counts as prompt. A filter kept answers at two tokens; no likelihoods are
    recorded by such a script.
    """
    for first in range(0, len(world.responses), PADDED_BATCH):
        batch = world.responses[first : first + PADDED_BATCH]
        longest = max(row["prompt_tokens"] for row in batch)
        for row in batch:
            row["prompt_tokens"] = max(row["prompt_tokens"], min(longest, len(row["token_ids"]) - 2))
            row["nll_per_token"] = None


def second_chunk_repeats_a_token(world: World) -> None:
    """Chunked prefill: the second chunk computes the last token of the first one again, and the plugin appends it.

    The buffer is cut to the number of tokens, so the shape is right. Prompts that fit in one chunk are untouched, in
    the others each row from the second chunk on is that of the token before.
    """
    chunk = max(BLOCK, median_low([len(states) for states in world.states.values()]) // 2 // BLOCK * BLOCK)
    for key, states in world.states.items():
        if len(states) > chunk:
            world.states[key] = torch.cat([states[:chunk], states[chunk - 1 : -1]])


def hooks_share_the_last_layer(world: World) -> None:
    """Capture hooks made in a loop close over its variable, so each of them stores the layer that the loop ended with.

    All three fused points hold the highest one. The state for the loss comes by another way and is right. The drafter
    learns well on this, and is then served with the three points that its config names.
    """
    *others, highest = [world.points.index(point) for point in world.campaign.drafter.points]
    for states in world.states.values():
        states[:, others] = states[:, [highest]]


def schedule_ends_with_the_first_epoch(world: World) -> None:
    """The scheduler was told the steps of one epoch, not of the run: after that the learning rate stays at zero.

    Every epoch runs, and the loss wobbles with the batches as if something were learnt.
    """

    def of_one_epoch(step: int, total: int, config: DrafterConfig) -> float:
        steps = total // config.epochs
        return learning_rate(step, steps, config) if step < steps else 0.0

    world.patches.append(mock.patch("tasks.eagle3.trainer.learning_rate", of_one_epoch))


def embedding_shards_joined_in_wrong_order(world: World) -> None:
    """The trainer joins the embeddings from the shards of a tensor-parallel checkpoint, the second rank's first.

    The head comes from another file and is right, so the loss falls as usual: the drafter only learns the
    vocabulary's embeddings in another arrangement. Servers share the target's own table with it.
    """

    def embed(head: TargetHead, token_ids: Tensor) -> Tensor:
        vocabulary = len(head.embeddings_VD)
        return F.embedding((token_ids + vocabulary // 2) % vocabulary, head.embeddings_VD)

    world.patches.append(mock.patch.object(TargetHead, "embed", embed))


def draft_vocabulary_counted_with_prompts(world: World) -> None:
    """The export script counts the draft vocabulary again, over whole texts where the trainer took the answers.

    Size, order and t2d are consistent. Most tokens are in both vocabularies, but behind each one that is not, rows of
    the head say their neighbour's token.
    """
    tensors = world.tensors()
    size, vocabulary = len(tensors["d2t"]), len(tensors["t2d"])
    everything = torch.cat([torch.tensor(row["token_ids"], dtype=torch.int64) for row in world.responses])
    counts = torch.bincount(everything, minlength=vocabulary)
    target_ids = counts.argsort(descending=True, stable=True)[:size].sort().values
    tensors["d2t"] = target_ids - torch.arange(size)
    tensors["t2d"] = torch.zeros(vocabulary, dtype=tensors["t2d"].dtype)
    tensors["t2d"][target_ids] = True
    world.write_tensors(tensors)


def moving_average_exported(world: World) -> None:
    """The export takes a moving average of the weights, whose decay is far too slow for so short a training.

    It is still nine parts the start in ten; head and norm start as the target's, so they look sound. The average is
    taken between the ends of the training here.
    """
    trained = world.tensors()
    config, drafter = drafter_config(target_config(world.model), len(trained["d2t"])), world.campaign.drafter
    target_ids = trained["d2t"] + torch.arange(len(trained["d2t"]))
    head = read_target_head(world.model, torch.float32, torch.device("cpu"))
    with torch.random.fork_rng():
        start = start_drafter(config, head, DraftVocabulary(target_ids, trained["t2d"], "", 1.0), drafter.seed)
    steps = drafter.epochs * len(world.responses) // drafter.batch_size
    averaged = {n: t.lerp(trained[n], 1 - AVERAGE_KEEPS**steps) for n, t in start.state_dict().items()}
    world.write_tensors(trained | averaged)


class CarriedNorm(nn.Module):
    """The drafter's final norm; its output also takes the place of the state that the next draft step starts from."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return x.copy_(self.norm(x))


def normed_state_carried_on(world: World) -> None:
    """The server's draft loop feeds back the first of the drafter's two outputs, the one after its final norm.

    The first draft token is as good as ever; those behind it start from a state on the wrong side of the norm.
    """

    def served(setup: Setup) -> Setup:
        drafter = copy.deepcopy(setup.drafter)
        drafter.set_submodule("norm", CarriedNorm(drafter.get_submodule("norm")))
        return replace(setup, drafter=drafter)

    world.served = served


FAULTS: list[Fault] = [
    Fault("prompt_length_of_the_padded_batch", "loss_mask", "responses", prompt_length_of_the_padded_batch),
    Fault("second_chunk_repeats_a_token", "token_shift", "states", second_chunk_repeats_a_token),
    Fault("hooks_share_the_last_layer", "layer_shift", "states", hooks_share_the_last_layer, past_checks=True),
    Fault("schedule_ends_with_the_first_epoch", "undertrained", "train", schedule_ends_with_the_first_epoch),
    Fault(
        "embedding_shards_joined_in_wrong_order", "embedding_not_target", "train",
        embedding_shards_joined_in_wrong_order,
    ),
    Fault("draft_vocabulary_counted_with_prompts", "d2t_mismatch", "export", draft_vocabulary_counted_with_prompts),
    Fault("moving_average_exported", "weights_damaged", "export", moving_average_exported),
    Fault("normed_state_carried_on", "norm_mixup", "serve", normed_state_carried_on, also=("serving_differs",)),
]
