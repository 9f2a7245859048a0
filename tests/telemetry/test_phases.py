"""Where a process is, told by a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

from lockstep.telemetry.phases import Phases, flight_path, read_phases, stack_path


def test_the_last_phase_can_be_read(tmp_path: Path) -> None:
    phases = Phases(tmp_path / "logs", 3, timeout_seconds=60)
    phases.enter("start", 0)
    phases.enter("data", 40)
    phases.enter("forward", 40)
    (phase,) = read_phases(tmp_path / "logs")
    assert (phase.rank, phase.pid, phase.count) == (3, os.getpid(), 3)
    assert (phase.name, phase.step, phase.steps_here) == ("forward", 40, 0)
    assert phase.began <= phase.since <= time.time()
    phases.enter("data", 41)
    assert [p.steps_here for p in read_phases(tmp_path / "logs")] == [1]
    phases.close()
    assert read_phases(tmp_path / "logs")[0].name == "data", "it outlives the process"


def test_a_torn_file_is_left_out(tmp_path: Path) -> None:
    for rank in (1, 0):
        phases = Phases(tmp_path, rank, timeout_seconds=60)
        phases.enter("save", 2)
        phases.close()
    (tmp_path / "phase-rank-2").write_text('{"rank": 2, "pi')
    assert [phase.rank for phase in read_phases(tmp_path)] == [0, 1]


def test_a_folder_that_refuses_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    phases = Phases(tmp_path / "logs", 0, timeout_seconds=60)
    phases.enter("data", 1)
    phases.close()


def test_who_waits_for_long_writes_where(tmp_path: Path) -> None:
    phases = Phases(tmp_path, 0, timeout_seconds=0.2)
    phases.enter("backward", 1)
    deadline = time.monotonic() + 20
    while not flight_path(tmp_path, 0).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    phases.close()
    assert "test_who_waits_for_long_writes_where" in stack_path(tmp_path, 0).read_text()
    assert flight_path(tmp_path, 0).exists()
