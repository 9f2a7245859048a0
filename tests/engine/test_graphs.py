"""Recorded passes: the same numbers as passes that run as they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lockstep.engine.graphs import PassGraphs

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([[8]] * 7, id="one pass a step"),
        pytest.param([[8, 8, 8]] * 4, id="three passes a step"),
        pytest.param([[8, 8, 4], [8], [8, 8, 4], [4, 8], [8, 8, 8]], id="uneven"),
        pytest.param([[4], [8], [2], [8], [1], [8], [8], [8]], id="changing"),
    ],
)
def test_same_gradients(sizes: list[list[int]]) -> None:
    torch.manual_seed(0)
    parts = (nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
    recorded = nn.Sequential(*parts).cuda()
    plain = copy.deepcopy(recorded)
    graphs, found = PassGraphs(list(recorded.parameters())), []
    for network in (recorded, plain):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)

        def compute(
            x: torch.Tensor, factor: torch.Tensor, network: nn.Module = network
        ) -> tuple[torch.Tensor]:
            losses = network(x).square().mean(1)
            (losses.sum() * factor).backward()
            return (losses.detach(),)

        results = []
        for step, passes in enumerate(sizes):
            if network is recorded and step == len(sizes) - 1:
                assert graphs._recorded
                graphs.release()  # and record anew
            for i, size in enumerate(passes):
                inputs = torch.randn(size + 1, 6, generator=torch.Generator().manual_seed(step + i))
                given = (inputs.cuda(), torch.tensor(1.0 / size, device="cuda"))
                torch.manual_seed(10 * step + i)
                losses = graphs(compute, given) if network is recorded else compute(*given)
                results.append(losses[0].clone())
            results += [p.grad.clone() for p in network.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        found.append(results + list(network.state_dict().values()))
    assert graphs._recorded
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
