"""Running statistics as partial sums of ranks, against one process's BatchNorm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import dist
from lockstep.data.sampler import num_micro_batches, window_slices
from lockstep.models.batchnorm import RunningStatistics
from tests.pool import on_group

WINDOWS = [(0, 20), (20, 40), (40, 48)]
MICRO = 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.BatchNorm1d(16, momentum=0.3)
    )


def images() -> torch.Tensor:
    return torch.randn(48, 3, 2, 2, generator=torch.Generator().manual_seed(1))


def statistics_of(model: nn.Module) -> list[torch.Tensor]:
    return [b for n, b in model.named_buffers() if "tracked" not in n]


def sequential() -> nn.Module:
    """One process, all micro-batches in order, torch alone."""
    model = network()
    for start, stop in WINDOWS:
        for first in range(start, stop, MICRO):
            model(images()[first : min(first + MICRO, stop)])
    return model


def share(model: nn.Module, rank: int, world: int) -> RunningStatistics:
    """What rank ``rank`` of ``world`` does; the model ends with its partial sums."""
    statistics = RunningStatistics(model)
    for buffer in statistics.buffers:
        buffer.div_(world)
    for start, stop in WINDOWS:
        for piece in window_slices(start, stop, MICRO, rank, world):
            if piece.start == piece.stop:
                with statistics.unchanged():
                    model(images()[:2])
            else:
                statistics.before_micro_batch(piece.index)
                model(images()[piece.start : piece.stop])
        statistics.end_window(num_micro_batches(start, stop, MICRO, world))
    return statistics


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 8])
def test_partial_sums_add_up(world: int) -> None:
    models = [network() for _ in range(world)]
    for rank, model in enumerate(models):
        share(model, rank, world)
    added = [sum(parts) for parts in zip(*map(statistics_of, models), strict=True)]
    torch.testing.assert_close(added, statistics_of(sequential()), rtol=1e-5, atol=1e-6)


def check_on_ranks() -> list[list[float]]:
    model = network()
    statistics = share(model, dist.rank(), dist.world_size())
    partial = copy.deepcopy(statistics.buffers)
    extra = torch.full((3,), float(dist.rank()))
    with statistics.whole([extra]):
        whole = copy.deepcopy(statistics.buffers)
        torch.testing.assert_close(whole, statistics_of(sequential()), rtol=1e-5, atol=1e-6)
        assert extra.eq(sum(range(dist.world_size()))).all()
    # Afterwards equal parts: what was summed stays, who holds it does not matter.
    torch.testing.assert_close([b * dist.world_size() for b in statistics.buffers], whole)
    assert dist.world_size() == 1 or any(
        not torch.equal(a, b) for a, b in zip(partial, statistics.buffers, strict=True)
    )
    with statistics.whole():
        torch.testing.assert_close(statistics.buffers, whole)
    return [b.tolist() for b in statistics.buffers]


@pytest.mark.parametrize("world", [2, 3])
def test_whole_and_split_on_ranks(pool: Any, world: int) -> None:
    first, *others = pool(world, on_group, check_on_ranks)
    assert all(other == first for other in others)


def test_one_process_is_not_touched() -> None:
    model = network()
    statistics = share(model, 0, 1)
    torch.testing.assert_close(statistics_of(model), statistics_of(sequential()), rtol=0, atol=0)
    before = copy.deepcopy(statistics.buffers)
    with statistics.whole():
        pass
    torch.testing.assert_close(statistics.buffers, before, rtol=0, atol=0)


def test_unchanged_gives_the_same_outputs_and_puts_momentum_back() -> None:
    model = network()
    statistics = RunningStatistics(model)
    before = copy.deepcopy(statistics.buffers)
    with statistics.unchanged():
        out = model(images()[:4])
    torch.testing.assert_close(statistics.buffers, before, rtol=0, atol=0)
    torch.testing.assert_close(out, network()(images()[:4]))
    assert [m.momentum for m in model if hasattr(m, "momentum")] == [0.1, 0.3]
    with pytest.raises(RuntimeError, match="inside"), statistics.unchanged():
        raise RuntimeError("inside")
    assert [m.momentum for m in model if hasattr(m, "momentum")] == [0.1, 0.3]


def test_micro_batches_come_in_order() -> None:
    statistics = RunningStatistics(network())
    statistics.before_micro_batch(2)
    with pytest.raises(AssertionError, match="order"):
        statistics.before_micro_batch(1)


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(lambda: nn.SyncBatchNorm(4), id="synchronised"),
        pytest.param(lambda: nn.BatchNorm2d(4, track_running_stats=False), id="untracked"),
        pytest.param(lambda: nn.BatchNorm2d(4, momentum=None), id="cumulative"),
        pytest.param(lambda: nn.GroupNorm(2, 4), id="group norm"),
    ],
)
def test_layers_left_alone(layer: Callable[[], nn.Module]) -> None:
    assert RunningStatistics(nn.Sequential(layer())).buffers == []


def test_count_of_batches() -> None:
    model = network()
    RunningStatistics(model).set_batches_tracked(41)
    assert [b.item() for n, b in model.named_buffers() if "tracked" in n] == [41, 41]
