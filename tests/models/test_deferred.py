"""Weights drawn later are the same wherever they are drawn, and what timm's code means them to be."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lockstep import dist
from lockstep.config.schema import Model
from lockstep.errors import UserError
from lockstep.models import deferred
from lockstep.models.build import build
from lockstep.models.deferred import build_deferred, fill, is_deferred
from tests.pool import on_group
from tests.toys import CPU, strategy_of

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "vit": {"name": "vit_tiny_patch16_224", "kwargs": SMALL},
    "rope": {"name": "vit_7b_patch16_dinov3", "kwargs": SMALL},
    "rescaled by depth": {"name": "beit_base_patch16_224", "kwargs": SMALL | {"num_heads": 3}},
    "batchnorm": {"name": "test_resnet"},
    "convnext": {"name": "convnext_atto"},
}


def built(kind: str, draw: str, seed: int = 0) -> nn.Module:
    defaults = {"pretrained": False, "image_size": None, "patch_size": None, "kwargs": {}}
    defaults |= {"drop_path": 0.2, "activation_checkpointing": True, "draw": draw}
    cfg = Model(**(defaults | MODELS[kind]))
    return build(cfg, image_size=32, num_classes=5, seed=seed, meta=False)


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_drawn(kind: str) -> None:
    """Constants and buffers are equal to those of a normal start, the rest is as widely spread."""
    normal, model = built(kind, "model"), built(kind, "parameter")
    assert is_deferred(model) and all(p.is_meta for p in model.parameters())
    fill(model, CPU)
    assert not is_deferred(model)
    buffers, expected = dict(model.named_buffers()), dict(normal.named_buffers())
    torch.testing.assert_close(buffers, expected, rtol=0, atol=0)
    assert list(model.state_dict()) == list(normal.state_dict())
    differ = 0
    for (name, mine), (_, theirs) in zip(
        weights(model).items(), weights(normal).items(), strict=True
    ):
        if len(theirs.unique()) == 1:
            assert torch.equal(mine, theirs), name
        else:
            differ += not torch.equal(mine, theirs)
            deviation = 6 / mine.numel() ** 0.5
            assert float(mine.std() / theirs.std()) == pytest.approx(1, abs=deviation), name
            assert abs(float(mine.mean() - theirs.mean())) < 2 * deviation * float(theirs.std())
    assert differ > 5
    images = torch.randn(2, 3, 32, 32)
    assert model(images, seeds=torch.arange(2)).isfinite().all()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.detach() for n, p in model.named_parameters()}
    return {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in found.items()}


def check_strategy(kind: str, strategy: str, shards: int, changes: dict[str, Any]) -> None:
    expected = fill(built(kind, "parameter"), CPU)
    model = built(kind, "parameter")
    strategy_of(strategy, shard_processes=shards, **changes).prepare(model, CPU)
    torch.testing.assert_close(weights(model), weights(expected), rtol=0, atol=0)
    buffers, others = dict(model.named_buffers()), dict(expected.named_buffers())
    torch.testing.assert_close(buffers, others, rtol=0, atol=0)
    assert dist.world_size() == 3


@pytest.mark.parametrize(
    "strategy, shards, changes",
    [
        pytest.param("ddp", 1, {}, id="ddp"),
        pytest.param("fsdp", 3, {}, id="fsdp"),
        pytest.param("fsdp", 3, {"cpu_offload": True, "meta_init": True}, id="fsdp offload"),
        pytest.param("hsdp", 1, {}, id="hsdp"),
    ],
)
@pytest.mark.parametrize("kind", ["rope", "batchnorm"])
def test_shards_are_those_of_the_whole(
    pool: Any, kind: str, strategy: str, shards: int, changes: dict[str, Any]
) -> None:
    pool(3, on_group, check_strategy, kind, strategy, shards, changes)


def test_weights_follow_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = weights(fill(built("vit", "parameter"), CPU))
    with patch.object(deferred, "_MAX_THREADS", 1):
        second = weights(fill(built("vit", "parameter"), CPU))
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    other = weights(fill(built("vit", "parameter", seed=1), CPU))
    assert not torch.equal(other["pos_embed"], first["pos_embed"])


class Odd(nn.Module):
    """Values from constants, views and a second name of a parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.b = nn.Parameter(torch.empty(4, 3))
        if kind != "never written":
            nn.init.ones_(self.b)
        with torch.no_grad():
            self.b[2:].normal_()
            self.b[0].mul_(3)
            if kind == "dependent":
                self.b.copy_(self.b.flip(0))
        if kind == "never written":
            self.c = nn.Parameter(torch.empty(2))


def test_odd_ways() -> None:
    model = fill(build_deferred(lambda: Odd(""), seed=0), CPU)
    assert torch.equal(model.a, torch.arange(6.0).view(2, 3))
    assert torch.equal(model.b[:2], torch.tensor([[3.0] * 3, [1.0] * 3]))
    assert len(model.b[2:].unique()) == 6


@pytest.mark.parametrize(
    "kind, why",
    [("dependent", "needs values that are not there"), ("never written", "c is given no values")],
)
def test_refused(kind: str, why: str) -> None:
    with pytest.raises(UserError, match=rf"model.draw = parameter: Odd .*{why}.*draw=model"):
        build_deferred(lambda: Odd(kind), seed=0)
