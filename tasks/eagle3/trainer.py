"""Training loop: AdamW, cosine schedule with warm-up, clipping, and checkpoints that resume exactly.

A checkpoint holds weights, optimizer, random state, data position and the history; the learning rate
is a function of the step. It is written beside its name and renamed, so a half-written one is never
found; one that cannot be read is passed over for the one before.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from tasks.config import DrafterConfig
from tasks.eagle3.data import Dataset, DraftVocabulary
from tasks.eagle3.loss import StepResult, unroll_loss
from tasks.eagle3.model import Drafter
from tasks.eagle3.target import TargetHead
from tasks.errors import DrafterBroken

log = logging.getLogger(__name__)

STUCK_STEPS = 5  # so many equal losses in a row mean that nothing is learnt
KEPT = 2  # newest checkpoints that stay
FLOOR = 0.05  # of the peak learning rate, at the end of the cosine


@dataclass(frozen=True)
class Progress:
    """One optimizer step: what the training table gets."""

    step: int
    tokens: int  # seen so far
    loss: float
    accuracy: list[float]  # per unroll step
    lr: float
    tok_s: float


def learning_rate(step: int, total: int, config: DrafterConfig) -> float:
    """Rate of step 1..total: linear warm-up, then a cosine down to FLOOR of the peak."""
    warmup = min(config.warmup_steps, total - 1)
    if step <= warmup:
        return config.learning_rate * (step / warmup)
    share = (step - warmup) / max(1, total - warmup)
    return config.learning_rate * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * share)))


def start_drafter(config: LlamaConfig, target: TargetHead, vocabulary: DraftVocabulary, seed: int) -> Drafter:
    """An untrained drafter: random but for its norm and head, which start as the target's."""
    torch.manual_seed(seed)
    drafter = Drafter(config)
    with torch.no_grad():
        drafter.norm.weight.copy_(target.norm_D)
        drafter.lm_head.weight.copy_(target.head_VD[vocabulary.target_ids.to(target.head_VD.device)])
    return drafter


class Trainer:
    """Trains one drafter; `fit` continues from the newest whole checkpoint in `folder`."""

    def __init__(
        self, drafter: Drafter, target: TargetHead, vocabulary: DraftVocabulary, data: Dataset,
        config: DrafterConfig, folder: Path, device: torch.device,
    ) -> None:
        self.drafter, self.target, self.data = drafter.to(device), target, data
        self.vocabulary, self.config, self.folder, self.device = vocabulary.to(device), config, folder, device
        self.steps_per_epoch = math.ceil(len(data) / config.batch_size)
        self.total = self.steps_per_epoch * config.epochs
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.order_state = torch.Generator().manual_seed(config.seed).get_state()  # before the epoch's shuffle
        self.history: list[Progress] = []
        self.resumed_at = 0

    def fit(self, on_step: Callable[[int, int], None] | None = None) -> list[Progress]:
        """Train to the end; returns every step, those before a resume included."""
        self._resume()
        self.drafter.train()
        while (done := len(self.history)) < self.total:
            generator = torch.Generator()
            generator.set_state(self.order_state)
            order = torch.randperm(len(self.data), generator=generator).tolist()
            size = self.config.batch_size
            for position in range(done % self.steps_per_epoch, self.steps_per_epoch):
                self._step(order[position * size : (position + 1) * size])
                if position + 1 == self.steps_per_epoch:
                    self.order_state = generator.get_state()
                step = len(self.history)
                if step % self.config.checkpoint_every_steps == 0 or step == self.total:
                    self._save()
                if on_step is not None:
                    on_step(step, self.total)
        return self.history

    def _step(self, numbers: list[int]) -> None:
        start = time.perf_counter()
        step = len(self.history) + 1
        lr = learning_rate(step, self.total, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        result = self._loss(numbers)
        loss = float(result.loss.detach())
        if not math.isfinite(loss) or loss == 0:
            raise DrafterBroken(f"training loss is {loss} at step {step}, first bad sample {self._first_bad(numbers)}")
        result.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        tokens = sum(len(self.data.rows[number].token_ids) for number in numbers)
        seen = self.history[-1].tokens if self.history else 0
        tok_s = tokens / (time.perf_counter() - start)
        self.history.append(Progress(step, seen + tokens, loss, result.accuracy, lr, tok_s))
        recent = [entry.loss for entry in self.history[-STUCK_STEPS:]]
        if len(recent) == STUCK_STEPS and len(set(recent)) == 1:
            raise DrafterBroken(
                f"training loss did not change in {STUCK_STEPS} steps (step {step}, {loss}), "
                f"first sample {self.data.rows[numbers[0]].sample_key}"
            )

    def _loss(self, numbers: list[int]) -> StepResult:
        batch = self.data.batch(numbers, self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return unroll_loss(
                self.drafter, self.target, self.vocabulary, batch, self.config.unroll_steps, self.config.step_loss_decay
            )

    @torch.no_grad()
    def _first_bad(self, numbers: list[int]) -> str:
        for number in numbers:
            loss = float(self._loss([number]).loss)
            if not math.isfinite(loss) or loss == 0:
                return self.data.rows[number].sample_key
        return self.data.rows[numbers[0]].sample_key

    def _save(self) -> None:
        step = len(self.history)
        state = {
            "weights": self.drafter.state_dict(), "optimizer": self.optimizer.state_dict(),
            "order_state": self.order_state, "torch_random": torch.get_rng_state(),
            "history": json.dumps([asdict(entry) for entry in self.history]),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".step-{step:08d}.tmp"
        with temporary.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(self.folder / f"step-{step:08d}.pt")
        for old in sorted(self.folder.glob("step-*.pt"))[:-KEPT]:
            old.unlink()

    def _resume(self) -> None:
        for file in sorted(self.folder.glob("step-*.pt"), reverse=True):
            try:
                state: dict[str, Any] = torch.load(file, map_location=self.device, weights_only=True)
                history = [Progress(**entry) for entry in json.loads(state["history"])]
                weights, optimizer = state["weights"], state["optimizer"]
                order_state, torch_random = state["order_state"].cpu(), state["torch_random"].cpu()
            except Exception as error:  # a torn zip raises whatever its reader trips over
                log.warning("checkpoint %s cannot be read (%s); trying the one before", file.name, error)
                continue
            self.drafter.load_state_dict(weights)
            self.optimizer.load_state_dict(optimizer)
            torch.set_rng_state(torch_random)
            self.history, self.order_state, self.resumed_at = history, order_state, len(history)
            log.info("training continues after step %d of %d", len(history), self.total)
            return
