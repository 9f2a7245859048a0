"""Reads a data set through before a run does. Level 2.

Every image is read and decoded once by threads. What is kept of it is a handful of numbers (40
bytes), so that millions fit; the findings do not depend on the number of threads.

Duplicates are files of the same bytes. A copy that was encoded anew, resized or cropped has other
bytes and is not found.
"""

from __future__ import annotations

import io
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import ExifTags, Image

from lockstep.data.decode import FORMATS, DecodeError, decode
from lockstep.data.listing import forget
from lockstep.data.source import EXTENSIONS, FolderSource
from lockstep.errors import UserError
from lockstep.machine import cores

IMBALANCE = 20
"""How many times the smallest class the largest may be without a warning."""
FEW_IMAGES = 5
"""A class of fewer is warned of."""

_NUM_EXAMPLES = 5
_NUM_COPIES = 3
"""Names in an example of files that are the same."""
_TASK_IMAGES = 32
"""Images that a thread takes at once."""
_QUANTILES = {"min": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}


@dataclass(frozen=True)
class Found:
    """How many of a kind there are, and the first few."""

    count: int
    examples: list[list[str]]
    """Names with the split in front; those that belong together in one list."""


@dataclass(frozen=True)
class SplitReport:
    """What one split holds. Figures of images are those of the readable ones."""

    split: str
    digest: str
    counts: dict[str, int]
    """Images of each class, readable or not."""
    unreadable: dict[str, str]
    """Path below the split's folder, and the reason."""
    formats: dict[str, int]
    """As Pillow calls them, the most frequent first; "unknown" where only the pixels are known."""
    modes: dict[str, int]
    """How the pixels are stored (RGB, L, CMYK, ...), as Pillow calls it; likewise."""
    traits: dict[str, int]
    """Images that are ``progressive``, ``turned`` by their EXIF, or of several frames or pages."""
    short_side: dict[str, float]
    """Pixels: min, p5, median, p95, max; empty without a readable image. So are the next two."""
    megapixels: dict[str, float]
    file_bytes: dict[str, float]
    short_side_histogram: dict[str, int]
    """Images by powers of two: ``128-255``."""
    other_files: dict[str, int]
    """What no run reads because of its ending: number by ending."""
    passed_over: dict[str, Found]
    """What no run reads although it ends like an image: by reason."""
    duplicates: Found
    """Images that are the same as an earlier one of this split."""
    leaked: Found
    """Images that are also in an earlier split."""
    conflicts: Found
    """Pictures of this split that lie under several classes, in this or an earlier split."""
    problems: list[str]
    """Why no run trains on it: sentences."""
    warnings: dict[str, list[str]]
    """What should be looked into, beside the unreadable, and the first few examples."""

    @property
    def usable(self) -> dict[str, int]:
        """Readable images of each class."""
        bad = Counter(name.partition("/")[0] for name in self.unreadable)
        return {name: count - bad[name] for name, count in self.counts.items()}


def check(
    root: Path, *, threads: int | None = None, progress: Callable[[int, int], None] | None = None
) -> list[SplitReport]:
    """Decode every image of train and val, whose classes may differ.

    Args:
        threads: that decode; None: one for each core.
        progress: called now and then with the images read and those to read.

    Raises:
        UserError: the folders cannot be listed.
    """
    for split in ("train", "val"):
        forget(root / split)  # what is remembered of it is to be checked, too
    sources = [FolderSource.open(root, split, strict=False) for split in ("train", "val")]
    total, before = sum(map(len, sources)), 0
    seen: list[_Reading] = []
    reports = []
    for source in sources:
        reading = _Reading(source)
        for done in reading.fill(threads or cores()):
            if progress is not None:
                progress(before + done, total)
        before += len(source)
        seen.append(reading)
        reports.append(_report(seen))
    return reports


class _Kind(NamedTuple):
    """What an image file says of itself."""

    format: str
    mode: str
    progressive: bool
    turned: bool
    several_frames: bool


_Part = tuple[Counter[_Kind], dict[int, str]]
"""Of some images: what those that can be read are, and why the others cannot."""


