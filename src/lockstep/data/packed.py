"""Images packed into a few large files: ordinary tars, and beside them an index of our own.

Level 2. Owns the format and its reading; ``pack`` writes it. Any tar tool lists and unpacks a
shard; the index alone is needed for random access::

    <root>/<split>/shard-00000.tar ...  members <class>/<...>/<file> in the folder source's order
    <root>/<split>/index/               one entry per image, little-endian:
        shards.npy offsets.npy sizes.npy  int32, int64, int64: where the image's bytes lie
        crc32.npy targets.npy             uint32, int64
        names.bin ends.npy                the names joined, and where each ends (int64)
        index.json                        the rest, and a sha256 of every file; written last

A pack may come from a stranger: nothing in it is executed, no name in it becomes a path.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.source import PACKED_INDEX, check_classes, digest_of, split_folder
from lockstep.errors import UserError

FORMAT = 1
INDEX = PACKED_INDEX
INDEX_FILE = "index.json"
NAMES = "names.bin"
ARRAYS: dict[str, np.dtype[Any]] = {
    "shards": np.dtype("<i4"),
    "offsets": np.dtype("<i8"),
    "sizes": np.dtype("<i8"),
    "crc32": np.dtype("<u4"),
    "targets": np.dtype("<i8"),
    "ends": np.dtype("<i8"),
}
"""Files ``<name>.npy`` and what they hold, one value per image."""
BLOCK_BYTES = 512
"""What everything in a tar is aligned to."""
HOW_TO_PACK = (
    "make it with `python scripts/prepare_data.py pack ROOT OUT` from a folder ROOT that holds "
    "train/<class>/* and val/<class>/*, and set data.root to OUT"
)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_ROWS = 1 << 17
"""Entries that are looked at at once: few enough that checking needs no memory to speak of."""
_MOST_BYTES = 1 << 31
"""Of one image: what is read at once must not be whatever a stranger asks for."""
_FETCH_BYTES = 128 * 1024
_MOST_OPEN = 256
"""Shards that one process keeps open."""


class Damaged(Exception):
    """A pack, or a part of it, that must not be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One tar file."""

    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True, slots=True)
class Index:
    """``index.json``."""

    classes: list[str]
    num_images: int
    digest: str
    """As FolderSource's, of the images as they are packed."""
    source_digest: str
    """FolderSource's, of what was packed: equal to ``digest`` when all images were, untouched."""
    settings: dict[str, int | None]
    """How images were changed, and the size of shards."""
    left_out: dict[str, str]
    """Names of unreadable images, and the reason."""
    shards: list[Shard]
    files: dict[str, str]
    """sha256 of each other file of the index."""

    def to_json(self) -> bytes:
        named = {shard_name(i): asdict(shard) for i, shard in enumerate(self.shards)}
        values = {"format": FORMAT} | asdict(self) | {"shards": named}
        return json.dumps(values, indent=1).encode() + b"\n"


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.tar"


