from __future__ import annotations

import io
import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.config.schema import Augment, Data
from lockstep.data import check as check_module
from lockstep.data.check import Found, SplitReport, check
from lockstep.data.loader import Loader
from lockstep.data.sampler import window_slices
from lockstep.data.sheet import contact_sheet
from lockstep.data.source import FolderSource
from lockstep.errors import UserError
from lockstep.launch import launch
from tests.runs import configure

pytestmark = [pytest.mark.filterwarnings("ignore:::PIL"), pytest.mark.timeout(60)]

MESSY = Path(__file__).parents[3] / "shared" / "data" / "messy"
needs_messy = pytest.mark.skipif(not MESSY.is_dir(), reason=f"no real odd images in {MESSY}")


def encoded(kind: str, seed: int = 0, mode: str = "RGB", side: int = 24, **options: Any) -> bytes:
    """A picture of noise, another for each seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (side, side + 8, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(out, kind, **options)
    return out.getvalue()


def bomb(side: int) -> bytes:
    """A whole PNG of ``side * side`` black pixels: a thousandth of its size when decoded."""

    def chunk(name: bytes, data: bytes) -> bytes:
        body = name + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    header = 2 * side.to_bytes(4, "big") + bytes([1, 0, 0, 0, 0])
    pixels = zlib.compress(bytes((1 + (side + 7) // 8) * side), 1)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(*part) for part in ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    )


def lay_out(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


NO_UNICODE = os.fsdecode(b"\xff\xfe")
REFUSED = {
    "猫/bomb.png": "too large",
    "猫/gone.jpg": "No such file or directory",
    "猫/half.jpg": "truncated",
    "猫/text.jpeg": "not an image of a known format",
    "猫/zero.JPG": "the file is empty",
}


@pytest.fixture(scope="module")
def odd_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a folder may hold that nobody wants to train on. Do not change."""
    root = tmp_path_factory.mktemp("odd")
    lay_out(
        root,
        {
            "train/猫/bomb.png": bomb(20_000),
            "train/猫/half.jpg": encoded("JPEG")[:900],
            "train/猫/text.jpeg": b"no image, but a text\n" * 50,
            "train/猫/zero.JPG": b"",
            "train/猫/a JPEG.png": encoded("JPEG", 1, quality=70, progressive=True),
            "train/猫/عربي.png": encoded("PNG", 2, "RGBA"),
            "train/猫/🐈\u200d⬛.webp": encoded("WEBP", 3),
            "train/猫/folder.jpg/within.tif": encoded("TIFF", 4, "CMYK"),
            "train/猫/turned.jpg": encoded("JPEG", 5, "L", exif=turned(6)),
            "train/猫/notes.txt": b"",
            "train/猫/photo.HEIC": b"",
            "train/猫/img.0001": b"",
            "train/猫/.hidden.png": b"",
            "train/loose.png": encoded("PNG", 6),
            f"train/plain/{NO_UNICODE}.png": encoded("PNG", 7),
            "val/plain/1.png": encoded("PNG", 8),
            "val/猫/1.png": encoded("PNG", 9),
            f"val/猫/{NO_UNICODE}.png": b"GIF89a",
        },
    )
    (root / "train/猫/gone.jpg").symlink_to("nowhere.jpg")
    (root / "train/猫/empty.jpg").mkdir()
    (root / "train/猫/endless.jpg").symlink_to("/dev/zero")
    os.mkfifo(root / "train/猫/pipe.jpg")
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "green", "blue")]
    frames[0].save(root / "train/plain/x.gif", save_all=True, append_images=frames[1:])
    return root


@pytest.fixture(scope="module")
def odd(odd_root: Path) -> list[SplitReport]:
    return check(odd_root)


def test_refused_by_name_with_a_reason(odd: list[SplitReport]) -> None:
    train, val = odd
    assert train.unreadable.keys() == REFUSED.keys()
    assert all(why in train.unreadable[name] for name, why in REFUSED.items())
    assert list(val.unreadable) == [f"猫/{NO_UNICODE}.png"]


def test_all_others_are_told_of(odd: list[SplitReport]) -> None:
    train, _ = odd
    assert train.counts == {"plain": 2, "猫": 10} and train.usable == {"plain": 2, "猫": 5}
    assert train.formats == {"JPEG": 2, "PNG": 2, "GIF": 1, "TIFF": 1, "WEBP": 1}
    assert train.modes == {"RGB": 3, "CMYK": 1, "L": 1, "P": 1, "RGBA": 1}
    assert train.traits == {"progressive": 1, "turned": 1, "several_frames": 1}
    assert train.other_files == {".heic": 1, ".txt": 1, "none": 1}
    assert train.passed_over == {
        "a pipe, a socket or a device": Found(2, [["train/猫/endless.jpg"], ["train/猫/pipe.jpg"]]),
        "in no class folder": Found(1, [["train/loose.png"]]),
    }


