"""Which process hangs, from what all of them have written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from lockstep.launch.hang import find_hang, process_state
from lockstep.telemetry.phases import Phase, flight_path

TIMEOUT = 10.0


def write(logs: Path, rank: int, **changes: Any) -> None:
    now = time.time()
    values = {
        "rank": rank, "pid": os.getpid(), "count": 50, "step": 11, "name": "backward",
        "since": now - 30, "began": now - 100, "steps_here": 5,
    }  # fmt: skip
    phase = Phase(**(values | changes))
    (logs / f"phase-rank-{rank}").write_text(json.dumps(asdict(phase)))


def test_the_rank_that_is_behind_is_named(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1, count=48, name="data", since=time.time() - 33)
    write(tmp_path, 2)
    entries = [
        {"retired": True, "profiling_name": "nccl:all_gather", "collective_seq_id": 76},
        {"retired": False, "profiling_name": "nccl:all_reduce", "collective_seq_id": 77},
    ]
    flight_path(tmp_path, 0).write_text(json.dumps({"entries": entries}))
    said = find_hang(tmp_path, [0, 1, 2], 3, TIMEOUT)
    assert said == (
        "rank 1 hangs: for 33 s it has not left data of step 12; rank 0, 2 waits for it in "
        "backward of step 12, in nccl:all_reduce number 77 (launch.timeout_seconds = 10)"
    )


@pytest.mark.parametrize(
    "changes, ranks",
    [
        pytest.param({"since": time.time() + 1e6}, [0, 1], id="one goes on"),
        pytest.param({"steps_here": 0}, [0, 1], id="one may still compile"),
        pytest.param({}, [0, 1, 2], id="one has not begun"),
    ],
)
def test_no_hang(tmp_path: Path, changes: dict[str, Any], ranks: list[int]) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1, **changes)
    assert find_hang(tmp_path, ranks, 3, TIMEOUT) is None


def test_ranks_of_another_machine_and_of_a_former_group(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1, count=40)  # of another machine: seen, not asked for
    write(tmp_path, 2, count=3, since=time.time() - 900, began=time.time() - 999)  # long gone
    said = find_hang(tmp_path, [0], 2, TIMEOUT)
    assert said is not None and said.startswith("rank 1 hangs") and "rank 2" not in said


def test_all_alike(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank)
    said = find_hang(tmp_path, [0, 1], 3, TIMEOUT)
    assert said is not None and said.startswith("all ranks stand still in backward of step 12")


def test_the_end_is_no_hang(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, name="finish")
    assert find_hang(tmp_path, [0, 1], 2, TIMEOUT) is None


def test_a_slow_disk_is_no_hang(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(tmp_path, rank, name="save")
    assert find_hang(tmp_path, [0, 1], 3, TIMEOUT) is None
    for rank in (0, 1):
        write(tmp_path, rank, name="save", since=time.time() - 11 * TIMEOUT)
    assert find_hang(tmp_path, [0, 1], 3, TIMEOUT) is not None


def test_a_stopped_process_is_the_one(tmp_path: Path) -> None:
    """Even when it is no phase behind."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        child.send_signal(signal.SIGSTOP)
        while process_state(child.pid) != "T":
            time.sleep(0.01)
        write(tmp_path, 0)
        write(tmp_path, 1, pid=child.pid)
        said = find_hang(tmp_path, [0, 1], 3, TIMEOUT)
        assert said is not None
        assert said.startswith("rank 1 hangs") and "stopped by a signal (SIGSTOP)" in said
    finally:
        child.kill()
        child.wait()
    assert process_state(child.pid) is None
