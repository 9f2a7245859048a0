"""What is told: records of ``metrics.jsonl`` and the rows derived from them; who can listen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, ClassVar

Record = Mapping[str, Any]
"""Plain values; "kind" is "step" or "eval"."""

STEP_KEYS = (
    "kind",
    "step",
    "epoch",
    "loss",
    "lr",
    "grad_norm",
    "samples_seen",
    "samples_per_second",
    "data_wait_fraction",
    "sample_digest",
    "time",  # seconds since the epoch when the host had queued the step
)
EVAL_KEYS = ("kind", "step", "weights", "top1", "top5", "loss", "count")


@dataclass(frozen=True)
class Row:
    """One evaluation, of all kinds of weights, with what was trained since the one before."""

    step: int
    epoch: int | None
    train_loss: float | None
    """Mean over the steps since the row before."""
    lr: float | None
    """Of the last step."""
    val_loss: float | None
    top1: float | None
    """Percent, as ``top5`` and ``ema_top1``."""
    top5: float | None
    ema_top1: float | None
    samples_per_second: float | None
    """Median over the steps since the row before: start-up and hiccups do not count."""


class History:
    """Derives rows from records, live or replayed."""

    def __init__(self) -> None:
        self._last_step: Record = {}
        self._losses: list[float] = []
        self._speeds: list[float] = []
        self._evaluations: dict[str, Record] = {}

    def step(self, record: Record) -> None:
        self._last_step = record
        self._losses.append(number(record["loss"]))
        self._speeds.append(number(record["samples_per_second"]))

    def evaluation(self, record: Record) -> None:
        self._evaluations[record["weights"]] = record

    def starts_new_row(self, record: Record) -> bool:
        """Whether this evaluation record belongs to another row than those before it."""
        return any(record["step"] != other["step"] for other in self._evaluations.values())

    def take_row(self) -> Row | None:
        """The row of the evaluation told last; None if there was none since the row before."""
        if not self._evaluations:
            return None
        raw = self._evaluations.get("raw", {})
        any_weights = next(iter(self._evaluations.values()))
        speeds = [speed for speed in self._speeds if math.isfinite(speed)]
        row = Row(
            step=any_weights["step"],
            epoch=self._last_step.get("epoch"),
            train_loss=fmean(self._losses) if self._losses else None,
            lr=self._last_step.get("lr"),
            val_loss=raw.get("loss"),
            top1=raw.get("top1"),
            top5=raw.get("top5"),
            ema_top1=self._evaluations.get("ema", {}).get("top1"),
            samples_per_second=median(speeds) if speeds else None,
        )
        self._evaluations = {}
        self._losses, self._speeds = [], []
        return row

    def replay(self, records: Iterable[Record]) -> list[Row]:
        """The rows of a run's past; what follows its last evaluation stays for the next row."""
        rows: list[Row | None] = []
        for record in records:
            if record["kind"] == "step":
                rows.append(self.take_row())
                self.step(record)
            elif record["kind"] == "eval":
                if self.starts_new_row(record):
                    rows.append(self.take_row())
                self.evaluation(record)
        rows.append(self.take_row())
        return [row for row in rows if row is not None]


class Sink:
    """Somebody who is told. Implementations override what they care about."""

    name: ClassVar[str]
    """What the user calls it."""
    speaks: ClassVar[bool] = False
    """Whether messages reach the user through it."""
    essential: ClassVar[bool] = False
    """Whether its failure ends the run."""
    notes: Sequence[str] = ()
    """What the user should know once it is open."""

    def step(self, record: Record) -> None: ...

    def evaluation(self, record: Record) -> None: ...

    def row(self, row: Row) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self, summary: dict[str, Any] | None) -> None: ...


def number(value: float | None) -> float:
    """A figure as a float; null, which stands for non-finite in JSON, is NaN."""
    return math.nan if value is None else float(value)
