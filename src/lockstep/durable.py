"""Files that are whole or not there, after a crash and a power cut, too. Level 0."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def atomic_write(path: Path, data: bytes) -> None:
    """Write ``path`` durably: readers see the old content or the new one, never a part.

    Raises:
        OSError: nothing changed.
    """
    partial = path.with_name(f".{path.name}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):  # of a file system that cannot be written
            partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable (creations, renames, deletions)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
