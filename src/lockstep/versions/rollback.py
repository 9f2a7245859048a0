"""One step back: data, checkpoints or all of a version into the working tree. Level 8.

HEAD and the branch stay where they are: what was restored shows as staged changes, to be committed
or undone. A state that is left is kept as a commit under ``refs/lockstep``, so that an undo is one
more rollback.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lockstep.errors import UserError, some
from lockstep.launch.folder import LOCK as LOCK_OF_RUN
from lockstep.launch.folder import run_lock
from lockstep.versions import swap
from lockstep.versions.outputs import CHECKPOINTS, LOCK, PIPELINE, Output, copy, outputs, unsaved
from lockstep.versions.repository import Repository

PARTS: dict[str, Callable[[PurePosixPath], bool]] = {
    "data": lambda path: path.suffix == ".dvc",
    "checkpoints": lambda path: path.parts[0] == CHECKPOINTS or path.name in (PIPELINE, LOCK),
    "all": lambda path: True,
}
"""Which files in Git make a part of a version; what DVC keeps follows from them."""
BEFORE, AFTER = "refs/lockstep/before", "refs/lockstep/after"
"""What the last rollback left, and what it made."""
_MOST_NAMED = 10


@dataclass(frozen=True)
class Done:
    """What a rollback has changed."""

    files: list[str]
    """Files in Git."""
    outputs: list[str]
    """Files and folders that DVC keeps."""
    absent: list[str]
    """What the pipeline had made, and neither cache nor remote holds: gone, to be made again."""


@contextmanager
def opened(place: Path) -> Iterator[Repository]:
    """The repository around a folder, for this process alone; finishes a rollback that was cut off.

    Raises:
        UserError: no repository, or another rollback is at work.
    """
    repository = Repository.find(place)
    folder = repository.state.parent
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rollback.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise UserError(f"{repository.root}: another rollback is at work; wait for it") from exc
        if journal := swap.pending(repository.state):
            _carry_out(repository, journal)
        yield repository


def roll_back(repository: Repository, revision: str, parts: Sequence[str]) -> Done:
    """Restore parts (keys of :data:`PARTS`) of a revision.

    Raises:
        UserError: no such revision; something in the way is not committed or in use; or a part is
            neither in the cache nor in the remote. Nothing has changed then.
    """
    source, now = repository.commit(revision), repository.staged()

    def of_parts(name: str) -> bool:
        path = PurePosixPath(name)
        # DVC's own settings stay: where the remote is does not go back in time.
        return path.parts[0] != ".dvc" and any(PARTS[part](path) for part in parts)

    target = repository.replaced(now, source, [*filter(of_parts, repository.changed(now, source))])
    kept = outputs(repository, source)
    wanted = {path for path, output in kept.items() if of_parts(output.said_by)}
    return _exchange(
        repository, target, source, {*filter(of_parts, repository.files(source))} | wanted
    )


def undo(repository: Repository) -> Done:
    """Take the last rollback back; doing so again repeats it.

    Raises:
        UserError: there was none, what it restored has changed since, or as :func:`roll_back`.
    """
    before, after = repository.ref(BEFORE), repository.ref(AFTER)
    if before is None or after is None:
        raise UserError("there is no rollback to undo")
    now, paths = repository.staged(), repository.changed(after, before)
    if since := sorted(repository.changed(after, now).keys() & paths.keys()):
        raise UserError(
            f"since the last rollback, what it restored was changed: {some(since, _MOST_NAMED)}; "
            f"`python scripts/rollback.py to {before[:8]} --all` restores what was there before it"
        )
    target = repository.replaced(now, before, paths)
    return _exchange(repository, target, before, set())


def _exchange(repository: Repository, target: str, source: str, wanted: Collection[str]) -> Done:
    """Make ``target`` the staged tree, with what it changes in the working tree.

    Args:
        source: commit from which DVC's outputs come.
        wanted: files and outputs that are restored where they are missing, besides what differs.
    """
    before = repository.staged()
    old, new = outputs(repository, before), outputs(repository, target)
    missing = {path for path in wanted if not os.path.lexists(repository.root / path)}
    there = [path for path in repository.files(target) if path in missing]
    files = repository.changed(before, target) | dict.fromkeys(there, True)
    moved = {
        path: path in new
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path) or path in missing
    }
    if not files and not moved:
        return Done([], [], [])
    _refuse_losses(repository, before, files, moved, old)
    paths = {name: comes for comes in (False, True) for name in (*files, *moved)
             if (files.get(name, False) or moved.get(name, False)) == comes}  # fmt: skip
    if blocking := swap.in_the_way(repository.root, paths, [*repository.files(before), *old]):
        raise UserError(
            f"in the way, and in no version: {some(blocking, _MOST_NAMED)}; move them elsewhere or commit them"
        )
    with ExitStack() as training:
        for config in repository.root.glob("*/*/config.yaml"):
            if (config.parent / LOCK_OF_RUN).exists():
                training.enter_context(run_lock(config.parent))
        _refuse_running_pipeline(repository.root)
        try:
            place = swap.start(repository.state)
            repository.write(target, [name for name, comes in files.items() if comes], place)
            absent = _copy(
                repository, source, [new[n] for n, comes in moved.items() if comes], place
            )
            after = repository.record(target, f"what was restored from {source[:8]}")
            left = repository.record(before, f"before the rollback to {source[:8]}")
            comes = {name: come and name not in absent for name, come in paths.items()}
            journal = swap.Journal(comes, left, after)
        except BaseException as exc:
            swap.clear(repository.state)
            if isinstance(exc, OSError):
                raise UserError(
                    "cannot prepare the rollback, nothing was changed: "
                    f"{exc.filename}: {exc.strerror}"
                ) from exc
            raise
        # Between here and the end, Ctrl-C has to wait: these are renames alone.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            swap.commit(repository.state, journal)
            _carry_out(repository, journal)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    return Done(sorted(files), sorted(moved), absent)


def _carry_out(repository: Repository, journal: swap.Journal) -> None:
    try:
        swap.move(repository.root, repository.state, journal)
    except OSError as exc:
        raise UserError(
            f"{exc.filename}: {exc.strerror}; once that is mended, any command of "
            "scripts/rollback.py finishes the rollback"
        ) from exc
    repository.git("read-tree", journal.after)
    repository.git("update-ref", BEFORE, journal.before)
    repository.git("update-ref", AFTER, journal.after)
    swap.finish(repository.state)


def _copy(repository: Repository, source: str, come: Sequence[Output], place: Path) -> list[str]:
    """Copies of outputs below ``place``; returns those of the pipeline that could not be had."""
    absent = []
    for output in come:
        try:
            copy(repository, source, output, place / output.path)
        except UserError:
            # Weights are what a rollback is for; what lies elsewhere, `dvc repro` makes again.
            if not output.is_made or PurePosixPath(output.path).parts[0] == CHECKPOINTS:
                raise
            absent.append(output.path)
    return absent


def _refuse_losses(
    repository: Repository,
    before: str,
    files: dict[str, bool],
    moved: dict[str, bool],
    old: dict[str, Output],
) -> None:
    """Raises UserError where what would be replaced could not be brought back."""
    # What a rollback has staged is committed under its reference.
    last = repository.ref(AFTER)
    staged = set(repository.changed("HEAD^{tree}", before))
    if last is not None:
        staged &= repository.changed(last, before).keys()
    if lost := sorted((staged | repository.unsaved()) & files.keys()):
        raise UserError(
            f"not committed, and would be lost: {some(lost, _MOST_NAMED)}; commit them (`git add`, "
            "`git commit`) or discard them (`git restore --staged --worktree`) first"
        )
    there = {path for path in moved if path in old and os.path.lexists(repository.root / path)}
    if not there:
        return
    changed, uncached = unsaved(repository)
    if lost := sorted(there & changed):
        raise UserError(
            f"changed since DVC recorded them, and would be lost: {some(lost, _MOST_NAMED)}; record them "
            "(`dvc commit`, then `git commit`) or discard them (`dvc checkout`) first"
        )
    if lost := sorted(there & uncached):
        raise UserError(
            f"not in DVC's cache, and could not be brought back: {some(lost, _MOST_NAMED)}; `dvc commit -f` "
            "puts them there"
        )
    if lost := sorted(path for path in there if not old[path].is_cached):
        raise UserError(
            f"neither in Git nor in DVC's cache (cache: false): {some(lost, _MOST_NAMED)}; commit them, or "
            "move them elsewhere"
        )
    if lost := sorted(path for path in there if old[path].holds_more(repository.root)):
        raise UserError(
            f"with files inside that .dvcignore hides, and that would be lost: {some(lost, _MOST_NAMED)}; "
            "move those elsewhere"
        )


def _refuse_running_pipeline(root: Path) -> None:
    """Raises UserError while a stage of DVC reads or writes; a dead one's entries count nothing."""
    try:
        entries = json.loads((root / ".dvc/tmp/rwlock").read_text() or "{}").values()
        users = [user for entry in entries for user in
                 (*entry.get("read", []), *filter(None, [entry.get("write")]))]  # fmt: skip
        alive = [user for user in users if Path(f"/proc/{int(user['pid'])}").exists()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return  # an aid for people: no file of ours, and of no promised format
    if alive:
        raise UserError(
            f"DVC is at work here (process {alive[0]['pid']}: {alive[0].get('cmd')}); wait for it, "
            "or stop it"
        )
