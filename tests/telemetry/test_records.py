"""Rows are derived alike from live and from replayed records."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lockstep.telemetry.records import History, Row


def step(number: int, loss: float | None = 1.0, speed: float | None = 100.0) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "epoch": 1 + number // 4,
        "loss": loss,
        "lr": number / 10,
        "samples_per_second": speed,
    }


def evaluation(number: int, weights: str = "raw", top1: float = 50.0) -> dict[str, Any]:
    return {
        "kind": "eval",
        "step": number,
        "weights": weights,
        "top1": top1,
        "top5": 90.0,
        "loss": 0.5,
        "count": 10,
    }


def test_row_sums_up_the_steps_since_the_row_before() -> None:
    records = [
        step(1, loss=9.0),
        evaluation(1),
        step(2, loss=1.0, speed=10.0),
        step(3, loss=2.0, speed=1000.0),
        step(4, loss=6.0, speed=20.0),
        evaluation(4, "raw", 60.0),
        evaluation(4, "ema", 70.0),
    ]
    assert History().replay(records)[1] == Row(
        step=4,
        epoch=2,
        train_loss=3.0,
        lr=0.4,
        val_loss=0.5,
        top1=60.0,
        top5=90.0,
        ema_top1=70.0,
        samples_per_second=20.0,
    )


@pytest.mark.parametrize(
    "records, steps",
    [
        pytest.param([], [], id="nothing"),
        pytest.param([step(1)], [], id="no evaluation"),
        pytest.param([evaluation(3)], [3], id="evaluation without a step"),
        pytest.param([evaluation(3), evaluation(3, "ema")], [3], id="two kinds of weights"),
        pytest.param([evaluation(3), evaluation(5)], [3, 5], id="two in a row"),
        pytest.param([evaluation(3, "ema")], [3], id="averaged weights alone"),
        pytest.param([{"kind": "other", "step": 1}, evaluation(3)], [3], id="unknown kind"),
    ],
)
def test_rows_of(records: list[dict[str, Any]], steps: list[int]) -> None:
    assert [row.step for row in History().replay(records)] == steps


def test_replaying_a_past_continues_like_living_it() -> None:
    past = [step(1, loss=2.0), evaluation(1), step(2, loss=4.0)]
    future = [step(3, loss=8.0), evaluation(3)]
    history = History()
    rows = history.replay(past) + history.replay(future)
    assert rows == History().replay(past + future)
    assert rows[1].train_loss == 6.0


def test_non_finite_figures() -> None:
    (row,) = History().replay([step(1, loss=None, speed=None), evaluation(1)])
    assert row.train_loss is not None and math.isnan(row.train_loss)
    assert row.samples_per_second is None
