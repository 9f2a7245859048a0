"""Make a data set, or read one through.

python scripts/prepare_data.py digits
python scripts/prepare_data.py cifar10 --root data
python scripts/prepare_data.py check /path/to/images --sheet build/sheet.png
python scripts/prepare_data.py pack /path/to/images /path/to/packed --short-side 256
python scripts/prepare_data.py verify /path/to/packed
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from lockstep.data.check import SplitReport
from lockstep.data.check import check as read_through
from lockstep.data.pack import Progress as DataProgress
from lockstep.data.sheet import contact_sheet
from lockstep.door import positive, save_bytes, save_json
from lockstep.errors import EXIT_OK, EXIT_USER_ERROR, UserError, exit_code, some
from lockstep.machine import cores

WIDTH = 100
"""Columns of the table of ``check`` at most."""


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, what in {
        "digits": "1,797 handwritten digits, no download",
        "cifar10": "60,000 images of 32 px, 170 MB download",
        "imagenette": "13,394 images of ten ImageNet classes, short side 320 px, 340 MB download",
    }.items():
        command = commands.add_parser(name, help=what)
        command.add_argument("--root", type=Path, default=Path("data"), help="default: data")
        command.set_defaults(run=lambda args, name=name: make(name, args.root))
    command = commands.add_parser(
        "check", help="decode every image: formats, sizes, classes, duplicates, the unreadable"
    )
    command.add_argument("root", type=Path, help="folder that holds train and val")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the findings there, too")
    command.add_argument("--sheet", type=Path, metavar="FILE.png", help="some images of each class")
    command.set_defaults(run=lambda args: check(args.root, args.json, args.sheet))
    command = commands.add_parser(
        "pack", help="put images into a few large files, the same or smaller"
    )
    command.add_argument("root", type=Path, metavar="ROOT", help="folder that holds train and val")
    command.add_argument("out", type=Path, metavar="OUT", help="a new folder, or one begun before")
    for option, what in {
        "--short-side": "make larger images smaller, as JPEG",
        "--max-side": "the same by the longer side",
    }.items():
        command.add_argument(option, type=positive, metavar="PIXELS", help=what)
    command.add_argument("--quality", type=positive, default=90, help="of these JPEGs, default: 90")
    command.add_argument("--threads", type=positive, metavar="N", help="default: one for each core")
    command.add_argument(
        "--on-error", choices=("stop", "skip"), default="stop", help="at an unreadable image"
    )
    command.add_argument(
        "--shard-mib",
        type=positive,
        default=1024,
        metavar="N",
        help="size of a file, default: 1024",
    )
    command.set_defaults(run=pack)
    command = commands.add_parser("verify", help="read packed images and compare all checksums")
    command.add_argument("out", type=Path, metavar="OUT", help="what pack has made")
    command.add_argument("--threads", type=positive, metavar="N", help="default: one for each core")
    command.set_defaults(run=lambda args: verify(args.out, args.threads))
    args = parser.parse_args(argv)
    return exit_code(lambda: int(args.run(args)), "stopped: give the same command again")


def make(name: str, root: Path) -> int:
    """Make ``<root>/<name>`` unless it is there."""
    if name == "digits":
        from lockstep.data.digits import write_digits

        try:
            made = write_digits(root)
        except OSError as error:
            raise UserError(
                f"--root {root}: cannot be written: {error.strerror or error}: make room, or choose another"
            ) from error
    else:
        from lockstep.data.download import download

        made = download(name, root)
    print(f"{root / name}: {'made' if made else 'complete'}")
    return EXIT_OK


def check(root: Path, json_to: Path | None, sheet_to: Path | None) -> int:
    """Tell what a data set holds, and write it as JSON and as a contact sheet where wanted.

    Returns:
        2 when an image cannot be read, or no run would take the classes.
    """
    for path in filter(None, (json_to, sheet_to)):  # before the reading, which may take an hour
        be_writable(path)
    with progress_line("images") as progress:
        reports = read_through(root, progress=progress)
    print_reports(reports)
    save_json(json_to, [asdict(report) for report in reports])
    if sheet_to is not None:
        contact_sheet(root, reports).save(page := BytesIO(), "PNG")
        save_bytes("--sheet", sheet_to, page.getvalue())
        print(f"contact sheet: {sheet_to}")
    bad = any(report.unreadable or report.problems for report in reports)
    return EXIT_USER_ERROR if bad else EXIT_OK


def be_writable(path: Path) -> None:
    """Make the folders above a file that shall be written; raises UserError where that fails."""
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}: choose another") from error


@contextmanager
def progress_line(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function of done and total that shows them on stderr, if that is a terminal."""
    with Progress(
        TextColumn("{task.completed:,} of {task.total:,} " + what),
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
        expand=True,
    ) as line:
        bar = line.add_task("", total=0)
        yield lambda done, total: line.update(bar, completed=done, total=total)


