"""DistributedDataParallel: every process holds the model, gradients are averaged."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import dist
from lockstep.models.deferred import fill
from lockstep.strategy.base import Strategy

# torch 2.14 renamed the argument.
_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


class DDPStrategy(Strategy):
    """Li et al. 2020, "PyTorch Distributed" (arXiv:2006.15704)."""

    def prepare(self, model: nn.Module, device: torch.device) -> nn.Module:
        model = fill(self._sync_batchnorm(model), device).to(device)
        self._module: nn.Module = model
        if dist.is_distributed():
            # Statistics are partial sums (models/batchnorm.py): rank 0's must not overwrite.
            options: dict[str, Any] = {_BUFFERS: False}
            self._module = DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                # A static graph learns its hooks in the first backward pass, which no_sync skips.
                static_graph=self.cfg.static_graph and self.accumulation == 1,
                bucket_cap_mb=self.cfg.bucket_mb,
                **options,
            )
        return self._module

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self._module, DistributedDataParallel):
            return nullcontext()
        return self._module.no_sync()
