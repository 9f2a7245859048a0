"""A run's checkpoints seen from outside: listed, verified, pruned. Level 4.

Plain file work of one process. Looking is safe beside a run that trains; pruning is not, and who
prunes holds the run's lock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from lockstep.checkpoint.manifest import (
    COMMITTED,
    LATEST,
    PARTIAL,
    Damaged,
    cut_off,
    read_manifest,
    remove,
    step_folders,
    verify,
)
from lockstep.errors import UserError


@dataclass(frozen=True)
class Entry:
    """One folder below ``checkpoints``."""

    path: Path
    step: int | None
    """None: the leftover of a save."""
    state: Literal["good", "damaged", "partial"]
    """good: committed, and nothing wrong was found; partial: never committed, or half deleted."""
    why: str
    """What is wrong with it."""
    metric: float | None
    committed_at: float | None
    """Seconds since the epoch."""
    size: int
    """Bytes on disk."""


def survey(run_dir: Path, *, thorough: bool) -> list[Entry]:
    """All checkpoints of a run, newest first, then what unfinished saves left.

    Args:
        thorough: read every file and compare its checksum; else manifests and sizes alone.

    Raises:
        UserError: no run folder.
    """
    folder = _checkpoints(run_dir)
    found = step_folders(folder)
    leftovers = []
    complete = {path for path, _ in cut_off(folder)}
    for path in sorted(folder.glob(f"step-*{PARTIAL}")):
        if path in complete:
            found.append((read_manifest(path).step, path))
        else:
            why = "a save that did not end"
            leftovers.append(Entry(path, None, "partial", why, None, None, _size(path)))
    entries = [_entry(path, step) for step, path in sorted(found, reverse=True)]
    return [_verified(entry) if thorough else entry for entry in entries] + leftovers


def best(entries: Iterable[Entry]) -> Entry | None:
    """The good one of the highest metric; of equals the earliest."""
    return next(_by_metric(entries), None)


def prune(
    run_dir: Path, *, keep_last: int, keep_best: bool, dry_run: bool
) -> tuple[list[Entry], list[Entry]]:
    """Delete what a save with these settings would, and what unfinished saves left.

    What is kept was read and is intact, the newest such checkpoint included. Damaged ones go. The
    caller holds the run's lock, unless ``dry_run``.

    Returns:
        Kept and deleted (``dry_run``: to be deleted), newest first.

    Raises:
        UserError: nothing good would be left (nothing is deleted), or a deletion fails.
    """
    assert keep_last >= 1
    # Whole files are read only of what may be kept; a verdict is remembered.
    verdicts = {entry.path: entry for entry in survey(run_dir, thorough=False)}

    def intact(candidates: Iterable[Entry]) -> Iterator[Entry]:
        for entry in candidates:
            verdicts[entry.path] = _verified(verdicts[entry.path])
            if verdicts[entry.path].state == "good":
                yield entry

    entries = list(verdicts.values())
    kept = {entry.path for entry in islice(intact(entries), keep_last)}
    if not kept:
        raise UserError(f"{run_dir}: no good checkpoint; nothing was deleted")
    if keep_best:
        kept |= {entry.path for entry in islice(intact(_by_metric(entries)), 1)}
    deleted = [entry for path, entry in verdicts.items() if path not in kept]
    stays = [entry for path, entry in verdicts.items() if path in kept]
    if not dry_run:
        for entry in deleted:
            _delete(entry.path)
        _mend_latest(stays[0].path)
    return stays, deleted


def step_folder(run_dir: Path, step: int) -> Path:
    """The folder of a step's checkpoint.

    Raises:
        UserError: it is not there; names those that are.
    """
    folders = dict(step_folders(_checkpoints(run_dir)))
    if step not in folders:
        there = ", ".join(str(other) for other in sorted(folders)) or "none"
        raise UserError(f"--step {step}: {run_dir} has no such checkpoint; its steps: {there}")
    return folders[step]


def _checkpoints(run_dir: Path) -> Path:
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        what = "holds no checkpoints" if run_dir.is_dir() else "no such folder"
        raise UserError(f"{run_dir}: {what}; give a run folder, as runs/NAME")
    return folder


def _entry(path: Path, step: int) -> Entry:
    entry = Entry(path, step, "good", "", None, None, _size(path))
    try:
        committed_at = (path / COMMITTED).stat().st_mtime
    except OSError:
        return replace(entry, state="partial", why=f"{COMMITTED} is missing")
    entry = replace(entry, committed_at=committed_at)
    try:
        manifest = read_manifest(path)
        if manifest.step != step:
            raise Damaged(f"holds step {manifest.step}")
        if manifest.metric is not None and not _is_finite(manifest.metric):
            raise Damaged(f"its figure is {manifest.metric!r}")
        entry = replace(entry, metric=manifest.metric)
        for name, expected in manifest.files.items():
            size = (path / name).stat().st_size
            if size != expected.size:
                raise Damaged(f"shard {name}: {size} bytes instead of {expected.size}")
    except Damaged as exc:
        return replace(entry, state="damaged", why=str(exc))
    except OSError as exc:
        return replace(entry, state="damaged", why=f"{exc.filename}: {exc.strerror}")
    return entry


def _verified(entry: Entry) -> Entry:
    if entry.state != "good":
        return entry
    try:
        verify(entry.path)
    except Damaged as exc:
        return replace(entry, state="damaged", why=str(exc))
    return entry


def _by_metric(entries: Iterable[Entry]) -> Iterator[Entry]:
    # Oldest first: sorting keeps the order of equals.
    oldest = reversed(list(entries))
    scored = [e for e in oldest if e.state == "good" and e.metric is not None]
    return iter(sorted(scored, key=lambda e: -(e.metric or 0.0)))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _mend_latest(newest: Path) -> None:
    latest = newest.with_name(LATEST)
    if latest.is_symlink() and not latest.exists():
        with suppress(OSError):
            latest.unlink()
            latest.symlink_to(newest.with_suffix("").name)


def _size(folder: Path) -> int:
    """Bytes; 0 for what vanishes while a run goes on."""
    try:
        return sum(path.lstat().st_size for path in folder.iterdir())
    except OSError:
        return 0


def _delete(path: Path) -> None:
    try:
        if path.is_dir():
            remove(path)
        else:
            path.unlink()
    except OSError as exc:
        raise UserError(f"{path}: cannot be deleted ({exc.strerror})") from exc
