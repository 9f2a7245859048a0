"""Packing, and reading what was packed."""

from __future__ import annotations

import errno
import gc
import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lockstep.data.digits import write_digits
from lockstep.data.pack import Progress, pack, reencode, shard_starts
from lockstep.data.packed import Damaged, PackedSource, read_index, verify
from lockstep.data.source import FolderSource
from lockstep.errors import EXIT_USER_ERROR, UserError
from scripts import prepare_data
from tests.conftest import REPOSITORY, clean_environment

MESSY = REPOSITORY.parent / "shared/data/messy"
NAMES = ["Zebra/b.PNG", "Zebra/a/9.jpeg", "ähre/ü 1.JPG", "日本/猫.tiff", f"日本/{'long' * 40}.jpg"]
SHARD_BYTES = 4096


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pulls the plug here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small files, no images, of three classes with names of all kinds. Do not change."""
    folder = tmp_path_factory.mktemp("raw")
    rng = np.random.default_rng(0)
    for split, extra in (("train", 20), ("val", 2)):
        for name in [*NAMES, *(f"Zebra/{i:03d}.jpg" for i in range(extra))]:
            path = folder / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(rng.bytes(int(rng.integers(1, 1500))))
    (folder / "train/Zebra/empty.jpg").touch()
    return folder


@pytest.fixture(scope="session")
def packed_root(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``root`` packed. Do not change."""
    out = tmp_path_factory.mktemp("packed")
    pack(root, out, threads=2, shard_bytes=SHARD_BYTES)
    return out


@pytest.fixture
def packed(packed_root: Path, tmp_path: Path) -> Path:
    """A copy to be spoiled."""
    return shutil.copytree(packed_root, tmp_path / "copy")


# What is packed


@pytest.mark.parametrize("threads", [1, 4])
def test_bytes_do_not_depend_on_threads(
    root: Path, packed_root: Path, tmp_path: Path, threads: int
) -> None:
    pack(root, tmp_path / "out", threads=threads, shard_bytes=SHARD_BYTES)
    assert contents(tmp_path / "out") == contents(packed_root)


def test_bytes_do_not_depend_on_versions_of_python_and_numpy(tmp_path: Path) -> None:
    for name in (*NAMES, os.fsdecode(b"Zebra/\xff.jpg")):
        path = tmp_path / "raw/train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(name))
    pack(tmp_path / "raw", tmp_path / "out", splits=["train"], threads=1)
    found = hashlib.sha256()
    for name, data in sorted(contents(tmp_path / "out").items()):
        found.update(name.encode() + b"\0" + data)
    assert found.hexdigest() == ("d93c29b2ccb65c17248f1d736805366a60e7d368ebe2f5fc00672177a840ab6f")


def digits(folder: Path) -> Path:
    write_digits(folder)
    return folder / "digits"


def messy(folder: Path) -> Path:
    if not MESSY.is_dir():
        pytest.skip(f"{MESSY} is absent")
    for split in ("train", "val"):
        for number, path in enumerate(sorted(MESSY.iterdir())):
            target = folder / "messy" / split / f"class{number % 2}" / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return folder / "messy"