@dataclass(frozen=True, eq=False)
class PackedSource:
    """The packed images of one split; reads as ``FolderSource`` does.

    The index is mapped, not loaded: processes share it. Safe to use from several threads and after a
    fork.
    """

    folder: Path
    classes: list[str]
    targets: np.ndarray
    """[n] int64, index into ``classes``; read-only."""
    digest: str
    """FolderSource's of the same images: equal to it when all are packed untouched."""
    settings: dict[str, int | None]
    """short_side, max_side (pixels) and quality, None where untouched; shard_bytes."""
    _arrays: dict[str, np.ndarray]
    _names: np.ndarray
    _descriptors: dict[int, int] = field(default_factory=dict)

    @classmethod
    def open(cls, root: Path, split: str, *, classes: Sequence[str] | None = None) -> PackedSource:
        """Map and check the index of ``<root>/<split>``.

        Args:
            classes: those that the split must have (the training set's).

        Raises:
            UserError: not packed, not completely, damaged, or not what ``classes`` says.
        """
        folder = (root / split).absolute()  # wherever it is read from later
        try:
            index = read_index(folder)
            check_sizes(folder, index)
            arrays, names = _map_entries(folder, index)
        except Damaged as damage:
            raise UserError(
                f"data.root = {root}: {split}: {damage}: copy it again from where it is whole, or "
                f"remove {folder} and pack again; `python scripts/prepare_data.py verify {root}` "
                "names everything that is damaged"
            ) from damage
        except OSError as error:
            raise UserError(
                f"data.root = {root}: cannot read {error.filename or folder}: {error.strerror}"
            ) from error
        check_classes(root, split, index.classes, classes)
        return cls(
            folder=folder,
            classes=index.classes,
            targets=arrays["targets"],
            digest=index.digest,
            settings=index.settings,
            _arrays=arrays,
            _names=names,
        )

    def __len__(self) -> int:
        return len(self.targets)

    def name(self, index: int) -> str:
        """Path below the split's folder before packing: ``<class>/<...>/<file>``."""
        return os.fsdecode(_name(self._names, self._arrays["ends"], index))

    def path(self, index: int) -> Path:
        """Where the image lies, for messages: ``<root>/<split>/shard-N.tar:<name>``."""
        shard = shard_name(int(self._arrays["shards"][index]))
        return self.folder / f"{shard}:{self.name(index)}"

    def read(self, index: int) -> bytes:
        """The image's bytes. Raises OSError where they cannot be read or are not what was packed.

        ``pread`` leaves Python's lock while it waits for the disk; a mapped file would not.
        """
        offset, size = int(self._arrays["offsets"][index]), int(self._arrays["sizes"][index])
        data = self._pread(int(self._arrays["shards"][index]), offset, size)
        if len(data) < size:
            raise OSError(errno.EIO, "the shard is truncated", str(self.path(index)))
        if zlib.crc32(data) != self._arrays["crc32"][index]:
            raise OSError(errno.EIO, "checksum differs", str(self.path(index)))
        return data

    def will_read(self, indices: np.ndarray) -> None:
        """Let the system fetch these images into its cache, neighbours at once.

        What cannot be fetched is told when it is read.
        """
        if not hasattr(os, "posix_fadvise") or not len(indices):
            return
        ordered = np.sort(indices)
        for run in np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1):
            shards = self._arrays["shards"][run]
            for part in np.split(run, np.flatnonzero(np.diff(shards)) + 1):
                first, last = int(part[0]), int(part[-1])
                start = int(self._arrays["offsets"][first])
                stop = int(self._arrays["offsets"][last] + self._arrays["sizes"][last])
                shard = self.folder / shard_name(int(self._arrays["shards"][first]))
                with suppress(OSError), shard.open("rb") as file:
                    # At once it fetches no more than the disk's read-ahead, 128 KiB if not told.
                    for at in range(start, stop, _FETCH_BYTES):
                        size = min(_FETCH_BYTES, stop - at)
                        os.posix_fadvise(file.fileno(), at, size, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close the shards; reading opens them again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _pread(self, shard: int, offset: int, size: int) -> bytes:
        descriptor = self._descriptors.get(shard)
        if descriptor is not None:
            return _pread(descriptor, offset, size)
        descriptor = os.open(self.folder / shard_name(shard), os.O_RDONLY | os.O_CLOEXEC)
        kept = None
        try:
            if len(self._descriptors) < _MOST_OPEN:
                # No lock, which a fork could catch locked: one of several threads wins.
                kept = self._descriptors.setdefault(shard, descriptor)
            return _pread(descriptor, offset, size)
        finally:
            if kept != descriptor:
                os.close(descriptor)


def _pread(descriptor: int, offset: int, size: int) -> bytes:
    """Up to ``size`` bytes: fewer at the end of the file, and never for a signal or a limit."""
    data = os.pread(descriptor, size, offset)
    if len(data) == size:
        return data
    parts, missing = [data], size - len(data)
    while missing and (data := os.pread(descriptor, missing, offset + size - missing)):
        parts.append(data)
        missing -= len(data)
    return b"".join(parts)


def _name(names: np.ndarray, ends: np.ndarray, index: int) -> bytes:
    return names[ends[index - 1] if index > 0 else 0 : ends[index]].tobytes()


def read_index(folder: Path) -> Index:
    """Read ``index.json``; the files that it describes are not looked at.

    Raises:
        UserError: there is none: not packed, or not to the end.
        Damaged: not as it was written.
    """
    try:
        text = (folder / INDEX / INDEX_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _not_packed(folder) from error
    try:
        raw = json.loads(text)
        if raw["format"] != FORMAT:
            raise Damaged(f"{INDEX_FILE}: format {raw['format']}, this version reads {FORMAT}")
        return _index(raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{INDEX_FILE} is not an index ({type(error).__name__}: {error})") from error


def _not_packed(folder: Path) -> UserError:
    root, split = folder.parent, folder.name
    try:
        split_folder(root, split, HOW_TO_PACK)
    except UserError as error:
        return error
    if (folder / shard_name(0)).exists() or (folder / INDEX).exists():
        return UserError(
            f"data.root = {root}: {split} is not packed to its end: give the same command again, "
            f"or {HOW_TO_PACK}"
        )
    return UserError(
        f"data.root = {root}: {split} is not packed: set data.source=folder, or {HOW_TO_PACK}"
    )


def _index(raw: dict[str, Any]) -> Index:
    """Raises ValueError and the like for anything that ``pack`` does not write."""
    classes, shards = list(raw["classes"]), dict(raw["shards"])
    for name in classes:
        # As the folder source lists them: no hidden ones, no ways out.
        if not isinstance(name, str) or not name or name[0] == "." or set(name) & set("/\0"):
            raise ValueError(f"class {name!r}")
    if classes != sorted(set(classes), key=os.fsencode):
        raise ValueError("classes out of order")
    if list(shards) != [shard_name(i) for i in range(len(shards))]:
        raise ValueError("names of shards")
    if set(raw["files"]) != {NAMES, *(f"{name}.npy" for name in ARRAYS)}:
        raise ValueError("names of files")
    index = Index(
        classes=classes,
        num_images=_whole(raw["num_images"], least=1),
        digest=_hash(_DIGEST, raw["digest"]),
        source_digest=_hash(_DIGEST, raw["source_digest"]),
        settings={
            str(key): None if value is None else _whole(value)
            for key, value in raw["settings"].items()
        },
        left_out={str(name): str(why) for name, why in raw["left_out"].items()},
        shards=[
            Shard(size=_whole(shard["size"]), sha256=_hash(_SHA256, shard["sha256"]))
            for shard in shards.values()
        ],
        files={name: _hash(_SHA256, value) for name, value in raw["files"].items()},
    )
    return index


def _whole(value: object, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a number of {least} or more")
    return value


def _hash(pattern: re.Pattern[str], value: object) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{value!r} is not a digest")
    return value


def check_sizes(folder: Path, index: Index) -> None:
    """Raises Damaged where a shard is missing or not as long as it was."""
    for number, shard in enumerate(index.shards):
        if why := _wrong_size(folder / shard_name(number), shard.size):
            raise Damaged(f"{shard_name(number)} {why}")


def _wrong_size(path: Path, size: int) -> str | None:
    if not path.is_file():
        return "is missing"
    found = path.stat().st_size
    return None if found == size else f"has {found:,} bytes instead of {size:,}"


def _map_entries(folder: Path, index: Index) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The arrays of the index by name, and the joined names as [bytes] uint8, all read-only.

    Raises:
        Damaged: other than written, or written by someone else with entries that lead astray.
    """
    for name, expected in index.files.items():
        path = folder / INDEX / name
        if not path.is_file():
            raise Damaged(f"{INDEX}/{name} is missing")
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise Damaged(f"{INDEX}/{name}: checksum differs")
    arrays = {name: _map_array(folder, name, index.num_images) for name in ARRAYS}
    ends = arrays["ends"]
    if why := _wrong_size(folder / INDEX / NAMES, max(int(ends[-1]), 1)):
        raise Damaged(f"{INDEX}/{NAMES} {why}")
    names = np.memmap(folder / INDEX / NAMES, dtype=np.uint8, mode="r").view(np.ndarray)
    _check_entries(index, arrays, names)
    _check_class_folders(index.classes, arrays["targets"], names, ends)
    return arrays, names


def _map_array(folder: Path, name: str, length: int) -> np.ndarray:
    file = f"{INDEX}/{name}.npy"
    try:
        array = np.load(folder / file, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # whatever numpy's reader of headers trips over
        raise Damaged(f"{file} is not an array ({error})") from error
    if not isinstance(array, np.ndarray) or array.dtype != ARRAYS[name] or array.shape != (length,):
        raise Damaged(f"{file} does not hold {length:,} values of type {ARRAYS[name]}")
    return array.view(np.ndarray)


def _check_entries(index: Index, arrays: dict[str, np.ndarray], names: np.ndarray) -> None:
    """Every entry lies within its shard, behind the one before, and has a name that goes down."""
    shard_sizes = np.array([shard.size for shard in index.shards], dtype=np.int64)
    for first in range(0, index.num_images, _ROWS):
        # One row of overlap: neighbours are compared.
        lead = max(first - 1, 0)
        part = {name: array[lead : first + _ROWS] for name, array in arrays.items()}
        ends, shards, offsets = part["ends"], part["shards"], part["offsets"]
        begin = 0 if lead == 0 else int(arrays["ends"][lead - 1])
        sound = (
            begin < ends[0]
            and ends[-1] <= len(names)
            and bool((np.diff(ends) > 0).all())
            and shards[0] >= 0
            and shards[-1] < len(shard_sizes)
            and bool((np.diff(shards) >= 0).all())
            and bool((offsets >= BLOCK_BYTES).all())
            and bool((part["sizes"] >= 0).all())
            and bool((part["sizes"] < _MOST_BYTES).all())
            # Not offset + size, which may be beyond 64 bits.
            and bool((offsets <= shard_sizes[shards]).all())
            and bool((part["sizes"] <= shard_sizes[shards] - offsets).all())
        )
        same_shard = np.diff(shards) == 0
        if not sound or (np.diff(offsets) < part["sizes"][:-1])[same_shard].any():
            raise Damaged(f"{INDEX}: entries {lead:,} to {lead + len(ends):,} lie astray")
        if not _all_go_down(names[begin : ends[-1]], ends - begin):
            raise Damaged(f"{INDEX}/{NAMES} holds names that no packing writes")


def _all_go_down(names: np.ndarray, ends: np.ndarray) -> bool:
    """Whether no part between slashes is empty or begins with a dot (hidden, or a way out)."""
    slashes = np.flatnonzero(names == ord("/"))
    ends_of_parts = np.concatenate([ends, slashes])
    order = np.argsort(ends_of_parts, kind="stable")
    ends_of_parts = ends_of_parts[order]
    # The part behind a slash begins after it, the one behind a name right there.
    starts = np.concatenate([[0], (ends_of_parts + (order >= len(ends)))[:-1]])
    if not (starts < ends_of_parts).all():
        return False
    return not (names[starts] == ord(".")).any() and not (names == 0).any()


def _check_class_folders(
    classes: list[str], targets: np.ndarray, names: np.ndarray, ends: np.ndarray
) -> None:
    """The images are ordered by class, each has some, and they lie in the class's folder."""
    bounds = np.searchsorted(targets, np.arange(len(classes) + 1))
    in_order = all(
        bool((np.diff(targets[max(i - 1, 0) : i + _ROWS]) >= 0).all())
        for i in range(0, len(targets), _ROWS)
    )
    if not in_order or targets[0] < 0 or targets[-1] >= len(classes):
        raise Damaged(f"{INDEX}/targets.npy does not number the classes")
    for number, name in enumerate(classes):
        first, last = int(bounds[number]), int(bounds[number + 1])
        if first == last:
            raise Damaged(f"{INDEX}: class {name} has no images")
        prefix = os.fsencode(name) + b"/"
        starts = np.concatenate([ends[first - 1 : first] if first else [0], ends[first : last - 1]])
        if (ends[first:last] - starts <= len(prefix)).any() or any(
            (names[starts + i] != byte).any() for i, byte in enumerate(prefix)
        ):
            raise Damaged(f"{INDEX}/{NAMES}: images of class {name} do not lie in its folder")


@dataclass(frozen=True, slots=True)
class Verified:
    """What reading a split through has found."""

    split: str
    num_images: int
    """0 where the index cannot be read."""
    num_bytes: int
    """Of the shards."""
    damage: list[str]
    """One line for each damaged thing; empty: as it was written."""


def verify(
    root: Path, *, threads: int, progress: Callable[[int, int], None] | None = None
) -> list[Verified]:
    """Read every byte of every packed split below ``root`` and compare all checksums.

    Args:
        threads: shards read at the same time.
        progress: called now and then with the bytes read of a split so far, and its bytes.

    Raises:
        UserError: nothing is packed there.
    """
    splits: list[Path] = []
    with suppress(OSError):
        splits = sorted(path for path in root.iterdir() if (path / INDEX).is_dir())
    if not splits:
        raise UserError(f"{root} holds no packed images: {HOW_TO_PACK}")
    return [
        _verify_split(folder, threads, progress or (lambda done, total: None)) for folder in splits
    ]


def _verify_split(folder: Path, threads: int, progress: Callable[[int, int], None]) -> Verified:
    split = folder.name
    try:
        index = read_index(folder)
        arrays, names = _map_entries(folder, index)
    except (Damaged, UserError) as why:
        return Verified(split, 0, 0, [str(why)])
    except OSError as error:
        return Verified(split, 0, 0, [f"{error.filename}: {error.strerror}"])
    all_names = (_name(names, arrays["ends"], i) for i in range(index.num_images))
    damage = []
    if digest_of(index.classes, all_names, arrays["sizes"].tolist()) != index.digest:
        damage.append(f"{INDEX_FILE}: the digest is not that of the names and sizes")
    total, done = sum(shard.size for shard in index.shards), 0
    bounds = np.searchsorted(arrays["shards"], np.arange(len(index.shards) + 1))

    def check(number: int) -> list[str]:
        entries = range(int(bounds[number]), int(bounds[number + 1]))
        return list(_damage_of_shard(folder, index.shards[number], number, arrays, names, entries))

    with ThreadPoolExecutor(threads) as pool:
        for number, found in enumerate(pool.map(check, range(len(index.shards)))):
            damage += found
            done += index.shards[number].size
            progress(done, total)
    return Verified(split, index.num_images, total, damage)


def _damage_of_shard(
    folder: Path,
    shard: Shard,
    number: int,
    arrays: dict[str, np.ndarray],
    names: np.ndarray,
    entries: range,
) -> Iterator[str]:
    """One pass: the checksum of the file, and of each image in it."""
    path = folder / shard_name(number)
    if why := _wrong_size(path, shard.size):
        yield f"{path.name} {why}"
        if not path.is_file():
            return
    sha256 = hashlib.sha256()
    try:
        with path.open("rb") as file:
            for i in entries:
                sha256.update(file.read(int(arrays["offsets"][i]) - file.tell()))
                data = file.read(int(arrays["sizes"][i]))
                sha256.update(data)
                if zlib.crc32(data) != arrays["crc32"][i]:
                    yield f"{path.name}:{os.fsdecode(_name(names, arrays['ends'], i))} is damaged"
            while data := file.read(1 << 20):
                sha256.update(data)
    except OSError as error:
        yield f"{path.name} cannot be read: {error.strerror}"
        return
    if why is None and sha256.hexdigest() != shard.sha256:
        yield f"{path.name}: checksum differs"
