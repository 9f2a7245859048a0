"""What people and logs see."""

from __future__ import annotations

import io
from typing import Any

import pytest

from lockstep.telemetry.console import (
    LiveConsole,
    Messages,
    Pace,
    PlainConsole,
    open_console,
)
from lockstep.telemetry.records import Row


def step(number: int, *, speed: float | None = 100.0, waited: float = 0.0) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "epoch": (number - 1) // 10 + 1,
        "loss": 1.5,
        "lr": 0.001,
        "samples_seen": 100 * number,
        "samples_per_second": speed,
        "data_wait_fraction": waited,
    }


class Clock:
    """Seconds that pass when told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(total_steps: int = 100, seconds: float = 10.0) -> tuple[PlainConsole, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    console = PlainConsole(
        stream, total_steps=total_steps, steps_per_epoch=10, seconds=seconds, clock=clock
    )
    return console, stream, clock


def shown_steps(stream: io.StringIO) -> list[int]:
    lines = stream.getvalue().splitlines()
    return [int(line.split("step")[1].split("/")[0]) for line in lines if "img/s" in line]


def test_plain_lines_come_by_time_and_always_first_and_last() -> None:
    console, stream, clock = plain(total_steps=35)
    for number in range(1, 36):
        clock.now = float(number)
        console.step(step(number))
    console.close({})
    assert shown_steps(stream) == [1, 11, 21, 31, 35]


def test_plain_lines_show_the_last_step_of_a_stopped_run() -> None:
    console, stream, _ = plain()
    for number in (1, 2, 3):
        console.step(step(number))
    console.close(None)
    assert shown_steps(stream) == [1, 3]


def test_plain_line() -> None:
    console, stream, clock = plain()
    console.step(step(1))
    clock.now = 10.0
    console.step(step(2, speed=1234.0, waited=0.034))
    assert stream.getvalue().splitlines()[1] == (
        "epoch  1/10  step   2/100  loss 1.5000  lr 1.00e-03  1,234 img/s  data wait 3%  "
        "ETA 0:16:20"
    )


def test_evaluation_lines_are_aligned() -> None:
    console, stream, _ = plain()
    console.row(Row(9, 1, 2.0, 0.1, 1.25, 9.5, 50.0, 8.25, 100.0))
    console.row(Row(100, 10, 0.5, 0.1, 0.25, 100.0, 100.0, 99.75, 100.0))
    console.row(Row(100, None, None, None, None, None, None, None, None))
    first, second, third = stream.getvalue().splitlines()
    tail = "val loss {}  train loss {}"
    left = "epoch  1/10  step   9/100  top-1   9.50 %  ema   8.25 %  "
    assert first == left + tail.format("1.2500", "2.0000")
    left = "epoch 10/10  step 100/100  top-1 100.00 %  ema  99.75 %  "
    assert second == left + tail.format("0.2500", "0.5000")
    left = "epoch  ?/10  step 100/100  top-1    nan %  "
    assert third == left + tail.format("nan", "nan")


def test_pace_averages_by_time_and_skips_the_first_step() -> None:
    pace = Pace()
    pace.add(step(1, speed=1.0, waited=1.0))
    assert pace.samples_per_second == 1.0
    pace.add(step(2, speed=100.0, waited=0.5))  # 1 second, half of it waiting
    pace.add(step(3, speed=25.0, waited=0.0))  # 4 seconds
    assert pace.samples_per_second == 200 / 5
    assert pace.data_wait_fraction == pytest.approx(0.5 / 5)


@pytest.mark.parametrize("speed", [None, 0.0, -1.0], ids=str)
def test_pace_ignores_an_impossible_speed(speed: float | None) -> None:
    pace = Pace()
    for record in (step(1), step(2), step(3, speed=speed)):
        pace.add(record)
    assert pace.samples_per_second == 100.0


@pytest.mark.parametrize(
    "speed, waited, count, warned",
    [
        pytest.param(50.0, 0.43, 60, True, id="long enough"),
        pytest.param(50.0, 0.19, 60, False, id="little waiting"),
        pytest.param(50.0, 0.43, 10, False, id="too short"),
        pytest.param(1.0, 0.43, 10, False, id="long but few steps"),
    ],
)
def test_waiting_for_images_is_told_once(
    speed: float, waited: float, count: int, warned: bool
) -> None:
    console, stream, _ = plain()
    for number in range(1, count + 1):
        console.step(step(number, speed=speed, waited=waited))
    warnings = [line for line in stream.getvalue().splitlines() if line.startswith("warning")]
    assert len(warnings) == warned
    assert all("waits for images 43% of the time" in line for line in warnings)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_lines_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    console = open_console(
        terminal, total_steps=100, steps_per_epoch=10, first_step=20, seconds=10.0
    )
    assert isinstance(console, LiveConsole)
    try:
        console.step(step(21))
        console.message("skipped [/bold] cat[1].png")
        console.row(Row(30, 3, 2.0, 0.1, 1.25, 9.5, 50.0, None, 100.0))
    finally:
        console.close(None)
    shown = terminal.getvalue()
    assert (
        "21/100" in shown
        and "loss 1.500 lr 1.0e-03 100 img/s wait 0%" in shown
        and "epoch  3/10" in shown
    )
    assert "skipped [/bold] cat[1].png" in shown
    assert shown.index("epoch  3/10  step  30/100  top-1   9.50 %") < shown.rindex("21/100")


@pytest.mark.parametrize("stream, term", [(io.StringIO(), "xterm"), (Terminal(), "dumb")])
def test_anything_else_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, term: str
) -> None:
    monkeypatch.setenv("TERM", term)
    console = open_console(stream, total_steps=1, steps_per_epoch=1, first_step=0, seconds=1.0)
    assert isinstance(console, PlainConsole)


def test_messages_alone() -> None:
    stream = io.StringIO()
    sink = Messages(stream)
    sink.step(step(1))
    sink.message("hello")
    assert stream.getvalue() == "hello\n"