@pytest.mark.parametrize("make", [digits, messy])
def test_untouched_reads_as_the_folder(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    raw, out = make(tmp_path), tmp_path / "out"
    reports = pack(raw, out, threads=4, shard_bytes=200_000)
    assert reports[0].num_shards > 1
    for split, report in zip(("train", "val"), reports, strict=True):
        folder, source = FolderSource.open(raw, split), PackedSource.open(out, split)
        assert source.classes == folder.classes and len(source) == len(folder)
        assert source.digest == folder.digest == report.digest
        assert source.targets.dtype == np.int64 and np.array_equal(source.targets, folder.targets)
        for i in range(len(folder)):
            assert source.name(i) == folder.name(i)
            assert source.read(i) == folder.read(i)
        assert source.settings["quality"] is None
    assert [found.damage for found in verify(out, threads=2)] == [[], []]


def test_a_shard_is_a_tar(root: Path, packed_root: Path) -> None:
    found: dict[str, bytes] = {}
    for shard in sorted((packed_root / "train").glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                assert member.isreg() and (member.mode, member.mtime) == (0o644, 0)
                data = tar.extractfile(member)
                assert data is not None
                found[member.name] = data.read()
    assert found == contents(root / "train")
    source = PackedSource.open(packed_root, "train")
    assert list(found) == [source.name(i) for i in range(len(source))]


def test_names_and_paths(packed_root: Path) -> None:
    source = PackedSource.open(packed_root, "val")
    assert [source.name(i) for i in range(2)] == ["Zebra/000.jpg", "Zebra/001.jpg"]
    assert source.path(0) == packed_root / "val/shard-00000.tar:Zebra/000.jpg"
    assert source.folder == packed_root / "val"
    with pytest.raises(ValueError, match="read-only"):
        source.targets[0] = 1


def test_shards_follow_from_the_sizes_of_the_source() -> None:
    # As tar members 1,024, 512, 1,024, 5,632 and 512 bytes.
    sizes = np.array([1, 0, 512, 5000, 0])
    assert shard_starts(sizes, 2048) == [0, 2, 3, 4]
    assert shard_starts(sizes, 2560) == [0, 3, 4]
    assert shard_starts(sizes, 1) == [0, 1, 2, 3, 4]
    assert shard_starts(sizes, 1 << 30) == [0]


# Interrupted

KILLED = """
import os, signal, sys
from pathlib import Path
from lockstep.data.pack import pack
calls, fsync = 0, os.fsync
def strike(descriptor):
    global calls
    calls += 1
    if calls == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)
os.fsync = strike
pack(Path(sys.argv[1]), Path(sys.argv[2]), threads=2, shard_bytes=int(sys.argv[4]))
"""


@pytest.mark.parametrize("at", [5, 16])
def test_killed_and_resumed(root: Path, packed_root: Path, tmp_path: Path, at: int) -> None:
    command = [sys.executable, "-c", KILLED, root, tmp_path / "out", str(at), str(SHARD_BYTES)]
    done = subprocess.run(command, env=clean_environment(), check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "out/train/unfinished").is_dir()
    with pytest.raises(UserError, match="give the same command again"):
        PackedSource.open(tmp_path / "out", "train")
    pack(root, tmp_path / "out", threads=3, shard_bytes=SHARD_BYTES)
    assert contents(tmp_path / "out") == contents(packed_root)


class Interrupted(BaseException):
    """As KeyboardInterrupt, but nobody else's."""


def fail_at(call: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let the n-th fsync fail; returns how many there were."""
    calls = 0

    def strike(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error

    monkeypatch.setattr(os, "fsync", strike)
    return lambda: calls


def test_interrupted_before_anything_becomes_durable(
    root: Path, packed_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each such moment of a packing."""
    undisturbed, calls = contents(packed_root / "val"), fail_at(0, Interrupted(), monkeypatch)
    assert sum(name.endswith(".tar") for name in undisturbed) > 1
    pack(root, tmp_path / "0", splits=["val"], threads=1, shard_bytes=SHARD_BYTES)
    moments = calls()
    for moment in range(1, moments + 1):
        out = tmp_path / str(moment)
        fail_at(moment, Interrupted(), monkeypatch)
        with pytest.raises(Interrupted):
            pack(root, out, splits=["val"], threads=2, shard_bytes=SHARD_BYTES)
        pack(root, out, splits=["val"], threads=1, shard_bytes=SHARD_BYTES)
        assert contents(out / "val") == undisturbed, moment


def test_full_disk_is_one_message_and_finished_shards_stay(
    root: Path, packed_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_at(8, OSError(errno.ENOSPC, "No space left on device"), patch)
        with pytest.raises(UserError, match=r"No space left on device: make room .* again"):
            pack(root, tmp_path / "out", threads=2, shard_bytes=SHARD_BYTES)
    assert not list(tmp_path.rglob("*.tar.tmp"))
    seen: list[Progress] = []
    pack(root, tmp_path / "out", threads=2, shard_bytes=SHARD_BYTES, progress=seen.append)
    assert contents(tmp_path / "out") == contents(packed_root)
    assert seen[0].images > 1, "a shard at once: it was there"
    assert [(p.images, p.total) for p in seen if p.split == "train"][-1] == (26, 26)


def test_complete_does_nothing(
    root: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {p: p.stat().st_mtime_ns for p in packed.rglob("*")}
    calls = fail_at(1, Interrupted(), monkeypatch)
    reports = pack(root, packed, threads=1, shard_bytes=SHARD_BYTES)
    assert all(report.was_complete for report in reports) and calls() == 0
    assert {p: p.stat().st_mtime_ns for p in packed.rglob("*")} == before


def test_one_writer_at_a_time(root: Path, tmp_path: Path) -> None:
    def second(_: Progress) -> None:
        pack(root, tmp_path / "out", threads=1)

    with pytest.raises(UserError, match="is being packed by another process"):
        pack(root, tmp_path / "out", threads=1, progress=second)


# Refused


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "begun"])
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"short_side": 8}, "short_side null there, 8 now"),
        ({"max_side": 8, "quality": 80}, "quality null there, 80 now"),
        ({"shard_bytes": 8192}, "shard_bytes 4096 there, 8192 now"),
    ],
    ids=["short side", "max side", "shard size"],
)
def test_other_settings_are_not_mixed(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, int],
    named: str,
    finished: bool,
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        fail_at(0 if finished else 9, Interrupted(), patch)
        try:
            pack(root, out, threads=1, shard_bytes=SHARD_BYTES)
        except Interrupted:
            assert not finished
    before = contents(out)
    with pytest.raises(UserError, match=named):
        pack(root, out, threads=1, **({"shard_bytes": SHARD_BYTES} | settings))
    assert contents(out) == before


