"""Exact evaluation: every sample counted once, whatever the number of processes."""

from __future__ import annotations

import torch
from torch import nn

from lockstep import dist
from lockstep.config.schema import Precision
from lockstep.data.loader import Loader
from lockstep.data.sampler import window_slices
from lockstep.errors import UserError
from lockstep.metrics import EvalResult, EvalSums
from lockstep.strategy.precision import autocast


@torch.no_grad()
def evaluate(
    module: nn.Module, loader: Loader, precision: Precision, *, batch: int, device: torch.device
) -> EvalResult:
    """Evaluate ``module`` on all of ``loader``'s samples. All ranks enter here.

    Every rank runs the same number of forward passes, as FSDP's collectives need; the surplus ones
    count nothing.

    Args:
        batch: samples per forward pass of one process.
    """
    training = module.training
    module.eval()
    sums = EvalSums(device)
    slices = window_slices(0, len(loader), batch, dist.rank(), dist.world_size())
    try:
        for images in loader.batches(0, slices):
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
