"""The files around the shards: manifests, checksums, the commit mark, atomic writes. Level 4.

A checkpoint is a folder ``step-N`` that holds the shards, ``manifest.json`` (step, metric, plain
values, and size and checksum of every other file) and ``COMMITTED`` (the manifest's own checksum,
written last). Plain file work: no tensors, no processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.config.bind import ONCE_LAW
from lockstep.durable import atomic_write, sync_folder
from lockstep.errors import UserError

FORMAT = 2
MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
LATEST = "latest"
"""A link to the newest checkpoint, for people and tools; resuming looks for itself."""
PARTIAL = ".tmp"
"""What the folder of a save is called until it is whole."""
_STEP_FOLDER = re.compile(r"step-(0|[1-9][0-9]*)")
_FORMAT_LINE = re.compile(rb'\{\s*"format": ([0-9]{1,9})\b')
_MAX_LAW_LINES = 10


class Damaged(Exception):
    """A checkpoint that must not be loaded; the message says why."""


@dataclass(frozen=True)
class FileEntry:
    """What a file must be to be trusted."""

    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal digest of the content."""


@dataclass(frozen=True)
class Manifest:
    """The plain half of a checkpoint."""

    step: int
    metric: float | None
    """Figure by which the best checkpoint is kept, higher is better; None: not evaluated."""
    meta: dict[str, Any]
    """The run's own plain values."""
    files: dict[str, FileEntry]


def describe(path: Path) -> FileEntry:
    """Make a file's content durable and return its entry."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(size=file.tell(), sha256=digest)


def commit(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, then the mark that says that everything before it is durable."""
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1).encode()
    atomic_write(folder / MANIFEST, text)
    atomic_write(folder / COMMITTED, hashlib.sha256(text).hexdigest().encode())


def read_manifest(folder: Path) -> Manifest:
    """Read a committed manifest; the files that it lists are not looked at.

    Raises:
        Damaged: not committed, torn, altered, or of a newer format.
    """
    if not (folder / COMMITTED).is_file():
        raise Damaged(f"{COMMITTED} is missing")
    try:
        text = (folder / MANIFEST).read_bytes()
        mark = (folder / COMMITTED).read_bytes()
    except OSError as exc:
        raise Damaged(f"{MANIFEST}: {exc.strerror or exc}") from exc
    # First: the mark of another format may be of another kind.
    if (found := _FORMAT_LINE.match(text)) and int(found[1]) != FORMAT:
        raise Damaged(
            f"{MANIFEST}: format {int(found[1])}, this version reads {FORMAT}; it is whole for the "
            "version of lockstep that wrote it"
        )
    if hashlib.sha256(text).hexdigest().encode() != mark.strip():
        raise Damaged(f"{MANIFEST}: checksum differs")
    try:
        raw = json.loads(text)
        files = {str(name): FileEntry(**entry) for name, entry in raw["files"].items()}
        manifest = Manifest(raw["step"], raw["metric"], raw["meta"], files)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise Damaged(f"{MANIFEST}: not a manifest ({exc})") from exc
    # The names come from outside: none may lead out of the folder.
    if any(Path(name).name != name for name in files):
        raise Damaged(f"{MANIFEST}: lists a file outside the checkpoint")
    return manifest


def verify(folder: Path) -> Manifest:
    """Read the manifest and every file that it lists.

    Raises:
        Damaged: names the first file that is missing, of another size or of another content.
    """
    manifest = read_manifest(folder)
    # Sizes first: a truncated shard is found without reading the others.
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError as exc:
            raise Damaged(f"shard {name}: {exc.strerror or exc}") from exc
        if size != entry.size:
            raise Damaged(f"shard {name}: {size} bytes instead of {entry.size}")

    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    # hashlib releases the GIL: shards are read side by side.
    with ThreadPoolExecutor(max_workers=8) as pool:
        try:
            for name, found in zip(manifest.files, pool.map(digest, manifest.files), strict=True):
                if found != manifest.files[name].sha256:
                    raise Damaged(f"shard {name}: checksum differs")
        except OSError as exc:
            raise Damaged(f"a shard cannot be read: {exc}") from exc
    return manifest


def step_folders(checkpoints: Path) -> list[tuple[int, Path]]:
    """The ``step-N`` folders, newest first, committed or not."""
    if not checkpoints.is_dir():
        return []
    matches = ((_STEP_FOLDER.fullmatch(p.name), p) for p in checkpoints.iterdir() if p.is_dir())
    return sorted(((int(m[1]), p) for m, p in matches if m), reverse=True)


def is_committed(folder: Path) -> bool:
    """Whether the mark and the manifest are whole; the other files are not looked at."""
    try:
        read_manifest(folder)
    except Damaged:
        return False
    return True


def cut_off(checkpoints: Path) -> list[tuple[Path, Path]]:
    """Saves that were killed between their mark and their renaming: folder and name to come."""
    pairs = ((path, path.with_suffix("")) for path in sorted(checkpoints.glob(f"step-*{PARTIAL}")))
    return [
        (path, to)
        for path, to in pairs
        if is_committed(path)
        and to.name == f"step-{read_manifest(path).step}"
        and not is_committed(to)
    ]


def remove(folder: Path) -> None:
    """Delete a checkpoint; the mark goes first, so that half a deletion is no checkpoint.

    Of a link only the link: what it leads to is not this run's.
    """
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / COMMITTED).unlink(missing_ok=True)
    sync_folder(folder)
    shutil.rmtree(folder)


def check_law(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse to go on from a checkpoint of another configuration.

    Args:
        saved, current: flat ``{dotted key: plain value}`` of what defines a run's result.

    Raises:
        UserError: names the keys that differ.
    """
    # Through JSON, as the saved side went: tuples become lists.
    current = json.loads(json.dumps(current))
    saved = {key: ONCE_LAW.get(key, value) for key, value in saved.items()}
    absent = object()

    def show(value: Any) -> str:
        return "absent" if value is absent else json.dumps(value)

    lines = [
        f"  {key}: checkpoint {show(saved.get(key, absent))}, now {show(current.get(key, absent))}"
        for key in sorted(saved.keys() | current.keys())
        if saved.get(key, absent) != current.get(key, absent)
    ]
    if not lines:
        return
    if len(lines) > _MAX_LAW_LINES:
        lines[_MAX_LAW_LINES:] = [f"  and {len(lines) - _MAX_LAW_LINES} more"]
    raise UserError(
        "the checkpoint was made by another configuration:\n"
        + "\n".join(lines)
        + "\nundo the change to go on, or start over with resume=never run.name=NEW_NAME"
    )