def test_other_images_are_not_mixed(root: Path, packed: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(root, tmp_path / "raw")
    (changed / "train/Zebra/b.PNG").write_bytes(b"another size")
    with pytest.raises(UserError, match=r"packed from other images .*source_digest"):
        pack(changed, packed, threads=1, shard_bytes=SHARD_BYTES)


@pytest.mark.parametrize("out", ["raw", "raw/train", "raw/val/Zebra/packed", "link"])
def test_place_among_the_images(root: Path, tmp_path: Path, out: str) -> None:
    raw = shutil.copytree(root, tmp_path / "raw")
    (tmp_path / "link").mkdir()
    (tmp_path / "link/train").symlink_to(raw / "val")
    before = contents(raw)
    with pytest.raises(UserError, match="lies inside the images"):
        pack(raw, tmp_path / out, threads=1)
    assert contents(raw) == before


def test_folder_that_holds_something_else(root: Path, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train/thesis.tex").write_text("three years")
    with pytest.raises(UserError, match=r"train holds thesis.tex, not a pack"):
        pack(root, tmp_path, threads=1)
    assert contents(tmp_path) == {"train/thesis.tex": b"three years"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"quality": 101}, "quality = 101"),
        ({"short_side": 0}, "short_side = 0"),
        ({"shard_bytes": 0}, "shard_bytes = 0"),
    ],
)
def test_values_out_of_range(
    root: Path, tmp_path: Path, arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        pack(root, tmp_path, threads=1, **arguments)


def test_unreadable_stops_or_is_left_out(root: Path, tmp_path: Path) -> None:
    raw, out = shutil.copytree(root, tmp_path / "raw"), tmp_path / "out"
    (raw / "train/Zebra/005.jpg").unlink()
    (raw / "train/Zebra/005.jpg").symlink_to("gone")
    with pytest.raises(UserError, match=r"Zebra/005.jpg cannot be packed: No such file"):
        pack(raw, out, threads=4)
    train, val = pack(raw, out, threads=4, on_error="skip")
    assert train.left_out == {"Zebra/005.jpg": "No such file or directory"} and not val.left_out
    source, folder = PackedSource.open(out, "train"), FolderSource.open(raw, "train")
    assert len(source) == len(folder) - 1 and source.digest != folder.digest
    kept = [i for i in range(len(folder)) if folder.name(i) != "Zebra/005.jpg"]
    assert [source.read(i) for i in range(len(source))] == [folder.read(i) for i in kept]
    assert pack(raw, out, threads=4, on_error="skip")[0].was_complete
    with pytest.raises(UserError, match=r"Zebra/005.jpg cannot be packed"):
        pack(raw, out, threads=4)


def test_untouched_packs_and_names_what_no_decoder_reads(image_root: Path, tmp_path: Path) -> None:
    raw, out = shutil.copytree(image_root, tmp_path / "raw"), tmp_path / "out"
    (raw / "train/class0/00.png").write_bytes(b"a text")
    (raw / "train/class1/01.png").write_bytes(b"")
    bad = {"class0/00.png": "not an image of a known format", "class1/01.png": "the file is empty"}

    def stop(done: Progress) -> None:
        if done.images == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(raw, out, threads=2, shard_bytes=2000, progress=stop)
    train, val = pack(raw, out, threads=2, shard_bytes=2000)
    assert train.undecodable == bad and not val.undecodable and not train.left_out
    assert train.digest == FolderSource.open(raw, "train").digest


def test_class_without_a_readable_image(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no readable images in Zebra, ähre, 日本"):
        pack(root, tmp_path / "out", threads=2, short_side=8, on_error="skip")


def test_file_that_changes_meanwhile(root: Path, tmp_path: Path) -> None:
    raw = shutil.copytree(root, tmp_path / "raw")

    def meddle(done: Progress) -> None:
        (raw / "val/日本/猫.tiff").write_bytes(b"another size")

    with pytest.raises(UserError, match="changed since it was listed"):
        pack(raw, tmp_path / "out", threads=1, progress=meddle)


# Made smaller


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


@pytest.mark.parametrize(
    ("limits", "size", "expected"),
    [
        pytest.param((20, None), (60, 40), (30, 20), id="short side, wide"),
        pytest.param((20, None), (31, 61), (20, 39), id="short side, high"),
        pytest.param((20, None), (20, 90), (20, 90), id="short side, just right"),
        pytest.param((None, 20), (60, 40), (20, 13), id="max side"),
        pytest.param((None, 20), (10, 20), (10, 20), id="max side, just right"),
        pytest.param((None, 20), (500, 2), (20, 1), id="max side, never nothing"),
        pytest.param((30, 40), (80, 40), (40, 20), id="both, the longer decides"),
        pytest.param((10, 40), (80, 40), (20, 10), id="both, the shorter decides"),
    ],
)
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_sizes(
    picture: Callable[..., Image.Image],
    limits: tuple[int | None, int | None],
    size: tuple[int, int],
    expected: tuple[int, int],
    kind: str,
) -> None:
    data = encoded(picture(*size), kind)
    found = reencode(data, short_side=limits[0], max_side=limits[1], quality=90)
    if expected == size and kind == "JPEG":
        assert found == data
        return
    reference = opened(data)
    if expected != size:
        reference = reference.resize(expected, Image.Resampling.BICUBIC)
    assert found == encoded(reference, quality=90, subsampling="4:2:0")
    assert opened(found).size == expected and opened(found).format == "JPEG"


@pytest.mark.parametrize(
    ("mode", "kind", "stays", "becomes"),
    [
        ("RGB", "JPEG", True, "RGB"),
        ("L", "JPEG", True, "L"),
        ("CMYK", "JPEG", False, "RGB"),
        ("L", "PNG", False, "L"),
        ("RGBA", "PNG", False, "RGB"),
        ("P", "PNG", False, "RGB"),
        ("I;16", "PNG", False, "RGB"),
        ("RGB", "WEBP", False, "RGB"),
    ],
)
def test_kinds(
    picture: Callable[..., Image.Image], mode: str, kind: str, stays: bool, becomes: str
) -> None:
    data = encoded(picture(32, 24).convert("L" if mode == "I;16" else "RGB").convert(mode), kind)
    small = reencode(data, short_side=64, max_side=None, quality=90)
    assert (small == data) is stays
    assert opened(small).format == "JPEG" and opened(small).mode == becomes


@pytest.mark.parametrize("turn", [1, 3, 6])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_orientation_is_kept_and_nothing_else(
    picture: Callable[..., Image.Image], kind: str, turn: int
) -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = turn, "a camera"
    data = encoded(picture(64, 32), kind, exif=exif)
    made = opened(reencode(data, short_side=16, max_side=None, quality=90))
    # TIFF's is part of the format and applied by whatever reads it.
    applied = kind == "TIFF" and turn == 6
    assert made.size == ((16, 32) if applied else (32, 16))
    kept = {} if turn == 1 or kind == "TIFF" else {0x0112: turn}
    assert dict(made.getexif()) == kept and not {"icc_profile", "comment"} & made.info.keys()


def test_images_made_smaller(image_root: Path, tmp_path: Path) -> None:
    (report, _) = pack(image_root, tmp_path, threads=2, short_side=12, quality=80)
    folder, source = FolderSource.open(image_root, "train"), PackedSource.open(tmp_path, "train")
    assert report.digest == source.digest != folder.digest
    assert read_index(tmp_path / "train").source_digest == folder.digest
    assert source.settings == {
        "short_side": 12,
        "max_side": None,
        "quality": 80,
        "shard_bytes": 2**30,
    }
    for i in range(len(source)):
        assert source.name(i) == folder.name(i)
        assert min(opened(source.read(i)).size) == 12


def test_the_messy_are_made_smaller_or_named(tmp_path: Path) -> None:
    raw, out = messy(tmp_path), tmp_path / "out"
    report, _ = pack(raw, out, threads=2, max_side=64, on_error="skip")
    source = PackedSource.open(out, "train")
    assert len(source) + len(report.left_out) == len(FolderSource.open(raw, "train"))
    for i in range(len(source)):
        image = opened(source.read(i))
        assert image.format == "JPEG" and max(image.size) <= 64
    assert "class1/truncated_jpeg.jpg" in report.left_out or "class0/truncated_jpeg.jpg" in (
        report.left_out
    )


# Damaged, forged, absent


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def damage_of(root: Path) -> list[str]:
    return [line for split in verify(root, threads=2) for line in split.damage]


def test_flipped_bit_in_an_image(packed: Path) -> None:
    source = PackedSource.open(packed, "train")
    flip(packed / "train/shard-00000.tar", 512)
    with pytest.raises(OSError, match="checksum differs") as caught:
        source.read(0)
    assert caught.value.filename == str(source.path(0))
    assert source.read(1)
    assert damage_of(packed) == [
        "shard-00000.tar:Zebra/000.jpg is damaged",
        "shard-00000.tar: checksum differs",
    ]


def test_flipped_bit_in_a_header(packed: Path) -> None:
    flip(packed / "train/shard-00001.tar", 0)
    assert damage_of(packed) == ["shard-00001.tar: checksum differs"]


def test_truncated_while_it_is_read(packed: Path) -> None:
    source = PackedSource.open(packed, "train")
    os.truncate(packed / "train/shard-00000.tar", 600)
    with pytest.raises(OSError, match="truncated"):
        source.read(0)


@pytest.mark.parametrize("name", ["index/targets.npy", "index/names.bin", "index/sizes.npy"])
def test_flipped_bit_in_the_index(packed: Path, name: str) -> None:
    flip(packed / "train" / name, 130)
    with pytest.raises(UserError, match=rf"{name}: checksum differs: copy it again"):
        PackedSource.open(packed, "train")
    assert damage_of(packed) == [f"{name}: checksum differs"]


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda p: os.truncate(p, 600), r"shard-00001.tar has 600 bytes instead of \d"),
        (lambda p: p.unlink(), "shard-00001.tar is missing"),
        (lambda p: (p.unlink(), os.mkfifo(p)), "shard-00001.tar is missing"),
    ],
    ids=["truncated", "removed", "pipe"],
)
def test_shard_that_is_not_whole(
    root: Path, packed: Path, spoil: Callable[[Path], None], named: str
) -> None:
    spoil(packed / "train/shard-00001.tar")
    with pytest.raises(UserError, match=f"train: {named}.*verify"):
        PackedSource.open(packed, "train")
    with pytest.raises(UserError, match=f"{named}.*: remove that folder and pack again"):
        pack(root, packed, threads=1, shard_bytes=SHARD_BYTES)
    assert "shard-00001.tar" in damage_of(packed)[0]


