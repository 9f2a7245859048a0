"""Images in folders, ``<root>/<split>/<class>/**/<image>``, as torchvision's ImageFolder has them.

Level 2. Owns which files belong to a data set, their order and the digest that tells whether they
are the same as before; knows nothing of pixels. What a loader needs of any source is ``Source``.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np

from lockstep.data.listing import Listing, forget, recall, remember
from lockstep.errors import UserError, some

EXTENSIONS = frozenset(
    f".{ending}"
    for ending in (
        *("jpg", "jpeg", "jpe", "jfif", "png", "bmp", "dib", "gif", "webp", "avif"),
        *("tif", "tiff", "ppm", "pgm", "pbm", "pnm", "pfm", "jp2", "j2k"),
    )
)
"""What counts as an image, in any case; whether it is one shows when it is decoded."""

HOW_TO_MAKE = {
    "digits": "`make data` (or `python scripts/prepare_data.py digits`) makes data/digits; your own "
    "images need data=folder",
    "cifar10": "`python scripts/prepare_data.py cifar10` makes data/cifar10",
    "imagenette": "`python scripts/prepare_data.py imagenette` makes data/imagenette",
    "imagenet": "lay ImageNet out as train/n01440764/*.JPEG and val/n01440764/*.JPEG (1,000 "
    "folders each) and set data.root to the folder that holds train and val",
    "folder": "set data.root to a folder that holds train/<class>/* and val/<class>/*",
}


PACKED_INDEX = "index"
"""A folder in a split that ``pack`` has made."""
_ROWS = 1 << 17
"""Entries that are hashed at once."""


class Source(Protocol):
    """The images of one split, wherever they are stored."""

    @property
    def folder(self) -> Path:
        """Of the split."""

    @property
    def classes(self) -> list[str]: ...

    @property
    def targets(self) -> np.ndarray:
        """[n] int64, index into ``classes``."""

    @property
    def digest(self) -> str:
        """:func:`digest_of` its images."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Path below the split's folder: ``<class>/<...>/<file>``."""

    def path(self, index: int) -> Path:
        """Where it lies, for messages."""

    def read(self, index: int) -> bytes:
        """The image's bytes; raises OSError where they cannot be read."""

    def will_read(self, indices: np.ndarray) -> None:
        """Let the system fetch what lies together, if it does."""


@dataclass(frozen=True, eq=False)
class FolderSource:
    """The images of one split, ordered by class and then by the bytes of their path.

    Hidden files and folders (a leading dot) are no part of it. Names lie joined in one array, so
    that a million of them are not a million objects.
    """

    folder: Path
    classes: list[str]
    targets: np.ndarray
    """[n] int64, index into ``classes``."""
    sizes: np.ndarray
    """[n] int64, bytes of each file when it was listed."""
    digest: str
    """Hash of class names, relative file names and file sizes: the same wherever the root lies."""
    _names: np.ndarray
    _ends: np.ndarray

    @classmethod
    def open(
        cls,
        root: Path,
        split: str,
        *,
        name: str = "folder",
        classes: Sequence[str] | None = None,
        strict: bool = True,
    ) -> FolderSource:
        """List ``<root>/<split>``.

        Args:
            name: ``data.name``; decides what the message about an absent folder recommends.
            classes: those that the split must have (the training set's).
            strict: refuse what :meth:`refuse` does.

        Raises:
            UserError: nothing that can be trained on; names what is missing or superfluous.
        """
        folder = split_folder(root, split, HOW_TO_MAKE[name])
        if is_packed(folder):
            raise UserError(
                f"data.root = {root}: {split} holds packed images: set data.source=packed, or give "
                "the folder that was packed"
            )
        found = recall(folder)
        if found is None:
            began_ns, folders = time.time_ns(), [b""]
            try:
                names = _class_names(root, folder)
                # Before all is listed, which may take a while.
                check_classes(root, split, names, classes if strict else names)
                found = _list(folder, names, folders)
            except OSError as error:
                raise UserError(
                    f"data.root = {root}: cannot list "
                    f"{os.fsdecode(error.filename or folder)}: {error.strerror}"
                ) from error
            remember(folder, found, folders, began_ns)
        source = cls(
            folder=folder,
            classes=found.classes,
            targets=np.repeat(np.arange(len(found.classes)), found.counts),
            sizes=found.sizes,
            digest=found.digest,
            _names=found.names,
            _ends=found.ends,
        )
        if strict:
            source.refuse(classes)
        return source

    def refuse(self, classes: Sequence[str] | None) -> None:
        """Raise UserError where a class is empty, or there are too few, or not ``classes``."""
        root, split = self.folder.parent, self.folder.name
        check_classes(root, split, self.classes, classes)
        counts = np.bincount(self.targets, minlength=len(self.classes))
        if empty := [f"{split}/{c}" for c, n in zip(self.classes, counts, strict=True) if not n]:
            raise UserError(
                f"data.root = {root}: no images in {some(empty)}: "
                f"add some ({', '.join(sorted(EXTENSIONS))}) or remove the folder in all splits"
            )

    def __len__(self) -> int:
        return len(self.targets)

    def name(self, index: int) -> str:
        """Path below the split's folder, with forward slashes: ``<class>/<...>/<file>``."""
        start = self._ends[index - 1] if index > 0 else 0
        return os.fsdecode(self._names[start : self._ends[index]].tobytes())

    def path(self, index: int) -> Path:
        """Where the file lies."""
        return self.folder / self.name(index)

    def read(self, index: int) -> bytes:
        """The file's bytes. Raises OSError where it cannot be read (any more), or was changed."""
        data, expected = self.path(index).read_bytes(), int(self.sizes[index])
        if len(data) != expected:
            forget(self.folder)  # what else has changed shows when it is listed anew
            reason = f"changed since it was listed, {len(data):,} bytes instead of {expected:,}"
            raise OSError(errno.ESTALE, reason, str(self.path(index)))
        return data

    def will_read(self, indices: np.ndarray) -> None:
        """Nothing: a file here and a file there."""


