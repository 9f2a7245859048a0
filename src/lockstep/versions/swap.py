"""Exchanging files and folders of a working tree so that a crash leaves nothing half done. Level 8.

What shall come is complete in ``new/`` before anything moves. Then a journal says what moves where,
and only renames follow. Cut off before the journal, nothing has changed; cut off after it, the
next command finishes, whatever was done already. Plain file work of one process on one disk.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.durable import atomic_write
from lockstep.errors import UserError

NEW, OLD, JOURNAL = "new", "old", "journal.json"


@dataclass(frozen=True)
class Journal:
    """What is to be done, whole."""

    paths: dict[str, bool]
    """What moves, in this order, and whether something takes its place."""
    before: str
    """Commit of the state that is left."""
    after: str
    """Commit of the state to come."""


def start(state: Path) -> Path:
    """An empty folder for what shall come; what an earlier try left is removed."""
    assert not (state / JOURNAL).exists(), "unfinished"
    clear(state)
    (state / NEW).mkdir(parents=True)
    return state / NEW


def commit(state: Path, journal: Journal) -> None:
    """From here on the exchange takes place."""
    os.sync()  # what was copied is on the disk before its place is promised to it
    atomic_write(state / JOURNAL, json.dumps(asdict(journal)).encode())


def pending(state: Path) -> Journal | None:
    """An exchange that was cut off. Raises UserError where its journal is not readable."""
    try:
        return Journal(**json.loads((state / JOURNAL).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as exc:
        raise UserError(
            f"{state / JOURNAL}: not the journal of a rollback ({exc}); what it was to bring lies "
            f"in {state / NEW}, what it has taken away in {state / OLD}"
        ) from exc


def move(root: Path, state: Path, journal: Journal) -> None:
    """Do the renames that are left to do; may be called again after any interruption.

    Raises:
        OSError: a rename failed; the rest is still to be done.
    """
    for name, comes in journal.paths.items():
        new, old, here = state / NEW / name, state / OLD / name, root / name
        if comes and not os.path.lexists(new):
            continue  # done
        if os.path.lexists(here) and not os.path.lexists(old):
            old.parent.mkdir(parents=True, exist_ok=True)
            here.rename(old)
        if comes:
            here.parent.mkdir(parents=True, exist_ok=True)
            new.rename(here)
        else:
            _remove_empty(here.parent, root)


def finish(state: Path) -> None:
    """Nothing is left to do: forget the journal, then what was taken away."""
    (state / JOURNAL).unlink(missing_ok=True)
    clear(state)


def clear(state: Path) -> None:
    """Remove what is no longer needed."""
    shutil.rmtree(state, ignore_errors=True)


def in_the_way(root: Path, paths: dict[str, bool], known: Iterable[str]) -> list[str]:
    """What would be overwritten although it is in no version.

    Args:
        paths: as a journal's.
        known: those of them that are there now by right.
    """
    gone, ours = {name for name, comes in paths.items() if not comes}, set(known)

    def blocks(place: Path) -> bool:
        if place.is_dir() and not place.is_symlink():  # a file takes the place of a folder
            inside = (p for p in place.rglob("*") if p.is_symlink() or not p.is_dir())
            return any(p.relative_to(root).as_posix() not in gone for p in inside)
        return os.path.lexists(place) and place.relative_to(root).as_posix() not in gone

    found = []
    for name in (name for name, comes in paths.items() if comes and name not in ours):
        above = [root / parent for parent in Path(name).parents if (root / parent) != root]
        files = [p for p in above if os.path.lexists(p) and (p.is_symlink() or not p.is_dir())]
        found += [str(p.relative_to(root)) for p in (*files, root / name) if blocks(p)]
    return found


def _remove_empty(folder: Path, root: Path) -> None:
    with suppress(OSError):  # not empty, or gone already
        while folder != root:
            folder.rmdir()
            folder = folder.parent
