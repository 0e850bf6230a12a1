"""The engine's log lines beside the task that caused them, with the level that the engine gave them."""

from __future__ import annotations

import logging
import re
from collections import deque
from pathlib import Path
from typing import Any, Final, Protocol

_LEVEL: Final = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
_LEVEL_WITHIN: Final = 80  # engines put the level near the start; later in a line the word is only text
WARNINGS: Final = 50
OTHERS: Final = 20


class HasLog(Protocol):
    """A server whose `log` is the file of its latest load."""

    log: Path


class EngineLog:
    """New lines of a server's log since the last look."""

    def __init__(self, server: HasLog) -> None:
        self._server = server
        self._offsets: dict[Path, int] = {}

    def pass_on(self, logger: Any) -> None:
        """Give the logger all new warnings and errors, up to 50, and the last 20 other lines."""
        path = self._server.log
        try:
            with path.open(errors="replace") as stream:
                stream.seek(self._offsets.get(path, 0))
                new = stream.read()
                self._offsets[path] = stream.tell()
        except OSError:
            return
        level = logging.INFO
        warnings: deque[tuple[int, int, str]] = deque(maxlen=WARNINGS)
        others: deque[tuple[int, int, str]] = deque(maxlen=OTHERS)
        for number, line in enumerate(new.splitlines()):
            level = level_of(line, level)
            (warnings if level >= logging.WARNING else others).append((number, level, line))
        for _, of_line, line in sorted([*warnings, *others]):
            logger.log(of_line, "%s | %s", path.stem, line)


def level_of(line: str, before: int) -> int:
    """Level of a log line; the lines of a traceback are errors, other continuations keep the level before."""
    found = _LEVEL.search(line[:_LEVEL_WITHIN])
    if found:
        return int(logging.getLevelName(found[1]))
    if line.startswith("Traceback"):
        return logging.ERROR
    return before if line[:1].isspace() else logging.INFO if line.startswith("[") else before