def _list(folder: Path, classes: list[str], folders: list[bytes]) -> Listing:
    """List a split, and each folder in it into ``folders``."""
    names: list[bytes] = []
    lengths, sizes, counts = [], [], []
    for c in classes:
        # Class by class: a million names must not be a million objects at any time.
        members = sorted(_images(os.fsencode(folder / c), os.fsencode(c), folders))
        names.append(b"".join(path for path, _ in members))
        lengths.append(np.array([len(path) for path, _ in members], dtype=np.int64))
        sizes.append(np.array([size for _, size in members], dtype=np.int64))
        counts.append(len(members))
    blob, ends = b"".join(names), np.cumsum(np.concatenate(lengths))
    all_sizes = np.concatenate(sizes)
    return Listing(
        classes=classes,
        counts=np.array(counts),
        names=np.frombuffer(blob, dtype=np.uint8),
        ends=ends,
        sizes=all_sizes,
        digest=digest_of(classes, _cut(blob, ends), all_sizes.tolist()),
    )


def is_packed(folder: Path) -> bool:
    """Whether a split's folder is what ``pack`` has made."""
    return (folder / PACKED_INDEX / "index.json").is_file()


def digest_of(classes: Sequence[str], names: Iterable[bytes], sizes: Iterable[int]) -> str:
    """Hash of class names, relative file names and file sizes."""
    found = blake2b("\0".join(classes).encode(errors="surrogateescape"), digest_size=16)
    entries = (b"\0%s\0%d" % entry for entry in zip(names, sizes, strict=True))
    while part := b"".join(islice(entries, _ROWS)):
        found.update(part)
    return found.hexdigest()


def _cut(joined: bytes, ends: np.ndarray) -> Iterator[bytes]:
    """The names that lie joined in ``joined``."""
    start = 0
    for end in ends.tolist():
        yield joined[start:end]
        start = end


def split_folder(root: Path, split: str, how_to_make: str) -> Path:
    """``<root>/<split>``; raises UserError where there is none."""
    folder = root / split
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise UserError(f"data.root = {root}: {what}: {how_to_make}")
    if not folder.is_dir():
        here = some(sorted(p.name for p in root.iterdir() if p.is_dir())) or "no folders"
        raise UserError(
            f"data.root = {root}: there is no folder {split} in it (but {here}): {how_to_make}"
        )
    return folder


def _class_names(root: Path, folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        folders = [e for e in entries if not e.name.startswith(".") and e.is_dir()]
    inside = (root.resolve(), folder.resolve())
    for entry in folders:
        target = Path(entry.path).resolve()
        if entry.is_symlink() and not any(target.is_relative_to(top) for top in inside):
            raise UserError(
                f"data.root = {root}: the class folder {folder.name}/{entry.name} is a link to "
                f"{target}, outside of the data: copy the images, or link them one by one"
            )
    return sorted((e.name for e in folders), key=os.fsencode)


def check_classes(root: Path, split: str, found: list[str], wanted: Sequence[str] | None) -> None:
    """Raises UserError where there are too few classes, or others than in training."""
    if not found:
        raise UserError(
            f"data.root = {root}: {split} has no class folders: put the images of each class "
            f"into a folder of their own, {split}/<class>/<image>"
        )
    if wanted is None and len(found) == 1:
        raise UserError(
            f"data.root = {root}: {split} has one class, {found[0]}: at least two are needed"
        )
    if wanted is not None and found != list(wanted):
        missing = [c for c in wanted if c not in set(found)]
        extra = [c for c in found if c not in set(wanted)]
        parts = [f"missing in {split}: {some(missing)}"] if missing else []
        parts += [f"only in {split}: {some(extra)}"] if extra else []
        raise UserError(
            f"data.root = {root}: train and {split} have different class folders "
            f"({'; '.join(parts)}): every class needs one in both"
        )


def _images(folder: bytes, prefix: bytes, folders: list[bytes]) -> Iterator[tuple[bytes, int]]:
    """Relative path and size of each image below ``folder``, in no order."""
    folders.append(prefix)
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(b"."):
                continue
            path = prefix + b"/" + entry.name
            if entry.is_dir():
                if entry.is_symlink():
                    reason = "is a link to a folder: copy the images, or link them one by one"
                    raise OSError(errno.ELOOP, reason, entry.path)
                yield from _images(entry.path, path, folders)
            elif os.path.splitext(entry.name)[1].lower().decode(errors="replace") in EXTENSIONS:
                # A dangling link is listed, so that reading it names it; a pipe or a device, linked
                # or not, would block or never end.
                if entry.is_file():
                    yield path, entry.stat().st_size
                elif entry.is_symlink() and not os.path.exists(entry.path):
                    yield path, 0
