"""Sinks in the run folder: ``metrics.jsonl``, the source of truth, and ``history.csv``, a view."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from lockstep.durable import atomic_write
from lockstep.errors import UserError
from lockstep.telemetry.records import EVAL_KEYS, STEP_KEYS, Record, Row, Sink

_KEYS = {"step": STEP_KEYS, "eval": EVAL_KEYS}


class MetricsFile(Sink):
    """One JSON object a line, flushed line by line.

    JSON has no NaN and no infinity: a non-finite figure is written as null.
    """

    name = "metrics.jsonl"
    essential = True

    def __init__(self, path: Path, *, keep_to_step: int) -> None:
        """Continue a file, or start one.

        Records beyond ``keep_to_step`` will be computed again and are dropped, so that the joined
        file equals that of an uninterrupted run; so is the line that a crash tore.

        Raises:
            UserError: the file system refuses.
        """
        self._path = path
        try:
            num_damaged = _drop_lines(path, keep_to_step) if path.exists() else 0
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as exc:
            raise _refused(path, exc) from exc
        if num_damaged:
            self.notes = [f"warning: {path.name}: {num_damaged} damaged lines were dropped"]

    def step(self, record: Record) -> None:
        self._write(record)

    def evaluation(self, record: Record) -> None:
        self._write(record)

    def close(self, summary: dict[str, Any] | None) -> None:
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as exc:
            raise _refused(self._path, exc) from exc

    def _write(self, record: Record) -> None:
        try:
            self._file.write(_line(record))
        except OSError as exc:
            raise _refused(self._path, exc) from exc


class HistoryFile(Sink):
    """One line an evaluation, for spreadsheets. Rebuilt from the records at every start."""

    name = "history.csv"

    def __init__(self, path: Path, past: Iterable[Row]) -> None:
        atomic_write(path, ",".join(field.name for field in fields(Row)).encode() + b"\n")
        self._file = path.open("a", encoding="utf-8", newline="", buffering=1)
        self._writer = csv.writer(self._file, lineterminator="\n")
        for row in past:
            self.row(row)

    def row(self, row: Row) -> None:
        self._writer.writerow("" if value is None else value for value in astuple(row))

    def close(self, summary: dict[str, Any] | None) -> None:
        self._file.close()


def read_records(path: Path) -> Iterator[Record]:
    """The records of a ``metrics.jsonl``, in order; a torn line is left out.

    Raises:
        OSError: no such file.
    """
    return (record for _, record in _lines(path))


def _lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    """Intact lines and what they say."""
    with path.open("rb") as file:
        for line in file:
            if (record := _parse(line)) is not None:
                yield line, record


def _drop_lines(path: Path, keep_to_step: int) -> int:
    """Drop damaged records and those beyond a step; returns how many were damaged.

    A torn last line is what every crash leaves and is not counted.
    """
    num_damaged = num_beyond = 0
    torn = False
    with path.open("rb") as file:
        for line in file:
            record = _parse(line)
            torn = record is None and not line.endswith(b"\n")
            num_damaged += record is None
            num_beyond += record is not None and record["step"] > keep_to_step
    if num_damaged or num_beyond:
        kept = (line for line, record in _lines(path) if record["step"] <= keep_to_step)
        atomic_write(path, b"".join(kept))
    return num_damaged - torn


def _parse(line: bytes) -> Record | None:
    """None for a line that is torn or no record."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
        return record if isinstance(record["step"], int) and record["kind"] else None
    except (ValueError, KeyError, TypeError):
        return None


def _line(record: Record) -> str:
    keys = _KEYS.get(record["kind"], ("kind", "step"))
    ordered = {key: record[key] for key in keys if key in record} | dict(record)
    return json.dumps({key: _finite(value) for key, value in ordered.items()}) + "\n"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refused(path: Path, exc: OSError) -> UserError:
    return UserError(
        f"{path} cannot be written: {exc.strerror or exc}. It is the run's record, so training "
        "stops; make room below run.root and run the same command again to go on"
    )
