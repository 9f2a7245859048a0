"""Every sink is told everything; one that fails hurts nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.config.schema import Telemetry as TelemetryConfig
from lockstep.errors import UserError
from lockstep.telemetry import Telemetry, open_telemetry
from lockstep.telemetry.records import Record, Row, Sink


def config(**changes: Any) -> TelemetryConfig:
    values: dict[str, Any] = {
        "console": True,
        "console_seconds": 10.0,
        "wandb": False,
        "wandb_project": "lockstep",
        "wandb_mode": "offline",
    }
    return TelemetryConfig(**values | changes)


def step(number: int) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "epoch": 1,
        "loss": float(number),
        "lr": 0.1,
        "grad_norm": 1.0,
        "samples_seen": 8 * number,
        "samples_per_second": 100.0,
        "data_wait_fraction": 0.0,
        "sample_digest": "0" * 24,
    }


def evaluation(number: int, weights: str = "raw") -> dict[str, Any]:
    return {
        "kind": "eval",
        "step": number,
        "weights": weights,
        "top1": 50.0,
        "top5": 90.0,
        "loss": 0.5,
        "count": 10,
    }


def open_in(run_dir: Path, *, resume_step: int = 0, **changes: Any) -> Telemetry:
    return open_telemetry(
        config(**changes),
        run_dir=run_dir,
        config={"seed": 0},
        run_name=run_dir.name,
        total_steps=4,
        steps_per_epoch=2,
        resume_step=resume_step,
    )


def tell(telemetry: Telemetry, *records: dict[str, Any]) -> None:
    for record in records:
        (telemetry.step if record["kind"] == "step" else telemetry.evaluation)(record)


class Diary(Sink):
    """Writes down what it is told."""

    name = "diary"

    def __init__(self, fails_at: str = "") -> None:
        self.told: list[str] = []
        self._fails_at = fails_at

    def _note(self, what: str) -> None:
        self.told.append(what)
        if what.startswith(self._fails_at or "never"):
            raise ConnectionError("no network")

    def step(self, record: Record) -> None:
        self._note(f"step {record['step']}")

    def evaluation(self, record: Record) -> None:
        self._note(f"eval {record['step']} {record['weights']}")

    def row(self, row: Row) -> None:
        self._note(f"row {row.step}")

    def message(self, text: str) -> None:
        self._note(f"message {text}")

    def close(self, summary: dict[str, Any] | None) -> None:
        self._note(f"close {summary}")


RUN = [step(1), step(2), evaluation(2), evaluation(2, "ema"), step(3), step(4), evaluation(4)]


def test_order_of_what_is_told() -> None:
    diary = Diary()
    telemetry = Telemetry([diary])
    tell(telemetry, *RUN)
    telemetry.close({"top1": 50.0})
    assert diary.told == [
        "step 1",
        "step 2",
        "eval 2 raw",
        "eval 2 ema",
        "row 2",
        "step 3",
        "step 4",
        "eval 4 raw",
        "row 4",
        "close {'top1': 50.0}",
    ]


@pytest.mark.parametrize("fails_at", ["step 2", "eval", "row", "message", "close"])
def test_a_failing_sink_is_dropped_with_one_warning(fails_at: str) -> None:
    failing, diary = Diary(fails_at), Diary()
    telemetry = Telemetry([failing, diary])
    telemetry.message("hello")
    tell(telemetry, *RUN)
    telemetry.close(None)
    warnings = [text for text in diary.told if text.startswith("message warning")]
    assert warnings == [
        "message warning: diary failed and is left out from here on (ConnectionError: no network)"
    ]
    assert failing.told[-1].startswith(fails_at)
    assert [text for text in diary.told if not text.startswith("message")] == [
        "step 1",
        "step 2",
        "eval 2 raw",
        "eval 2 ema",
        "row 2",
        "step 3",
        "step 4",
        "eval 4 raw",
        "row 4",
        "close None",
    ]


def test_all_views_failing_at_once() -> None:
    telemetry = Telemetry([Diary("step"), Diary("step"), Diary("message")])
    tell(telemetry, *RUN)
    telemetry.close(None)


def test_the_failure_of_a_console_is_told_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Diary):
        speaks = True

    telemetry = Telemetry([Broken("step")])
    tell(telemetry, *RUN)
    assert "warning: diary failed" in capsys.readouterr().err


def test_the_failure_of_the_truth_ends_the_run_but_the_others_are_closed() -> None:
    class Truth(Diary):
        essential = True

    truth, diary = Truth("close"), Diary()
    telemetry = Telemetry([truth, diary])
    with pytest.raises(ConnectionError):
        telemetry.close(None)
    telemetry.close(None)  # as whoever sees the error does
    assert truth.told == diary.told == ["close None"]


def test_without_sinks_nothing_happens(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry = Telemetry([])
    tell(telemetry, *RUN)
    telemetry.message("hello")
    telemetry.close(None)
    assert capsys.readouterr() == ("", "")


# A checkpoint of step 2 is saved after its evaluation, the fourth record.
@pytest.mark.parametrize(
    "resume_step, crash_after",
    [(0, n) for n in range(len(RUN) + 1)] + [(2, n) for n in range(4, len(RUN) + 1)],
)
def test_an_interrupted_run_leaves_the_files_of_an_uninterrupted_one(
    tmp_path: Path, resume_step: int, crash_after: int
) -> None:
    whole, joined = tmp_path / "whole", tmp_path / "joined"
    for folder in (whole, joined):
        folder.mkdir()
    telemetry = open_in(whole)
    tell(telemetry, *RUN)
    telemetry.close({})
    # Not closed: the process is gone.
    tell(open_in(joined), *RUN[:crash_after])
    telemetry = open_in(joined, resume_step=resume_step)
    tell(telemetry, *(record for record in RUN if record["step"] > resume_step))
    telemetry.close({})
    for name in ("metrics.jsonl", "history.csv"):
        assert (joined / name).read_bytes() == (whole / name).read_bytes()


def test_stdout_holds_nothing_but_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry = open_in(tmp_path, console=False)
    telemetry.message("hello")
    tell(telemetry, *RUN)
    telemetry.close({})
    assert capsys.readouterr() == ("", "hello\n")


def test_a_view_that_cannot_be_opened_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "history.csv").mkdir()
    telemetry = open_in(tmp_path)
    tell(telemetry, *RUN)
    telemetry.close({})
    assert "warning: history.csv failed and is left out" in capsys.readouterr().out
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(RUN)


def test_a_truth_that_cannot_be_opened_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be written"):
        open_in(tmp_path)
