"""Remembers what lies in a large folder, so that the next process need not list it again. Level 2.

A listing holds as long as every folder in it is the same one and has not changed (its times of
change tell of files that came, went or were renamed; nobody can set the second one). A file that
was written over shows when it is read: its size differs.
"""

from __future__ import annotations

import os
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from lockstep.machine import cache_folder

LEAST = 10_000
"""Images from which on a listing is worth a file."""
_SETTLED_NS = 2 * 10**9
"""A folder that changed so shortly before may change again within the same tick of its clock."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The images of one split, in order."""

    classes: list[str]
    counts: np.ndarray
    """[classes] int64."""
    names: np.ndarray
    """[bytes] uint8: paths below the split's folder, joined."""
    ends: np.ndarray
    """[n] int64: where each name ends."""
    sizes: np.ndarray
    """[n] int64, bytes."""
    digest: str


def recall(folder: Path) -> Listing | None:
    """The listing of a split's folder, if one is known and still holds."""
    with (
        suppress(OSError, EOFError, RuntimeError, ValueError, KeyError, zipfile.BadZipFile),
        np.load(_file_of(folder), allow_pickle=False) as saved,
    ):
        folders = _split(saved["folders"])
        if _states(folder, folders) != saved["states"].tolist():
            return None
        classes = [os.fsdecode(name) for name in _split(saved["classes"])]
        arrays = {key: saved[key] for key in ("counts", "names", "ends", "sizes")}
        digest = saved["digest"].tobytes().decode()
        return Listing(classes=classes, digest=digest, **arrays)
    return None


def remember(folder: Path, listing: Listing, folders: list[bytes], began_ns: int) -> None:
    """Keep a listing, unless the folder is still being written to.

    Args:
        folders: all that were listed, relative to ``folder``; empty for itself.
        began_ns: when listing began, ``time.time_ns()``.
    """
    if len(listing.ends) < LEAST:
        return
    # A cache that cannot be written is no cache.
    with suppress(OSError, RuntimeError):
        states = _states(folder, folders)
        if max(max(state[2:]) for state in states) > began_ns - _SETTLED_NS:
            return
        path = _file_of(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{os.getpid()}-{time.monotonic_ns()}.npz")
        try:
            np.savez(
                partial,
                folders=_joined(folders),
                states=np.array(states, dtype=np.uint64),
                classes=_joined([os.fsencode(name) for name in listing.classes]),
                counts=listing.counts,
                names=listing.names,
                ends=listing.ends,
                sizes=listing.sizes,
                digest=_bytes(listing.digest.encode()),
            )
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def forget(folder: Path) -> None:
    """Let the folder be listed anew the next time."""
    with suppress(OSError, RuntimeError):
        _file_of(folder).unlink(missing_ok=True)


def _states(folder: Path, folders: list[bytes]) -> list[list[int]]:
    """Device, inode, and times of change of the content and of anything, nanoseconds."""
    found = (os.stat(os.path.join(os.fsencode(folder), name)) for name in folders)
    return [[s.st_dev, s.st_ino, s.st_mtime_ns, s.st_ctime_ns] for s in found]


def _file_of(folder: Path) -> Path:
    """Raises RuntimeError for a user without a home."""
    place = blake2b(os.fsencode(folder.resolve()), digest_size=16).hexdigest()
    return cache_folder() / "listings" / f"{place}.npz"


def _joined(names: list[bytes]) -> np.ndarray:
    return _bytes(b"".join(name + b"\0" for name in names))


def _split(joined: np.ndarray) -> list[bytes]:
    return joined.tobytes().split(b"\0")[:-1]


def _bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)
