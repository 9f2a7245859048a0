from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lockstep.data import listing
from lockstep.data import source as source_module
from lockstep.data.source import FolderSource
from lockstep.errors import UserError


def lay_out(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two classes in both splits."""
    return lay_out(
        tmp_path / "pets", "train/cat/1.jpg", "train/dog/1.jpg", "val/cat/1.jpg", "val/dog/1.jpg"
    )


def test_order_names_and_targets(tmp_path: Path) -> None:
    names = ["Zebra/b.PNG", "Zebra/a/9.jpeg", "Zebra/a0.webp", "ähre/ü 1.JPG", "日本/猫.tiff"]
    lay_out(tmp_path, *(f"train/{name}" for name in names))
    lay_out(tmp_path, "train/Zebra/notes.txt", "train/Zebra/._b.png", "train/.cache/x.png")
    lay_out(tmp_path, "train/loose.png", "train/日本/.git/x.jpg", "train/日本/jpg")
    source = FolderSource.open(tmp_path, "train")
    assert source.classes == ["Zebra", "ähre", "日本"]
    in_order = [source.name(i) for i in range(len(source))]
    assert in_order == ["Zebra/a/9.jpeg", "Zebra/a0.webp", "Zebra/b.PNG", *names[3:]]
    assert source.targets.dtype == np.int64 and source.targets.tolist() == [0, 0, 0, 1, 2]
    for i, name in enumerate(in_order):
        assert source.path(i) == tmp_path / "train" / name
        assert source.read(i) == f"train/{name}".encode()


def test_names_that_are_no_unicode(tmp_path: Path) -> None:
    lay_out(tmp_path, "train/a/1.png")
    folder = os.fsencode(tmp_path / "train") + b"/\xff\xfe"
    os.mkdir(folder)
    Path(os.fsdecode(folder + b"/\xe9.png")).write_bytes(b"pixels")
    source = FolderSource.open(tmp_path, "train")
    assert source.read(1) == b"pixels" and len(source.digest) == 32


def test_digest_is_of_the_content_and_not_of_the_place(root: Path, tmp_path: Path) -> None:
    digest = FolderSource.open(root, "train").digest
    moved = shutil.copytree(root, tmp_path / "elsewhere")
    assert FolderSource.open(moved, "train").digest == digest
    (moved / "train/dog/.DS_Store").write_text("ignored")
    assert FolderSource.open(moved, "train").digest == digest
    (moved / "train/cat/1.jpg").rename(moved / "train/cat/2.jpg")
    renamed = FolderSource.open(moved, "train").digest
    (moved / "train/cat/2.jpg").write_text("longer than before")
    assert len({digest, renamed, FolderSource.open(moved, "train").digest}) == 3


def test_link_to_an_image_is_an_image(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "store.jpg"
    outside.write_bytes(b"linked")
    (root / "train/cat/2.jpg").symlink_to(outside)
    (root / "train/cat/3.jpg").symlink_to(tmp_path / "gone.jpg")
    source = FolderSource.open(root, "train")
    assert source.name(1) == "cat/2.jpg" and source.read(1) == b"linked"
    with pytest.raises(FileNotFoundError):
        source.read(2)


def test_whole_split_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (root / "train").rename(tmp_path / "fast_disk")
    (root / "train").symlink_to(tmp_path / "fast_disk")
    assert len(FolderSource.open(root, "train")) == 2


def test_pipe_is_not_read(root: Path) -> None:
    os.mkfifo(root / "train/cat/0.jpg")
    assert len(FolderSource.open(root, "train")) == 2


def _drop(*names: str) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        for name in names:
            shutil.rmtree(root / name)

    return spoil


def _link(name: str, target: str) -> Callable[[Path], None]:
    return lambda root: (root / name).symlink_to(target)


def _empty(root: Path) -> None:
    (root / "train/cow").mkdir()


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        pytest.param(_drop(""), ["does not exist", "train/<class>/*"], id="no root"),
        pytest.param(_drop("train"), ["no folder train", "but val"], id="no split"),
        pytest.param(_drop("train/cat", "train/dog"), ["no class folders"], id="no classes"),
        pytest.param(_drop("train/cat"), ["one class, dog"], id="one class"),
        pytest.param(_empty, ["no images in train/cow"], id="empty class"),
        pytest.param(_link("train/cow", "/usr"), ["train/cow", "/usr", "outside"], id="way out"),
        pytest.param(_link("train/dog/x", ".."), ["train/dog/x: is a link"], id="circle"),
        pytest.param(_link("train/me", "me"), ["train/me", "cannot list"], id="self"),
    ],
)
def test_refused_with_key_value_and_fix(
    root: Path, spoil: Callable[[Path], None], expected: list[str]
) -> None:
    spoil(root)
    with pytest.raises(UserError) as caught:
        FolderSource.open(root, "train")
    message = str(caught.value)
    assert message.startswith(f"data.root = {root}: ") and "\n" not in message
    assert all(part in message for part in expected), message


def test_root_that_is_a_file(root: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        FolderSource.open(root / "train/cat/1.jpg", "train")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("digits", "make data"),
        ("cifar10", "prepare_data.py cifar10"),
        ("imagenette", "prepare_data.py imagenette"),
        ("imagenet", "n01440764"),
    ],
)
def test_absent_known_set_says_how_to_make_it(tmp_path: Path, name: str, advice: str) -> None:
    with pytest.raises(UserError, match=advice):
        FolderSource.open(tmp_path / "none", "train", name=name)


def test_val_must_have_the_training_classes(root: Path) -> None:
    train = FolderSource.open(root, "train")
    assert FolderSource.open(root, "val", classes=train.classes).classes == train.classes
    shutil.rmtree(root / "val/cat")
    lay_out(root, "val/emu/1.jpg")
    with pytest.raises(UserError, match=r"missing in val: cat; only in val: emu"):
        FolderSource.open(root, "val", classes=train.classes)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set that is remembered; its folders have not changed for a while."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(listing, "LEAST", 1)
    root = tmp_path / "data"
    for name in ("a/1.png", "a/deep/\u732b.png", "b/2.png"):
        (root / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "train" / name).write_bytes(name.encode())
    monkeypatch.setattr(listing, "_SETTLED_NS", -(10**12))  # as if it had lain there for long
    return root


def names_of(source: FolderSource) -> list[str]:
    return [source.name(i) for i in range(len(source))]


def test_a_listing_is_remembered(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FolderSource.open(kept, "train")
    monkeypatch.setattr(source_module, "_images", None)  # not listed again
    again = FolderSource.open(kept, "train")
    assert names_of(again) == names_of(first) == ["a/1.png", "a/deep/\u732b.png", "b/2.png"]
    assert (again.digest, again.classes) == (first.digest, first.classes)
    np.testing.assert_array_equal(again.targets, first.targets)
    np.testing.assert_array_equal(again.sizes, first.sizes)
    with pytest.raises(UserError, match="different class folders"):
        FolderSource.open(kept, "train", classes=["a", "c"])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda train: (train / "a/0.png").write_bytes(b"new"), id="new"),
        pytest.param(lambda train: (train / "a/deep/\u732b.png").unlink(), id="deleted"),
        pytest.param(lambda train: (train / "b/2.png").rename(train / "b/3.png"), id="renamed"),
        pytest.param(lambda train: (train / "b").rename(train / "c"), id="class renamed"),
        pytest.param(lambda train: add_unnoticed(train / "a"), id="time of change set back"),
    ],
)
def test_a_changed_folder_is_listed_anew(kept: Path, change: Callable[[Path], object]) -> None:
    before = FolderSource.open(kept, "train")
    change(kept / "train")
    after = FolderSource.open(kept, "train")
    assert names_of(after) != names_of(before) and after.digest != before.digest
    assert sorted(names_of(after)) == sorted(
        str(p.relative_to(kept / "train")) for p in (kept / "train").rglob("*.png")
    )


def add_unnoticed(folder: Path) -> None:
    """As archives and copying tools do."""
    before = folder.stat()
    (folder / "0.png").write_bytes(b"new")
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_file_that_was_written_over_is_noticed_when_it_is_read(kept: Path) -> None:
    before = FolderSource.open(kept, "train")
    (kept / "train/b/2.png").write_bytes(b"longer than before")
    source = FolderSource.open(kept, "train")
    assert source.digest == before.digest
    with pytest.raises(OSError, match="changed since it was listed, 18 bytes instead of 7"):
        source.read(2)
    assert FolderSource.open(kept, "train").digest != before.digest


def test_a_folder_that_has_just_changed_is_not_remembered(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "_SETTLED_NS", 2 * 10**9)
    FolderSource.open(kept, "train")
    assert listing.recall(kept / "train") is None


def test_without_a_home_nothing_is_remembered(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert len(FolderSource.open(kept, "train")) == len(FolderSource.open(kept, "train")) == 3


@pytest.mark.parametrize("damage", [b"", b"not a listing", b"PK\x03\x04"])
def test_a_damaged_listing_is_no_listing(kept: Path, tmp_path: Path, damage: bytes) -> None:
    expected = names_of(FolderSource.open(kept, "train"))
    (saved,) = (tmp_path / "cache").rglob("*.npz")
    saved.write_bytes(damage)
    assert names_of(FolderSource.open(kept, "train")) == expected
