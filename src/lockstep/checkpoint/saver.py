"""One save: write on all ranks, commit, retain. Level 4.

It fills ``step-N.tmp`` and renames it to ``step-N`` when all of it is durable: whatever interrupts
it leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan

from lockstep import dist
from lockstep.checkpoint import shards
from lockstep.checkpoint.manifest import (
    LATEST,
    PARTIAL,
    Damaged,
    FileEntry,
    Manifest,
    commit,
    describe,
    is_committed,
    read_manifest,
    remove,
    step_folders,
    verify,
)
from lockstep.checkpoint.shards import Tensors
from lockstep.durable import sync_folder
from lockstep.errors import UserError

RECORDS = "metrics.jsonl"
"""The run's records up to a step lie in the checkpoint, too: what is lost or altered is restored."""
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass
class Saver:
    """Saves into one run folder. Plain values only: it goes to other processes."""

    run_dir: Path
    keep_last: int
    """How many of the newest checkpoints survive a save."""
    keep_best: bool
    """The one of the highest metric survives, too."""
    damaged: set[Path] = field(default_factory=set)
    """Checkpoints that are known to be of no use."""

    @property
    def folder(self) -> Path:
        return self.run_dir / "checkpoints"

    def save(
        self,
        step: int,
        tensors: Tensors,
        meta: dict[str, Any],
        *,
        metric: float | None,
        plan: SavePlan | None = None,
    ) -> None:
        """Save and return when everything is durable. All ranks enter here.

        A step that is committed and intact stays as it is, unless it lacks the metric that is known
        now: the state of a run after a step is the same however it got there. A damaged one is
        replaced.

        Args:
            tensors: each rank's shards; the same keys on every rank.
            meta: plain JSON values, those of rank 0 count.
            metric: higher is better; None or non-finite: no candidate for the best.
            plan: see :func:`shards.write`.

        Raises:
            UserError: on every rank, when one of them cannot write. Nothing is left of this save
                and the earlier checkpoints are intact.
        """
        final = self.folder / f"step-{step}"
        target = self.folder / (final.name + PARTIAL)
        known = metric if metric is not None and math.isfinite(metric) else None
        explained = _explained(step, dist.on_main(partial(self._newest_before, step)))
        try:
            if dist.on_main(explained(partial(self._begin, final, target, known))):
                return
            explained(shards.write)(target, tensors, plan)
            # Each rank reads what it wrote: checksums are computed side by side.
            own = dist.together(explained(partial(_entries, shards.own_files(target))))
            files = {name: e for entries in dist.gather_objects(own) for name, e in entries.items()}
            manifest = Manifest(step, known, meta, files)
            dist.on_main(explained(partial(self._commit, final, target, manifest)))
        except UserError:
            dist.on_main(partial(shutil.rmtree, target, ignore_errors=True))
            raise

    def _newest_before(self, step: int) -> str | None:
        folders = (p for n, p in step_folders(self.folder) if n != step and is_committed(p))
        return next((p.name for p in folders if p not in self.damaged), None)

    def _begin(self, final: Path, target: Path, metric: float | None) -> bool:
        """Make room for a save; True if there is nothing to do."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"step-*{PARTIAL}"):
            shutil.rmtree(leftover)
        with suppress(Damaged):
            if verify(final).metric is not None or metric is None:
                return True
        target.mkdir()
        return False

    def _commit(self, final: Path, target: Path, manifest: Manifest) -> None:
        if invisible := [name for name in manifest.files if not (target / name).is_file()]:
            raise UserError(
                f"run.root = {self.run_dir.parent}: not shared by all nodes "
                f"({invisible[0]} of another process is not visible); choose a shared file system"
            )
        if (self.run_dir / RECORDS).exists():
            shutil.copyfile(self.run_dir / RECORDS, target / RECORDS)
        whole = [path for path in (target / shards.INDEX, target / RECORDS) if path.exists()]
        commit(target, replace(manifest, files=manifest.files | _entries(whole)))
        if final.exists():
            remove(final)
        # Killed here, the next start finds the mark in the partial folder and renames it.
        target.rename(final)
        sync_folder(self.folder)
        self.damaged.discard(final)
        _point(self.folder / LATEST, final.name)
        # The save is done. What cannot be deleted now is tried again after the next one.
        with suppress(OSError):
            self._retain(final)

    def _retain(self, newest: Path) -> None:
        good, metrics = [], {}
        for _, folder in step_folders(self.folder):
            with suppress(Damaged):
                if folder not in self.damaged:
                    metrics[folder] = read_manifest(folder).metric
                    good.append(folder)
        keep = {newest, *good[: self.keep_last]}
        scored = [folder for folder in reversed(good) if metrics[folder] is not None]
        if self.keep_best and scored:
            # The earliest of equals, as max() takes the first.
            keep.add(max(scored, key=lambda folder: metrics[folder] or 0.0))
        for _, folder in step_folders(self.folder):
            if folder not in keep:
                remove(folder)


def _entries(files: Sequence[Path]) -> dict[str, FileEntry]:
    # hashlib releases Python's lock: the files are read side by side.
    with ThreadPoolExecutor(max_workers=max(1, len(files))) as pool:
        entries = pool.map(describe, files)
        return {path.name: entry for path, entry in zip(files, entries, strict=True)}


def _point(link: Path, name: str) -> None:
    """Let ``link`` lead to its sibling ``name``, where the file system knows links."""
    partial_link = link.with_name(f".{link.name}{PARTIAL}")
    with suppress(OSError):
        partial_link.unlink(missing_ok=True)
        partial_link.symlink_to(name)
        partial_link.replace(link)


@contextmanager
def _explained(step: int, previous: str | None) -> Iterator[None]:
    """Turn an operating system's refusal into a sentence for the user."""
    try:
        yield
    except OSError as exc:
        what = "disk full" if exc.errno in _DISK_FULL else "the file system failed"
        kept = (
            f"the previous checkpoint {previous} is intact" if previous else "there is no other yet"
        )
        raise UserError(
            f"{what} while saving step {step}: {exc}; {kept}. "
            "Make room below run.root and run the same command again to go on"
        ) from exc