def forge(split: Path, **changes: Any) -> None:
    """Change the index as someone would who knows how it is checked."""
    index = json.loads((split / "index/index.json").read_bytes())
    for name, value in changes.items():
        if isinstance(value, bytes | np.ndarray):
            file = "names.bin" if name == "names" else f"{name}.npy"
            data = value if isinstance(value, bytes) else npy(value)
            (split / "index" / file).write_bytes(data)
            index["files"][file] = hashlib.sha256(data).hexdigest()
        else:
            index[name] = value
    (split / "index/index.json").write_text(json.dumps(index))


def npy(array: np.ndarray, *, allow_pickle: bool = False) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=allow_pickle)
    return stream.getvalue()


class Evil:
    def __reduce__(self) -> Any:
        return os._exit, (66,)


def put(name: str, row: int, value: int) -> Callable[[Path], None]:
    def spoil(split: Path) -> None:
        array = np.load(split / f"index/{name}.npy")
        array[row] = value
        forge(split, **{name: array})

    return spoil


def rename(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Of the same length: the ends stay."""
    assert len(old) == len(new)

    def spoil(split: Path) -> None:
        names = (split / "index/names.bin").read_bytes()
        assert old in names
        forge(split, names=names.replace(old, new, 1))

    return spoil


def say(**changes: Any) -> Callable[[Path], None]:
    return lambda split: forge(split, **changes)


def pickled(split: Path) -> None:
    forge(split, targets=npy(np.array([Evil()] * 7), allow_pickle=True))


def bare_pickle(split: Path) -> None:
    forge(split, targets=pickle.dumps(Evil()))


def archive(split: Path) -> None:
    stream = io.BytesIO()
    np.savez(stream, targets=np.zeros(7, np.int64))
    forge(split, targets=stream.getvalue())


def wide(split: Path) -> None:
    forge(split, offsets=np.load(split / "index/offsets.npy").astype(np.int32))


def short(split: Path) -> None:
    forge(split, offsets=np.load(split / "index/offsets.npy")[:-1])


def shards_called(name: str) -> Callable[[Path], None]:
    def spoil(split: Path) -> None:
        index = json.loads((split / "index/index.json").read_bytes())
        forge(split, shards={name: next(iter(index["shards"].values()))})

    return spoil


def more_files(split: Path) -> None:
    index = json.loads((split / "index/index.json").read_bytes())
    forge(split, files=index["files"] | {"../../secret": "0" * 64})


def no_json(split: Path) -> None:
    (split / "index/index.json").write_text("[" * 100_000)


FORGED = {
    "pickle inside npy": pickled,
    "pickle instead of npy": bare_pickle,
    "npz instead of npy": archive,
    "other type": wide,
    "too few": short,
    "empty names": say(names=b""),
    "offset behind the shard": put("offsets", 0, 1 << 40),
    "offset and size overflow": put("sizes", 0, (1 << 63) - 1),
    "negative offset": put("offsets", 0, -512),
    "negative size": put("sizes", 3, -1),
    "overlap": put("offsets", 3, 1024),
    "shard that is not there": put("shards", 6, 99),
    "negative shard": put("shards", 0, -1),
    "ends beyond the names": put("ends", 6, 1 << 40),
    "ends in disorder": put("ends", 0, 40),
    "negative end": put("ends", 0, -1),
    "class that is not there": put("targets", 6, 99),
    "classes in disorder": put("targets", 0, 1),
    "class without images": put("targets", 0, -1),
    "absolute name": rename(b"Zebra/000", b"/ebra/000"),
    "name with a way out": rename(b"Zebra/a/9.jpeg", b"Zebra/../.jpeg"),
    "hidden name": rename(b"Zebra/000", b"Zebra/.00"),
    "empty part": rename(b"Zebra/000", b"Zebra//00"),
    "zero byte": rename(b"Zebra/000", b"Zebra/\x0000"),
    "ends with a slash": rename(b"Zebra/000.jpg", b"Zebra/000.jp/"),
    "other class": rename(b"Zebra/000", b"Tiger/000"),
    "shard elsewhere": shards_called("../../shard-00000.tar"),
    "absolute shard": shards_called("/etc/passwd"),
    "file elsewhere": more_files,
    "class elsewhere": say(classes=["..", "Zebra", "ähre"]),
    "class with a slash": say(classes=["Zebra/x", "ähre", "日本"]),
    "class twice": say(classes=["Zebra", "Zebra", "日本"]),
    "class that is no text": say(classes=[1, 2, 3]),
    "no images": say(num_images=0),
    "count that is no number": say(num_images="7"),
    "digest that is none": say(digest="x"),
    "format of the future": say(format=99),
    "shards of another kind": say(shards=7),
    "not JSON": no_json,
}


@pytest.mark.parametrize("spoil", FORGED.values(), ids=FORGED.keys())
def test_forged_index(packed: Path, spoil: Callable[[Path], None]) -> None:
    spoil(packed / "val")
    with pytest.raises(UserError, match=r"val: .*index.*verify") as caught:
        PackedSource.open(packed, "val")
    assert isinstance(caught.value.__cause__, Damaged)
    assert len(damage_of(packed)) == 1


def test_digest_that_is_not_of_the_names(packed: Path) -> None:
    forge(packed / "val", digest="0" * 32)
    assert damage_of(packed) == ["index.json: the digest is not that of the names and sizes"]


def test_absent(root: Path, packed: Path, tmp_path: Path) -> None:
    def message(place: Path, split: str = "train") -> str:
        with pytest.raises(UserError) as caught:
            PackedSource.open(place, split)
        return str(caught.value)

    for text in (
        message(tmp_path / "none"),
        message(packed, "test"),
        message(root),
        message(root / "train/Zebra/b.PNG"),
    ):
        assert text.startswith("data.root = ") and "prepare_data.py pack ROOT OUT" in text
    with pytest.raises(UserError, match="holds no packed images"):
        verify(root, threads=1)


def test_val_must_have_the_training_classes(packed: Path) -> None:
    train = PackedSource.open(packed, "train")
    assert PackedSource.open(packed, "val", classes=train.classes).classes == train.classes
    with pytest.raises(UserError, match="missing in val: emu"):
        PackedSource.open(packed, "val", classes=[*train.classes, "emu"])


# Threads, forks, copies


def open_descriptors() -> int:
    """Of this process; those of other tests' garbage must not be closed between two counts."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_many_threads_one_descriptor_each_shard(packed_root: Path) -> None:
    source = PackedSource.open(packed_root, "train")
    expected = [PackedSource.open(packed_root, "train").read(i) for i in range(len(source))]
    before = open_descriptors()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(source.read, list(range(len(source))) * 20))
    assert found == expected * 20
    num_shards = len(list((packed_root / "train").glob("*.tar")))
    assert open_descriptors() - before == num_shards
    source.close()
    assert open_descriptors() == before
    assert source.read(0) == expected[0]


