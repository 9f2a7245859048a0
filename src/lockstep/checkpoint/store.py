"""Checkpoints of a run: save on all ranks, commit, retain, find the newest good one, load. Level 4.

A save fills ``step-N.tmp`` and renames it to ``step-N`` when all of it is durable: whatever
interrupts it leaves the earlier checkpoints as they were. It runs in a thread behind the training,
one at a time, on copies in host memory and through a process group of its own.
"""

from __future__ import annotations

import errno
import math
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep import dist
from lockstep.checkpoint import shards
from lockstep.checkpoint.manifest import (
    Damaged,
    FileEntry,
    Manifest,
    atomic_write,
    commit,
    describe,
    read_manifest,
    remove,
    step_folders,
    sync_folder,
    verify,
)
from lockstep.checkpoint.staging import Staged, Staging, Tensors
from lockstep.errors import UserError

LATEST = "latest"
"""A link to the newest checkpoint, for people and tools; resuming looks for itself."""
RECORDS = "metrics.jsonl"
"""The run's records up to a step lie in the checkpoint, too: what is lost or altered is restored."""
_PARTIAL = ".tmp"
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class Found:
    """A checkpoint whose every file was verified."""

    path: Path
    step: int
    meta: dict[str, Any]
    metric: float | None
    files: tuple[str, ...]
    """Names of the verified files."""
    notes: list[str] = field(default_factory=list)
    """What the user should know: which newer checkpoints were passed over, and why."""


