"""Where each process of a run is, in a small file that outlives it.

A process that hangs or is killed cannot tell where it was: others read it here. All ranks go
through the same phases in the same order, so the one with the lowest ``count`` is behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep import dist

_PATIENCE = 0.7
"""Share of the time-out after which a process that waits writes down what for."""
_WIDTH = 256
"""Bytes of the record, always the same, so that it is overwritten in place."""


@dataclass(frozen=True)
class Phase:
    """What a process does."""

    rank: int
    pid: int
    count: int
    """Phases entered since the process began training."""
    step: int
    """Optimiser steps done."""
    name: str
    """start, data, forward, backward, update, evaluate, save or finish."""
    since: float
    """Seconds since the epoch."""
    began: float
    """When the process began training, alike."""
    steps_here: int
    """Optimiser steps that this process has done: 0 while it may still compile."""


class Phases:
    """This process's own file, ``logs/phase-rank-R``. A disk that refuses is no reason to stop."""

    def __init__(self, logs: Path, rank: int, timeout_seconds: float) -> None:
        """
        Args:
            timeout_seconds: whoever stays in a phase for longer is taken to hang; shortly before,
                the process writes its last collectives and its threads' stacks into ``logs``.
        """
        self._rank = rank
        self._count = 0
        self._began = time.time()
        self._first_step: int | None = None
        self._file: int | None = None
        with contextlib.suppress(OSError):
            logs.mkdir(parents=True, exist_ok=True)
            self._file = os.open(_path(logs, rank), os.O_WRONLY | os.O_CREAT, 0o644)
            for path in (flight_path(logs, rank), stack_path(logs, rank)):
                path.unlink(missing_ok=True)
        self._closed = threading.Event()
        threading.Thread(
            target=self._watch,
            args=(logs, _PATIENCE * timeout_seconds),
            name="watch",
            daemon=True,
        ).start()

    def enter(self, name: str, step: int) -> None:
        """Say that this process begins ``name`` after ``step`` optimiser steps."""
        if self._first_step is None and name != "start":
            self._first_step = step
        self._count += 1
        if self._file is None:
            return
        here = step - (self._first_step if self._first_step is not None else step)
        now = time.time()
        phase = Phase(self._rank, os.getpid(), self._count, step, name, now, self._began, here)
        text = json.dumps(asdict(phase)).ljust(_WIDTH - 1) + "\n"
        with contextlib.suppress(OSError):
            os.pwrite(self._file, text.encode(), 0)

    def close(self) -> None:
        self._closed.set()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _watch(self, logs: Path, patience_seconds: float) -> None:
        seen, since, written = self._count, time.monotonic(), False
        while not self._closed.wait(min(1.0, patience_seconds / 4)):
            if self._count != seen:
                seen, since, written = self._count, time.monotonic(), False
            elif not written and time.monotonic() - since > patience_seconds:
                written = True
                with contextlib.suppress(OSError, RuntimeError, ValueError):
                    with stack_path(logs, self._rank).open("w") as file:
                        faulthandler.dump_traceback(file, all_threads=True)
                    flight_path(logs, self._rank).write_text(dist.flight_record() or "{}")


def read_phases(logs: Path) -> list[Phase]:
    """The last phase of every process that wrote one, in rank order, of this attempt or earlier."""
    phases = []
    for path in logs.glob("phase-rank-*"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            phases.append(Phase(**json.loads(path.read_bytes())))
    return sorted(phases, key=lambda phase: phase.rank)


def flight_path(logs: Path, rank: int) -> Path:
    """Where a rank that waits for too long writes its last collectives."""
    return logs / f"flight-rank-{rank}.json"


def stack_path(logs: Path, rank: int) -> Path:
    """Where it writes what each of its threads does."""
    return logs / f"stack-rank-{rank}.txt"


def _path(logs: Path, rank: int) -> Path:
    return logs / f"phase-rank-{rank}"
