from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

from lockstep.data import download as module
from lockstep.data.download import download
from lockstep.data.source import FolderSource
from lockstep.errors import UserError


class FakeCIFAR10:
    """Ten images a split, in torchvision's form."""

    classes = ("plane", "car")

    def __init__(self, root: str, *, train: bool, download: bool) -> None:
        Path(root, "archive").write_bytes(b"raw")
        self.data = np.full((10, 32, 32, 3), 200 if train else 100, dtype=np.uint8)
        self.targets = [i % 2 for i in range(10)]


class FakeImagenette:
    """Two images a split, unpacked as torchvision does."""

    def __init__(self, root: str, *, split: str, size: str, download: bool) -> None:
        for part in ("train", "val"):
            for name in ("n01440764", "n02102040"):
                path = Path(root, "imagenette2-320", part, name, "1.JPEG")
                path.parent.mkdir(parents=True)
                Image.new("RGB", (9, 9)).save(path)


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "CIFAR10", FakeCIFAR10)
    monkeypatch.setattr(datasets, "Imagenette", FakeImagenette)
    for name, counts in {"cifar10": (10, 10), "imagenette": (2, 2)}.items():
        known = module.DOWNLOADS[name]
        monkeypatch.setitem(module.DOWNLOADS, name, module._Download(known.fill, counts))


@pytest.mark.parametrize("name", ["cifar10", "imagenette"])
def test_laid_out_as_folders_once(tmp_path: Path, name: str) -> None:
    assert download(name, tmp_path)
    train = FolderSource.open(tmp_path / name, "train", name=name)
    FolderSource.open(tmp_path / name, "val", name=name, classes=train.classes)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert not download(name, tmp_path)
    train.path(0).unlink()
    with pytest.raises(UserError, match=r"move it away|no images"):
        download(name, tmp_path)


def test_cifar10_pixels(tmp_path: Path) -> None:
    download("cifar10", tmp_path)
    assert Image.open(tmp_path / "cifar10/train/car/00001.png").getpixel((0, 0)) == (200,) * 3
    assert Image.open(tmp_path / "cifar10/val/plane/00000.png").getpixel((0, 0)) == (100,) * 3


@pytest.mark.parametrize(
    "failure",
    [URLError("no route"), RuntimeError("File not found or corrupted."), OSError(28, "No space")],
    ids=["network", "checksum", "disk"],
)
def test_failure_is_a_sentence_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(datasets, "CIFAR10", fail)
    with pytest.raises(UserError, match="cifar10 could not be downloaded"):
        download("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []
