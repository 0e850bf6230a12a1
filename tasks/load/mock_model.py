"""Answers of the stub engine: the target's own text, cut into chunks as speculation would cut it."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final

import numpy as np

from tasks.config import StubFault
from tasks.load.tiny_forward import Array, TinyLlama
from tasks.load.tiny_forward import Sequence as Cache

ACCEPT_RATES: Final = (0.67, 0.50, 0.33)  # vLLM 0.32, EAGLE-3 drafter of a tiny Llama, k = 3: accept length 2.5
REMEMBERED: Final = 256  # greedy continuations kept, so that a second measurement costs no second forward


class Greedy:
    """The target's greedy continuation of one prompt, computed as far as anybody asked."""

    def __init__(self, model: TinyLlama, prompt: Sequence[int]) -> None:
        self.model, self.cache, self.ids, self.logprobs = model, Cache(), list[int](), list[float]()
        self.prompt_states, logits = model.forward(self.cache, list(prompt))
        self._next: Array = logits[-1]

    def token(self, i: int) -> int:
        """Token `i` of the continuation; an end-of-text token does not end it."""
        while len(self.ids) <= i:
            if self.ids:
                self._next = self.model.forward(self.cache, [self.ids[-1]])[1][-1]
            self.ids.append(int(self._next.argmax()))
            self.logprobs.append(log_softmax(self._next, self.ids[-1]))
        return self.ids[i]


def log_softmax(logits: Array, token: int) -> float:
    """Log-probability of `token` in nats."""
    top = float(logits.max())
    return float(logits[token]) - top - float(np.log(np.exp(logits - top).sum()))


class Answers:
    """What the model says and what speculation would have counted."""

    def __init__(self, model: TinyLlama, num_speculative_tokens: int, fault: StubFault | None) -> None:
        self.model, self.k, self.fault = model, num_speculative_tokens, fault
        self.known: OrderedDict[tuple[int, ...], Greedy] = OrderedDict()
        self.drafts = self.accepted = 0
        self.per_position = [0] * num_speculative_tokens

    def greedy(self, prompt: tuple[int, ...]) -> Greedy:
        """The prompt's continuation, remembered."""
        if prompt not in self.known:
            self.known[prompt] = Greedy(self.model, prompt)
            if len(self.known) > REMEMBERED:
                self.known.popitem(last=False)
        return self.known[prompt]

    def tokens(self, prompt: tuple[int, ...], body: dict[str, Any]) -> Iterator[tuple[int, float]]:
        """(token id, log-probability), one after another, up to the end-of-text token or max_tokens."""
        endless = self._sampled(prompt, body) if body.get("temperature", 0) > 0 else self._greedily(prompt)
        for token, logprob in islice(endless, body["max_tokens"]):
            yield token, logprob
            if token in self.model.end_ids and not body.get("ignore_eos"):
                return

    def _greedily(self, prompt: tuple[int, ...]) -> Iterator[tuple[int, float]]:
        greedy, i = self.greedy(prompt), 0
        while True:
            yield greedy.token(i), greedy.logprobs[i]
            i += 1

    def _sampled(self, prompt: tuple[int, ...], body: dict[str, Any]) -> Iterator[tuple[int, float]]:
        cache, new, source = Cache(), list(prompt), np.random.default_rng()
        while True:
            logits = self.model.forward(cache, new)[1][-1]
            scaled = np.exp((logits - logits.max()) / body["temperature"]).astype(np.float64)
            order = np.argsort(-scaled)
            shares = scaled[order] / scaled.sum()
            kept = shares * (np.cumsum(shares) - shares < body.get("top_p", 1.0))
            new = [int(order[source.choice(len(kept), p=kept / kept.sum())])]
            yield new[0], log_softmax(logits, new[0])

    def chunks(self, prompt: tuple[int, ...], body: dict[str, Any]) -> Iterator[tuple[list[int], str | None]]:
        """(token ids, finish reason or None) of each step; the first is the prefill's single token."""
        tokens, chance, sent, size = self.tokens(prompt, body), random.Random(repr(prompt)), 0, 1
        while ids := [token for token, _ in islice(tokens, size)]:
            if self.fault is StubFault.lossy and sum(prompt) % 2 and sent <= 2 < sent + len(ids):
                ids[2 - sent] = (ids[2 - sent] + 1) % self.model.vocab_size
            sent += len(ids)
            finish = self.finish_reason(ids, sent, body)
            yield ids, finish
            if finish:
                return
            size = 1 + self._draft(chance)

    def finish_reason(self, ids: Sequence[int], sent: int, body: dict[str, Any]) -> str | None:
        """`stop` after an end-of-text token, `length` at max_tokens, else None."""
        if ids and ids[-1] in self.model.end_ids and not body.get("ignore_eos"):
            return "stop"
        return "length" if sent >= body["max_tokens"] else None

    def _draft(self, chance: random.Random) -> int:
        """Play one draft step: how many of k tokens the target accepts."""
        taken, reach = 0, 1.0
        while taken < self.k and self.fault is not StubFault.no_drafts:
            rate = ACCEPT_RATES[taken] if taken < len(ACCEPT_RATES) else ACCEPT_RATES[-1] * 0.6 ** (taken - 2)
            if chance.random() >= rate / reach:
                break
            self.per_position[taken] += 1
            taken, reach = taken + 1, rate
        if self.k:
            self.drafts, self.accepted = self.drafts + 1, self.accepted + taken
        return taken
