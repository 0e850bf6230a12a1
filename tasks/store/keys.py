"""Content keys: what makes two pieces of work the same.

A key never holds a path, a row number, a time or a host name, so that work done elsewhere or
under another name is found again, and changed content is never mistaken for old content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tasks.errors import InputError

KEY_LENGTH = 32  # hex digits: 128 bits, far from collisions at 10^9 samples


def content_key(*parts: Any) -> str:
    """Key of JSON-like values; dict order does not matter, list order does."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def file_checksum(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@lru_cache(maxsize=4096)
def _checksum_of_unchanged(path: Path, size: int, mtime_ns: int, inode: int) -> str:
    return file_checksum(path)


def _remembered_checksum(path: Path) -> str:
    stat = path.stat()
    return _checksum_of_unchanged(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


def folder_fingerprint(folder: Path, patterns: Iterable[str]) -> str:
    """Key of the contents of the files in `folder` that match any of `patterns`."""
    files = sorted({f for pattern in patterns for f in folder.glob(pattern) if f.is_file()})
    return content_key([[f.name, _remembered_checksum(f)] for f in files])


def weights_fingerprint(model: Path) -> str:
    """Key of a target's weights and configuration (not of its tokenizer)."""
    if not any(model.glob("*.safetensors")):
        raise InputError(f"{model}: no *.safetensors in this model folder")
    return folder_fingerprint(model, ["*.safetensors", "config.json"])


def template_fingerprint(model: Path) -> str:
    """Key of the tokenizer and chat template, which decide the token ids of a prompt."""
    return folder_fingerprint(
        model, ["tokenizer.json", "tokenizer_config.json", "chat_template*", "tokenizer.model", "*.tiktoken"]
    )


def prompt_key(messages: Sequence[dict[str, Any]]) -> str:
    """Key of a conversation up to the answer that is to be generated."""
    return content_key("prompt", list(messages))


def sample_key(prompt: str, draw: int, target: str, template: str, sampling: dict[str, Any]) -> str:
    """Key of one answer: draw number `draw` of a prompt under a target, template and sampling."""
    return content_key("sample", prompt, draw, target, template, sampling)


def state_key(token_ids: Sequence[int], pool: str) -> str:
    """Key of the states of one token sequence within a pool (target, engine, plugin, points, dtype)."""
    return content_key("state", list(token_ids), pool)
