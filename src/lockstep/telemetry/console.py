"""The terminal: a progress bar for people, plain lines for logs, one line per evaluation."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from lockstep.errors import silence, tell
from lockstep.telemetry.records import Record, Row, Sink, number

_PACE_SECONDS = 30.0
"""Training time over which speed and waiting are averaged, and after which waiting is judged."""
_PACE_STEPS = 20
_WAIT_WARNING = 0.2


class Messages(Sink):
    """Nothing but messages, for runs without a console."""

    name = "messages"
    speaks = True

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def message(self, text: str) -> None:
        tell(text, self._stream)


class Pace:
    """Speed and data wait over the last seconds of training."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, float, float]] = deque()
        self._samples, self._seconds, self._waited = 0, 0.0, 0.0
        self._last: Record | None = None

    def add(self, record: Record) -> None:
        last, self._last = self._last, record
        speed = number(record["samples_per_second"])
        # The first step holds start-up and compilation, and no step before tells its size.
        if last is None or not speed > 0:
            return
        samples = record["samples_seen"] - last["samples_seen"]
        seconds = samples / speed
        self._push((samples, seconds, seconds * number(record["data_wait_fraction"])), 1)
        while len(self._steps) > _PACE_STEPS and self._seconds - self._steps[0][1] > _PACE_SECONDS:
            self._push(self._steps.popleft(), -1)

    def _push(self, step: tuple[int, float, float], sign: int) -> None:
        if sign > 0:
            self._steps.append(step)
        self._samples += sign * step[0]
        self._seconds += sign * step[1]
        self._waited += sign * step[2]

    @property
    def samples_per_second(self) -> float:
        if self._seconds > 0:
            return self._samples / self._seconds
        return math.nan if self._last is None else number(self._last["samples_per_second"])

    @property
    def data_wait_fraction(self) -> float:
        if self._seconds > 0:
            return self._waited / self._seconds
        return math.nan if self._last is None else number(self._last["data_wait_fraction"])

    @property
    def is_settled(self) -> bool:
        """Whether it covers enough to be judged."""
        return self._seconds >= _PACE_SECONDS and len(self._steps) >= _PACE_STEPS


class Console(Sink):
    """What plain lines and the progress bar have in common."""

    name = "console"
    speaks = True

    def __init__(self, *, total_steps: int, steps_per_epoch: int) -> None:
        self._total_steps = total_steps
        self._num_epochs = math.ceil(total_steps / steps_per_epoch)
        self._pace = Pace()
        self._warned = False

    def step(self, record: Record) -> None:
        self._pace.add(record)
        self._show_step(record)
        waited = self._pace.data_wait_fraction
        if not self._warned and self._pace.is_settled and waited > _WAIT_WARNING:
            self._warned = True
            self.message(
                f"warning: training waits for images {waited:.0%} of the time: raise data.workers, "
                "or put smaller images on a faster disk"
            )

    def row(self, row: Row) -> None:
        ema = "" if row.ema_top1 is None else f"  ema {row.ema_top1:6.2f} %"
        self.message(
            f"{self._epoch(row.epoch)}  {self._step(row.step)}  top-1 {number(row.top1):6.2f} %"
            f"{ema}  val loss {number(row.val_loss):.4f}  train loss {number(row.train_loss):.4f}"
        )

    def _show_step(self, record: Record) -> None:
        raise NotImplementedError

    def _epoch(self, epoch: int | None) -> str:
        width = len(str(self._num_epochs))
        return f"epoch {'?' if epoch is None else str(epoch):>{width}}/{self._num_epochs}"

    def _step(self, step: int) -> str:
        return f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}"


class PlainConsole(Console):
    """A line now and then, for logs: the first step, the last, and one every so many seconds."""

    def __init__(
        self,
        stream: TextIO,
        *,
        total_steps: int,
        steps_per_epoch: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(total_steps=total_steps, steps_per_epoch=steps_per_epoch)
        self._stream = stream
        self._seconds = seconds
        self._clock = clock
        self._start: tuple[int, float] | None = None
        self._shown_at = -math.inf
        self._unshown: Record | None = None

    def message(self, text: str) -> None:
        try:
            print(text, file=self._stream, flush=True)
        except OSError:
            silence(self._stream)  # Python itself would write the rest in the end
            raise

    def close(self, summary: dict[str, Any] | None) -> None:
        if self._unshown is not None:
            self._print(self._unshown)

    def _show_step(self, record: Record) -> None:
        now = self._clock()
        self._start = self._start or (record["step"], now)
        if record["step"] == self._total_steps or now - self._shown_at >= self._seconds:
            self._print(record)
        else:
            self._unshown = record

    def _print(self, record: Record) -> None:
        self._shown_at, self._unshown = self._clock(), None
        self.message(
            f"{self._epoch(record['epoch'])}  {self._step(record['step'])}  "
            f"loss {number(record['loss']):.4f}  lr {number(record['lr']):.2e}  "
            f"{self._pace.samples_per_second:,.0f} img/s  "
            f"data wait {self._pace.data_wait_fraction:.0%}{self._remaining(record['step'])}"
        )

    def _remaining(self, step: int) -> str:
        """By the wall clock since the first step, so that evaluations and saves count."""
        assert self._start is not None
        first_step, start = self._start
        if not first_step < step < self._total_steps:
            return ""
        per_step = (self._clock() - start) / (step - first_step)
        return f"  ETA {timedelta(seconds=round(per_step * (self._total_steps - step)))}"


class LiveConsole(Console):
    """A progress bar at the bottom of a terminal; lines scroll above it."""

    def __init__(
        self, stream: TextIO, *, total_steps: int, steps_per_epoch: int, first_step: int
    ) -> None:
        super().__init__(total_steps=total_steps, steps_per_epoch=steps_per_epoch)
        self._progress = Progress(
            TextColumn("{task.description}"),
            # Where room is short the bar gives way, not the numbers.
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=RichConsole(file=stream),
            expand=True,
        )
        self._bar = self._progress.add_task(
            "starting", total=total_steps, completed=first_step, figures=""
        )
        self._progress.start()

    def message(self, text: str) -> None:
        # A file name may hold [brackets]: no markup.
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self, summary: dict[str, Any] | None) -> None:
        self._progress.stop()

    def _show_step(self, record: Record) -> None:
        self._progress.update(
            self._bar,
            completed=record["step"],
            description=self._epoch(record["epoch"]),
            # Shorter than in plain lines: all of it has to fit in 80 columns.
            figures=f"loss {number(record['loss']):.3f} lr {number(record['lr']):.1e} "
            f"{self._pace.samples_per_second:,.0f} img/s "
            f"wait {self._pace.data_wait_fraction:.0%}",
        )


def open_console(
    stream: TextIO, *, total_steps: int, steps_per_epoch: int, first_step: int, seconds: float
) -> Console:
    """The console that fits ``stream``: a progress bar on a terminal, else plain lines.

    Args:
        first_step: steps that were done before this process.
        seconds: plain lines: time between two of them.
    """
    if stream.isatty() and os.environ.get("TERM") != "dumb":
        return LiveConsole(
            stream,
            total_steps=total_steps,
            steps_per_epoch=steps_per_epoch,
            first_step=first_step,
        )
    return PlainConsole(
        stream, total_steps=total_steps, steps_per_epoch=steps_per_epoch, seconds=seconds
    )