def test_findings_do_not_depend_on_threads(
    odd_root: Path, odd: list[SplitReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_module, "_TASK_IMAGES", 1)
    for threads in (1, 5):
        again = check(odd_root, threads=threads)
        assert json.dumps([asdict(r) for r in again]) == json.dumps([asdict(r) for r in odd])


def test_progress_ends_at_the_total(image_root: Path) -> None:
    told: list[tuple[int, int]] = []
    check(image_root, progress=lambda done, total: told.append((done, total)))
    assert told == [(23, 30), (30, 30)]


def test_file_that_vanishes_is_named(
    image_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(image_root, tmp_path / "vanishing")
    read = FolderSource.read

    def read_too_late(self: FolderSource, index: int) -> bytes:
        if self.name(index) == "class1/04.png":
            self.path(index).unlink()
        return read(self, index)

    monkeypatch.setattr(FolderSource, "read", read_too_late)
    reports = check(root)
    missing = {"class1/04.png": "No such file or directory"}
    assert [r.unreadable for r in reports] == [missing, missing]
    assert contact_sheet(root, reports).size[1] > 3 * 128


A, B, C, D = (encoded("PNG", seed) for seed in range(4))


def test_the_same_bytes(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        {
            "train/cat/1.png": A,
            "train/cat/2.png": A,
            "train/cat/3.png": B,
            "train/dog/4.png": A,
            "train/dog/5.png": C,
            "train/dog/6.png": b"",
            "train/dog/7.png": b"",
            "val/cat/1.png": B,
            "val/cat/2.png": C,
            "val/cat/3.png": B,
            "val/dog/4.png": D,
        },
    )
    train, val = check(root)
    everywhere = ["train/cat/1.png", "train/cat/2.png", "train/dog/4.png"]
    assert train.duplicates == Found(2, [everywhere])
    assert train.conflicts == Found(1, [["train/cat/1.png", "train/dog/4.png"]])
    assert train.leaked == Found(0, [])
    assert val.duplicates == Found(1, [["val/cat/1.png", "val/cat/3.png"]])
    assert val.leaked == Found(
        3, [["val/cat/1.png", "train/cat/3.png"], ["val/cat/2.png", "train/dog/5.png"]]
    )
    assert val.conflicts == Found(1, [["train/dog/5.png", "val/cat/2.png"]])
    assert val.warnings["LEAKAGE, also in train byte for byte: 3"] == [
        "val/cat/1.png = train/cat/3.png",
        "val/cat/2.png = train/dog/5.png",
    ]


def test_examples_are_few_and_the_first(tmp_path: Path) -> None:
    copies = {
        f"{split}/{c}/{i:02d}.png": A for split in ("train", "val") for c in "ab" for i in range(9)
    }
    others = {f"train/a/x{i}{j}.png": encoded("PNG", 10 + i) for i in range(9) for j in "12"}
    train, val = check(lay_out(tmp_path, copies | others))
    assert train.duplicates.count == 17 + 9
    assert train.duplicates.examples == [
        ["train/a/00.png", "train/a/01.png", "train/a/02.png"],
        *([f"train/a/x{i}1.png", f"train/a/x{i}2.png"] for i in range(4)),
    ]
    assert val.leaked == Found(18, [["val/a/00.png", "train/a/00.png"]])


def test_sizes(tmp_path: Path) -> None:
    sides = [1, 15, 16, 17, 31, 32, 40, 300]
    files = {f"train/{'ab'[i % 2]}/{i}.png": encoded("PNG", i, side=s) for i, s in enumerate(sides)}
    root = lay_out(tmp_path, files | {"val/a/1.png": b"", "val/b/1.png": b""})
    train, val = check(root)
    assert train.short_side == {"min": 1, "p5": 1, "median": 17, "p95": 300, "max": 300}
    assert train.megapixels["max"] == 300 * 308 / 1e6
    assert train.file_bytes["max"] == max(map(len, files.values()))
    assert train.short_side_histogram == {
        "1-1": 1, "2-3": 0, "4-7": 0, "8-15": 1, "16-31": 3, "32-63": 2,
        "64-127": 0, "128-255": 0, "256-511": 1,
    }  # fmt: skip
    assert val.short_side == val.megapixels == val.file_bytes == val.short_side_histogram == {}
    assert val.formats == {} and val.leaked == Found(0, [])


def test_balance(tmp_path: Path) -> None:
    numbers = {"train/many": 127, "train/some": 6, "val/many": 5, "val/some": 5}
    names = [f"{folder}/{i:03d}.png" for folder, n in numbers.items() for i in range(n)]
    root = lay_out(tmp_path, {name: encoded("PNG", i, side=2) for i, name in enumerate(names)})
    imbalance = "imbalance, the largest class is more than 20 times the smallest"
    assert [r.warnings for r in check(root)] == [{imbalance: ["many: 127", "some: 6"]}, {}]
    for i in range(7):
        (root / f"train/many/{i:03d}.png").unlink()
    (root / "val/some/000.png").write_bytes(b"no image")
    few = "classes of fewer than 5 readable images: 1"
    assert [r.warnings for r in check(root)] == [{}, {few: ["some: 4"]}]


def test_both_splits_are_looked_at_first(image_root: Path, tmp_path: Path) -> None:
    root = shutil.copytree(image_root, tmp_path / "half")
    shutil.rmtree(root / "val")
    with pytest.raises(UserError, match="no folder val"):
        check(root, progress=lambda done, total: pytest.fail("began to read"))


def test_classes_that_no_run_takes_are_a_finding(tmp_path: Path) -> None:
    files = {"train/a/1.png": A, "train/c/1.png": B, "val/b/1.png": C, "val/c/1.png": B}
    root = lay_out(tmp_path, files)
    (root / "train/d").mkdir()
    train, val = check(root)
    assert train.counts == {"a": 1, "c": 1, "d": 0} and val.counts == {"b": 1, "c": 1}
    assert "no images in train/d" in train.problems[0]
    assert "(missing in val: a, d; only in val: b)" in val.problems[0]
    assert val.leaked == Found(1, [["val/c/1.png", "train/c/1.png"]])
    assert val.conflicts == Found(0, [])
    assert contact_sheet(root, [train, val]).size[1] > 4 * 128
    for name in files:
        (root / name).unlink()
    assert [sum(report.counts.values()) for report in check(root)] == [0, 0]
    with pytest.raises(UserError, match="no images in train/a, train/c, train/d"):
        FolderSource.open(root, "train")


@pytest.fixture
def messy_root(tmp_path: Path) -> Path:
    """The real odd images, all of one class, beside those of another."""
    for split, kept in (("train", 0), ("val", 1)):
        lay_out(
            tmp_path, {f"{split}/plain/{i}.png": encoded("PNG", 2 * i + kept) for i in range(5)}
        )
        (tmp_path / split / "messy").mkdir()
    for i, path in enumerate(sorted(MESSY.iterdir())):
        shutil.copy(path, tmp_path / ("val" if i % 4 == 3 else "train") / "messy")
    return tmp_path


@needs_messy
def test_real_odd_images(messy_root: Path) -> None:
    train, val = check(messy_root)
    together = {name for report in (train, val) for name in report.unreadable}
    assert together == {
        "messy/broken.png",
        "messy/broken_data_stream.png",
        "messy/decompression_bomb.gif",
        "messy/truncated_image.png",
        "messy/truncated_jpeg.jpg",
    }

    def sums(what: str) -> dict[str, int]:
        a, b = getattr(train, what), getattr(val, what)
        return {key: a.get(key, 0) + b.get(key, 0) for key in sorted(a | b)}

    assert sums("counts") == {"messy": 33, "plain": 10}
    assert sums("formats") == {
        "BMP": 1, "GIF": 2, "JPEG": 13, "PNG": 15, "PPM": 1, "TIFF": 3, "WEBP": 3,
    }  # fmt: skip
    assert sums("modes") == {"CMYK": 1, "I;16": 1, "L": 3, "P": 4, "RGB": 27, "RGBA": 2}
    assert sums("traits") == {"progressive": 0, "several_frames": 3, "turned": 6}


@pytest.fixture(params=["odd", pytest.param("messy", marks=needs_messy)])
def any_root(request: pytest.FixtureRequest) -> Path:
    root: Path = request.getfixturevalue(f"{request.param}_root")
    return root


@pytest.mark.parametrize("augmented", [False, True], ids=["eval", "train"])
def test_a_loader_leaves_out_what_was_foretold(
    any_root: Path,
    data_config: Callable[..., Data],
    augment_config: Callable[..., Augment],
    augmented: bool,
) -> None:
    for report in check(any_root):
        loader = Loader(
            FolderSource.open(any_root, report.split),
            data_config(on_error="skip"),
            augment_config(crop="random_resized") if augmented else None,
            image_size=16,
            seed=0,
            device=torch.device("cpu"),
            threads=2,
        )
        batches = list(loader.batches(0, window_slices(0, len(loader), 5, 0, 1)))
        assert sum(len(batch.ids) for batch in batches) == sum(report.usable.values())
        assert loader.skipped == report.unreadable
        assert all(torch.isfinite(batch.images).all() for batch in batches)


def test_the_summary_of_a_run_names_them(
    odd_root: Path, odd: list[SplitReport], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = ["device=cpu", "strategy=single", "batch.global=6", "epochs=1", "data.image_size=32"]
    model = ["++model.kwargs={depth: 1, embed_dim: 24, num_heads: 2}"]
    data = [f"data.root={odd_root}", "data.num_classes=null", "data.num_train=null"]
    data += ["data.num_val=null", "data.on_error=skip", f"run.root={tmp_path}"]
    assert launch(configure(*tiny, *model, *data), "odd") == 0
    left_out = json.loads((tmp_path / "odd/DONE").read_text())["left_out"]
    assert left_out == {r.split: sorted(r.unreadable) for r in odd}
    told = capsys.readouterr().out
    assert "left out  5 of train, unreadable: 猫/bomb.png" in told
    assert "left out  1 of val, unreadable: 猫/" in told