class Store:
    """The checkpoints of one run folder. All ranks enter every method."""

    def __init__(
        self, run_dir: Path, *, keep_last: int, keep_best: bool, asynchronous: bool
    ) -> None:
        """
        Args:
            keep_last: how many of the newest checkpoints survive a save.
            keep_best: the one of the highest metric survives, too.
            asynchronous: :meth:`save` returns while the files are still written.
        """
        assert keep_last >= 1
        self._folder = run_dir / "checkpoints"
        self._records = run_dir / RECORDS
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._damaged: set[Path] = set()
        self.asynchronous = asynchronous
        self._staging = Staging()
        self._group = dist.second_group() if asynchronous else None
        self._in_flight: _Save | None = None
        self.reserved = False

    def save(
        self,
        step: int,
        tensors: Tensors,
        meta: dict[str, Any],
        *,
        metric: float | None,
        changing: Collection[torch.Tensor] = (),
    ) -> None:
        """Write, commit and retain, behind the training if the store is asynchronous.

        Waits for the save before it. A step that is committed and intact stays as it is, unless it
        lacks the metric that is known now: the state of a run after a step is the same however it
        got there. A damaged one is replaced.

        Args:
            tensors: each rank's shards; the same keys on every rank. With an asynchronous store,
                call :meth:`before_update` before they change and :meth:`approve` when the step has
                turned out well.
            meta: plain JSON values, those of rank 0 count.
            metric: higher is better; None or non-finite: no candidate for the best.
            changing: tensors that may change before :meth:`before_update` is called.

        Raises:
            UserError: on every rank, when one of them cannot write this save or, with an
                asynchronous store, the one before it. Nothing is left of the failed save and the
                earlier checkpoints are intact.
        """
        assert not self.unapproved, "the save before would be forgotten"
        self.wait()
        if not self.asynchronous:
            self._save(step, tensors, meta, metric)
            return
        staged = self._staging.copy(tensors, changing)

        def work() -> None:
            with dist.using(self._group):
                staged.wait()
                self._save(step, staged.tensors, meta, metric)

        self._in_flight = _Save(step, staged, work)

    def approve(self, step: int) -> None:
        """Say that all steps up to ``step`` have turned out well. Not a collective.

        An asynchronous save of that step is written from now on: a GPU's figures are known some
        steps later, and a state that must not be kept is never written.
        """
        if self._in_flight is not None and self._in_flight.step <= step:
            self._in_flight.begin()

    @property
    def unapproved(self) -> bool:
        """Whether a save waits for :meth:`approve`."""
        return self._in_flight is not None and not self._in_flight.begun

    def reserve(self, tensors: Tensors) -> None:
        """Make the host memory for copies of ``tensors`` now: the first save would wait for it."""
        if self.asynchronous and not self.reserved:
            self._staging.reserve(tensors)
        self.reserved = True

    def before_update(self) -> None:
        """Say that what is being saved will change. Not a collective; the host does not wait."""
        if self._in_flight is not None:
            self._in_flight.staged.fence()

    def wait(self) -> None:
        """Wait for the save in flight; one that was never approved is forgotten.

        Raises:
            UserError: on every rank, when it failed.
        """
        if (save := self._in_flight) is not None:
            self._in_flight = None
            shards.hurry.set()
            try:
                save.join()
            finally:
                shards.hurry.clear()

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the save in flight failed; :meth:`wait` tells why."""
        return self._in_flight is not None and self._in_flight.error is not None

    def _save(
        self, step: int, tensors: Tensors, meta: dict[str, Any], metric: float | None
    ) -> None:
        final = self._folder / f"step-{step}"
        target = self._folder / (final.name + _PARTIAL)
        known = metric if metric is not None and math.isfinite(metric) else None
        explained = _explained(step, dist.on_main(partial(self._newest_before, step)))
        try:
            if dist.on_main(explained(partial(self._begin, final, target, known))):
                return
            explained(shards.write)(target, tensors)
            # Each rank reads what it wrote: checksums are computed side by side.
            own = dist.together(explained(partial(_entries, shards.own_files(target))))
            files = {name: e for entries in dist.gather_objects(own) for name, e in entries.items()}
            manifest = Manifest(step, known, meta, files)
            dist.on_main(explained(partial(self._commit, final, target, manifest)))
        except UserError:
            dist.on_main(partial(shutil.rmtree, target, ignore_errors=True))
            raise

    def find(self, where: Path | None = None) -> Found | None:
        """The newest checkpoint that is committed and intact, verified on rank 0.

        Args:
            where: a run folder, its checkpoints folder or one ``step-N`` folder; None: this run.

        Returns:
            None only if this run has no checkpoints at all.

        Raises:
            UserError: nothing good at ``where``, or all checkpoints of this run are damaged.
        """
        if where is not None:
            return find_checkpoint(where)
        return dist.on_main(self._find_own)

    def load(self, found: Found, tensors: Tensors) -> dict[str, Any]:
        """Fill ``tensors`` in place, whatever strategy and number of processes saved them.

        The run's records become those of the checkpoint.

        Returns:
            The plain values that were saved.

        Raises:
            UserError: the keys, shapes or dtypes differ, or a file holds what it must not.
        """
        shards.read(found.path, found.files, tensors)
        dist.on_main(partial(self._restore_records, found))
        return found.meta

    @staticmethod
    def load_full(found: Found) -> dict[str, dict[str, Any]]:
        """Whole tensors on this process's CPU; not a collective. Raises as ``load``."""
        return shards.read_full(found.path, found.files)

    def _restore_records(self, found: Found) -> None:
        if RECORDS in found.files:
            atomic_write(self._records, (found.path / RECORDS).read_bytes())

    def _newest_before(self, step: int) -> str | None:
        folders = (p for n, p in step_folders(self._folder) if n != step and _committed(p))
        return next((p.name for p in folders if p not in self._damaged), None)

    def _begin(self, final: Path, target: Path, metric: float | None) -> bool:
        """Make room for a save; True if there is nothing to do."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(f"step-*{_PARTIAL}"):
            shutil.rmtree(leftover)
        with suppress(Damaged):
            if verify(final).metric is not None or metric is None:
                return True
        target.mkdir()
        return False

    def _commit(self, final: Path, target: Path, manifest: Manifest) -> None:
        if invisible := [name for name in manifest.files if not (target / name).is_file()]:
            raise UserError(
                f"run.root = {self._folder.parent.parent}: not shared by all nodes "
                f"({invisible[0]} of another process is not visible); choose a shared file system"
            )
        if self._records.exists():
            shutil.copyfile(self._records, target / RECORDS)
        whole = [path for path in (target / shards.INDEX, target / RECORDS) if path.exists()]
        commit(target, replace(manifest, files=manifest.files | _entries(whole)))
        if final.exists():
            remove(final)
        # Killed here, the next start finds the mark in the partial folder and renames it.
        target.rename(final)
        sync_folder(self._folder)
        self._damaged.discard(final)
        _point(self._folder / LATEST, final.name)
        # The save is done. What cannot be deleted now is tried again after the next one.
        with suppress(OSError):
            self._retain(final)

    def _retain(self, newest: Path) -> None:
        good, metrics = [], {}
        for _, folder in step_folders(self._folder):
            with suppress(Damaged):
                if folder not in self._damaged:
                    metrics[folder] = read_manifest(folder).metric
                    good.append(folder)
        keep = {newest, *good[: self._keep_last]}
        scored = [folder for folder in reversed(good) if metrics[folder] is not None]
        if self._keep_best and scored:
            # The earliest of equals, as max() takes the first.
            keep.add(max(scored, key=lambda folder: metrics[folder] or 0.0))
        for _, folder in step_folders(self._folder):
            if folder not in keep:
                remove(folder)

    def _find_own(self) -> Found | None:
        for complete in self._folder.glob(f"step-*{_PARTIAL}"):
            # Killed between the mark and the rename.
            if _committed(complete) and not (final := complete.with_suffix("")).exists():
                complete.rename(final)
        found, reasons = _newest_good(step_folders(self._folder))
        self._damaged = {self._folder / name for name in reasons}
        if found is None and reasons:
            raise UserError(
                f"every checkpoint of the run is damaged:\n{_listed(reasons)}\n"
                f"restore one, or delete {self._folder} to start over"
            )
        return found


def find_checkpoint(where: Path) -> Found:
    """The newest good checkpoint of a run folder, checkpoints folder or ``step-N`` folder.

    All ranks enter here; rank 0 decides.

    Raises:
        UserError: there is none; says what is wrong with those that are there.
    """

    def search() -> Found:
        if not where.is_dir():
            raise UserError(f"{where}: no such folder; give the path of a run or checkpoint")
        inside = where / "checkpoints"
        folders = step_folders(inside if inside.is_dir() else where)
        if not folders:
            # ``where`` is the checkpoint itself; resolved, because its name tells the step.
            here = where.resolve()
            folders = [item for item in step_folders(here.parent) if item[1] == here]
        found, reasons = _newest_good(folders)
        if found is None:
            raise UserError(
                f"{where}: no usable checkpoint"
                + (f":\n{_listed(reasons)}" if reasons else "; no step-N folder is there")
            )
        return found

    return dist.on_main(search)


def _newest_good(folders: Iterable[tuple[int, Path]]) -> tuple[Found | None, dict[str, str]]:
    """The first good one, and why those before it are not."""
    reasons: dict[str, str] = {}
    for step, folder in folders:
        try:
            manifest = verify(folder)
            if manifest.step != step:
                raise Damaged(f"holds step {manifest.step}")
        except Damaged as exc:
            reasons[folder.name] = str(exc)
            continue
        notes = [f"{name}: {why}; falling back to {folder.name}" for name, why in reasons.items()]
        files = tuple(manifest.files)
        return Found(folder, step, manifest.meta, manifest.metric, files, notes), reasons
    return None, reasons


class _Save:
    """A save that runs in a thread once it is told to begin."""

    def __init__(self, step: int, staged: Staged, work: Callable[[], None]) -> None:
        self.step = step
        self.staged = staged
        self.error: BaseException | None = None
        self._work = work
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        if self._thread is None:
            # A daemon: a process that must end does not wait for a disk, or for a lost peer.
            self._thread = threading.Thread(target=self._run, name="save", daemon=True)
            self._thread.start()

    @property
    def begun(self) -> bool:
        return self._thread is not None

    def join(self) -> None:
        """Wait, and raise what the thread met."""
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as exc:  # noqa: BLE001 - raised where somebody waits for it
            self.error = exc


def _point(link: Path, name: str) -> None:
    """Let ``link`` lead to its sibling ``name``, where the file system knows links."""
    partial_link = link.with_name(f".{link.name}{_PARTIAL}")
    with suppress(OSError):
        partial_link.unlink(missing_ok=True)
        partial_link.symlink_to(name)
        partial_link.replace(link)


def _committed(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except Damaged:
        return False
    return True


def _entries(files: Sequence[Path]) -> dict[str, FileEntry]:
    # hashlib releases Python's lock: the files are read side by side.
    with ThreadPoolExecutor(max_workers=max(1, len(files))) as pool:
        entries = pool.map(describe, files)
        return {path.name: entry for path, entry in zip(files, entries, strict=True)}


def _listed(reasons: dict[str, str]) -> str:
    return "\n".join(f"  {name}: {why}" for name, why in reasons.items())


@contextmanager
def _explained(step: int, previous: str | None) -> Iterator[None]:
    """Turn an operating system's refusal into a sentence for the user."""
    try:
        yield
    except OSError as exc:
        what = "disk full" if exc.errno in _DISK_FULL else "the file system failed"
        kept = f"the previous checkpoint {previous} is intact" if previous else "none was there yet"
        raise UserError(
            f"{what} while saving step {step}: {exc}; {kept}. "
            "Make room below run.root and run the same command again to go on"
        ) from exc
