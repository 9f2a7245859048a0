"""The data set that needs no download: the 1,797 handwritten digits that scikit-learn ships.

Level 2. Written as PNG files of 8 x 8 grey pixels whose bytes are the same on every machine, so
that a committed checksum verifies them (UCI ML, "Optical Recognition of Handwritten Digits").
"""

from __future__ import annotations

import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from lockstep.errors import UserError

_VAL_EVERY = 5


def write_digits(root: Path) -> bool:
    """Make ``<root>/digits/{train,val}/<digit>/<NNNN>.png``; every fifth sample is for validation.

    Appears as a whole or not at all; damaged or missing files are made anew.

    Returns:
        False where everything was right already.

    Raises:
        UserError: the folder holds files that do not belong to it.
    """
    files = digit_files()
    target = root / "digits"
    present = _present(target)
    if foreign := sorted(present - files.keys()):
        raise UserError(
            f"{target} holds files that are not of the digits, {foreign[0]} for one: move them "
            "away, or choose another --root"
        )
    if present == files.keys() and all((target / p).read_bytes() == files[p] for p in files):
        return False

    def fill(folder: Path) -> None:
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)

    replace_folder(target, fill)
    return True


def replace_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Make a folder as a whole or not at all; what it held before is gone afterwards.

    Args:
        fill: puts everything into the empty folder that it is given.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: a rename is atomic within one file system only.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as workshop:
        new = Path(workshop) / "new"
        new.mkdir()
        fill(new)
        if target.exists():
            target.rename(Path(workshop) / "old")
        new.rename(target)


def digit_files() -> dict[str, bytes]:
    """Contents of the data set: path below ``digits/`` to file bytes."""
    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    files = {}
    for i, (image, label) in enumerate(zip(pixels, digits.target, strict=True)):
        split = "val" if i % _VAL_EVERY == _VAL_EVERY - 1 else "train"
        files[f"{split}/{label}/{i:04d}.png"] = grey_png(image)
    return files


def grey_png(pixels: np.ndarray) -> bytes:
    """[h, w] uint8 as a PNG file.

    Written here because a compressor's output changes with its version; uncompressed does not.
    """
    height, width = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    assert len(rows) < 1 << 16, "one stored block"
    stored = b"\1" + struct.pack("<HH", len(rows), len(rows) ^ 0xFFFF) + rows
    stream = b"\x78\x01" + stored + struct.pack(">I", zlib.adler32(rows))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", stream), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def _present(target: Path) -> set[str]:
    """Files below ``target``, hidden ones apart."""
    paths = (p.relative_to(target) for p in target.rglob("*") if not p.is_dir())
    return {p.as_posix() for p in paths if not any(part.startswith(".") for part in p.parts)}
