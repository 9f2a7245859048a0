"""What command lines have in common: options, tables, and files that are asked for. Level 0."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.durable import atomic_write
from lockstep.errors import UserError


def add_effort(parser: argparse.ArgumentParser) -> None:
    """How much is measured of what, where the figures go, and overrides."""
    add = parser.add_argument
    add("--batch", type=positive, default=256, help="images of one process (GPU) in a step")
    add("--image-size", type=positive, default=224)
    add("--device", choices=["auto", "cuda", "cpu"], default="auto")
    add("--steps", type=positive, default=30, help="of one repeat")
    add("--repeat", type=positive, default=3)
    add("--warmup", type=positive, default=10, help="steps before the first repeat")
    add("--timeout", type=positive, default=1200, metavar="SECONDS", help="of one row")
    add("--json", type=Path, metavar="FILE")
    add("--png", type=Path, metavar="FILE")
    add("overrides", nargs="*", metavar="KEY=VALUE")


def names(text: str) -> list[str]:
    """Words with commas between them."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise argparse.ArgumentTypeError("names at least one")
    return found


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number from 1")
    return int(text)


def fraction(text: str) -> float:
    """A number from 0, below 1."""
    try:
        if 0 <= float(text) < 1:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text}: must be a fraction such as 0.05")


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Lines of a table; the columns of these numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def save_json(path: Path | None, values: Any) -> None:
    """Write ``--json``, if it is asked for. Raises UserError."""
    if path is not None:
        save_bytes("--json", path, (json.dumps(values, indent=1) + "\n").encode())


def save_bytes(option: str, path: Path, data: bytes) -> None:
    """Write a whole file or nothing. Raises UserError."""
    write(option, path, partial(_put, data=data))


def _put(path: Path, data: bytes) -> None:
    """A link stays one; what is no file is written to."""
    if str(path) == "/dev/stdout":  # opened once more, it would be written over by what is printed
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.flush()
    elif path.is_relative_to("/dev") or (path.exists() and not path.is_file()):
        path.write_bytes(data)
    else:
        atomic_write(path.resolve() if path.is_symlink() else path, data)


def write(option: str, path: Path, save: Callable[[Path], object]) -> None:
    """Write a file. Raises UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(path)
    except (OSError, ValueError) as exc:  # Pillow does not know the ending
        why = getattr(exc, "strerror", None) or exc
        raise UserError(f"{option} {path}: cannot be written: {why}") from exc
