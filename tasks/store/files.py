"""Folders and small files of the store: what the disk refuses becomes one line that says what to do."""

from __future__ import annotations

import errno
import os
import tempfile
import uuid
from pathlib import Path
from typing import Final

from tasks.errors import StoreError

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cannot_write(path: Path, error: OSError) -> StoreError:
    """The error to raise for a write that the disk refused."""
    space = "free some space and rerun"
    other = "choose a store that you may write to (--store or DRAFTHOUSE_STORE)"
    what = "a file where a folder is needed" if isinstance(error, FileExistsError | NotADirectoryError) else ""
    full = error.errno in _FULL or error.errno is None
    return StoreError(f"{path}: cannot write ({what or error.strerror or error}); {space if full else other}")


def made_folder(folder: Path) -> Path:
    """`folder`, made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return folder


def write_whole(path: Path, text: str) -> None:
    """Write a small file that a reader finds either as it was or complete."""
    unfinished = made_folder(path.parent) / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        try:
            unfinished.write_text(text)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def require_folder(root: Path) -> None:
    """Refuse a store that is no folder or that cannot be listed; one that is not there yet is empty."""
    try:
        os.scandir(root).close()
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise StoreError(f"{root}: the store has to be a folder, and this is a file or lies below one; "
                         "name a folder with --store or DRAFTHOUSE_STORE") from error
    except OSError as error:
        raise StoreError(f"{root}: cannot read the store ({error.strerror or error}); "
                         "name one that you may read with --store or DRAFTHOUSE_STORE") from error


def require_writable(root: Path) -> None:
    """Refuse a store that cannot be written to or made; leaves nothing behind."""
    require_folder(root)
    existing = next(folder for folder in (root, *root.resolve().parents) if folder.exists())
    try:
        # Really writing is the only question that a read-only file system, /proc and root answer truly.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise cannot_write(root, error) from error