@dataclass
class _Reading:
    """What is kept of the n images of a split."""

    source: FolderSource
    hashes: np.ndarray = field(init=False)
    """[n, 2] uint64."""
    sides: np.ndarray = field(init=False)
    """[n, 2] int64, pixels; 0 for an unreadable one."""
    file_bytes: np.ndarray = field(init=False)
    """[n] int64."""
    kinds: Counter[_Kind] = field(default_factory=Counter)
    reasons: dict[int, str] = field(default_factory=dict)
    """Why an image is unreadable."""

    def __post_init__(self) -> None:
        n = len(self.source)
        self.hashes = np.zeros((n, 2), np.uint64)
        self.sides = np.zeros((n, 2), np.int64)
        self.file_bytes = np.zeros(n, np.int64)

    def fill(self, threads: int) -> Iterator[int]:
        """Read all images; tells now and then how many are done."""
        n = len(self.source)
        pool = ThreadPoolExecutor(threads, thread_name_prefix="check")
        tasks: deque[tuple[int, Future[_Part]]] = deque()
        try:
            for start in range(0, n, _TASK_IMAGES):
                rows = range(start, min(start + _TASK_IMAGES, n))
                tasks.append((rows.stop, pool.submit(self._read, rows)))
                if len(tasks) > 2 * threads:
                    yield self._take(*tasks.popleft())
            while tasks:
                yield self._take(*tasks.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _take(self, done: int, task: Future[_Part]) -> int:
        kinds, reasons = task.result()
        self.kinds += kinds
        self.reasons |= reasons
        return done

    def _read(self, rows: range) -> _Part:
        """A thread's task; no two share a row."""
        kinds: Counter[_Kind] = Counter()
        reasons: dict[int, str] = {}
        for i in rows:
            try:
                data = self.source.read(i)
                height, width = np.shape(decode(data, exif_rotate=True))[:2]
            except (OSError, DecodeError) as error:
                reasons[i] = reason(error)
                continue
            self.hashes[i] = np.frombuffer(blake2b(data, digest_size=16).digest(), np.uint64)
            self.sides[i] = height, width
            self.file_bytes[i] = len(data)
            kinds[_kind(data)] += 1
        return kinds, reasons

    def name(self, index: int) -> str:
        return f"{self.source.folder.name}/{self.source.name(index)}"


def reason(error: OSError | DecodeError) -> str:
    """Why an image cannot be read, on one line."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _kind(data: bytes) -> _Kind:
    """Of a file that can be decoded; its header alone is looked at (PNG's EXIF may come last).

    Pillow's readers raise whatever a damaged field trips over. As in decoding, an EXIF block that
    cannot be read counts as none, and what lies behind the first frame does not matter.
    """
    with suppress(Exception), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        turned = several = False
        with suppress(Exception):
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) in range(2, 9)
        with suppress(Exception):
            several = bool(getattr(image, "is_animated", False))
        progressive = bool(image.info.get("progressive"))
        return _Kind(image.format or "unknown", image.mode, progressive, turned, several)
    return _Kind("unknown", "unknown", False, False, False)  # another decoder than Pillow read it


def _report(readings: Sequence[_Reading]) -> SplitReport:
    """Of the last one, beside those before."""
    reading = readings[-1]
    source, split = reading.source, reading.source.folder.name
    readable = reading.sides.all(axis=1)
    sides = reading.sides[readable]
    short = sides.min(axis=1)
    duplicates, leaked, conflicts = _same_bytes(readings)
    other_files, passed_over = _not_listed(source.folder)
    counts = np.bincount(source.targets, minlength=len(source.classes))
    report = SplitReport(
        split=split,
        digest=source.digest,
        counts={name: int(n) for name, n in zip(source.classes, counts, strict=True)},
        unreadable={source.name(i): why for i, why in reading.reasons.items()},
        formats=_shares(reading.kinds, "format"),
        modes=_shares(reading.kinds, "mode"),
        traits={
            trait: sum(n for kind, n in reading.kinds.items() if getattr(kind, trait))
            for trait in ("progressive", "turned", "several_frames")
        },
        short_side=_quantiles(short),
        megapixels=_quantiles(sides.prod(axis=1) / 1e6),
        file_bytes=_quantiles(reading.file_bytes[readable]),
        short_side_histogram=_by_powers_of_two(short),
        other_files=other_files,
        passed_over=passed_over,
        duplicates=duplicates,
        leaked=leaked,
        conflicts=conflicts,
        problems=[],
        warnings={},
    )
    try:
        source.refuse(None if len(readings) == 1 else readings[0].source.classes)
    except UserError as error:
        report.problems.append(str(error))
    report.warnings.update(_warnings(report, [r.source.folder.name for r in readings[:-1]]))
    return report


def _shares(kinds: Counter[_Kind], what: str) -> dict[str, int]:
    shares: Counter[str] = Counter()
    for kind, count in kinds.items():
        shares[getattr(kind, what)] += count
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))


def _quantiles(values: np.ndarray) -> dict[str, float]:
    """Values that occur, none in between."""
    if not len(values):
        return {}
    found = np.quantile(values, list(_QUANTILES.values()), method="inverted_cdf")
    return dict(zip(_QUANTILES, found.tolist(), strict=True))


def _by_powers_of_two(values: np.ndarray) -> dict[str, int]:
    """``values`` are at least 1; from the first power that occurs to the last."""
    counts = np.bincount(np.frexp(values)[1] - 1) if len(values) else np.zeros(0, np.int64)
    first = int(np.argmax(counts > 0)) if len(counts) else 0
    return {f"{1 << k}-{(2 << k) - 1}": int(counts[k]) for k in range(first, len(counts))}


def _same_bytes(readings: Sequence[_Reading]) -> tuple[Found, Found, Found]:
    """Duplicates, leaked and conflicts of the last split; see :class:`SplitReport`."""
    firsts = np.cumsum([0, *(len(r.source) for r in readings)])
    indices = np.flatnonzero(np.concatenate([r.sides for r in readings]).all(axis=1))
    hashes = np.concatenate([r.hashes for r in readings])[indices]
    # Stable: the images of a group stay in the order of the splits and their names.
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))
    hashes, indices = hashes[order], indices[order]
    is_first = np.ones(len(indices), dtype=bool)
    is_first[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
    starts = np.flatnonzero(is_first)
    if not len(starts):
        return Found(0, []), Found(0, []), Found(0, [])
    # Splits may differ in their classes: numbers that mean the same in all.
    known = {name: i for i, name in enumerate({c: 0 for r in readings for c in r.source.classes})}
    numbers = [np.array([known[c] for c in r.source.classes])[r.source.targets] for r in readings]
    targets = np.concatenate(numbers)[indices]
    sizes = np.diff(starts, append=len(indices))
    num_here = np.add.reduceat((indices >= firsts[-2]).astype(np.int64), starts)
    num_before = sizes - num_here
    differ = np.minimum.reduceat(targets, starts) != np.maximum.reduceat(targets, starts)

    def examples(groups: np.ndarray, members: Callable[[int], list[int]]) -> list[list[str]]:
        """Of the groups chosen by a mask, those whose first image comes first."""
        chosen = np.flatnonzero(groups)
        chosen = chosen[np.argsort(indices[starts[chosen]], kind="stable")][:_NUM_EXAMPLES]
        return [[name(i) for i in members(int(group))] for group in chosen]

    def name(index: int) -> str:
        split = int(np.searchsorted(firsts, index, side="right")) - 1
        return readings[split].name(index - int(firsts[split]))

    def all_of(group: int) -> list[int]:
        start = int(starts[group])
        return [int(i) for i in indices[start : start + int(sizes[group])]]

    def own(group: int) -> list[int]:
        return [i for i in all_of(group) if i >= firsts[-2]][:_NUM_COPIES]

    def own_and_earlier(group: int) -> list[int]:
        return [own(group)[0], all_of(group)[0]]

    def one_of_each_class(group: int) -> list[int]:
        start = int(starts[group])
        _, at = np.unique(targets[start : start + int(sizes[group])], return_index=True)
        return [all_of(group)[i] for i in sorted(at)[:_NUM_COPIES]]

    twice, both = num_here > 1, (num_here > 0) & (num_before > 0)
    torn = (num_here > 0) & differ
    return (
        Found(int((num_here[twice] - 1).sum()), examples(twice, own)),
        Found(int(num_here[both].sum()), examples(both, own_and_earlier)),
        Found(int(torn.sum()), examples(torn, one_of_each_class)),
    )


def _not_listed(folder: Path) -> tuple[dict[str, int], dict[str, Found]]:
    """Files of a split that no run reads; hidden ones are no part of a data set."""
    endings: Counter[str] = Counter()
    names: dict[str, list[str]] = {}

    def walk(path: str, below: str) -> None:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                name = f"{below}/{entry.name}"
                ending = os.path.splitext(entry.name)[1].lower()
                if entry.is_dir():
                    walk(entry.path, name)
                elif ending not in EXTENSIONS:
                    # Numbers at the end of names are no kinds of files.
                    endings[ending if re.fullmatch(r"\.[a-z]\w{0,7}", ending) else "none"] += 1
                elif below == folder.name:
                    names.setdefault("in no class folder", []).append(name)
                elif not entry.is_file() and os.path.exists(entry.path):
                    names.setdefault("a pipe, a socket or a device", []).append(name)

    walk(str(folder), folder.name)
    found = {
        why: Found(len(some), [[name] for name in sorted(some)[:_NUM_EXAMPLES]])
        for why, some in sorted(names.items())
    }
    return dict(sorted(endings.items(), key=lambda item: (-item[1], item[0]))), found


def _warnings(report: SplitReport, before: Sequence[str]) -> dict[str, list[str]]:
    usable = report.usable
    findings = {
        f"LEAKAGE, also in {' or '.join(before)} byte for byte": report.leaked,
        "label conflict, the same bytes under several classes": report.conflicts,
        "duplicates, copies of other images": report.duplicates,
        **{f"passed over, {why}": found for why, found in report.passed_over.items()},
    }
    warnings = {
        f"{what}: {found.count:,}": [" = ".join(names) for names in found.examples]
        for what, found in findings.items()
        if found.count
    }
    least, most = (pick(usable, key=lambda name: usable[name]) for pick in (min, max))
    if usable[most] > IMBALANCE * usable[least]:
        what = f"imbalance, the largest class is more than {IMBALANCE} times the smallest"
        warnings[what] = [f"{most}: {usable[most]:,}", f"{least}: {usable[least]:,}"]
    if few := [f"{name}: {count}" for name, count in usable.items() if count < FEW_IMAGES]:
        what = f"classes of fewer than {FEW_IMAGES} readable images: {len(few):,}"
        warnings[what] = few[:_NUM_EXAMPLES]
    return warnings
