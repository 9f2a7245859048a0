"""Checkpoints of a run: find the newest good one, load, save now or behind the training. Level 4."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep import dist
from lockstep.checkpoint import shards
from lockstep.checkpoint.manifest import (
    Damaged,
    cut_off,
    remove,
    step_folders,
    verify,
)
from lockstep.checkpoint.saver import RECORDS, Saver
from lockstep.checkpoint.shards import Tensors
from lockstep.checkpoint.writer import Writer
from lockstep.durable import atomic_write
from lockstep.errors import UserError


@dataclass(frozen=True)
class Found:
    """A checkpoint whose every file was verified."""

    path: Path
    step: int
    meta: dict[str, Any]
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
        self._saver = Saver(run_dir, keep_last, keep_best)
        self.asynchronous = asynchronous
        self._writer: Writer | None = None
        self._unapproved: tuple[int, dict[str, Any], float | None] | None = None
        self.waited_seconds = 0.0
        """How long the last :meth:`save` waited for the one before it; 0 for the first wait, when
        the writing process had yet to start."""
        self._has_waited = False

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

        Waits for the save before it; what is saved and what stays: see :meth:`Saver.save`.

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
        began, in_flight = time.monotonic(), self._writer is not None
        self.wait()
        self.waited_seconds = time.monotonic() - began if self._has_waited else 0.0
        self._has_waited = self._has_waited or in_flight
        if not self.asynchronous:
            self._saver.save(step, tensors, meta, metric=metric)
            return
        self.reserve(tensors).copy(tensors, changing)
        self._unapproved = (step, meta, metric)

    def approve(self, step: int) -> None:
        """Say that all steps up to ``step`` have turned out well. Not a collective.

        An asynchronous save of that step is written from now on: a GPU's figures are known some
        steps later, and a state that must not be kept is never written.
        """
        if self._unapproved is not None and self._unapproved[0] <= step:
            assert self._writer is not None
            self._writer.begin(*self._unapproved)
            self._unapproved = None

    @property
    def unapproved(self) -> bool:
        """Whether a save waits for :meth:`approve`."""
        return self._unapproved is not None

    @property
    def wants_memory(self) -> bool:
        """Whether :meth:`reserve` has anything to do."""
        return self.asynchronous and self._writer is None

    def reserve(self, tensors: Tensors) -> Writer:
        """Make memory for copies of ``tensors``, for which the first save would have to wait."""
        if self._writer is None:
            self._writer = Writer(self._saver, tensors)
        return self._writer

    def before_update(self) -> None:
        """Say that what is being saved will change. Not a collective; the host does not wait."""
        if self._writer is not None:
            self._writer.fence()

    def wait(self) -> None:
        """Wait for the save in flight; one that was never approved is forgotten.

        Raises:
            UserError: on every rank, when it failed.
        """
        self._unapproved = None
        if self._writer is not None:
            self._writer.wait()

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the save in flight failed; :meth:`wait` tells why."""
        return self._writer is not None and self._writer.failed

    def close(self) -> None:
        """Give back memory and process. Not a collective."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def find(self) -> Found | None:
        """The run's newest checkpoint that is committed and intact, verified on rank 0.

        Returns:
            None only if this run has no checkpoints at all.

        Raises:
            UserError: all of them are damaged.
        """
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
            with refused(self._saver.run_dir):
                atomic_write(self._saver.run_dir / RECORDS, (found.path / RECORDS).read_bytes())

    def forget(self, step: int) -> None:
        """Delete this run's checkpoints of ``step`` and later: what they hold was a mistake."""

        def work() -> None:
            with refused(self._saver.folder):
                for number, folder in step_folders(self._saver.folder):
                    if number >= step:
                        remove(folder)

        dist.on_main(work)

    def _find_own(self) -> Found | None:
        with refused(self._saver.folder):
            for complete, final in cut_off(self._saver.folder):
                if final.exists():  # half deleted, to make room for it
                    remove(final)
                complete.rename(final)
        found, reasons = _newest_good(step_folders(self._saver.folder))
        self._saver.damaged = {self._saver.folder / name for name in reasons}
        if found is None and reasons:
            raise UserError(
                f"every checkpoint of the run is damaged:\n{_listed(reasons)}\n"
                f"restore one, or delete {self._saver.folder} to start over"
            )
        return found


@contextmanager
def refused(folder: Path) -> Iterator[None]:
    """Turn an operating system's refusal into a sentence for the user."""
    try:
        yield
    except OSError as exc:
        raise UserError(
            f"{exc.filename or folder}: {exc.strerror or exc}. Make room or permit writing below "
            "run.root, and run the same command again to go on"
        ) from exc


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
        return Found(folder, step, manifest.meta, files, notes), reasons
    return None, reasons


def _listed(reasons: dict[str, str]) -> str:
    return "\n".join(f"  {name}: {why}" for name, why in reasons.items())
