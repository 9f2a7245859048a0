"""Which process of a run stands still, in one sentence. Level 7."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lockstep.telemetry.phases import Phase, flight_path, read_phases

_DISK_FACTOR = 10
"""How much longer all may wait together for a disk than for one another."""


def find_hang(
    logs: Path, ranks: Collection[int], world_size: int, timeout_seconds: float
) -> str | None:
    """A sentence about the processes that keep the others waiting; None: the run goes on.

    Before a process has done its first step here it may compile for as long as it likes.

    Args:
        ranks: processes of this machine, which must be there; all others that can be seen count.
    """
    # A larger group before this one has left files of more ranks.
    phases = [phase for phase in read_phases(logs) if phase.rank < world_size]
    here = [phase for phase in phases if phase.rank in ranks]
    now = time.time()
    if len(here) < len(ranks) or any(phase.steps_here == 0 for phase in here):
        return None
    if any(phase.name == "finish" for phase in here):
        return None  # the rest is export and farewell, and each rank's own
    patience = timeout_seconds
    if all(phase.name == "save" for phase in phases):
        patience *= _DISK_FACTOR
    if min(now - phase.since for phase in phases) <= patience:
        return None
    stopped = [phase for phase in here if process_state(phase.pid) == "T"]
    behind = stopped or [p for p in phases if p.count == min(q.count for q in phases)]
    if len(behind) == len(phases) > 1 and not stopped:
        return (
            f"all ranks stand still in {_place(behind[0])} for {now - behind[-1].since:.0f} s"
            f"{_collective(logs, behind)} (launch.timeout_seconds = {timeout_seconds:g})"
        )
    waiting = [phase for phase in phases if phase not in behind]
    said = "; ".join(
        f"rank {phase.rank} hangs: for {now - phase.since:.0f} s it has not left "
        f"{_place(phase)}{_state(phase, stopped)}"
        for phase in behind
    )
    if waiting:
        ranks_waiting = ", ".join(str(phase.rank) for phase in waiting)
        said += (
            f"; rank {ranks_waiting} waits for it in {_place(waiting[0])}"
            f"{_collective(logs, waiting)}"
        )
    return f"{said} (launch.timeout_seconds = {timeout_seconds:g})"


def process_state(pid: int) -> str | None:
    """The kernel's letter for a process of this machine (T: stopped by a signal); None: unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def _place(phase: Phase) -> str:
    return f"{phase.name} of step {phase.step + 1}"


def _state(phase: Phase, stopped: Collection[Phase]) -> str:
    return ", its process is stopped by a signal (SIGSTOP)" if phase in stopped else ""


def _collective(logs: Path, phases: Collection[Phase]) -> str:
    """The collective that the first of these ranks waits in, from its flight record."""
    for phase in phases:
        try:
            record: dict[str, Any] = json.loads(flight_path(logs, phase.rank).read_text())
            entry = next(e for e in record["entries"] if not e["retired"])
            return f", in {entry['profiling_name']} number {entry['collective_seq_id']}"
        except (OSError, ValueError, LookupError, TypeError, StopIteration):
            continue
    return ""
