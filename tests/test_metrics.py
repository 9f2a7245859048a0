"""Sums and counts of an evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lockstep import dist
from lockstep.metrics import EvalResult, EvalSums
from tests.pool import on_group

CPU = torch.device("cpu")
LOGITS = torch.randn(101, 12, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(12, (101,), generator=torch.Generator().manual_seed(1))


def sums_of(pieces: list[slice], weights: torch.Tensor | None = None) -> EvalSums:
    sums = EvalSums(CPU)
    weights = torch.ones(len(LOGITS)) if weights is None else weights
    for piece in pieces:
        sums.add(LOGITS[piece], TARGETS[piece], weights[piece])
    return sums


def expected(chosen: torch.Tensor) -> EvalResult:
    logits, targets = LOGITS[chosen].double(), TARGETS[chosen]
    ranks = (logits > logits.gather(1, targets[:, None])).sum(1)
    n = len(targets)
    return EvalResult(
        top1=100 * int((ranks < 1).sum()) / n,
        top5=100 * int((ranks < 5).sum()) / n,
        loss=F.cross_entropy(logits, targets).item(),
        count=n,
    )


def check(result: EvalResult, reference: EvalResult) -> None:
    assert (result.top1, result.top5, result.count) == (
        reference.top1,
        reference.top5,
        reference.count,
    )
    assert result.loss == pytest.approx(reference.loss, rel=1e-6)


@pytest.mark.parametrize("size", [1, 7, 101])
def test_any_batches_give_the_same_figures(size: int) -> None:
    pieces = [slice(i, i + size) for i in range(0, len(LOGITS), size)]
    check(sums_of(pieces).reduce(), expected(torch.ones(len(LOGITS), dtype=torch.bool)))


def test_samples_of_weight_0_do_not_count() -> None:
    chosen = torch.arange(len(LOGITS)) % 3 > 0
    check(sums_of([slice(None)], chosen.float()).reduce(), expected(chosen))


@pytest.mark.parametrize("classes", [2, 4, 5])
def test_few_classes(classes: int) -> None:
    """Top-5 of fewer than five classes is always right."""
    sums = EvalSums(CPU)
    sums.add(LOGITS[:, :classes], TARGETS % classes, torch.ones(len(LOGITS)))
    assert sums.reduce().top5 == 100


def test_half_precision_logits() -> None:
    sums = EvalSums(CPU)
    sums.add(LOGITS.bfloat16(), TARGETS, torch.ones(len(LOGITS)))
    reference = EvalSums(CPU)
    reference.add(LOGITS.bfloat16().float(), TARGETS, torch.ones(len(LOGITS)))
    assert sums.reduce() == reference.reduce()


def test_nothing_at_all() -> None:
    assert EvalSums(CPU).reduce() == EvalResult(0.0, 0.0, 0.0, 0)


def reduce_share() -> EvalResult:
    bounds = [0, 40, 40, len(LOGITS)]
    return sums_of([slice(*bounds[dist.rank() : dist.rank() + 2])]).reduce()


def test_ranks_add_up(pool: Any) -> None:
    """One of the three has nothing."""
    for result in pool(3, on_group, reduce_share):
        check(result, expected(torch.ones(len(LOGITS), dtype=torch.bool)))
