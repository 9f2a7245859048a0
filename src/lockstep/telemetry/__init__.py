"""Level 4: who is told how a run goes.

``metrics.jsonl`` is the truth; console, ``history.csv`` and Weights & Biases are views of the same
records. A view that fails is dropped with a warning; without the truth the run stops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.schema import Telemetry as TelemetryConfig
from lockstep.telemetry.console import Messages, open_console
from lockstep.telemetry.files import HistoryFile, MetricsFile, read_records
from lockstep.telemetry.records import History, Record, Sink
from lockstep.telemetry.wandb import WandbSink

__all__ = ["Telemetry", "open_telemetry"]


class Telemetry:
    """Hands every record to every sink. Without sinks it does nothing: what other ranks hold."""

    def __init__(self, sinks: Sequence[Sink], history: History | None = None) -> None:
        """
        Args:
            history: what came before the first record of this process.
        """
        self._sinks = list(sinks)
        self._history = history or History()

    def step(self, record: Record) -> None:
        """Tell of an optimiser step (a ``"kind": "step"`` record).

        Raises:
            UserError: metrics.jsonl cannot be written.
        """
        # A step ends the evaluation before it: by now all kinds of weights have been told.
        self._tell_row()
        self._history.step(record)
        self._tell(lambda sink: sink.step(record))

    def evaluation(self, record: Record) -> None:
        """Tell of an evaluation of one kind of weights (a ``"kind": "eval"`` record).

        Raises:
            UserError: metrics.jsonl cannot be written.
        """
        if self._history.starts_new_row(record):
            self._tell_row()
        self._history.evaluation(record)
        self._tell(lambda sink: sink.evaluation(record))

    def message(self, text: str) -> None:
        """Tell the user one line."""
        self._tell(lambda sink: sink.message(text))

    def close(self, summary: dict[str, Any] | None) -> None:
        """Finish every sink.

        Args:
            summary: plain figures of a finished run; None: it did not finish.

        Raises:
            UserError: metrics.jsonl cannot be written; the others are finished all the same.
        """
        self._tell_row()
        # The one that may raise comes last.
        self._sinks.sort(key=lambda sink: sink.essential)
        try:
            self._tell(lambda sink: sink.close(summary))
        finally:
            self._sinks.clear()

    def _tell_row(self) -> None:
        if (row := self._history.take_row()) is not None:
            self._tell(lambda sink: sink.row(row))

    def _tell(self, what: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                what(sink)
            except Exception as exc:
                if sink.essential:
                    raise
                self._drop(sink, exc)

    def _drop(self, sink: Sink, exc: Exception) -> None:
        # Taken out first: the warning itself must not meet it again.
        self._sinks.remove(sink)
        if sink.speaks:
            self._sinks.append(Messages(sys.stderr))
        self.message(failure(sink.name, exc))


def open_telemetry(
    cfg: TelemetryConfig,
    *,
    run_dir: Path,
    config: dict[str, Any],
    run_name: str,
    total_steps: int,
    steps_per_epoch: int,
    resume_step: int,
) -> Telemetry:
    """Open the sinks of a run, on rank 0 alone.

    Args:
        config: the whole configuration as plain values, to be logged.
        resume_step: last step of the checkpoint that the run goes on from; 0: from the start.
            Records beyond it are forgotten.

    Raises:
        UserError: metrics.jsonl cannot be written.
    """
    metrics = MetricsFile(run_dir / "metrics.jsonl", keep_to_step=resume_step)
    history = History()
    rows = history.replay(read_records(run_dir / "metrics.jsonl"))
    views: dict[str, Callable[[], Sink]] = {
        "history.csv": lambda: HistoryFile(run_dir / "history.csv", rows),
    }
    if cfg.console:
        views["console"] = lambda: open_console(
            sys.stdout,
            total_steps=total_steps,
            steps_per_epoch=steps_per_epoch,
            first_step=resume_step,
            seconds=cfg.console_seconds,
        )
    else:
        views["messages"] = lambda: Messages(sys.stderr)
    if cfg.wandb:
        views["wandb"] = lambda: WandbSink(cfg, run_dir=run_dir, run_name=run_name, config=config)
    sinks: list[Sink] = [metrics]
    failures: list[str] = []
    for name, open_view in views.items():
        try:
            sinks.append(open_view())
        except Exception as exc:  # noqa: BLE001  whatever it is, training does not need the view
            failures.append(failure(name, exc))
    telemetry = Telemetry(sinks, history)
    for note in [*(note for sink in sinks for note in sink.notes), *failures]:
        telemetry.message(note)
    return telemetry


def failure(name: str, exc: Exception) -> str:
    """The warning about a view that failed."""
    reason = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
    return f"warning: {name} failed and is left out from here on ({reason})"