def test_more_shards_than_may_be_open(packed_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.data.packed._MOST_OPEN", 2)
    source, reference = (PackedSource.open(packed_root, "train") for _ in range(2))
    before = open_descriptors()
    assert all(source.read(i) for i in range(len(source)) if source.name(i) != "Zebra/empty.jpg")
    assert open_descriptors() - before == 2
    assert reference.read(3) == source.read(3)


# The doors


def test_pack_and_verify(
    image_root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["pack", str(image_root), str(tmp_path), "--threads", "2"]
    digest = FolderSource.open(image_root, "train").digest
    assert prepare_data.main(command) == 0
    first = capsys.readouterr().out
    assert "train: 23 images, 1 shards, 0.0" in first and f"digest {digest}" in first
    assert first.endswith(f"data.source=packed data.root={tmp_path}\n")
    assert prepare_data.main(command) == 0 and "was complete" in capsys.readouterr().out
    assert prepare_data.main(["verify", str(tmp_path)]) == 0
    assert "val: 7 images" in capsys.readouterr().out
    flip(tmp_path / "val/shard-00000.tar", 700)
    assert prepare_data.main(["verify", str(tmp_path)]) == EXIT_USER_ERROR
    assert "damaged: val: shard-00000.tar:class0/00.png is damaged" in capsys.readouterr().out
    assert prepare_data.main([*command, "--short-side", "16"]) == EXIT_USER_ERROR
    assert "short_side null there, 16 now" in capsys.readouterr().err


def test_left_out_is_told(
    image_root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    raw = shutil.copytree(image_root, tmp_path / "raw")
    (raw / "val/class1/01.png").write_bytes(b"no image")
    command = ["pack", str(raw), str(tmp_path / "out"), "--max-side", "16"]
    assert prepare_data.main(command) == EXIT_USER_ERROR
    assert "01.png cannot be packed: not an image of a known format" in capsys.readouterr().err
    assert prepare_data.main([*command, "--on-error", "skip"]) == 0
    told = capsys.readouterr().out
    assert "left out: val/class1/01.png: not an image of a known format" in told
    assert "val: 6 images, 1 left out, 1 shards" in told


def test_neighbours_are_fetched_at_once(packed_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, asked = PackedSource.open(packed_root, "train"), []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *args: asked.append(args))
    source.will_read(np.array([], dtype=np.int64))
    assert not asked
    offsets, sizes = source._arrays["offsets"], source._arrays["sizes"]
    shards = source._arrays["shards"]
    source.will_read(np.arange(len(source))[::-1])
    assert len(asked) == len(np.unique(shards)) > 1  # one stretch of each shard, all of them small
    assert all(advice == os.POSIX_FADV_WILLNEED for *_, advice in asked)
    assert sum(length for _, length, _ in asked) >= sizes.sum()
    asked.clear()
    source.will_read(np.array([3, 0, 1]))
    assert (int(offsets[0]), int(offsets[1] + sizes[1] - offsets[0])) == asked[0][:2]
    assert (int(offsets[3]), int(sizes[3])) == asked[1][:2]
