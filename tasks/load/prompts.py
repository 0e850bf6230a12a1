"""Prompts from JSON lines, and the token ids that are sent for them.

Roles follow one rule. Known names map to the four roles of chat templates (human -> user, gpt, chatgpt,
bing, bard, model, ai -> assistant, function -> tool). A row with any other role, none, or a system turn
after the first place is dropped whole and counted by that reason: a turn is never taken out of the middle.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

from tasks.errors import InputError
from tasks.store.keys import prompt_key, template_fingerprint

log = logging.getLogger(__name__)
T = TypeVar("T")

ROLES: Final = {
    "system": "system", "user": "user", "assistant": "assistant", "tool": "tool", "human": "user", "gpt": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant", "ai": "assistant",
    "function": "tool",
}
KEPT_FIELDS: Final = ("content", "tool_calls", "tool_call_id", "name", "reasoning_content")


class Kept(list[T]):
    """What was kept, in order; `dropped` counts the rows that were not, by reason."""

    def __init__(self, items: Iterable[T] = ()) -> None:
        super().__init__(items)
        self.dropped: Counter[str] = Counter()


@dataclass(frozen=True)
class Prompt:
    """A conversation up to the answer that is to be generated."""

    key: str
    category: str | None
    messages: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt and the token ids that are sent for it."""

    prompt: Prompt
    token_ids: list[int]


class _Dropped(Exception):
    """A readable row that is not used; the text is the reason."""


class _Broken(Exception):
    """A row that is no prompt at all."""


def read_prompts(path: Path | str, limit: int | None = None) -> Kept[Prompt]:
    """The first `limit` usable prompts of a JSON lines file, each only once; the result counts what was dropped.

    A row holds `messages` (or `conversations` with from/value), `turns` (the first is used), `prompt` or
    `question`, and perhaps `category`. Answers after the last user turn are left out: they are to be generated.
    Raises InputError that names the broken rows (numbers from 1), or says why no row is usable.
    """
    path, prompts, broken = Path(path), Kept[Prompt](), []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would cut at U+2028 inside a text
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read the prompts ({error})") from error
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if limit is not None and len(prompts) >= limit:
            break
        if not line.strip():
            continue
        try:
            prompt = _prompt(line)
            if prompt.key in seen:
                raise _Dropped("repeated prompt")
            seen.add(prompt.key)
            prompts.append(prompt)
        except _Dropped as reason:
            prompts.dropped[str(reason)] += 1
        except _Broken as why:
            broken.append(f"{number} ({why})")
    if broken:
        more = f" and {len(broken) - 10} more" if len(broken) > 10 else ""
        raise InputError(f"{path}: broken rows {', '.join(broken[:10])}{more}; mend or remove them")
    _report(path, prompts, "prompts")
    return prompts


def render(
    prompts: Sequence[Prompt], model_dir: Path | str, max_prompt_tokens: int, *, trust_remote_code: bool = False
) -> Kept[RenderedPrompt]:
    """Token ids of each prompt by the target's own tokenizer and chat template, generation prompt included.

    Longer prompts than `max_prompt_tokens` are dropped and counted. Raises InputError if none is left or
    the folder has no tokenizer or chat template.
    """
    model_dir = Path(model_dir)
    tokenizer = _tokenizer(model_dir, template_fingerprint(model_dir), trust_remote_code)
    rendered: Kept[RenderedPrompt] = Kept()
    for prompt in prompts:
        try:
            ids = tokenizer.apply_chat_template(
                list(prompt.messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # templates raise errors of their own for turns that they do not know
            rendered.dropped[f"chat template: {error}"] += 1
            continue
        if len(ids) > max_prompt_tokens:
            rendered.dropped[f"longer than {max_prompt_tokens} tokens"] += 1
        else:
            rendered.append(RenderedPrompt(prompt, [int(i) for i in ids]))
    _report(model_dir, rendered, "rendered prompts")
    return rendered


def check_disjoint(train: Sequence[Prompt], heldout: Sequence[Prompt]) -> None:
    """Raise InputError if a held-out prompt shares a user turn with a training prompt (case and spaces aside)."""
    trained = {text for prompt in train for text in _user_texts(prompt)}
    shared = [text for prompt in heldout for text in _user_texts(prompt) if text in trained]
    if shared:
        raise InputError(
            f"prompts: {len(shared)} held-out user turns also stand in the training prompts, the first is "
            f"{shared[0][:80]!r}; remove them from one file"
        )


def _user_texts(prompt: Prompt) -> list[str]:
    texts = [m["content"] for m in prompt.messages if m["role"] == "user"]
    return [" ".join(str(t).casefold().split()) for t in texts]


@lru_cache(maxsize=4)
def _tokenizer(model_dir: Path, fingerprint: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer  # seconds to import, and not needed for random loads

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{model_dir}: no usable tokenizer ({' '.join(str(error).split())[:200]})") from error
    if not tokenizer.chat_template:
        raise InputError(f"{model_dir}: its tokenizer has no chat template; prompts cannot be rendered")
    return tokenizer


def _report(where: Path, kept: Kept[Any], what: str) -> None:
    reasons = ", ".join(f"{n} × {reason}" for reason, n in kept.dropped.most_common())
    if not kept:
        raise InputError(f"{where}: no usable {what} ({reasons or 'the file has no rows'})")
    if reasons:
        log.info("%s: kept %d %s, dropped %s", where, len(kept), what, reasons)


def _prompt(line: str) -> Prompt:
    try:
        row = json.loads(line)
    except ValueError:
        raise _Broken("not JSON") from None
    if not isinstance(row, dict):
        raise _Broken("not a JSON object")
    messages = tuple(_upto_last_question(_messages(row)))
    category = row.get("category")
    return Prompt(prompt_key(messages), None if category is None else str(category), messages)


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    turns = row.get("messages", row.get("conversations"))
    if turns is not None:
        if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
            raise _Broken("messages is not a list of objects")
        return [_message(t) for t in turns]
    text = row.get("turns", row.get("prompt", row.get("question")))
    if isinstance(text, list):
        text = text[0] if text else ""
    if not isinstance(text, str):
        raise _Broken("none of messages, turns, prompt, question")
    return [{"role": "user", "content": text}]


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(str(name).strip().lower()) if name is not None else None
    if role is None:
        raise _Dropped("turn without a role" if name is None else f"unknown role {name!r}")
    kept: dict[str, Any] = {field: turn[field] for field in KEPT_FIELDS if field in turn}
    if "value" in turn and "content" not in kept:
        kept["content"] = turn["value"]
    return {"role": role, **kept}


def _upto_last_question(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    turns = messages[1:] if messages and messages[0]["role"] == "system" else messages
    if not turns:
        raise _Dropped("no user turn")
    if any(m["role"] == "system" for m in turns):
        raise _Dropped("system turn in the middle")
    if turns[0]["role"] != "user":
        raise _Dropped(f"starts with {turns[0]['role']}")
    for m in turns:
        if m["role"] == "user" and not str(m.get("content") or "").strip():
            raise _Dropped("empty user turn")
    return messages
