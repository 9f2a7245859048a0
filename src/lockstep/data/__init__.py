"""Level 2: from files to batches on the device.

``source`` lists files and ``packed`` reads what ``pack`` has put into a few of them, ``decode``
makes RGB pixels, ``sampler`` says who takes which sample when, ``augment`` (one image) and
``mixing`` (pairs) change them, ``cache`` keeps them, ``resample`` resizes many on the device,
``loader`` puts it together; ``digits`` and ``download`` make data sets, ``check`` and ``sheet``
read one through.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.config.schema import Data
from lockstep.data.packed import PackedSource
from lockstep.data.source import FolderSource, Source, is_packed

__all__ = ["is_packed", "open_split"]


def open_split(cfg: Data, split: str, *, classes: Sequence[str] | None = None) -> Source:
    """The images of ``<data.root>/<split>``, stored as ``data.source`` says.

    Args:
        classes: those that the split must have (the training set's).

    Raises:
        UserError: nothing that can be trained on.
    """
    if cfg.source == "packed":
        return PackedSource.open(Path(cfg.root), split, classes=classes)
    return FolderSource.open(Path(cfg.root), split, name=cfg.name, classes=classes)
