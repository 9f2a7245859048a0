"""Exact evaluation: every sample counted once, whatever the number of processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lockstep import dist
from lockstep.config.schema import Precision
from lockstep.data.loader import Loader
from lockstep.data.sampler import window_slices
from lockstep.errors import UserError
from lockstep.metrics import EvalResult, EvalSums
from lockstep.strategy.precision import autocast

_ASK_EVERY = 8
"""Forward passes between two questions whether to go on."""


class Interrupted(Exception):
    """The evaluation was asked to stop, on all ranks."""


@torch.no_grad()
def evaluate(
    module: nn.Module,
    loader: Loader,
    precision: Precision,
    *,
    batch: int,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
) -> EvalResult:
    """Evaluate ``module`` on all of ``loader``'s samples. All ranks enter here.

    Every rank runs the same number of forward passes, as FSDP's collectives need; the surplus ones
    count nothing.

    Args:
        batch: samples per forward pass of one process.
        stop: called before each forward pass; the evaluation ends once it is true on any rank.

    Raises:
        Interrupted: it ended so.
    """
    training = module.training
    module.eval()
    sums = EvalSums(device)
    slices = window_slices(0, len(loader), batch, dist.rank(), dist.world_size())
    try:
        for i, images in enumerate(loader.batches(0, slices)):
            asked = stop()
            if i % _ASK_EVERY == 0 and dist.any_rank(asked):
                raise Interrupted
            with autocast(precision, device):
                logits = module(images.images, seeds=images.seeds)
            sums.add(logits, images.targets, images.weights)
    finally:
        module.train(training)
    result = sums.reduce()
    skipped = sum(dist.gather_objects(loader.num_left_out))
    if result.count + skipped < len(loader) or result.count > len(loader):
        raise AssertionError(f"evaluation counted {result.count} of {len(loader)} samples")
    if result.count == 0:
        raise UserError(
            f"none of the {len(loader)} images below {loader.source.folder} can be read: look at "
            "them with python scripts/prepare_data.py check"
        )
    return result
