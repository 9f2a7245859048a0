"""Reads a data set through before a run does. Level 2."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.data.decode import DecodeError, decode
from lockstep.data.source import FolderSource


@dataclass(frozen=True)
class SplitReport:
    """What one split holds."""

    split: str
    digest: str
    counts: dict[str, int]
    """Images of each class, readable or not."""
    unreadable: dict[str, str]
    """Path below the split's folder, and the reason."""


def check(root: Path) -> list[SplitReport]:
    """Decode every image of train and val.

    Raises:
        UserError: the folders cannot be trained on.
    """
    train = FolderSource.open(root, "train")
    return [_check_split(s) for s in (train, FolderSource.open(root, "val", classes=train.classes))]


def _check_split(source: FolderSource) -> SplitReport:
    def reason(index: int) -> str | None:
        try:
            decode(source.read(index), exif_rotate=False)
        except OSError as error:
            return error.strerror or str(error)
        except DecodeError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reasons: Sequence[str | None] = list(pool.map(reason, range(len(source))))
    counts = np.bincount(source.targets, minlength=len(source.classes))
    return SplitReport(
        split=source.folder.name,
        digest=source.digest,
        counts={name: int(n) for name, n in zip(source.classes, counts, strict=True)},
        unreadable={source.name(i): why for i, why in enumerate(reasons) if why is not None},
    )
