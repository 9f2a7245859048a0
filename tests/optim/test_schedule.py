"""The learning rate against closed forms and torch's schedulers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.config.schema import Schedule
from lockstep.optim.schedule import learning_rate

TOTAL, WARMUP, PEAK = 40, 8, 0.3


def config(name: str, **changes: Any) -> Schedule:
    values: dict[str, Any] = {
        "name": name,
        "warmup_epochs": 0,
        "warmup_start": 0.0,
        "final": 0.0,
        "milestones": (0.25, 0.5, 0.9),
        "factor": 0.1,
    }
    return Schedule(**(values | changes))


def curve(cfg: Schedule, total: int = TOTAL, warmup: int = WARMUP) -> list[float]:
    return [
        learning_rate(cfg, step=i, total_steps=total, warmup_steps=warmup, peak=PEAK)
        for i in range(total)
    ]


def reference(make: Any, total: int = TOTAL) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    scheduler = make(optimizer)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", ["cosine", "step", "constant"])
@pytest.mark.parametrize("start", [0.0, 0.01, 1.0])
def test_warm_up_is_linear(name: str, start: float) -> None:
    rates = curve(config(name, warmup_start=start, milestones=()))
    expected = reference(
        lambda o: torch.optim.lr_scheduler.LinearLR(o, max(start, 1e-12), total_iters=WARMUP)
    )
    assert rates[: WARMUP + 1] == pytest.approx(expected[: WARMUP + 1], abs=1e-9)
    assert rates[WARMUP] == PEAK


@pytest.mark.parametrize("final", [0.0, 0.1])
def test_cosine(final: float) -> None:
    rates = curve(config("cosine", final=final))[WARMUP:]
    expected = reference(
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(
            o, T_max=TOTAL - WARMUP - 1, eta_min=final * PEAK
        ),
        total=TOTAL - WARMUP,
    )
    assert rates == pytest.approx(expected, abs=1e-9)
    assert rates[-1] == pytest.approx(final * PEAK, abs=1e-12), "reached at the last step"


def test_step() -> None:
    expected = reference(
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, milestones=[10, 20, 36], gamma=0.1)
    )
    assert curve(config("step"), warmup=0) == pytest.approx(expected)


def test_constant() -> None:
    assert set(curve(config("constant"), warmup=0)) == {PEAK}


@pytest.mark.parametrize(
    "total, warmup, expected",
    [
        pytest.param(1, 0, [PEAK], id="one step"),
        pytest.param(2, 1, [0.0, PEAK], id="one after the warm-up"),
        pytest.param(2, 0, [PEAK, 0.0], id="two steps"),
    ],
)
def test_short_runs(total: int, warmup: int, expected: list[float]) -> None:
    assert curve(config("cosine"), total, warmup) == pytest.approx(expected)
