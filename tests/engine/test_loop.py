"""The loop: when things happen, and how a run ends before its time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.schema import Config
from lockstep.engine import loop
from lockstep.engine.loop import due, forward_size
from lockstep.engine.state import Progress, TrainState
from lockstep.errors import UserError
from lockstep.metrics import EvalResult
from tests.runs import configure, plan_of, records, train_one_rank


@pytest.fixture
def config(few_digits: Path) -> Any:
    def make(*overrides: str) -> Config:
        return configure(
            f"data.root={few_digits}",
            *("data.image_size=16", "data.num_classes=4", "data.workers=1", "device=cpu"),
            *("model=vit_tiny", "+model.kwargs.depth=1", "+model.kwargs.embed_dim=48"),
            *("batch.global=20", "epochs=2", "telemetry.console=false"),
            *overrides,
        )

    return make


@pytest.mark.parametrize(
    "progress, epochs, steps, expected",
    [
        pytest.param(Progress(step=5, consumed=3), None, None, False, id="never"),
        pytest.param(Progress(step=6, consumed=3), None, 3, True, id="every third step"),
        pytest.param(Progress(step=7, consumed=3), None, 3, False, id="between"),
        pytest.param(Progress(step=7, epoch=1, consumed=0), 1, None, True, id="end of epoch"),
        pytest.param(Progress(step=7, epoch=1, consumed=5), 1, None, False, id="within epoch"),
        pytest.param(Progress(step=7, epoch=1, consumed=0), 2, None, False, id="odd epoch"),
        pytest.param(Progress(step=7, epoch=2, consumed=0), 2, None, True, id="even epoch"),
        pytest.param(Progress(step=7, epoch=1, consumed=0), 1, 5, True, id="either"),
    ],
)
def test_due(progress: Progress, epochs: int | None, steps: int | None, expected: bool) -> None:
    assert due(progress, epochs, steps) is expected


def test_forward_size_is_that_of_all_devices(config: Any) -> None:
    assert forward_size(plan_of(config())) is None
    assert forward_size(plan_of(config("batch.micro=3"))) == 3


@pytest.mark.parametrize(
    "overrides, evaluated, saved",
    [
        pytest.param([], [3, 6], [3, 6], id="every epoch"),
        pytest.param(
            ["evaluate.every_epochs=null", "checkpoint.every_epochs=null"],
            [6],
            [6],
            id="the last step alone",
        ),
        pytest.param(
            ["evaluate.every_steps=2", "evaluate.every_epochs=null", "checkpoint.every_steps=4"],
            [2, 4, 6],
            [3, 4, 6],
            id="steps",
        ),
        pytest.param(["steps=4"], [3, 4], [3, 4], id="ends within an epoch"),
        pytest.param(["stop_at=2"], [], [2], id="stopped: saved, not evaluated"),
    ],
)
def test_when(
    config: Any, tmp_path: Path, overrides: list[str], evaluated: list[int], saved: list[int]
) -> None:
    cfg = config("checkpoint.keep_last=9", *overrides)
    train_one_rank(cfg, plan_of(cfg), tmp_path)
    assert [r["step"] for r in records(tmp_path, "eval")] == evaluated
    steps = sorted(int(p.name.split("-")[1]) for p in (tmp_path / "checkpoints").glob("step-*"))
    assert steps == saved


def test_windows_cover_every_epoch_once(config: Any, tmp_path: Path) -> None:
    cfg = config("epochs=3")
    train_one_rank(cfg, plan_of(cfg), tmp_path)
    steps = records(tmp_path, "step")
    assert [s["epoch"] for s in steps] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    parts = [[int(s["sample_digest"][i : i + 6], 16) for i in (0, 6, 12, 18)] for s in steps]
    epochs = [
        [sum(column) % 2**24 for column in zip(*parts[i : i + 3], strict=True)] for i in (0, 3, 6)
    ]
    assert epochs[0] == epochs[1] == epochs[2], "the same samples"
    assert steps[0]["sample_digest"] != steps[3]["sample_digest"], "in another order"


def test_the_best_is_remembered(config: Any, tmp_path: Path, monkeypatch: Any) -> None:
    figures = iter([30.0, 50.0, 40.0, 50.0])
    monkeypatch.setattr(
        "lockstep.engine.loop.evaluate",
        lambda *_, **__: EvalResult(top1=next(figures), top5=100.0, loss=1.0, count=23),
    )
    cfg = config("epochs=4")
    summary = train_one_rank(cfg, plan_of(cfg), tmp_path)
    assert summary is not None
    assert (summary["top1"], summary["best_top1"], summary["best_step"]) == (50.0, 50.0, 6)


@pytest.mark.parametrize(
    "where, message",
    [
        pytest.param("weight", "step 4: the loss is nan", id="loss"),
        pytest.param("gradient", "step 4: the gradient norm is nan", id="gradient alone"),
    ],
)
def test_a_nan_stops_with_one_message_and_none_of_it_is_saved(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, message: str
) -> None:
    step, after = loop.micro_step, loop.update

    def poison_weight(state: TrainState, *args: Any, **kwargs: Any) -> None:
        if where == "weight" and state.progress.step == 3:
            with torch.no_grad():
                next(state.model.parameters()).fill_(torch.nan)
        step(state, *args, **kwargs)

    def poison_gradient(state: TrainState, *args: Any, **kwargs: Any) -> torch.Tensor:
        if where == "gradient" and state.progress.step == 3:
            parameter = next(state.model.parameters())
            parameter.grad = torch.full_like(parameter, torch.nan)
        return after(state, *args, **kwargs)

    monkeypatch.setattr(loop, "micro_step", poison_weight)
    monkeypatch.setattr(loop, "update", poison_gradient)
    cfg = config("checkpoint.every_steps=1", "checkpoint.keep_last=9", "checkpoint.keep_best=false")
    with pytest.raises(UserError, match=message):
        train_one_rank(cfg, plan_of(cfg), tmp_path)
    saved = sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-1", "step-2", "step-3"]
    assert records(tmp_path, "step")[-1]["step"] == 4


def test_a_learning_rate_that_blows_up(config: Any, tmp_path: Path) -> None:
    cfg = config(
        "optimizer=sgd", "optimizer.lr=1e30", "schedule=constant", "optimizer.base_batch=null"
    )
    with pytest.raises(UserError, match=r"Learning rate 1e\+30.*Lower optimizer.lr"):
        train_one_rank(cfg, plan_of(cfg), tmp_path)