def print_reports(reports: Sequence[SplitReport]) -> None:
    """A column for each split, then warnings, every unreadable file by name, and problems."""
    out = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    if isinstance(sys.stdout, TextIOWrapper):  # names may be of any script, the terminal of few
        sys.stdout.reconfigure(errors="backslashreplace")
    table = Table(box=None, width=min(out.width, WIDTH), padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for report in reports:
        table.add_column(report.split, ratio=1, overflow="fold")
    for label, *cells in rows(reports):
        table.add_row(Text(label), *(Text(visible(cell)) for cell in cells))
    out.print(table)
    for report in reports:
        for warning, examples in report.warnings.items():
            line = f"warning: {report.split}: {visible(warning)}"
            out.print(Text(line, "yellow"), soft_wrap=True)
            for example in examples:
                out.print(Text(f"    {visible(example)}"), soft_wrap=True)
    for report in reports:
        for name, reason in report.unreadable.items():
            line = f"unreadable: {report.split}/{visible(name)}: {visible(reason)}"
            out.print(Text(line, "red"), soft_wrap=True)
    for problem in (problem for report in reports for problem in report.problems):
        out.print(Text(f"problem: {visible(problem)}", "red"), soft_wrap=True)


def rows(reports: Sequence[SplitReport]) -> Iterator[tuple[str, ...]]:
    """The table: a label and a cell for each split."""

    def row(label: str, cell: Callable[[SplitReport], str]) -> tuple[str, ...]:
        return label, *map(cell, reports)

    blank = row("", lambda r: "")
    yield row("images", lambda r: f"{sum(r.counts.values()):,}")
    yield row("classes", lambda r: f"{len(r.counts):,}")
    yield row("problems", lambda r: f"{len(r.problems):,}")
    yield row("unreadable", lambda r: f"{len(r.unreadable):,}")
    yield row("copies within", lambda r: f"{r.duplicates.count:,}")
    yield row(
        "in an earlier split", lambda r: f"{r.leaked.count:,}" if r is not reports[0] else "-"
    )
    yield row("under several classes", lambda r: f"{r.conflicts.count:,}")
    yield row("other files", lambda r: shares(r.other_files))
    yield row("digest", lambda r: r.digest)
    yield blank
    yield row("formats", lambda r: shares(r.formats))
    yield row("modes", lambda r: shares(r.modes))
    yield row("progressive", lambda r: f"{r.traits['progressive']:,}")
    yield row("turned by EXIF", lambda r: f"{r.traits['turned']:,}")
    yield row("several frames", lambda r: f"{r.traits['several_frames']:,}")
    yield blank
    yield row("", lambda r: "".join(f"{q:>7}" for q in ("min", "5 %", "median", "95 %", "max")))
    yield row("short side, px", lambda r: quantiles(r.short_side))
    yield row("megapixels", lambda r: quantiles(r.megapixels))
    yield row("file, kB", lambda r: quantiles(r.file_bytes, unit=1000))
    yield blank
    bins = {key for report in reports for key in report.short_side_histogram}
    for key in sorted(bins, key=lambda key: int(key.partition("-")[0])):
        yield f"short side {key}", *(bar(r.short_side_histogram, key) for r in reports)
    yield blank
    for label, place in (("smallest class", 0.0), ("median class", 0.5), ("largest class", 1.0)):
        yield label, *(ranked(r.usable, place) for r in reports)


def shares(counts: dict[str, int]) -> str:
    """``JPEG 480, PNG 20``."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "-"


def quantiles(values: dict[str, float], unit: int = 1) -> str:
    """Aligned below their titles."""

    def number(value: float) -> str:
        digits = 0 if value >= 100 or value == int(value) else 1 if value >= 10 else 3
        return f"{value:>7,.{digits}f}"

    return "".join(number(value / unit) for value in values.values()) or "-"


def bar(histogram: dict[str, int], key: str) -> str:
    """Number, share and a bar of one bin."""
    count = histogram.get(key, 0)
    if count == 0:
        return f"{0:>9}"
    share = count / sum(histogram.values())
    return f"{count:>9,} {f'{share:.0%}' if share >= 0.01 else '<1%':>4} " + "#" * round(18 * share)


def ranked(counts: dict[str, int], place: float) -> str:
    """The class at a place from 0, the smallest, to 1, the largest."""
    order = sorted(counts, key=lambda name: (counts[name], name))
    name = order[round(place * (len(order) - 1))]
    return f"{counts[name]:>9,}  {name}"


def pack(args: argparse.Namespace) -> int:
    """Pack train and val, or go on with it; how to use it is the last line."""
    from lockstep.config.cli import quoted
    from lockstep.data.pack import pack as pack_splits

    with PackingLine() as line:
        splits = pack_splits(
            args.root,
            args.out,
            short_side=args.short_side,
            max_side=args.max_side,
            quality=args.quality,
            shard_bytes=args.shard_mib * 2**20,
            threads=args.threads or cores(),
            on_error=args.on_error,
            progress=line.show,
        )
    for split in splits:
        for name, reason in split.left_out.items():
            print(f"left out: {split.split}/{visible(name)}: {visible(reason)}")
    for split in splits:
        left_out = f", {len(split.left_out):,} left out" if split.left_out else ""
        print(
            f"{split.split}: {split.num_images:,} images{left_out}, {split.num_shards:,} shards, "
            f"{split.num_bytes / 1e9:.3f} GB, digest {split.digest}"
            f"{', was complete' if split.was_complete else ''}"
        )
        if bad := split.undecodable:
            named = some(f"{visible(name)} ({visible(why)})" for name, why in bad.items())
            print(
                f"{split.split}: {len(bad):,} of them cannot be decoded, their headers say: {named};"
                " a run stops there, or leaves them out with data.on_error=skip"
            )
    root = shlex.quote(f"data.root={quoted(str(args.out))}")
    print(f"train with: python train.py data=folder data.source=packed {root}")
    return EXIT_OK


class PackingLine:
    """How far packing is, on stderr: a bar on a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._first: dict[str, tuple[float, DataProgress]] = {}
        self._shown = time.monotonic()
        self._live = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.fields[figures]}"),
            console=Console(stderr=True),
            disable=not self._is_terminal,
            transient=True,
            expand=True,
        )
        self._bar = self._live.add_task("listing", total=None, figures="")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, now: DataProgress) -> None:
        """Called for each image; the speed is that since this command began."""
        seconds = time.monotonic()
        since, first = self._first.setdefault(now.split, (seconds, now))
        if seconds - self._shown < (0.1 if self._is_terminal else 10):
            return
        self._shown = seconds
        speed = (now.images - first.images) / max(seconds - since, 1e-9)
        left = timedelta(seconds=round((now.total - now.images) / speed)) if speed else "?"
        text = f"{now.split} {now.images:,}/{now.total:,} images"
        figures = f"{speed:,.0f} images/s  {now.num_bytes / 1e6:,.0f} MB  {left} left"
        self._live.update(
            self._bar, description=text, completed=now.images, total=now.total, figures=figures
        )
        if not self._is_terminal:
            print(f"{text}  {figures}", file=sys.stderr, flush=True)


def verify(out: Path, threads: int | None) -> int:
    """Name everything that is not as it was packed; 2 when there is anything."""
    from lockstep.data.packed import verify as verify_splits

    with progress_line("bytes") as progress:
        splits = verify_splits(out, threads=threads or cores(), progress=progress)
    for split in splits:
        for line in split.damage:
            print(f"damaged: {split.split}: {visible(line)}")
        state = f"{len(split.damage):,} damaged" if split.damage else "as packed"
        print(
            f"{split.split}: {split.num_images:,} images, {split.num_bytes / 1e9:.3f} GB, {state}"
        )
    return EXIT_USER_ERROR if any(split.damage for split in splits) else EXIT_OK


def visible(text: str) -> str:
    """Bytes that are no text, and characters that steer a terminal, as escapes."""
    known = os.fsencode(text).decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in known)


if __name__ == "__main__":
    sys.exit(main())
