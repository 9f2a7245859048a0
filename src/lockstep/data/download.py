"""Data sets that torchvision downloads, laid out as folders of images. Level 2."""

from __future__ import annotations

import http.client
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from torchvision import datasets

from lockstep.data.digits import replace_folder
from lockstep.data.source import FolderSource
from lockstep.errors import UserError


def download(name: str, root: Path) -> bool:
    """Make ``<root>/<name>/{train,val}/<class>/<image>`` of a set in :data:`DOWNLOADS`.

    Appears as a whole or not at all.

    Returns:
        False where it was there already.

    Raises:
        UserError: no network, a damaged download, or something else in its place.
    """
    target, known = root / name, DOWNLOADS[name]
    if target.exists():
        counts = tuple(len(FolderSource.open(target, split)) for split in ("train", "val"))
        if counts != known.counts:
            raise UserError(
                f"{target} holds {counts[0]} + {counts[1]} images, but {name} has "
                f"{known.counts[0]} + {known.counts[1]}: move it away, or choose another --root"
            )
        return False
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root) as raw:
        try:
            with _members_stay_inside():
                replace_folder(target, lambda folder: known.fill(Path(raw), folder))
        # RuntimeError is torchvision's word for a file whose checksum is wrong.
        except (OSError, http.client.HTTPException, RuntimeError, tarfile.TarError) as error:
            raise UserError(
                f"{name} could not be downloaded ({error}): check the network connection and the "
                f"free space in {root}, or lay the images out below {target} yourself"
            ) from error
    return True


@contextmanager
def _members_stay_inside() -> Iterator[None]:
    """Refuse archives whose members or links lead out of the folder that they are unpacked to.

    torchvision checks each download's MD5, but unpacks as Python's default has it, which trusts the
    archive before Python 3.14. Pythons before 3.11.4 know no filter: the MD5 alone stands there.
    """
    if not hasattr(tarfile, "data_filter"):
        yield
        return
    before = tarfile.TarFile.extraction_filter
    tarfile.TarFile.extraction_filter = staticmethod(tarfile.data_filter)
    try:
        yield
    finally:
        tarfile.TarFile.extraction_filter = before


def _cifar10(raw: Path, folder: Path) -> None:
    for split, train in (("train", True), ("val", False)):
        found = datasets.CIFAR10(str(raw), train=train, download=True)
        for name in found.classes:
            (folder / split / name).mkdir(parents=True)
        for i, (pixels, target) in enumerate(zip(found.data, found.targets, strict=True)):
            Image.fromarray(pixels).save(folder / split / found.classes[target] / f"{i:05d}.png")


def _imagenette(raw: Path, folder: Path) -> None:
    """Short side 320 pixels."""
    datasets.Imagenette(str(raw), split="train", size="320px", download=True)
    for split in ("train", "val"):
        (raw / "imagenette2-320" / split).rename(folder / split)


@dataclass(frozen=True)
class _Download:
    fill: Callable[[Path, Path], None]
    """Downloads into one folder and lays out in another."""
    counts: tuple[int, int]
    """Images in train and val."""


DOWNLOADS = {
    "cifar10": _Download(_cifar10, (50_000, 10_000)),
    "imagenette": _Download(_imagenette, (9_469, 3_925)),
}
