"""From sums of ranks to records of ``metrics.jsonl``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import dist
from lockstep.checkpoint.store import Store
from lockstep.engine.guard import StepGuard, StragglerWatch
from lockstep.engine.record import Recorder
from lockstep.engine.step import StepSums, digest_of, digest_text
from lockstep.errors import UserError
from lockstep.telemetry import Telemetry
from tests.pool import on_group
from tests.toys import CPU, guard_config

FEW: Any = None  # names samples, which no step here has to


def sums(loss: float, ids: list[int]) -> StepSums:
    result = StepSums.on(CPU)
    result.loss += loss
    result.samples, result.digest = len(ids), digest_of(ids)
    return result


def submit(
    recorder: Recorder,
    step: int,
    what: StepSums,
    *,
    window: int,
    stop: bool = False,
    waited: float = 0.0,
    norm: float = 2.0,
) -> None:
    record = {"kind": "step", "step": step, "lr": 0.5}
    recorder.submit(
        record,
        what,
        torch.tensor(norm),
        window=window,
        waited=waited,
        stop=stop,
        regroup=False,
        left_out=False,
    )


def recorder_and_records(
    *, exact: bool = True, skips: bool = False
) -> tuple[Recorder, list[dict[str, Any]]]:
    records: list[dict[str, Any]] = []
    telemetry = Telemetry([])
    telemetry.step = records.append  # type: ignore[method-assign,assignment]
    recorder = Recorder(
        CPU,
        telemetry,
        Store(Path(), keep_last=1, keep_best=False, asynchronous=False),
        StepGuard(guard_config(), FEW, []),
        StragglerWatch(None, ranks_meet_in_forward=False),
        all_samples_count=exact,
        overflow_is_skipped=skips,
    )
    return recorder, records


def test_images_that_are_missing_are_told_once() -> None:
    recorder, records = recorder_and_records(exact=False)
    told: list[str] = []
    recorder._telemetry.message = told.append  # type: ignore[method-assign]
    for step, ids in enumerate([[1, 2, 3], [4, 5], [6]], start=1):
        submit(recorder, step, sums(1.0, ids), window=3)
    assert told == [
        (
            "step 2: 1 of its 3 images cannot be read and are left out; the end of the run names all "
            "such images"
        )
    ]
    submit(recorder, 4, sums(0.0, []), window=1)
    with pytest.raises(UserError, match="step 5: none of its 3 images can be read, so nothing is"):
        submit(recorder, 5, sums(0.0, []), window=3)
    assert [r["step"] for r in records] == [1, 2, 3, 4]


def test_record() -> None:
    recorder, records = recorder_and_records()
    submit(recorder, 1, sums(6.0, [3, 4, 5]), window=3)
    recorder.settle()
    (record,) = records
    assert record["step"] == 1 and record["lr"] == 0.5
    assert record["loss"] == 2.0
    assert record["grad_norm"] == 2.0
    assert record["sample_digest"] == digest_text(digest_of([3, 4, 5]))
    assert record["samples_per_second"] > 0
    assert record["data_wait_fraction"] == 0.0


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_records_come_in_order_after_the_lag(lag: int) -> None:
    recorder, records = recorder_and_records()
    recorder._lag = lag
    for step in range(1, 5):
        submit(recorder, step, sums(1.0, [step]), window=1)
        assert [r["step"] for r in records] == list(range(1, step - lag + 1))
    recorder.settle()
    assert [r["step"] for r in records] == [1, 2, 3, 4]
    recorder.settle()
    assert len(records) == 4


def test_waiting_for_data_is_a_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 104.0, 110.0, 120.0, 121.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    recorder, records = recorder_and_records()  # 100
    submit(recorder, 1, sums(1.0, [1, 2]), window=2, waited=1.0)  # 104
    submit(recorder, 2, sums(1.0, [1, 2]), window=2, waited=100.0)  # 110
    recorder.restart_clock(waited=100.0)  # 120, after an evaluation
    submit(recorder, 3, sums(1.0, [1, 2]), window=2, waited=100.5)  # 121
    assert [r["data_wait_fraction"] for r in records] == [0.25, 1.0, 0.5]
    assert [r["samples_per_second"] for r in records] == pytest.approx([0.5, 2 / 6, 2.0])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_loss_stops_the_run(value: float) -> None:
    recorder, records = recorder_and_records()
    submit(recorder, 1, sums(1.0, [1]), window=1)
    with pytest.raises(UserError, match=f"step 2: the loss is {value}.*optimizer.lr") as caught:
        submit(recorder, 2, sums(value, [1]), window=1)
    assert "\n" not in str(caught.value)
    assert [r["step"] for r in records] == [1, 2], "the record of that step is told, too"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_gradient_stops_the_run_unless_it_was_skipped(value: float) -> None:
    """Its update has broken the weights, which must not be saved."""
    recorder, _ = recorder_and_records()
    with pytest.raises(UserError, match=f"step 1: the gradient norm is {value}"):
        submit(recorder, 1, sums(1.0, [1]), window=1, norm=value)
    recorder, records = recorder_and_records(skips=True)
    submit(recorder, 1, sums(1.0, [1]), window=1, norm=value)
    assert len(records) == 1


def test_samples_that_are_missing_are_our_own_mistake() -> None:
    recorder, _ = recorder_and_records()
    with pytest.raises(AssertionError, match="step of 4 samples counted 3"):
        submit(recorder, 1, sums(1.0, [1, 2, 3]), window=4)


@pytest.mark.parametrize("ids, loss", [([1, 2, 3], 2.0), ([], 0.0)], ids=["some", "none left"])
def test_unreadable_samples_are_left_out_of_the_mean(ids: list[int], loss: float) -> None:
    recorder, records = recorder_and_records(exact=False)
    submit(recorder, 1, sums(2.0 * len(ids), ids), window=len(ids) + 1)
    assert records[0]["loss"] == loss


def check_ranks() -> tuple[list[Any], list[bool]]:
    rank = dist.rank()
    recorder, records = recorder_and_records()
    stopping = []
    for step in (1, 2, 3):
        ids = list(range(10 * rank, 10 * rank + 2 + rank))
        asked = step == 2 and rank == 1
        submit(recorder, step, sums(float(len(ids)), ids), window=9, stop=asked)
        stopping.append(recorder.stop_requested)
    return [(r["loss"], r["sample_digest"]) for r in records], stopping


def test_ranks_add_up_and_stop_together(pool: Any) -> None:
    ids = [0, 1, 10, 11, 12, 20, 21, 22, 23]
    for records, stopping in pool(3, on_group, check_ranks):
        assert records == [(1.0, digest_text(digest_of(ids)))] * 3
        assert stopping == [False, True, True]
