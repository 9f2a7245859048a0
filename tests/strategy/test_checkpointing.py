"""Activation checkpointing gives the same losses and gradients, bit for bit, under every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from lockstep import dist
from lockstep.config.schema import Model
from lockstep.data.sampler import window_slices
from lockstep.engine.step import StepSums, micro_step, update
from lockstep.models.build import build
from lockstep.strategy.fsdp import FSDPStrategy
from tests.pool import on_group
from tests.toys import CPU, batch_of, nowhere, optimizer_config, precision, state_of, strategy_of

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "rope as an argument": {"name": "vit_7b_patch16_dinov3", "kwargs": SMALL},
    "rope of each block": {"name": "vit_small_patch16_rope_mixed_224", "kwargs": SMALL},
    "relative positions": {
        "name": "swin_tiny_patch4_window7_224",
        "kwargs": {"embed_dim": 24, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
    },
}


@contextmanager
def inputs_cast_once() -> Iterator[None]:
    """A policy that casts a block's inputs, as earlier FSDP2 did it: not when a block is run again
    from within the backward pass. A checkpoint around the block meets a rope table in fp32 there
    that was bf16 before; it has to be within, behind the cast."""
    cast = getattr(FSDPState, "_cast_forward_inputs", None)  # else it is such an FSDP2
    policy = FSDPStrategy._mixed_precision

    def once(self: FSDPState, args: Any, kwargs: Any) -> Any:
        assert cast is not None
        again = self._training_state == TrainingState.PRE_BACKWARD
        return (args, kwargs) if again else cast(self, args, kwargs)

    def casting(self: FSDPStrategy, model: torch.nn.Module) -> MixedPrecisionPolicy:
        return replace(policy(self, model), cast_forward_inputs=True)

    with (
        patch.object(FSDPState, "_cast_forward_inputs", once) if cast else nullcontext(),
        patch.object(FSDPStrategy, "_mixed_precision", casting),
    ):
        yield


def trained(kind: str, strategy: str, number_format: str, checkpoints: bool) -> list[torch.Tensor]:
    """Losses of two steps, then the gradients of the second."""
    defaults = {
        "pretrained": False,
        "image_size": None,
        "patch_size": None,
        "kwargs": {},
        "draw": "model",
    }
    cfg = Model(
        **(defaults | {"drop_path": 0.2} | MODELS[kind]), activation_checkpointing=checkpoints
    )
    model = build(cfg, image_size=32, num_classes=5, seed=0, meta=False)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.get_classifier().weight)  # type: ignore[operator]
    images, targets = torch.randn(6, 3, 32, 32), torch.randint(5, (6,))
    shards = dist.world_size() if strategy == "fsdp" else 1
    state, how = state_of(
        model,
        strategy_of(strategy, shard_processes=shards, number_format=precision(number_format)),
        optimizer=optimizer_config(lr=0.01),
    )
    out: list[torch.Tensor] = []
    for _ in range(2):
        sums = StepSums.on(CPU)
        (piece,) = window_slices(0, 6, None, dist.rank(), dist.world_size())
        batch = batch_of(images, targets, piece)
        micro_step(
            state, how, precision(number_format), batch, sums,
            window=6, last=True, label_smoothing=0.1, graphs=None, enter=nowhere,
        )  # fmt: skip
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        grads = [(g.to_local() if isinstance(g, DTensor) else g).clone() for g in grads]
        update(
            state, how, lr=0.01, clip=None, num_micro_batches=dist.world_size(),
            leave_out=False, check_loss=None,
        )  # fmt: skip
        out.append(sums.loss)
    return [*out, *grads]


def check_same(kind: str, strategy: str, number_format: str, casts: bool) -> None:
    with inputs_cast_once() if casts else nullcontext():
        plain, thrifty = (trained(kind, strategy, number_format, c) for c in (False, True))
    assert plain[0] != plain[1]
    torch.testing.assert_close(thrifty, plain, rtol=0, atol=0)


PLACES = [
    pytest.param(1, "single", False, id="single"),
    pytest.param(2, "ddp", False, id="ddp"),
    pytest.param(2, "fsdp", False, id="fsdp"),
    pytest.param(2, "fsdp", True, id="fsdp that casts inputs once"),
]


@pytest.mark.parametrize("number_format", ["fp32", "bf16"])
@pytest.mark.parametrize("world, strategy, casts", PLACES)
@pytest.mark.parametrize("kind", MODELS)
def test_checkpointing_changes_nothing(
    pool: Any, kind: str, world: int, strategy: str, casts: bool, number_format: str
) -> None:
    arguments = (kind, strategy, number_format, casts)
    if world == 1:
        check_same(*arguments)
    else:
        pool(world, on_group, check_same, *arguments)
