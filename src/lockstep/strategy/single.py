"""One process: one device, or DataParallel over all of them."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.models.deferred import fill
from lockstep.strategy.base import Strategy


class SingleStrategy(Strategy):
    """One process, one device."""

    def prepare(self, model: nn.Module, device: torch.device) -> nn.Module:
        return fill(model, device).to(device)


class DataParallelStrategy(Strategy):
    """torch.nn.DataParallel: one process copies the model to all GPUs in every forward pass.

    Kept to be measured against. BatchNorm statistics are those of the first device's part.
    """

    def prepare(self, model: nn.Module, device: torch.device) -> nn.Module:
        model = fill(model, device).to(device)
        # Without device=cuda it would take the GPUs it sees, or, without any, only pass through.
        return nn.DataParallel(model) if device.type == "cuda" else model
