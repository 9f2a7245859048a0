"""Writes a folder of images as the shards that ``packed`` reads. Level 2.

Threads read (and re-encode) ahead in a bounded window, one writes in order, and which image goes to
which shard follows from the source alone: the same input gives the same bytes with any number of
threads, interrupted or not. A finished shard is durable and described by a side file in
``<out>/<split>/unfinished``; the index comes last, then that folder goes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import tarfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import PIL
from PIL import Image, features

from lockstep.data.decode import (
    FORMATS,
    ORIENTATION_TAG,
    TURNS,
    DecodeError,
    decode,
    header_problem,
    orientation,
)
from lockstep.data.packed import (
    ARRAYS,
    BLOCK_BYTES,
    INDEX,
    INDEX_FILE,
    NAMES,
    Damaged,
    Index,
    Shard,
    check_sizes,
    read_index,
    shard_name,
)
from lockstep.data.source import FolderSource, digest_of
from lockstep.durable import atomic_write, sync_folder
from lockstep.errors import UserError, some

UNFINISHED = "unfinished"
"""Beside the shards until the index is written: settings, side files, the shard in work."""

_SETTINGS, _LOCK = "settings.json", "lock"
_END_OF_TAR = bytes(2 * BLOCK_BYTES)
_WINDOW_IMAGES = 8
"""Images in work or waiting to be written, for each thread."""
_WINDOW_BYTES = 256 * 2**20
"""Their size in the source, all in all."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one split is."""

    split: str
    images: int
    """Done, the unreadable included."""
    total: int
    num_bytes: int
    """Of the shards so far."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One finished split."""

    split: str
    num_images: int
    num_shards: int
    num_bytes: int
    """Of the shards."""
    digest: str
    left_out: dict[str, str]
    """Unreadable images: name and reason."""
    undecodable: dict[str, str]
    """Packed untouched although their headers show that no run can decode them: name and reason."""
    was_complete: bool
    """There was nothing to do; ``undecodable`` is not known then."""


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What, beside the source, decides the bytes of a pack."""

    short_side: int | None
    max_side: int | None
    quality: int | None
    """None: bytes stay as they are."""
    shard_bytes: int


@dataclass(frozen=True, slots=True)
class _Image:
    """What a thread has made of one image."""

    data: bytes
    crc32: int
    why_not: str | None = None
    """Why it cannot be packed."""
    undecodable: str | None = None
    """Why no run can decode it."""


@dataclass(frozen=True, slots=True)
class _Written:
    """A finished shard, as its side file has it."""

    size: int
    sha256: str
    packed: list[tuple[int, int, int, int]]
    """Of each image in it: index into the source, offset, size, crc32."""
    left_out: dict[str, str]
    undecodable: dict[str, str] = field(default_factory=dict)


def pack(
    root: Path,
    out: Path,
    *,
    splits: Sequence[str] = ("train", "val"),
    short_side: int | None = None,
    max_side: int | None = None,
    quality: int = 90,
    shard_bytes: int = 2**30,
    threads: int,
    on_error: Literal["stop", "skip"] = "stop",
    progress: Callable[[Progress], None] | None = None,
) -> list[Packed]:
    """Pack ``<root>/<split>/<class>/**/<image>`` into ``<out>/<split>``; may be stopped at any time.

    The same call goes on where the last one ended, and does nothing when all is done.

    Args:
        splits: the first one decides which classes the others must have.
        short_side, max_side: images whose short (longest) side is longer are made smaller; then
            everything that is not an 8-bit grey or RGB JPEG becomes one. Both None: untouched.
        quality: of JPEGs that are written, 1..100; colour at half resolution (4:2:0).
        shard_bytes: a shard is closed before its images, as they are in the source, exceed this.
        threads: that read and re-encode.
        on_error: an image that cannot be read, or decoded when sides are given: stop, or leave it
            out and name it. Without sides what cannot be decoded is packed, as the folder has it.
        progress: called for each image, in this thread.

    Raises:
        UserError: nothing to pack, an unreadable image, a full disk, or ``out`` holds something
            else.
    """
    _check_arguments(short_side, max_side, quality, shard_bytes)
    recipe = _Recipe(
        short_side=short_side,
        max_side=max_side,
        quality=quality if short_side or max_side else None,
        shard_bytes=shard_bytes,
    )
    for split in splits:
        _check_place(root, splits, out / split)
    sources: list[FolderSource] = []
    for split in splits:
        classes = sources[0].classes if sources else None
        sources.append(FolderSource.open(root, split, classes=classes))
    return [
        _Split(source, out / split, recipe, threads, on_error, progress).pack()
        for split, source in zip(splits, sources, strict=True)
    ]


def _check_arguments(
    short_side: int | None, max_side: int | None, quality: int, shard_bytes: int
) -> None:
    if not 1 <= quality <= 100:
        raise UserError(f"quality = {quality}: must be 1 to 100")
    sides = {"short_side": short_side, "max_side": max_side, "shard_bytes": shard_bytes}
    for name, value in sides.items():
        if value is not None and value < 1:
            raise UserError(f"{name} = {value}: must be 1 or more")


def _check_place(root: Path, splits: Sequence[str], target: Path) -> None:
    """The shards must not lie among the images: they would be listed, or written over."""
    for split in splits:
        images = (root / split).resolve()
        if target.resolve().is_relative_to(images):
            raise UserError(
                f"{target} lies inside the images to be packed ({images}): choose a folder "
                "outside of them"
            )


class _Split:
    """The packing of one split."""

    def __init__(
        self,
        source: FolderSource,
        folder: Path,
        recipe: _Recipe,
        threads: int,
        on_error: Literal["stop", "skip"],
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._source = source
        self._folder = folder
        self._unfinished = folder / UNFINISHED
        self._recipe = recipe
        self._threads = threads
        self._stops = on_error == "stop"
        self._progress = progress or (lambda done: None)
        self._num_done, self._num_bytes = 0, 0

    def pack(self) -> Packed:
        try:
            if (done := self._finished()) is not None:
                return done
            self._refuse_foreign()
            with _sole_writer(self._unfinished):
                if (done := self._finished()) is not None:  # by the former writer
                    return done
                self._begin()
                shards = self._write_shards()
                index = self._write_index(shards)
                shutil.rmtree(self._unfinished)
                undecodable = {k: why for done in shards for k, why in done.undecodable.items()}
                return self._report(index, undecodable, was_complete=False)
        except OSError as error:  # of reading: made a reason, or a UserError, where it happens
            where = error.filename or self._folder
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise UserError(
                    f"{where}: {error.strerror}: make room on the disk and give the same command "
                    "again: it goes on behind the finished shards"
                ) from error
            raise UserError(f"{where}: {error.strerror or error}: cannot pack into it") from error

    def _finished(self) -> Packed | None:
        """The report of a split that is complete; None: there is something to do."""
        if not (self._folder / INDEX / INDEX_FILE).exists():
            return None
        try:
            index = read_index(self._folder)
            check_sizes(self._folder, index)
        except Damaged as damage:
            raise UserError(
                f"{self._folder}: {damage}: remove that folder and pack again"
            ) from damage
        self._refuse_others({"source_digest": index.source_digest, **index.settings})
        self._refuse_left_out(index.left_out)
        shutil.rmtree(self._unfinished, ignore_errors=True)
        return self._report(index, {}, was_complete=True)

    def _report(self, index: Index, undecodable: dict[str, str], *, was_complete: bool) -> Packed:
        return Packed(
            split=self._folder.name,
            num_images=index.num_images,
            num_shards=len(index.shards),
            num_bytes=sum(shard.size for shard in index.shards),
            digest=index.digest,
            left_out=index.left_out,
            undecodable=undecodable,
            was_complete=was_complete,
        )

    def _wanted(self) -> dict[str, Any]:
        return {"source_digest": self._source.digest, **asdict(self._recipe)}

    def _refuse_foreign(self) -> None:
        if (self._unfinished / _SETTINGS).exists() or not self._folder.exists():
            return
        if other := sorted(p.name for p in self._folder.iterdir() if p != self._unfinished):
            raise UserError(
                f"{self._folder} holds {some(other)}, not a pack that was begun: choose an empty "
                "or new folder"
            )

    def _begin(self) -> None:
        """Note what is packed, or make sure that what was begun is the same."""
        # Other versions make other bytes of the same pixels: never both in one pack.
        encoder = f"Pillow {PIL.__version__}, libjpeg-turbo {features.version('libjpeg_turbo')}"
        wanted = self._wanted() | {"encoder": encoder if self._recipe.quality else None}
        path = self._unfinished / _SETTINGS
        if path.exists():
            self._refuse_others(json.loads(path.read_bytes()), wanted)
            return
        atomic_write(path, json.dumps(wanted).encode())

    def _refuse_others(self, found: dict[str, Any], wanted: dict[str, Any] | None = None) -> None:
        wanted = self._wanted() if wanted is None else wanted
        different = [
            f"{key} {json.dumps(found.get(key))} there, {json.dumps(wanted.get(key))} now"
            for key in {**wanted, **found}
            if found.get(key) != wanted.get(key)
        ]
        if different:
            raise UserError(
                f"{self._folder} was packed from other images or with other settings "
                f"({'; '.join(different)}): give the same ones, choose another folder, or remove "
                "this one"
            )

    def _refuse_left_out(self, left_out: dict[str, str]) -> None:
        if self._stops and left_out:
            name, reason = next(iter(left_out.items()))
            raise UserError(
                f"{self._source.folder / name} cannot be packed: {reason}: repair or remove it, "
                "or leave such images out with --on-error skip"
            )

    def _write_shards(self) -> list[_Written]:
        sizes = self._source.sizes
        starts = shard_starts(sizes, self._recipe.shard_bytes)
        members = [range(*pair) for pair in zip(starts, [*starts[1:], len(sizes)], strict=True)]
        shards = {i: done for i in range(len(members)) if (done := self._read_side_file(i))}
        for number, done in shards.items():
            self._refuse_left_out(done.left_out)
            self._count(len(members[number]), done.size)
        missing = [number for number in range(len(members)) if number not in shards]
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="pack")
        try:
            # One window over all shards: threads do not wait while a shard is made durable.
            todo = [i for number in missing for i in members[number]]
            ready = _in_order(pool, self._prepare, todo, sizes, most=_WINDOW_IMAGES * self._threads)
            for number in missing:
                shards[number] = self._write_shard(number, zip(members[number], ready))  # noqa: B905
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return [shards[number] for number in range(len(members))]

    def _count(self, images: int, num_bytes: int) -> None:
        self._num_done += images
        self._num_bytes += num_bytes
        self._progress(
            Progress(self._folder.name, self._num_done, len(self._source), self._num_bytes)
        )

    def _prepare(self, index: int, size: int) -> _Image:
        """A thread's task."""
        try:
            data = self._source.read(index)
        except OSError as error:
            if error.errno == errno.ESTALE:
                raise UserError(
                    f"{self._source.path(index)}: {error.strerror}: pack again when nobody writes "
                    "there"
                ) from error
            return _Image(b"", 0, error.strerror or str(error))
        if self._recipe.quality is None:
            # What no run can decode is packed all the same: the run is that of the folder.
            return _Image(data, zlib.crc32(data), undecodable=header_problem(data))
        try:
            data = reencode(
                data,
                short_side=self._recipe.short_side,
                max_side=self._recipe.max_side,
                quality=self._recipe.quality,
            )
        except DecodeError as error:
            return _Image(b"", 0, str(error))
        return _Image(data, zlib.crc32(data))

    def _write_shard(self, number: int, images: Iterable[tuple[int, _Image]]) -> _Written:
        partial = self._unfinished / f"{shard_name(number)}.tmp"
        try:
            with partial.open("wb", buffering=1 << 20) as file:
                written = self._fill_shard(file, images)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            partial.unlink(missing_ok=True)  # a full disk has a use for it
            raise
        partial.rename(self._folder / shard_name(number))
        sync_folder(self._folder)
        atomic_write(self._side_file(number), json.dumps(asdict(written)).encode())
        return written

    def _fill_shard(self, file: BinaryIO, images: Iterable[tuple[int, _Image]]) -> _Written:
        sha256, position = hashlib.sha256(), 0
        packed: list[tuple[int, int, int, int]] = []
        left_out: dict[str, str] = {}
        undecodable: dict[str, str] = {}

        def put(data: bytes) -> None:
            nonlocal position
            file.write(data)
            sha256.update(data)
            position += len(data)

        for index, image in images:
            begin, name = position, self._source.name(index)
            if image.why_not is None:
                put(tar_header(name, len(image.data)))
                packed.append((index, position, len(image.data), image.crc32))
                put(image.data)
                put(bytes(-position % BLOCK_BYTES))
                if image.undecodable is not None:
                    undecodable[name] = image.undecodable
            else:
                left_out[name] = image.why_not
                self._refuse_left_out(left_out)
            self._count(1, position - begin)
        put(_END_OF_TAR)
        return _Written(position, sha256.hexdigest(), packed, left_out, undecodable)

    def _side_file(self, number: int) -> Path:
        return self._unfinished / f"{shard_name(number)}.json"

    def _read_side_file(self, number: int) -> _Written | None:
        """None: the shard is not there, or not to its end."""
        path, shard = self._side_file(number), self._folder / shard_name(number)
        if not path.exists() or not shard.exists():
            return None
        written = _Written(**json.loads(path.read_bytes()))
        return written if shard.stat().st_size == written.size else None

    def _write_index(self, shards: list[_Written]) -> Index:
        source, folder = self._source, self._folder / INDEX
        table = np.array([row for shard in shards for row in shard.packed], dtype=np.int64)
        images, offsets, sizes, crc32 = table.reshape(-1, 4).T
        targets = source.targets[images]
        counts = np.bincount(targets, minlength=len(source.classes))
        if empty := [name for name, n in zip(source.classes, counts, strict=True) if n == 0]:
            raise UserError(
                f"{source.folder}: no readable images in {some(empty)}: repair some, or remove the "
                "class folder in all splits"
            )
        names = [os.fsencode(source.name(index)) for index in images.tolist()]
        values = {
            "shards": np.repeat(np.arange(len(shards)), [len(shard.packed) for shard in shards]),
            "offsets": offsets,
            "sizes": sizes,
            "crc32": crc32,
            "targets": targets,
            "ends": np.cumsum([len(name) for name in names]),
        }
        files = {NAMES: b"".join(names)}
        for name, dtype in ARRAYS.items():
            stream = io.BytesIO()
            np.save(stream, values[name].astype(dtype), allow_pickle=False)
            files[f"{name}.npy"] = stream.getvalue()
        folder.mkdir(exist_ok=True)
        for name, data in files.items():
            atomic_write(folder / name, data)
        index = Index(
            classes=source.classes,
            num_images=len(images),
            digest=digest_of(source.classes, names, sizes.tolist()),
            source_digest=source.digest,
            settings=asdict(self._recipe),
            left_out={name: why for shard in shards for name, why in shard.left_out.items()},
            shards=[Shard(shard.size, shard.sha256) for shard in shards],
            files={name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        )
        atomic_write(folder / INDEX_FILE, index.to_json())
        return index


def shard_starts(sizes: np.ndarray, shard_bytes: int) -> list[int]:
    """First image of each shard: as many as fit, but at least one.

    Args:
        sizes: [n] int64, bytes of the images in the source.
        shard_bytes: that the images, as members of a tar, may fill.
    """
    lengths = BLOCK_BYTES + -(-sizes // BLOCK_BYTES) * BLOCK_BYTES
    before = np.concatenate([[0], np.cumsum(lengths)])

    def end(start: int) -> int:
        fitting = np.searchsorted(before, before[start] + shard_bytes, side="right") - 1
        return max(int(fitting), start + 1)

    starts = [0]
    while (after := end(starts[-1])) < len(sizes):
        starts.append(after)
    return starts


def tar_header(name: str, size: int) -> bytes:
    """Header of a regular file, the same whenever and by whomever it is written.

    A name that is long or not ASCII gets a pax record, bytes that are no UTF-8 included.
    """
    assert all(part.strip(".") for part in name.split("/")), f"{name!r} leads elsewhere"
    member = tarfile.TarInfo(name)
    member.size = size
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def reencode(data: bytes, *, short_side: int | None, max_side: int | None, quality: int) -> bytes:
    """An image as JPEG whose sides are no longer than asked for.

    One that already is a JPEG of 8 bits, grey or RGB, and small enough stays as it is. Decoded by
    the rules of ``decode``, made smaller by antialiased bicubic interpolation. The EXIF orientation
    is not applied but kept, as the only metadata: ``data.exif_rotate`` decides when it is read.

    Raises:
        DecodeError: unreadable, or too large for a JPEG.
    """
    pixels = Image.fromarray(decode(data, exif_rotate=False))
    kind, mode, turn = _describe(data)
    factors = [
        limit / side
        for limit, side in ((short_side, min(pixels.size)), (max_side, max(pixels.size)))
        if limit is not None and limit < side
    ]
    if kind == "JPEG" and mode in ("L", "RGB") and not factors:
        return data
    if mode == "L":
        pixels = pixels.convert("L")
    if factors:
        width, height = (max(1, round(side * min(factors))) for side in pixels.size)
        pixels = pixels.resize((width, height), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    if turn in TURNS:
        exif[ORIENTATION_TAG] = turn
    stream = io.BytesIO()
    try:
        pixels.save(
            stream, "JPEG", quality=quality, subsampling="4:2:0", exif=exif if exif else b""
        )
    except (OSError, ValueError) as error:
        raise DecodeError(f"{pixels.width} x {pixels.height} pixels: {error}") from error
    return stream.getvalue()


def _describe(data: bytes) -> tuple[str | None, str, int]:
    """Format, Pillow's mode and EXIF orientation of an image that can be decoded."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.format != "JPEG":
                # A PNG's EXIF may follow the pixels; TIFF applies its own while loading.
                image.load()
            return image.format, image.mode, orientation(image)
    except Exception as error:  # as in decode
        raise DecodeError(" ".join(str(error).split()) or type(error).__name__) from error


def _in_order(
    pool: ThreadPoolExecutor,
    task: Callable[[int, int], _Image],
    indices: Iterable[int],
    sizes: np.ndarray,
    *,
    most: int,
) -> Iterator[_Image]:
    """``task(index, size)`` of each index, a bounded number and size of images ahead."""
    pending: deque[tuple[int, Future[_Image]]] = deque()
    ahead_bytes = 0
    for index in indices:
        size = int(sizes[index])
        while pending and (len(pending) >= most or ahead_bytes + size > _WINDOW_BYTES):
            done_size, done = pending.popleft()
            ahead_bytes -= done_size
            yield done.result()
        pending.append((size, pool.submit(task, index, size)))
        ahead_bytes += size
    while pending:
        yield pending.popleft()[1].result()


@contextmanager
def _sole_writer(unfinished: Path) -> Iterator[None]:
    """Hold a lock that the kernel releases, however this process ends."""
    unfinished.mkdir(parents=True, exist_ok=True)
    with (unfinished / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"{unfinished.parent} is being packed by another process: wait for it, or stop it"
            ) from error
        yield
