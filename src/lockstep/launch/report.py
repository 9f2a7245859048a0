"""How a process of a run says why it ended, so that its launcher tells the user once. Level 7."""

from __future__ import annotations

import contextlib
import json
import re
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lockstep.durable import atomic_write
from lockstep.errors import NotBegun, Regroup, Stopped, UserError

_LOST_PEER = re.compile(
    r"Connection (closed|reset)|Broken pipe|connection (was|is) (closed|aborted)|remote process"
    r"|Dist(Backend|Network|Store)Error|Socket Timeout|NCCL communicator was aborted",
    re.IGNORECASE,
)

Kind = Literal["user", "stopped", "regroup", "crash"]


@dataclass(frozen=True)
class Report:
    """Why one process ended."""

    rank: int
    kind: Kind
    message: str
    traceback: str
    time: float
    """Seconds since the epoch."""

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Report:
        """Describe what escaped from a process."""
        kind: Kind = "crash"
        if isinstance(error, UserError):
            kind = "user"
        elif isinstance(error, Stopped | NotBegun):
            kind = "regroup" if isinstance(error, Regroup) else "stopped"
        text = "".join(traceback.format_exception(error))
        return cls(rank, kind, str(error) or type(error).__name__, text, time.time())

    @property
    def lost_peer(self) -> bool:
        """A consequence, most likely: it failed because another process had gone."""
        return self.kind == "crash" and _LOST_PEER.search(self.traceback) is not None

    def write(self, logs: Path) -> None:
        """Leave the report for the launcher. A full disk must not hide the failure itself."""
        with contextlib.suppress(OSError):
            atomic_write(_path(logs, self.rank), json.dumps(asdict(self)).encode())


def read_reports(logs: Path, since: float = 0.0) -> list[Report]:
    """The reports after ``since`` (seconds since the epoch), the most likely cause first."""
    reports = []
    for path in logs.glob("error-rank-*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            reports.append(Report(**json.loads(path.read_text())))
    reports = [report for report in reports if report.time >= since]
    return sorted(reports, key=lambda r: (r.lost_peer, r.time))


def clear_report(logs: Path, rank: int) -> None:
    """Forget what a rank's former attempts have left."""
    _path(logs, rank).unlink(missing_ok=True)


def log_path(logs: Path, rank: int) -> Path:
    """Where a rank's output goes; rank 0 keeps the terminal."""
    return logs / f"rank-{rank}.log"


def _path(logs: Path, rank: int) -> Path:
    return logs / f"error-rank-{rank}.json"
