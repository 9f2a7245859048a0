"""A worker that breaks once, at a chosen place. Level 8.

Training itself knows nothing of it: in the processes of a drill, the functions at which a fault can
strike are wrapped before the real worker runs.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from lockstep import dist, worker
from lockstep.checkpoint import saver
from lockstep.checkpoint.store import Store
from lockstep.checkpoint.writer import Writer
from lockstep.config.plan import Plan
from lockstep.config.schema import Config
from lockstep.data.loader import Batch, Loader
from lockstep.engine import loop
from lockstep.engine.loop import StopRequest, Training

VARIABLE = "LOCKSTEP_DRILL"
"""Holds the :class:`Script` of the processes of a drill."""

PLACES = ("start", "step", "evaluate", "save")

_FULL_BYTES = 1024
"""How far a file grows on the full disk: the records of the phases are overwritten in place."""


@dataclass(frozen=True)
class Script:
    """What is to happen in the processes of one start of a run."""

    folder: str
    """Where the processes leave their traces."""
    fault: str | None = None
    """A name of :data:`FAULTS`; None: nothing breaks."""
    rank: int = 0
    place: str = "step"
    after_step: int = 0
    """Not before so many optimiser steps are done; at the start at once."""
    seconds_alone: float = 0.0
    """Slows every step of a process that trains alone, so that another can come in time."""
    wait_for_port: int | None = None
    """The agent begins once somebody listens there."""

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Script:
        return cls(**json.loads(environ[VARIABLE]))

    @property
    def fired(self) -> Path:
        """Exists once the fault has struck: it does so once, whatever starts again."""
        return Path(self.folder) / "fired"

    @property
    def starts(self) -> Path:
        """One line for each time that a process came to train: its :class:`Start` as JSON."""
        return Path(self.folder) / "starts.jsonl"

    def read_starts(self) -> list[Start]:
        if not self.starts.exists():
            return []
        return [Start(**json.loads(line)) for line in self.starts.read_text().splitlines()]


@dataclass(frozen=True)
class Start:
    """A process that came to train."""

    pid: int
    rank: int
    world_size: int
    step: int | None
    """Optimiser steps that it need not do again; None: it comes, and has not looked yet."""


WRITER = "SIGKILL writer"
"""The one fault that needs asynchronous saves."""


class Saboteur:
    """Stands at all places and strikes at the one of its script."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.poisoned = False
        """The next batch of this process holds NaN."""
        self.training: Training | None = None
        self.writer: Writer | None = None
        self.saving = 0
        """The step that was saved last, or is being saved."""

    def at(self, place: str, step: int | None = None) -> None:
        """This process comes to a place, after so many steps if training does not know it."""
        script = self._script
        if place == "step" and dist.world_size() == 1:
            time.sleep(script.seconds_alone)
        if step is None and self.training is not None:
            step = self.training.state.progress.step
        due = place == "start" or (step is not None and step >= script.after_step)
        if script.fault is None or (place, dist.rank()) != (script.place, script.rank) or not due:
            return
        try:
            script.fired.touch(exist_ok=False)
        except FileExistsError:
            return
        FAULTS[script.fault](self)

    def sign_in(self, step: int | None) -> None:
        """This process comes, and comes again when it knows at which step it begins to train."""
        here = Start(os.getpid(), dist.rank(), dist.world_size(), step)
        with self._script.starts.open("a") as file:
            file.write(json.dumps(asdict(here)) + "\n")

    def poison(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, but for the next one with samples where it is to be poisoned."""
        for batch in batches:
            if self.poisoned and len(batch.ids):
                self.poisoned = False
                batch = replace(batch, images=batch.images * float("nan"))
            yield batch


def _signal(signum: signal.Signals, *, agent: bool = False) -> Callable[[Saboteur], None]:
    def fault(_: Saboteur) -> None:
        os.kill(os.getppid() if agent else os.getpid(), signum)

    return fault


def _crash(_: Saboteur) -> None:
    """What native code does on a bad pointer, without the core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)


def _exception(_: Saboteur) -> None:
    raise RuntimeError("an exception of the drill")


def _out_of_memory(_: Saboteur) -> None:
    raise torch.OutOfMemoryError("an out-of-memory error of the drill")


def _kill_writer(saboteur: Saboteur) -> None:
    assert saboteur.writer is not None
    os.kill(saboteur.writer.pid, signal.SIGKILL)


def _nan(saboteur: Saboteur) -> None:
    saboteur.poisoned = True


def _disk_full(_: Saboteur) -> None:
    """No file of this process grows any more; the store takes EFBIG as it takes ENOSPC."""
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (_FULL_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )


FAULTS: dict[str, Callable[[Saboteur], None]] = {
    "crash": _crash,
    "exception": _exception,
    "OOM": _out_of_memory,
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "NaN": _nan,
    "disk full": _disk_full,
    WRITER: _kill_writer,
    "SIGTERM agent": _signal(signal.SIGTERM, agent=True),
    "SIGKILL agent": _signal(signal.SIGKILL, agent=True),
}
"""What can happen to a process of a run, or through it to the agent that started it."""


def run(config: Config, plan: Plan, run_dir: Path, stop: StopRequest) -> dict[str, Any]:
    """Train as the real worker, with what the script has in store for this process."""
    _install(Saboteur(Script.read(os.environ)))
    return worker.run(config, plan, run_dir, stop)


def _install(saboteur: Saboteur) -> None:
    def start(*_: Any) -> None:
        saboteur.sign_in(None)
        saboteur.at("start")

    def fit(training: Training) -> None:
        saboteur.training = training
        saboteur.sign_in(training.state.progress.step)

    def save(_: Store, step: int, *__: Any) -> None:
        saboteur.saving = step

    def begin(writer: Writer, step: int, *_: Any) -> None:
        saboteur.writer = writer
        saboteur.at("save", step)

    _before(Writer, "begin", begin)
    _before(worker, "compose", start)
    _before(worker, "fit", fit)
    _before(loop, "train_window", lambda *_: saboteur.at("step"))
    _before(loop, "evaluate", lambda *_: saboteur.at("evaluate"))
    _before(Store, "save", save)
    # Not at the door but in the middle: the shards are written, and not yet committed. Training
    # may be some steps ahead.
    _before(saver, "describe", lambda _: saboteur.at("save", saboteur.saving))
    batches = Loader.batches
    poisoned = wraps(batches)(lambda *args: saboteur.poison(batches(*args)))
    setattr(Loader, "batches", poisoned)  # noqa: B010 (a plain assignment is no type of mypy's)


def _before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Let ``action`` see the positional arguments of each call of ``owner.name``."""
    real = getattr(owner, name)

    @wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        action(*args)
        return real(*args, **kwargs)

    setattr(owner, name, call)
