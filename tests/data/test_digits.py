from __future__ import annotations

import io
import shutil
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from lockstep.data.digits import digit_files, grey_png, write_digits
from lockstep.data.source import FolderSource
from lockstep.errors import UserError

BYTES = "ff5d015de2817b05717d704cf1db5f07"


def content(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    assert write_digits(root)
    return root


def test_the_data_set(built: Path) -> None:
    train = FolderSource.open(built / "digits", "train")
    val = FolderSource.open(built / "digits", "val", classes=train.classes)
    assert (len(train), len(val)) == (1438, 359)
    assert train.classes == [str(digit) for digit in range(10)]
    digits = load_digits()
    for source in (train, val):
        for i in range(0, len(source), 50):
            number = int(source.path(i).stem)
            assert (number % 5 == 4) == (source is val)
            assert source.targets[i] == digits.target[number]
            image = Image.open(source.path(i))
            assert image.mode == "L"
            np.testing.assert_array_equal(image, np.rint(digits.images[number] * 255 / 16))


def test_bytes_are_the_same_everywhere() -> None:
    total = blake2b(digest_size=16)
    for path, data in sorted(digit_files().items()):
        total.update(path.encode() + data)
    assert total.hexdigest() == BYTES


def test_twice_is_once(built: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in built.rglob("*")}
    assert not write_digits(built)
    assert {p: p.stat().st_mtime_ns for p in built.rglob("*")} == before


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_damage_is_repaired(built: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(built / "digits", tmp_path / "digits")
    some = tmp_path / "digits/train/3"
    if damage == "truncated":
        next(some.iterdir()).write_bytes(b"")
    else:
        next(some.iterdir()).unlink()
    (tmp_path / "digits/.DS_Store").touch()
    assert write_digits(tmp_path)
    assert content(tmp_path / "digits") == content(built / "digits")
    assert [p.name for p in tmp_path.iterdir()] == ["digits"]


def test_foreign_files_are_not_deleted(built: Path, tmp_path: Path) -> None:
    shutil.copytree(built / "digits", tmp_path / "digits")
    (tmp_path / "digits/train/3/mine.png").write_bytes(b"precious")
    with pytest.raises(UserError, match=r"train/3/mine\.png"):
        write_digits(tmp_path)
    assert (tmp_path / "digits/train/3/mine.png").read_bytes() == b"precious"


@pytest.mark.parametrize("shape", [(1, 1), (8, 8), (5, 200)], ids=str)
def test_grey_png_is_a_png(shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    with Image.open(io.BytesIO(grey_png(pixels))) as image:
        assert image.format == "PNG" and image.mode == "L"
        np.testing.assert_array_equal(image, pixels)
    with Image.open(io.BytesIO(grey_png(pixels))) as image:
        image.verify()
