"""Builds the tiny target: tokenizer, weights and prompt files. Run `python build.py [STEPS]`.

A 4-layer Llama of 2.3 M parameters, trained from nothing on answers of `corpus.py` (Muon for the
matrices, AdamW for the rest). Prompts whose words overlap with a held-out prompt are left out of its
training text. Weights are rounded to bfloat16 and stored so; served in float32 they are the same numbers.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import Example, example, held_out_and_training, runs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
MODEL = HERE / "model"
HELD_OUT, TRAINING = 64, 512
VOCAB, WIDTH, BATCH, LONGEST = 2048, 192, 12, 192
SPECIAL = ["<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]
BOS, EOS, PAD = 0, 1, 2
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SEED = 7
APART = 0.5  # weight of `closeness` beside the cross-entropy


def build_tokenizer() -> PreTrainedTokenizerFast:
    r = random.Random(SEED)
    texts = [part for _ in range(12_000) for e in [example(r)] for part in (e.prompt, e.answer)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=SPECIAL[BOS], eos_token=SPECIAL[EOS], pad_token=SPECIAL[PAD],
        additional_special_tokens=SPECIAL[3:], clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model() -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=4, num_attention_heads=3,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=1024, bos_token_id=BOS, eos_token_id=EOS,
        pad_token_id=PAD, tie_word_embeddings=False, rms_norm_eps=1e-6, rope_theta=10_000.0, dtype="float32",
    ))


class Rows:
    """An endless stream of token rows whose prompts overlap with no held-out prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, held_out: list[Example]) -> None:
        self.tokenizer, self.random = tokenizer, random.Random(SEED + 1)
        self.avoid = set().union(*(runs(e.prompt) for e in held_out))

    def ids(self, e: Example) -> tuple[list[int], list[int]]:
        talk = [{"role": "user", "content": e.prompt}]
        prompt = self.tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
        return prompt, [*self.tokenizer.encode(e.answer, add_special_tokens=False), EOS]

    def batch(self) -> torch.Tensor:
        rows: list[list[int]] = []
        while len(rows) < BATCH:
            e = example(self.random)
            if runs(e.prompt) & self.avoid:
                continue
            prompt, answer = self.ids(e)
            rows.append((prompt + answer)[:LONGEST])
        longest = max(map(len, rows))
        return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def closeness(states: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """How far neighbouring layers are from differing by half of their length: 0 = far enough.

    Without it a model this small adds little per layer, and a capture that is off by one would be hard to see.
    """
    gaps = []
    for low, high in pairwise(states):
        length = torch.maximum(low.norm(dim=-1), high.norm(dim=-1))
        gaps.append(F.relu(0.5 - (high - low).norm(dim=-1) / length).mean())
    return torch.stack(gaps).mean()


def train(model: LlamaForCausalLM, rows: Rows, steps: int, log: list[str]) -> None:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.02),
        torch.optim.AdamW(others, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    peaks = [0.02, 5e-3]
    start, tokens = time.process_time(), 0
    model.train()
    for step in range(1, steps + 1):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * min(1, step / 20) * (1 - 0.97 * step / steps)
        ids_BT = rows.batch()
        wanted_BT = ids_BT[:, 1:]
        out = model.model(input_ids=ids_BT[:, :-1], output_hidden_states=True)
        hidden_BTD = out.last_hidden_state
        keep_BT = wanted_BT != PAD
        loss = F.cross_entropy(model.lm_head(hidden_BTD[keep_BT]), wanted_BT[keep_BT])
        (loss + APART * closeness(out.hidden_states[1:4])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        tokens += int(keep_BT.sum())
        if step % 100 == 0 or step == steps:
            log.append(f"step {step}  tokens {tokens}  loss {loss.item():.3f}  cpu {time.process_time() - start:.0f} s")
            print(log[-1], flush=True)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    model.to(torch.bfloat16).save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)
    config = json.loads((MODEL / "config.json").read_text())
    config["dtype"] = "float32"  # how it is served; bfloat16 numbers are exact in float32
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where older readers look for it
    (MODEL / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (MODEL / "model.safetensors").chmod(0o644)
    model.to(torch.float32)


@torch.no_grad()
def figures(model: LlamaForCausalLM, rows: Rows, held_out: list[Example], longest: int = 96) -> list[str]:
    """What the demo relies on, measured on greedy answers to the held-out prompts."""
    model.eval()
    answers, right, gaps = [], 0, []
    layers = model.model.layers
    for e in held_out:
        prompt, wanted = rows.ids(e)
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=longest, do_sample=False)
        answers.append(whole[0, len(prompt) :].tolist())
        right += answers[-1] == wanted[:longest]
        seen: list[torch.Tensor] = []
        hooks = [layer.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out[0])) for layer in layers]
        model(whole)
        for hook in hooks:
            hook.remove()
        gaps.append([float((b - a).norm() / torch.maximum(a.norm(), b.norm())) for a, b in pairwise(seen)])
    grams = [tuple(a[i : i + 4]) for a in answers for i in range(len(a) - 3)]
    return [
        f"held-out prompts {len(held_out)}, greedy answers of up to {longest} tokens:",
        f"distinct 4-grams {len(set(grams)) / len(grams):.3f}",
        f"tokens per answer, median {statistics.median(map(len, answers))}",
        f"ended by their end token {sum(a[-1] == EOS for a in answers) / len(answers):.2f}",
        f"equal to the corpus' own answer {right / len(answers):.2f}",
        "smallest relative difference of neighbouring layers 1-2, 2-3, 3-4: "
        + ", ".join(f"{min(column):.2f}" for column in zip(*gaps, strict=True)),
    ]


def write_prompts(path: Path, examples: list[Example]) -> None:
    rows = [{"messages": [{"role": "user", "content": e.prompt}], "category": e.category} for e in examples]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def main(steps: int) -> None:
    log = [f"seed {SEED}, {steps} steps of {BATCH} rows, torch {torch.__version__}"]
    held_out, training = held_out_and_training(HELD_OUT, TRAINING)
    write_prompts(HERE / "prompts-heldout.jsonl", held_out)
    write_prompts(HERE / "prompts-train.jsonl", training)
    tokenizer, model = build_tokenizer(), build_model()
    log.append(f"parameters {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M, vocabulary {len(tokenizer)}")
    rows = Rows(tokenizer, held_out)
    train(model, rows, steps, log)
    save(model, tokenizer)
    log += figures(model, rows, held_out)
    (HERE / "build.log").write_text("\n".join(log) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1800)
