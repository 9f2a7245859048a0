"""What became of each job of a sweep: one small file a job, written whole or not at all. Level 7."""

from __future__ import annotations

import contextlib
import fcntl
import json
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lockstep.durable import atomic_write

State = Literal["waiting", "running", "done", "pruned", "stopped", "failed"]


@dataclass(frozen=True)
class Entry:
    """A job as the ledger knows it."""

    run: str
    """Name of the run's folder, which holds the configuration's fingerprint."""
    run_dir: str
    fingerprint: str
    varied: dict[str, str]
    """The keys in which the jobs differ, and this job's values."""
    state: State
    exit_code: int | None
    attempts: int
    seconds: float
    """Of all attempts."""
    host: str
    metrics: dict[str, float]
    """Of the last evaluation, the step as well; percent where they are shares."""
    seen: float
    """When a sweep looked at the job last, seconds since the epoch."""


class Ledger:
    """The entries below a sweep's folder, which several sweeps may write at the same time."""

    def __init__(self, sweep_dir: Path) -> None:
        self._folder = sweep_dir / "ledger"
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, entry: Entry) -> None:
        """Only for runs that are claimed."""
        atomic_write(self._path(entry.run), (json.dumps(asdict(entry), indent=1) + "\n").encode())

    def read(self, run: str) -> Entry | None:
        """What is known of a run."""
        try:
            return Entry(**json.loads(self._path(run).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def entries(self) -> list[Entry]:
        """All that are known, also of configurations that have changed since."""
        found = (self.read(path.stem) for path in sorted(self._folder.glob("*.json")))
        return [entry for entry in found if entry is not None]

    def _path(self, run: str) -> Path:
        return self._folder / f"{run}.json"


def claimed(root: Path, name: str, *, wait: bool = False) -> AbstractContextManager[object] | None:
    """Claim a run or a GPU until the returned context is left; None: somebody else has it.

    The kernel ends a claim when its holder ends, however that may be.

    Args:
        wait: until nobody else has it.
    """
    path = root / ".sweep" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        file.close()
        return None
    return contextlib.closing(file)
