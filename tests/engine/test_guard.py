"""What happens when a step goes wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lockstep.config.schema import Config
from lockstep.data.loader import Batch
from lockstep.engine import guard as guard_module
from lockstep.engine import loop
from lockstep.engine.guard import RollBack, StepGuard, StragglerWatch
from lockstep.engine.state import TrainState
from lockstep.engine.step import SampleLosses
from lockstep.errors import UserError
from tests.runs import configure, plan_of, records, train_one_rank
from tests.toys import guard_config


class Source:
    """Names samples."""

    def name(self, index: int) -> str:
        return f"cat/{index}.jpg"


def losses(*values: float) -> SampleLosses:
    """Of samples 10, 11, ...; the last sample does not count."""
    result = SampleLosses()
    weights = torch.ones(len(values) + 1)
    weights[-1] = 0
    ids = 10 + np.arange(len(values))
    result.add(ids, torch.tensor([*values, math.nan]), weights)
    return result


def guard(recent: list[float] | None = None, **changes: Any) -> StepGuard:
    source: Any = Source()
    return StepGuard(guard_config(**changes), source, [] if recent is None else recent)


def record(step: int = 7, loss: float = 1.0) -> dict[str, Any]:
    return {"step": step, "loss": loss, "lr": 0.1}


# --- judging ----------------------------------------------------------------------------------


def test_the_samples_and_their_rank_are_named() -> None:
    with pytest.raises(UserError) as caught:
        guard().check(record(), "the loss is nan", losses(1.0, math.nan, 2.0), left_out=False)
    assert "step 7: the loss is nan (rank 0: cat/11.jpg (id 11))" in str(caught.value)
    with pytest.raises(UserError, match=r"6 of 6 samples, as cat/10.jpg \(id 10\)"):
        guard().check(record(), "the loss is inf", losses(*[math.inf] * 6), left_out=False)
    with pytest.raises(UserError, match="each sample's loss is finite: the backward pass"):
        guard().check(record(), "the gradient norm is nan", losses(1.0), left_out=False)


def test_skipping_has_an_end() -> None:
    bad = guard(nonfinite="skip", max_incidents=2)
    for step in (1, 2):
        note = bad.check(record(step), "the loss is nan", losses(math.nan), left_out=False)
        assert note is not None and f"step {step}" in note and "left out" in note
    assert bad.check(record(3), None, losses(1.0), left_out=False) is None
    for step in (4, 5):
        bad.check(record(step), "the loss is nan", losses(math.nan), left_out=False)
    with pytest.raises(UserError, match=r"more than guard.max_incidents = 2 steps in a row"):
        bad.check(record(6), "the loss is nan", losses(math.nan), left_out=False)


def test_rolling_back() -> None:
    bad = guard(nonfinite="rollback")
    with pytest.raises(RollBack, match="step 7: the loss is nan") as caught:
        bad.check(record(), "the loss is nan", losses(math.nan), left_out=False)
    assert caught.value.steps == [7]
    note = bad.check(record(), "the loss is nan", losses(math.nan), left_out=True)
    assert note is not None and "again" in note


def test_a_spike_is_measured_by_the_recent_median() -> None:
    recent = [1.0] * 19
    spiky = guard(recent, spike=3.0)
    spiky.check(record(20, 9.0), None, losses(9.0), left_out=False)  # too few to judge
    spiky.check(record(21, 2.9), None, losses(2.9), left_out=False)
    spiky.check(record(22, 9.0), None, losses(9.0), left_out=True)  # not judged
    assert recent == [*[1.0] * 19, 9.0, 2.9]
    with pytest.raises(RollBack, match=r"loss 3.1 is 3.1 times the usual 1") as caught:
        spiky.check(record(23, 3.1), None, losses(3.1), left_out=False)
    assert caught.value.steps == [22, 23]
    for step in range(100):
        spiky.check(record(step, 1.0), None, losses(1.0), left_out=False)
    assert recent == [1.0] * 50


def test_no_spike_over_a_loss_of_nothing() -> None:
    assert (
        guard([0.0] * 50, spike=3.0).check(record(60, 1e-6), None, losses(1e-6), left_out=False)
        is None
    )


def test_no_spike_without_the_option() -> None:
    recent: list[float] = [1.0] * 50
    assert guard(recent).check(record(60, 1e9), None, losses(1e9), left_out=False) is None


@pytest.mark.parametrize(
    "seconds, factor, found",
    [
        pytest.param([[0.1, 0.5], [0.1, 0.5]], 1.5, None, id="alike"),
        pytest.param(
            [[0.1, 0.5], [0.3, 0.5]], 1.5, "rank 1 .* data", id="one of two waits for data"
        ),
        pytest.param([[0.1, 0.9], [0.1, 0.5], [0.1, 0.5]], 1.5, "rank 0 .* forward", id="forward"),
        pytest.param([[0.001, 0.5], [0.009, 0.5]], 1.5, None, id="too little to matter"),
        pytest.param([[0.1, 0.5], [0.3, 0.5]], 4.0, None, id="below the factor"),
        pytest.param([[0.1, 0.5], [0.3, 0.5]], None, None, id="off"),
        pytest.param([[9.0, 0.5]], 1.5, None, id="alone"),
    ],
)
def test_straggler(seconds: list[list[float]], factor: float | None, found: str | None) -> None:
    watch = StragglerWatch(factor, ranks_meet_in_forward=False)
    notes = [watch.add(np.array(seconds), 1.0) for _ in range(200)]
    told = [note for note in notes if note is not None]
    assert len(told) == (found is not None), "once"
    if found is not None:
        import re

        assert re.search(found, told[0])


# --- real runs --------------------------------------------------------------------------------


@pytest.fixture
def config(few_digits: Path) -> Callable[..., Config]:
    def make(*overrides: str) -> Config:
        return configure(
            f"data.root={few_digits}",
            *("data.image_size=16", "data.num_classes=4", "data.workers=1", "device=cpu"),
            *("model=timm", "model.name=test_resnet", "batch.global=20", "epochs=3"),
            *("batch.micro=10", "optimizer.lr=0.001", "telemetry.console=false"),
            *("checkpoint.every_epochs=null", "checkpoint.every_steps=2", *overrides),
        )

    return make


def poison(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The images of one step are NaN, however often it comes."""
    real = loop.micro_step

    def poisoned(
        state: TrainState, strategy: Any, precision: Any, batch: Batch, *a: Any, **k: Any
    ) -> None:
        if state.progress.step == step - 1:
            batch.images.fill_(torch.nan)
        real(state, strategy, precision, batch, *a, **k)

    monkeypatch.setattr(loop, "micro_step", poisoned)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_bad_step_leaves_no_trace(
    config: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    policy: str,
) -> None:
    """BatchNorm's statistics included: a NaN in them would stay for ever."""
    poison(monkeypatch, step=4)
    run = tmp_path / policy
    cfg = config(f"guard.nonfinite={policy}")
    summary = train_one_rank(cfg, plan_of(cfg), run)
    assert summary is not None and math.isfinite(summary["loss"])
    assert summary["skipped_steps"] == ([4] if policy == "rollback" else [])
    steps = records(run, "step")
    assert [s["step"] for s in steps] == list(range(1, 10))
    assert [s["step"] for s in steps if s["loss"] is None] == [4]
    said = capfd.readouterr().err
    assert "step 4: the loss is nan (rank 0: 20 of 20 samples, as " in said
    assert "left out" in said
    weights = load_file(run / "model.safetensors")
    assert all(w.isfinite().all() for w in weights.values() if w.is_floating_point())


