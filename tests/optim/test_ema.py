"""The moving average of weights against its formula, on plain and on sharded tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lockstep import dist
from lockstep.config.schema import Ema
from lockstep.models.batchnorm import RunningStatistics
from lockstep.optim.ema import WeightAverage
from tests.pool import on_group

STEPS = 5


def config(*, decay: float = 0.9, warmup: bool = False) -> Ema:
    return Ema(enabled=True, decay=decay, warmup=warmup)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def averaged(model: nn.Module, cfg: Ema) -> tuple[WeightAverage, list[dict[str, torch.Tensor]]]:
    """Move ``model`` and its average; returns the average and what the model was at each step."""
    average = WeightAverage(model, RunningStatistics(model).buffers, cfg)
    seen = [copy.deepcopy(whole(model))]
    generator = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            for _, tensor in sorted(tracked(model).items()):
                change = torch.randn(tensor.shape, generator=generator)
                if isinstance(tensor, DTensor):
                    full = tensor.full_tensor() + change
                    rows = full.chunk(dist.world_size())
                    tensor.to_local().copy_(rows[dist.rank()] if dist.rank() < len(rows) else full)
                else:
                    tensor.add_(change)
        average.update(step)
        seen.append(copy.deepcopy(whole(model)))
    return average, seen


def tracked(model: nn.Module) -> dict[str, torch.Tensor]:
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor for name, tensor in named.items() if tensor.is_floating_point()}


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {n: t.detach() for n, t in tracked(model).items()}
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in named.items()}


def expected(seen: list[dict[str, torch.Tensor]], decays: list[float]) -> dict[str, torch.Tensor]:
    shadow = dict(seen[0])
    for values, decay in zip(seen[1:], decays, strict=True):
        shadow = {n: decay * shadow[n] + (1 - decay) * values[n] for n in shadow}
    return shadow


@pytest.mark.parametrize(
    "cfg, decays",
    [
        pytest.param(config(), [0.9] * STEPS, id="fixed"),
        pytest.param(
            config(warmup=True), [(1 + s) / (10 + s) for s in range(1, STEPS + 1)], id="warm-up"
        ),
        pytest.param(
            config(decay=0.2, warmup=True), [2 / 11, 0.2, 0.2, 0.2, 0.2], id="warm-up ends"
        ),
    ],
)
def test_formula(cfg: Ema, decays: list[float]) -> None:
    average, seen = averaged(network(), cfg)
    torch.testing.assert_close(average.shadow, expected(seen, decays))


def test_swapping_there_and_back() -> None:
    model = network()
    average, seen = averaged(model, config())
    shadow = copy.deepcopy(average.shadow)
    with average.swapped():
        torch.testing.assert_close(whole(model), shadow, rtol=0, atol=0)
    torch.testing.assert_close(whole(model), seen[-1], rtol=0, atol=0)
    torch.testing.assert_close(average.shadow, shadow, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="inside"), average.swapped():
        raise RuntimeError("inside")
    torch.testing.assert_close(whole(model), seen[-1], rtol=0, atol=0)


def test_frozen_parameters_are_no_part_of_it() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    average = WeightAverage(model, [], config())
    statistics = ["1.running_mean", "1.running_var"]
    assert sorted(average.shadow) == [
        "0.bias",
        "1.bias",
        *statistics,
        "1.weight",
        "2.bias",
        "2.weight",
    ]


def test_statistics_that_are_no_partial_sums() -> None:
    """Those of SyncBatchNorm are the same on every rank."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(network())
    average, seen = averaged(model, config())
    assert average.buffers == []
    torch.testing.assert_close(average.shadow, expected(seen, [0.9] * STEPS))


def test_buffers_are_the_shadows_of_the_statistics() -> None:
    average, _ = averaged(network(), config())
    names = ["1.running_mean", "1.running_var"]
    assert all(b is average.shadow[n] for b, n in zip(average.buffers, names, strict=True))


def check_shards() -> None:
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.world_size(),)))
    average, seen = averaged(model, config())
    decays = [0.9] * STEPS
    shadow = {
        n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in average.shadow.items()
    }
    torch.testing.assert_close(shadow, expected(seen, decays))
    assert isinstance(average.shadow["0.weight"], DTensor)
    with average.swapped():
        torch.testing.assert_close(whole(model), expected(seen, decays))
    torch.testing.assert_close(whole(model), seen[-1])


def test_shards(pool: Any) -> None:
    """Five rows over two processes: three and two."""
    pool(2, on_group, check_shards)
