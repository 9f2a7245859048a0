"""metrics.jsonl survives crashes and resumes; history.csv follows from it."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from lockstep.errors import UserError
from lockstep.telemetry.files import HistoryFile, MetricsFile, read_records
from lockstep.telemetry.records import EVAL_KEYS, STEP_KEYS, Row


def step(number: int, **changes: Any) -> dict[str, Any]:
    # Not in the order of the file, as the engine may build it.
    return {
        "sample_digest": f"{number:024x}",
        "time": 1.8e9 + number,
        "step": number,
        "kind": "step",
        "epoch": 1,
        "lr": 0.1,
        "loss": 1.5,
        "grad_norm": 2.0,
        "samples_seen": 8 * number,
        "samples_per_second": 100.0,
        "data_wait_fraction": 0.0,
    } | changes


def evaluation(number: int) -> dict[str, Any]:
    return {
        "step": number,
        "kind": "eval",
        "weights": "raw",
        "top1": 50.0,
        "top5": 90.0,
        "loss": 0.5,
        "count": 10,
    }


def write(path: Path, *records: dict[str, Any], keep_to_step: int = 0) -> MetricsFile:
    sink = MetricsFile(path, keep_to_step=keep_to_step)
    for record in records:
        (sink.step if record["kind"] == "step" else sink.evaluation)(record)
    return sink


def test_records_are_complete_and_ordered(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), evaluation(1))
    # Not closed: every line must be there at once.
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [tuple(line) for line in lines] == [STEP_KEYS, EVAL_KEYS]
    assert lines == [step(1), evaluation(1)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_non_finite_figures_are_null(tmp_path: Path, value: float) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1, loss=value)).close(None)
    assert next(read_records(path))["loss"] is None
    assert b"NaN" not in path.read_bytes() and b"Infinity" not in path.read_bytes()


@pytest.mark.parametrize(
    "tail",
    [
        pytest.param(b"", id="clean"),
        pytest.param(b'{"kind": "step", "st', id="torn line"),
        pytest.param(b'{"kind": "step", "step": 4}', id="line without its end"),
        pytest.param(b"\x00\x00\x00", id="zeros after a power cut"),
    ],
)
@pytest.mark.parametrize("resume", [0, 2, 3, 9])
def test_a_resumed_file_equals_an_uninterrupted_one(
    tmp_path: Path, resume: int, tail: bytes
) -> None:
    records = [step(1), step(2), evaluation(2), step(3)]
    write(tmp_path / "whole", *records).close(None)
    path = tmp_path / "joined"
    write(path, *records).close(None)
    with path.open("ab") as file:
        file.write(tail)
    sink = write(path, *(r for r in records if r["step"] > resume), keep_to_step=resume)
    assert not sink.notes
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


def test_damage_in_the_middle_is_dropped_and_told(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), step(2), step(3)).close(None)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\xff\xfe{}\n[1]\n" + lines[2])
    sink = MetricsFile(path, keep_to_step=3)
    assert [record["step"] for record in read_records(path)] == [1, 3]
    assert "2 damaged lines" in sink.notes[0]


def test_a_clean_file_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(1)).close(None)
    inode = path.stat().st_ino
    MetricsFile(path, keep_to_step=1)
    assert path.stat().st_ino == inode


def test_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    sink = MetricsFile(tmp_path / "metrics.jsonl", keep_to_step=0)
    # Refuses every write with ENOSPC.
    sink._file = Path("/dev/full").open("a", buffering=1)  # noqa: SIM115
    with pytest.raises(
        UserError, match=r"metrics\.jsonl cannot be written: No space left on device"
    ):
        sink.step(step(1))


def test_an_unwritable_folder_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        MetricsFile(tmp_path / "absent" / "metrics.jsonl", keep_to_step=0)


def test_history_is_rebuilt_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_text("what a crash left")
    first = Row(2, 1, 0.5, 0.1, 0.25, 50.0, 90.0, None, 100.0)
    second = Row(4, None, None, None, 0.125, 60.0, 95.0, 61.0, None)
    sink = HistoryFile(path, [first])
    sink.row(second)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["ema_top1"] == "" and rows[0]["train_loss"] == "0.5"
    assert rows[1] == {
        "step": "4",
        "epoch": "",
        "train_loss": "",
        "lr": "",
        "val_loss": "0.125",
        "top1": "60.0",
        "top5": "95.0",
        "ema_top1": "61.0",
        "samples_per_second": "",
    }