def test_both_policies_leave_out_the_same(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, step=4)
    for policy in ("skip", "rollback"):
        cfg = config(f"guard.nonfinite={policy}")
        train_one_rank(cfg, plan_of(cfg), tmp_path / policy)
    a, b = (load_file(tmp_path / p / "model.safetensors") for p in ("skip", "rollback"))
    a, b = ({n: w for n, w in x.items() if w.is_floating_point()} for x in (a, b))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_saving_before_the_first_update_changes_nothing(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither memory for a save behind the training, nor a save, nor a resume from it."""
    poison(monkeypatch, step=1)
    ways = {
        "late": ["checkpoint.async=false", "checkpoint.every_steps=9"],
        "behind": ["checkpoint.async=true"],
        "each": ["checkpoint.async=false", "checkpoint.every_steps=1"],
        "parts": ["checkpoint.async=true", "stop_at=1"],
    }
    for name, words in ways.items():
        cfg = config("guard.nonfinite=skip", *words)
        train_one_rank(cfg, plan_of(cfg), tmp_path / name)
    cfg = config("guard.nonfinite=skip")
    train_one_rank(cfg, plan_of(cfg), tmp_path / "parts")
    late, *others = (
        [(s["step"], s["loss"]) for s in records(tmp_path / name, "step")] for name in ways
    )
    assert len(late) == 9 and late[0] == (1, None)
    assert others == [late] * 3


def test_a_left_out_step_stays_left_out_after_a_resume(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, step=4)
    cfg = config("guard.nonfinite=rollback", "stop_at=6")
    assert train_one_rank(cfg, plan_of(cfg), tmp_path) is None
    cfg = config()  # with guard.nonfinite=stop
    summary = train_one_rank(cfg, plan_of(cfg), tmp_path)
    assert summary is not None and summary["skipped_steps"] == [4]


def test_rolling_back_has_an_end(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.micro_step

    def poisoned(
        state: TrainState, strategy: Any, precision: Any, batch: Batch, *a: Any, **k: Any
    ) -> None:
        if state.progress.step >= 3:
            batch.images.fill_(torch.nan)
        real(state, strategy, precision, batch, *a, **k)

    monkeypatch.setattr(loop, "micro_step", poisoned)
    cfg = config("guard.nonfinite=rollback", "guard.max_incidents=2")
    with pytest.raises(UserError, match=r"step 6: .*more than guard.max_incidents = 2 rollbacks"):
        train_one_rank(cfg, plan_of(cfg), tmp_path)


def test_a_spike_is_left_behind_with_the_update_before_it(
    config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint that holds that update is not gone on from, though its loss was fine."""
    monkeypatch.setattr(guard_module, "SPIKE_LEAST", 3)
    real = loop.micro_step

    def spiky(
        state: TrainState, strategy: Any, precision: Any, batch: Batch, *a: Any, **k: Any
    ) -> None:
        real(state, strategy, precision, batch, *a, **k)
        if state.progress.step == 5:
            a[0].loss.mul_(100)

    monkeypatch.setattr(loop, "micro_step", spiky)
    cfg = config("guard.spike=10", "checkpoint.every_steps=1", "resume=never")
    summary = train_one_rank(cfg, plan_of(cfg), tmp_path)
    assert summary is not None and summary["skipped_steps"] == [5, 6]
    assert [s["step"] for s in records(tmp_path, "step")] == list(range(1, 10))
